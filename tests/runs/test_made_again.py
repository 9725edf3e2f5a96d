"""Models that are made again: to go on, by another method, in an export. They must be the same ones."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import coterie
from coterie import randomness
from coterie.errors import ConfigError, ModelError
from coterie.models.handed_over import hand_over
from coterie.models.remade import refuse_hidden_numbers
from tests.small_runs import SMALL

NET = """
import numpy, random, torch
from torch import nn

class Net(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.layer = nn.Linear(6, outputs)
        with torch.no_grad():
            self.layer.bias.copy_(torch.from_numpy(numpy.random.normal(size=outputs)) + random.random())

    def forward(self, x):
        return self.layer(x.flatten(1))
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a module of the user's, as it is when it has not been imported yet."""
    monkeypatch.syspath_prepend(str(tmp_path))
    written = []

    def write(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
        written.append(name)
        return f"import:{name}:Net"

    yield write
    for name in written:
        sys.modules.pop(name, None)


def losses(model: str, out: Path, **more: Any) -> list[float]:
    result = coterie.run("fedavg", **{**SMALL, "model": model, "rounds": 1, "out": out, "progress": False, **more})
    return list(result.metrics["value"])


def test_what_a_file_draws_when_it_is_imported_changes_no_model(file: Any, tmp_path: Path) -> None:
    plain = file("coterie_plain", NET)
    drawing = file("coterie_drawing", f"{NET}\nPROTOTYPE = Net(3)\nOTHER = numpy.random.normal(), random.random()\n")
    wanted = losses(plain, tmp_path / "plain")
    before = randomness.generator_states(torch.device("cpu"))
    assert losses(drawing, tmp_path / "first") == wanted, "the run that imports it"
    assert losses(drawing, tmp_path / "second") == wanted
    first = sys.modules.pop("coterie_drawing")
    assert losses(drawing, tmp_path / "third", seed=SMALL.get("seed", 1)) == wanted, "as in another process"
    assert torch.equal(first.PROTOTYPE.layer.weight, sys.modules["coterie_drawing"].PROTOTYPE.layer.weight)
    assert first.OTHER == sys.modules["coterie_drawing"].OTHER
    assert randomness.generator_states(torch.device("cpu")) == before


def test_what_a_file_of_data_seeds_stays_seeded(file: Any, tmp_path: Path) -> None:
    text = """
import numpy, torch
from coterie.data import Dataset

numpy.random.seed(0)

def data():
    x = torch.from_numpy(numpy.random.randn(90, 6)).float()
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0)
    return Dataset("drawn", x, y, 90, "multiclass", ("a", "b", "c"), (0.0,), (1.0,))
"""
    spec = file("coterie_seeded", text).replace("Net", "data")
    first = losses("linear", tmp_path / "first", data=spec, partition="iid")
    del sys.modules["coterie_seeded"]
    assert losses("linear", tmp_path / "second", data=spec, partition="iid") == first


def made(init: str, forward: str) -> type[nn.Module]:
    """A linear layer whose class has more lines in both."""
    names: dict[str, Any] = {"nn": nn, "torch": torch, "np": np}
    text = f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        {init}
    def forward(self, x):
        return {forward}
"""
    exec(text, names)
    found: type[nn.Module] = names["Net"]
    return found


HIDDEN = {
    "a list of numbers": ("self.order = torch.randperm(6).tolist()", "self.layer(x[:, self.order])"),
    "a plain tensor": ("self.w = torch.randn(6, 6)", "self.layer(x @ self.w)"),
    "a buffer that is not kept": (
        "self.register_buffer('w', torch.randn(6, 6), persistent=False)",
        "self.layer(x @ self.w)",
    ),
    "layers in a list": ("self.layers = [nn.Linear(6, 6)]", "self.layer(self.layers[0](x))"),
    "what is hidden behind zeros": (
        "self.w = torch.randn(6, 6); nn.init.zeros_(self.layer.weight); nn.init.zeros_(self.layer.bias)",
        "self.layer(x @ self.w)",
    ),
    "what counts in training alone": (
        "self.w = torch.randn(6, 6)",
        "self.layer(x @ self.w if self.training else x)",
    ),
    "NumPy's": ("self.w = float(np.random.normal())", "self.layer(x * self.w)"),
}
KEPT = {
    "a buffer": ("self.register_buffer('w', torch.randn(6, 6))", "self.layer(x @ self.w)"),
    "a frozen parameter": ("self.w = nn.Parameter(torch.randn(6, 6), requires_grad=False)", "self.layer(x @ self.w)"),
    "layers in a ModuleList": ("self.layers = nn.ModuleList([nn.Linear(6, 6)])", "self.layer(self.layers[0](x))"),
    "a generator with a seed": (
        "self.order = torch.randperm(6, generator=torch.Generator().manual_seed(3)).tolist()",
        "self.layer(x[:, self.order])",
    ),
    "statistics": ("self.norm = nn.BatchNorm1d(6)", "self.layer(self.norm(x))"),
    "what is drawn in forward": ("", "self.layer(x * torch.rand_like(x))"),  # refused for that, elsewhere
    "what fails": ("", "self.layer(x[:, :5])"),
}


@pytest.mark.parametrize("name", [*HIDDEN, *KEPT])
def test_numbers_that_are_drawn_for_a_model_and_not_kept_with_it_are_refused(name: str) -> None:
    maker = made(*({**HIDDEN, **KEPT}[name]))
    module = maker()
    module.train()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    if name in HIDDEN:
        with pytest.raises(ModelError, match=r"another model when it is made again.*register_buffer.*nn\.ModuleList"):
            refuse_hidden_numbers(module, maker, (6,), words=False)
    else:
        refuse_hidden_numbers(module, maker, (6,), words=False)
    assert module.training and all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


@pytest.mark.parametrize("of", ["a file", "a function"])
def test_a_run_of_such_a_model_is_refused_and_leaves_no_folder(of: str, file: Any, tmp_path: Path) -> None:
    text = NET.replace("super().__init__()\n", "super().__init__()\n        self.w = torch.rand(6)\n")
    spec = file("coterie_hiding", text.replace("self.layer(x.flatten(1))", "self.layer(x.flatten(1) * self.w)"))
    model = spec if of == "a file" else lambda outputs: importlib.import_module("coterie_hiding").Net(outputs)
    with pytest.raises(ModelError, match=r"^model .* another model when it is made again"):
        losses(model, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    handed_over = importlib.import_module("coterie_hiding").Net(3)  # kept whole: it is not made again
    assert losses(handed_over, tmp_path / "run")


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), r"model 'Sequential': layer '1' .* without a shape yet"),
        (nn.Sequential(nn.Flatten(), nn.Linear(6, 3, device="meta")), r"model 'Sequential': .* device meta"),
        (5, "model is a int, but must be a name, an nn.Module, or a function that makes one"),
    ],
    ids=["lazy", "meta", "none"],
)
def test_objects_that_are_no_finished_model_are_refused(model: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises((ModelError, ConfigError), match=why):
        losses(model, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_name_is_no_model_that_was_handed_over() -> None:
    with pytest.raises(ConfigError, match=r"model is the name 'mlp', but an nn\.Module, or a function"):
        hand_over("mlp")
