"""LoRA's adapters in whole runs: engines agree, a stopped run ends the same, a federation too, and export."""

from __future__ import annotations

import os
import runpy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from coterie import randomness  # noqa: E402
from coterie.api import run  # noqa: E402
from coterie.compute.engine import Engine  # noqa: E402
from coterie.config import from_mapping  # noqa: E402
from coterie.errors import CheckpointError  # noqa: E402
from coterie.federation.agreement import Schema  # noqa: E402
from coterie.federation.node import Node  # noqa: E402
from coterie.federation.plan import Plan  # noqa: E402
from coterie.federation.server import serve  # noqa: E402
from coterie.results import Result  # noqa: E402
from coterie.results.export import export  # noqa: E402
from coterie.runs import launch  # noqa: E402
from coterie.runs.builder import assemble  # noqa: E402
from tests.conformance_table import TABLE  # noqa: E402
from tests.federation.grid import (  # noqa: E402
    Local,
    LocalGrid,
    combined,
    compare,
    make_agreement,
    make_federation,
    parts,
    states,
)
from tests.hugging_face_models import save  # noqa: E402
from tests.small_runs import Killed, assert_same_end, finish, last_state, stop  # noqa: E402
from tests.support import DEVICE  # noqa: E402

# Two layers with two projections of 16 x 16 each: A is [2, 16], B is [16, 2]. The head is 16 x 3 and 3.
OF_A, OF_B, OF_HEAD = 2 * 2 * 2 * 16, 2 * 2 * 16 * 2, 16 * 3 + 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("adapters")
    save("bert", made / "bert")
    draw = randomness.stream(1, "words")
    x = draw.integers(1, 30, size=(40, 6))
    x[::3, 4:] = 0  # padding
    clients = np.repeat(np.arange(5), [4, 6, 8, 10, 12])
    np.savez(made / "words.npz", x=x, y=(x[:, 1] + x[:, 0]) % 3, client=clients)
    return made


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def config_of(folder: Path, algorithm: str = "fedavg", **more: Any) -> Any:
    return from_mapping(
        {
            "algorithm": algorithm,
            "settings": TABLE[algorithm].settings,
            "data": f"npz:{folder / 'words.npz'},words=true",
            "partition": "natural",
            "clients": 5,
            "rounds": 2,
            "participation": 0.6,
            "device": os.environ.get("COTERIE_TEST_DEVICE", "cpu"),
            "model": f"hf:{folder / 'bert'},lora=2,targets=q+v,dropout=0.1",
            **more,
        }
    )


@pytest.mark.parametrize("algorithm", ["fedavg", "fedacs", "fedamp", "flame", "fedpg", "ditto", "apfl", "scaffold"])
def test_engines_agree(algorithm: str, folder: Path, tmp_path: Path) -> None:
    ends = []
    for engine in ("loop", "batched"):
        playing = launch.begin(config_of(folder, algorithm, engine=engine, dtype="float64"), tmp_path / engine)
        assert playing.parts.engine.problem.layout.size == OF_A + OF_B + OF_HEAD
        if engine == "batched":
            assert playing.parts.engine.choices["kernel"] == "stacked"
        finish(playing)
        ends.append(Result(tmp_path / engine).metrics["value"])
    assert (ends[0] - ends[1]).abs().max() < 1e-10
    assert ends[0].nunique() > 5


def test_stopped_and_resumed_ends_the_same(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, "fedacs", rounds=4, checkpoint_every=2)
    finish(launch.begin(config, tmp_path / "whole"))
    stop(launch.begin(config, tmp_path / "cut"), "in a round", 3)
    stop(launch.resume(tmp_path / "cut"), "in evaluation", 4, Killed)
    finish(launch.resume(tmp_path / "cut"))
    assert_same_end(tmp_path / "whole", tmp_path / "cut")


