"""Exported models: loaded by their own few lines, they measure what the run recorded."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

from coterie import api
from coterie.cli.app import app
from coterie.config import from_mapping
from coterie.errors import CheckpointError, ConfigError, CoterieError, RunFolderError
from coterie.results import Result
from coterie.results.export import Exported, Kind, export, kind
from coterie.runs.builder import make_population
from tests.small_runs import config_of

CLIENT = 2


def finished(name: str, path: Path, **more: Any) -> Path:
    api.run_config(config_of(name, rounds=3, threads=1, **more), out=path, progress=False)
    return path


def loaded(exported: Exported) -> Any:
    found = importlib.util.spec_from_file_location("loader", exported.loader)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def accuracy(exported: Exported, run: Path, client: int = CLIENT) -> float:
    """Measure the files on the client's test samples, with nothing of the run but who holds what."""
    population = make_population(from_mapping(Result(run).config))
    mine = population.shares.test[client]
    loader = loaded(exported)
    with torch.no_grad():
        outputs = loader.load_model()(loader.prepare(population.dataset.x[mine]))
    return float((outputs.argmax(1) == population.dataset.y[mine]).double().mean())


def recorded(run: Path, model: str, client: int = CLIENT, split: str = "test", metric: str = "accuracy") -> float:
    frame = Result(run).metrics
    chosen = frame[(frame["model"] == model) & (frame["split"] == split) & (frame["metric"] == metric)]
    return float(chosen[(chosen["round"] == 3) & (chosen["client"] == client)]["value"].item())


@pytest.mark.parametrize(
    ("name", "models"),
    [
        ("fedavg", ("personal", "global")),
        ("fedavg_ft", ("personal", "global")),
        ("fedrep", ("personal",)),
        ("fedacs", ("personal", "global")),
        ("apfl", ("personal",)),
        ("fedrod", ("global",)),
        ("fedsgd", ("global",)),
    ],
)
def test_an_exported_model_measures_what_was_recorded(name: str, models: tuple[Kind, ...], tmp_path: Path) -> None:
    run = finished(name, tmp_path / "run")
    for model in models:
        found = export(run, CLIENT, tmp_path / f"{model}.safetensors", best=model)
        assert accuracy(found, run) == pytest.approx(recorded(run, model), abs=1e-12)
        assert found.about["test"]["accuracy"] == recorded(run, model) and found.about["kind"] == model
    assert Result(run).finished  # nothing in the run was changed


@pytest.mark.parametrize("name", ["fedavg", "fedacs", "flame", "ditto"])
def test_an_exported_model_has_the_parts_that_stayed_with_the_client(name: str, tmp_path: Path) -> None:
    run = finished(name, tmp_path / "run", local="head")
    models: tuple[Kind, ...] = ("personal", "global")
    for model in models:
        found = export(run, CLIENT, tmp_path / f"{model}.safetensors", best=model)
        assert accuracy(found, run) == pytest.approx(recorded(run, model), abs=1e-12)
    heads = [load_file(tmp_path / f"{model}.safetensors")["head.weight"] for model in models]
    assert torch.equal(*heads)


def test_images_are_scaled_by_the_loader(tmp_path: Path) -> None:
    run = finished("local", tmp_path / "run", data="digits", partition="iid", clients=5)
    found = export(run, CLIENT, tmp_path / "model.safetensors")
    assert accuracy(found, run) == pytest.approx(recorded(run, "personal"), abs=1e-12)


def test_the_hybrid_is_the_better_on_validation_samples(tmp_path: Path) -> None:
    run = finished("flame", tmp_path / "run", validation=0.4)
    for client in range(5):
        found = export(run, client, tmp_path / f"{client}.safetensors", best="hybrid")
        scores = {
            model: (
                recorded(run, model, client, "validation"),
                -recorded(run, model, client, "validation", "loss"),
            )
            for model in ("personal", "global")
        }
        assert found.about["kind"] == max(scores, key=lambda model: scores[model])
        assert accuracy(found, run, client) == pytest.approx(recorded(run, "hybrid", client), abs=1e-12)


def test_a_newcomers_model(tmp_path: Path) -> None:
    run = finished("fedavg", tmp_path / "run", hold_out=0.2)
    shares = Result(run).shares
    client = int(shares.loc[shares["role"] == "newcomer", "client"].item())
    found = export(run, client, tmp_path / "model.safetensors")
    assert accuracy(found, run, client) == pytest.approx(recorded(run, "newcomer", client), abs=1e-12)


class Tied(nn.Module):
    """Two names for one matrix, a frozen layer, and dropout."""

    def __init__(self, input_shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(input_shape[0], input_shape[0], bias=False)
        self.again = nn.Linear(input_shape[0], input_shape[0], bias=False)
        self.again.weight = self.first.weight
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Linear(input_shape[0], input_shape[0])
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(input_shape[0], outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.drop(torch.tanh(self.again(torch.tanh(self.first(x)))))))


def test_a_module_of_the_users_with_tied_and_frozen_parameters(tmp_path: Path) -> None:
    run = finished("local", tmp_path / "run", model=f"import:{__name__}:Tied")
    found = export(run, CLIENT, tmp_path / "model.safetensors")
    assert accuracy(found, run) == pytest.approx(recorded(run, "personal"), abs=1e-12)
    tensors = load_file(found.model)
    assert tensors["first.weight"].equal(tensors["again.weight"]) and "frozen.weight" in tensors


