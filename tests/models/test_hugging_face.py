"""Models of Hugging Face's: what is trained and what is shared, all clients at once, padding, adapters."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"  # whatever is not in a folder is an error
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from coterie import models, randomness  # noqa: E402
from coterie.algorithms.base import Batch  # noqa: E402
from coterie.compute.nets.folded import FoldedNet  # noqa: E402
from coterie.compute.nets.row_net import ModuleNet, branches_on_values  # noqa: E402
from coterie.compute.nets.sound_net import sound_net  # noqa: E402
from coterie.compute.sample_costs import bytes_of_sample  # noqa: E402
from coterie.errors import ConfigError, ModelError  # noqa: E402
from coterie.models.hugging_face_network import HuggingFaceModel  # noqa: E402
from coterie.models.hugging_face_spec import spec_of  # noqa: E402
from coterie.models.problem import LOSSES, Problem  # noqa: E402
from tests.hugging_face_models import TARGETS, save  # noqa: E402

ROWS, SAMPLES, LENGTH, CLASSES = 3, 4, 6, 3


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for kind in TARGETS:
        save(kind, folder / kind)
    return folder


def built(folder: Path, options: str = "") -> HuggingFaceModel:
    with randomness.torch_stream(1, "model"):
        made = models.build(f"hf:{folder}{options}", (LENGTH,), CLASSES)
    assert isinstance(made, HuggingFaceModel)
    return made


def inputs(kind: str) -> Tensor:
    draw = randomness.stream(1, "inputs")
    if kind == "vit":
        return torch.from_numpy(draw.normal(size=(ROWS, SAMPLES, 1, 8, 8)))
    x = torch.from_numpy(draw.integers(3, 30, size=(ROWS, SAMPLES, LENGTH)))
    x[:, ::2, LENGTH - 2 :] = 1 if kind == "roberta" else 0  # padding
    return x


def drawn(*shape: int) -> Tensor:
    return torch.from_numpy(randomness.stream(2, "rows").normal(size=shape))


@pytest.mark.parametrize("kind", list(TARGETS))
def test_adapters_of_all_clients_at_once_are_those_of_each(saved: Path, kind: str) -> None:
    module = built(saved / kind, f",lora=2,targets={TARGETS[kind]},dropout=0.2")
    models.check(module)
    problem = Problem.of(module, dtype=torch.float64)
    assert all(".lora_" in name or "modules_to_save" in name for name in problem.layout.names)
    x, y = inputs(kind), torch.arange(ROWS * SAMPLES).view(ROWS, SAMPLES) % CLASSES
    folded, plain = sound_net(module, problem.layout, x, "stacked", "auto"), ModuleNet(module, problem.layout)
    assert isinstance(folded, FoldedNet)
    models.check(module, x[0])
    params = problem.start + 0.1 * drawn(ROWS, problem.layout.size)
    weight = torch.full((ROWS, SAMPLES), 1 / SAMPLES, dtype=torch.float64)
    rate = torch.tensor([[0.1], [0.2], [0.3]], dtype=torch.float64)
    keys = randomness.keys(1, "dropout", 1, torch.arange(ROWS))
    ends: list[tuple[Tensor, ...]] = []
    for net in (folded, plain):
        moved = params.clone()
        batch = Batch(net, LOSSES["cross_entropy"], x, y, weight, weight.sum(1), keys)
        batch.descend_(moved, rate)
        assert net.uses_dropout
        ends.append((net.outputs(params, x), net.outputs(params, x, keys), batch.grad(params), moved))
    for got, wanted in zip(*ends, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    still, dropped = ends[0][:2]
    assert not torch.allclose(still, dropped)
    assert not torch.allclose(folded.outputs(params, x, keys + 1), dropped)


@pytest.mark.parametrize("kind", list(TARGETS))
def test_outputs_are_pefts_own(saved: Path, kind: str) -> None:
    """With the same adapters and head, PEFT's model, with Hugging Face's own attention and mask, gives the same."""
    module = built(saved / kind, f",lora=2,targets={TARGETS[kind]},alpha=3")
    problem = Problem.of(module, dtype=torch.float64)
    params = problem.start + 0.1 * drawn(ROWS, problem.layout.size)
    x = inputs(kind)
    got = FoldedNet(module, problem.layout).outputs(params, x)
    images = kind == "vit"
    auto = transformers.AutoModelForImageClassification if images else transformers.AutoModelForSequenceClassification
    plain = auto.from_pretrained(saved / kind, num_labels=CLASSES, dtype=torch.float64)
    config = peft.LoraConfig(
        r=2,
        lora_alpha=3,
        target_modules=module.adapted[0].peft_config["default"].target_modules,
        modules_to_save=["classifier", "pre_classifier", "score"],
        fan_in_fan_out=kind == "gpt2",
    )
    theirs = peft.get_peft_model(plain, config).double().eval()
    for row in range(ROWS):
        own = problem.layout.state_dict(params[row])
        found = theirs.base_model.model.load_state_dict(
            {name.removeprefix("model."): value for name, value in own.items()}, strict=False
        )
        assert not found.unexpected_keys
        pad = 1 if kind == "roberta" else 0
        given = {"pixel_values": x[row]} if images else {"input_ids": x[row], "attention_mask": (x[row] != pad).long()}
        near = 1e-6 if kind in ("llama", "vit") else 1e-10  # their softmax is in float32, whatever the rest is
        torch.testing.assert_close(got[row], theirs(**given).logits, rtol=near, atol=near)


def test_padding_is_not_read(saved: Path) -> None:
    module = built(saved / "bert").double()
    module.eval()
    x = inputs("bert")[0]
    short = x[::2, : LENGTH - 2]
    torch.testing.assert_close(module(x)[::2], module(short), rtol=1e-10, atol=1e-12)
    other = built(saved / "bert", ",pad=7").double().eval()
    assert not torch.allclose(other(x)[::2], other(short))


def test_what_is_frozen_is_shared_and_keeps_its_type(saved: Path) -> None:
    whole, head = (Problem.of(built(saved / "bert", options)) for options in ("", ",train=head"))
    assert whole.layout.size == sum(value.numel() for value in whole.module.parameters())
    assert head.layout.names == ("model.classifier.weight", "model.classifier.bias")
    # Two layers, each with two projections of 16 x 16: A is [4, 16] and B is [16, 4]; the head is 16 x 3 and 3.
    adapted = Problem.of(built(saved / "bert", ",lora=4,targets=q+v,base=bfloat16"))
    assert adapted.layout.size == 2 * 2 * (4 * 16 + 16 * 4) + 16 * 3 + 3
    types = {value.dtype for value in adapted.module.parameters() if not value.requires_grad}
    assert types == {torch.bfloat16} and adapted.start.dtype == torch.float32
    x = inputs("bert")
    params = adapted.start + 0.1 * drawn(ROWS, adapted.layout.size).float()
    nets = FoldedNet(adapted.module, adapted.layout), ModuleNet(adapted.module, adapted.layout)
    together, apart = (net.outputs(params, x) for net in nets)
    assert together.dtype == torch.float32
    exact = Problem.of(built(saved / "bert", ",lora=4,targets=q+v"))
    wanted = ModuleNet(exact.module, exact.layout).outputs(params, x)
    for got in (together, apart):  # eight bits of mantissa
        torch.testing.assert_close(got, wanted, rtol=0.1, atol=0.05)


def test_begins_with_the_saved_weights_and_the_same_head_for_the_same_seed(saved: Path) -> None:
    one, two = built(saved / "distilbert", ",lora=2"), built(saved / "distilbert", ",lora=2")
    for (name, first), second in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(first, second), name
    base = transformers.AutoModel.from_pretrained(saved / "distilbert")
    weights = dict(one.model.named_parameters())
    assert torch.equal(
        weights["distilbert.transformer.layer.0.attention.q_lin.base_layer.weight"],
        base.transformer.layer[0].attention.q_lin.weight,
    )
    # A model that was saved with a head for other classes gets a new one.
    other = transformers.AutoModelForSequenceClassification.from_pretrained(saved / "bert", num_labels=7)
    other.save_pretrained(saved / "seven")
    assert built(saved / "seven").model.classifier.weight.shape == (CLASSES, 16)


def test_no_model_looks_at_numbers(saved: Path) -> None:
    """Hugging Face's models look whether a mask is needed, but not where they are recorded or have no numbers."""
    for kind in TARGETS:
        problem = Problem.of(built(saved / kind, f",lora=2,targets={TARGETS[kind]}"))
        x = inputs(kind)[0]
        assert not branches_on_values(problem.module, x.float() if kind == "vit" else x)