def test_another_base_is_not_the_same_run(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "bert"
    transformers.AutoModel.from_pretrained(folder / "bert").save_pretrained(model)
    config = config_of(folder, model=f"hf:{model},lora=2,targets=q+v", rounds=3, checkpoint_every=1)
    stop(launch.begin(config, tmp_path / "run"), "in a round", 2)
    changed = transformers.AutoModel.from_pretrained(folder / "bert")
    with torch.no_grad():
        changed.embeddings.word_embeddings.weight[5, 5] += 1
    changed.save_pretrained(model)
    with pytest.raises(CheckpointError, match="the model is not what the run"):
        launch.resume(tmp_path / "run")


def test_what_stays_at_home(folder: Path, tmp_path: Path) -> None:
    """FedSA-LoRA: A and the head are averaged, B is each client's own."""
    playing = launch.begin(config_of(folder, local="*.lora_B.*", participation=1.0), tmp_path / "run")
    engine: Engine = playing.parts.engine
    finish(playing)
    state = last_state(tmp_path / "run")
    assert state.clients["local_part"].shape == (5, OF_B)
    assert len(state.clients["local_part"].unique(dim=0)) == 5
    assert {value.shape[-1] for value in state.server.values() if value.dim()} == {OF_A + OF_HEAD}
    assert engine.problem.layout.size == OF_A + OF_B + OF_HEAD


@pytest.mark.parametrize(("dtype", "near"), [("float64", 1e-12), ("float32", 1e-6)])
def test_export_as_peft_reads_it(dtype: str, near: float, folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, "fedamp", dtype=dtype)
    finish(launch.begin(config, tmp_path / "run"))
    found = export(tmp_path / "run", tmp_path / "model", clients=[1, 3])
    file = found.folder / found.about["clients"][1]["file"]
    adapters = file.with_suffix(".peft")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in adapters.iterdir()}
    x = torch.from_numpy(np.load(folder / "words.npz")["x"])
    base = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder / "bert", num_labels=3, dtype=getattr(torch, dtype)
    )
    theirs = peft.PeftModel.from_pretrained(base, adapters, autocast_adapter_dtype=False).to(base.dtype).eval()
    wanted = theirs(input_ids=x, attention_mask=(x != 0).long()).logits
    ours = runpy.run_path(str(tmp_path / "model" / "predict.py"))["load"](3, tmp_path / "model").outputs(x)
    torch.testing.assert_close(ours, wanted, rtol=near, atol=near)
    begun = assemble(config).engine.problem.module  # what was trained is more than rounding
    assert (begun(x.to(DEVICE)).cpu() - wanted).abs().max() > 1e-3
    # What is frozen is in the base's own folder.
    assert sum(value.numel() for value in load_file(file).values()) == OF_A + OF_B + OF_HEAD


def test_a_base_that_has_moved_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "bert", base := tmp_path / "base")
    config = config_of(folder, "fedavg")
    config = config.model_copy(update={"model": config.model.replace(str(folder / "bert"), str(base))})
    finish(launch.begin(config, tmp_path / "run"))
    export(tmp_path / "run", model := tmp_path / "model", clients=3)
    predict = runpy.run_path(str(model / "predict.py"))
    np.save(tmp_path / "words.npy", np.load(folder / "words.npz")["x"])
    assert predict["main"]([str(tmp_path / "words.npy")]) == 0
    wanted = capsys.readouterr().out
    base.rename(tmp_path / "elsewhere")
    assert predict["main"]([str(tmp_path / "words.npy")]) == 1
    said = capsys.readouterr().err
    assert "its base is not in " in said and "words.npy" not in said
    monkeypatch.setenv("COTERIE_BASE", str(tmp_path / "elsewhere"))
    assert predict["main"]([str(tmp_path / "words.npy")]) == 0
    assert capsys.readouterr().out == wanted


def test_export_of_a_head_alone(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, "fedamp", model=f"hf:{folder / 'bert'},train=head")
    playing = launch.begin(config, tmp_path / "run")
    finish(playing)
    found = export(tmp_path / "run", tmp_path / "model", clients=3)
    assert not list(found.folder.glob("*.peft"))
    saved = load_file(found.folder / found.about["clients"][0]["file"])
    rows = playing.parts.simulation.personal(torch.tensor([3]), config.rounds)["w"]
    assert torch.equal(playing.parts.engine.problem.layout.row_of(saved), rows[0].cpu())


def test_a_federation_is_the_loop_engine(tmp_path: Path) -> None:
    model = f"hf:{save('vit', tmp_path / 'vit')},lora=2,targets=q+v"
    local = make_federation(tmp_path, model=model, local="*.lora_B.*")
    more = {"settings": {"local_epochs": 1}}
    serve(local.agreement, local.grid, Plan(algorithm="fedacs", rounds=2, **more), tmp_path / "run")
    compare(local, "fedacs", 2, tmp_path / "run", tmp_path / "simulation", **more)


@pytest.mark.parametrize(("algorithm", "more"), [("fedavg", {"local": "*.lora_B.*"}), ("fedacs", {})])
def test_a_federation_on_texts_is_the_loop_engine(algorithm: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Three nodes with texts of eight words, the rest of a line being padding, on a saved encoder."""
    model = f"hf:{save('bert', tmp_path / 'bert')},lora=2,targets=q+v"
    schema = Schema(task="multiclass", input_shape=(8,), classes=tuple("0123456789"), words=True)
    agreement = make_agreement(3, data=schema, model=model, **more)
    datasets = [replace(each, x=each.x.flatten(1)[:, 20:28].long().clamp(max=16)) for each in parts(3)]
    nodes = {k: Node(agreement, k, datasets[k], tmp_path / f"node-{k}") for k in range(3)}
    local = Local(agreement, LocalGrid(nodes), tmp_path, datasets)
    settings = {"local_epochs": 1, "batch_size": 20}
    serve(agreement, local.grid, Plan(algorithm=algorithm, rounds=2, settings=settings), tmp_path / "run")
    simulated = combined(local, tmp_path / "all")
    simulated["data"] += ",words=true"
    run(algorithm, out=tmp_path / "simulation", progress=False, rounds=2, settings=settings, **simulated)
    ours, theirs = (states(tmp_path / name)[0] for name in ("run", "simulation"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    begun = assemble(from_mapping({"algorithm": algorithm, **simulated})).simulation.server
    assert any(bool((ours[name] != begun[name]).any()) for name in ours)