@pytest.mark.parametrize(
    ("name", "best", "sentence"),
    [
        ("fedrod", "personal", "the personal model of FedROD is more than the model"),
        ("splitgp", "global", "the global model of SplitGP is more than the model"),
        ("local", "global", "Local has no global model"),
        ("local", "hybrid", "best is hybrid, but"),
        ("fedsgd", "personal", "FedSGD has no personal model"),
    ],
)
def test_what_cannot_be_exported_is_refused(name: str, best: Kind, sentence: str, tmp_path: Path) -> None:
    more = {"model": "mlp:hidden=5-4"} if name == "splitgp" else {}
    run = finished(name, tmp_path / "run", **more)
    with pytest.raises(ConfigError, match=sentence) as refused:
        export(run, CLIENT, tmp_path / "model.safetensors", best=best)
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_mistakes(tmp_path: Path) -> None:
    run = finished("local", tmp_path / "run")
    out = tmp_path / "model.safetensors"
    with pytest.raises(ConfigError, match="clients 0 to 4"):
        export(run, 5, out)
    with pytest.raises(ConfigError, match="must end in"):
        export(run, 1, tmp_path / "model.pt")
    with pytest.raises(RunFolderError, match="there is no folder"):
        export(run, 1, tmp_path / "nowhere/model.safetensors")
    with pytest.raises(ConfigError, match="must be personal, global, hybrid"):
        kind("median")
    save_file({"a": torch.zeros(1)}, out)
    with pytest.raises(RunFolderError, match="is there already"):
        export(run, 1, out)
    out.unlink()
    for path in (run / "checkpoint").iterdir():
        (path / "state.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="whole"):
        export(run, 1, out)
    (run / "summary.json").unlink()
    with pytest.raises(RunFolderError, match="not finished"):
        export(run, 1, out)


# ----------------------------------------------------------------------------------------------------------------- ONNX


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_onnx_without_its_packages_is_refused_before_anything_is_written(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", ModuleType("onnx"))
    monkeypatch.setitem(sys.modules, package, None)
    run = finished("local", tmp_path / "run")
    with pytest.raises(ConfigError) as refused:
        export(run, CLIENT, tmp_path / "model.safetensors", onnx=True)
    assert str(refused.value) == f"onnx needs {package}, which is not installed: install coterie[onnx]"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_module_that_onnx_cannot_say_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("step 3/3\nnext steps") from ValueError("no function for aten.view\nat all")

    for package in ("onnx", "onnxscript"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setattr(torch.onnx, "export", refusing)
    run = finished("local", tmp_path / "run")
    with pytest.raises(ConfigError) as refused:
        export(run, CLIENT, tmp_path / "model.safetensors", onnx=True)
    assert str(refused.value) == "the model 'mlp:hidden=5' cannot be written as ONNX (no function for aten.view)"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.filterwarnings("ignore")  # what the exporter warns of is its own
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("fedavg", {"data": "digits", "partition": "iid", "clients": 5, "model": "mlp"}),
        ("local", {"data": "digits", "partition": "iid", "clients": 5, "model": "cnn_small"}),
        ("local", {"model": f"import:{__name__}:Tied"}),
    ],
)
def test_an_onnx_file_gives_what_the_module_gives(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason=f"{package} is not installed: install coterie[onnx] to test it")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: the ONNX file cannot be run")
    run = finished(name, tmp_path / "run", **more)
    out = tmp_path / "m.safetensors"
    words = ["export", str(run), "--client", str(CLIENT), "--onnx", "--out", str(out)]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0 and "onnx: " in done.stderr
    code = ["m_code"] if "import:" in more["model"] else []
    files = ["load_m.py", "m.json", "m.onnx", "m.safetensors", *code, "run"]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    session = runtime.InferenceSession(str(tmp_path / "m.onnx"))
    about = json.loads((tmp_path / "m.json").read_text())
    assert json.loads(session.get_modelmeta().custom_metadata_map["coterie"]) == about
    loader = loaded(Exported(out, tmp_path / "load_m.py", about))
    population = make_population(from_mapping(Result(run).config))
    samples = loader.prepare(population.dataset.x[population.shares.test[CLIENT]])
    for count in (1, 2, len(samples)):  # of the axis of samples, any length
        (found,) = session.run(None, {"x": samples[:count].numpy()})
        with torch.no_grad():
            wanted = loader.load_model()(samples[:count])
        torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-5, atol=1e-5)
    right = torch.from_numpy(found).argmax(1) == population.dataset.y[population.shares.test[CLIENT]]
    assert float(right.double().mean()) == pytest.approx(recorded(run, "personal"), abs=1e-12)


def test_the_command(tmp_path: Path) -> None:
    run = finished("fedavg", tmp_path / "run")
    words = ["export", str(run), "--client", str(CLIENT), "--best", "global", "--out", str(tmp_path / "m.safetensors")]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0 and f"accuracy {recorded(run, 'global'):.4f}" in done.stderr.replace("\n", " ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["load_m.py", "m.json", "m.safetensors", "run"]
    with pytest.raises(CoterieError, match="is there already"):
        CliRunner().invoke(app, words, catch_exceptions=False)