def test_memory_of_a_sample_grows_with_the_model_and_not_with_the_rows(saved: Path) -> None:
    problem = Problem.of(built(saved / "bert", ",lora=2,targets=q+v"))
    net = FoldedNet(problem.module, problem.layout)
    x = inputs("bert")
    each = bytes_of_sample(net, problem.start, x)
    # At least what enters the activations of the two layers and what leaves them, 20 and 16 wide.
    assert each > 2 * LENGTH * 4 * (16 + 20)
    assert bytes_of_sample(net, problem.start, x[:1]) == pytest.approx(each, rel=0.2)
    assert bytes_of_sample(net, problem.start, torch.cat([x, x], 2)) > 1.7 * each


class Answer:
    def __init__(self, logits: Tensor) -> None:
        self.logits, self.loss = logits, None


class Answering(nn.Module):
    """A module of the user's whose output has logits."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return Answer(self.last(x))


def test_any_module_whose_output_has_logits() -> None:
    module = Answering()
    problem = Problem.of(module, dtype=torch.float64)
    params, x = drawn(ROWS, problem.layout.size), drawn(ROWS, SAMPLES, 4)
    models.check(module, x[0])
    views = problem.layout.views(params)
    wanted = torch.einsum("rsi,roi->rso", x, views["last.weight"]) + views["last.bias"].unsqueeze(1)
    for kernel in ("module", "vmap", "stacked"):
        got = sound_net(module, problem.layout, x, kernel, "auto").outputs(params, x)
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (",lora=2,targets=q+w", r"no layer is called 'w': its layers are dense, key, query, value"),
        (",targets=q", "targets is given, but lora is 0"),
        (",lora=2,train=head", "train=head fits lora=0 alone"),
        (",base=bfloat16", "nothing is frozen"),
        (",lora=-1", "lora is '-1', but must be integer ≥ 0"),
        (",rank=2", "has no parameter 'rank'"),
    ],
)
def test_mistakes_in_options(saved: Path, options: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        built(saved / "bert", options)
    assert "\n" not in str(caught.value)


def test_mistakes_in_folders(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        built(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        built(tmp_path)
    with pytest.raises(ModelError, match="there is no folder no-such-model, and it cannot be loaded"):
        models.build("hf:no-such-model", (LENGTH,), CLASSES)
    transformers.CLIPTextConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="a clip_text_model has no head for classes of texts or images"):
        built(tmp_path)


def test_a_relative_folder_is_named_from_anywhere(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved)
    spec = spec_of("hf:bert,lora=2,targets=q+v")
    assert spec is not None
    assert spec.with_absolute_folder().text() == f"hf:{saved / 'bert'},lora=2,targets=q+v"
    named = spec_of("hf:someone/something,lora=2")
    assert named is not None and named.with_absolute_folder().text() == "hf:someone/something,lora=2"
