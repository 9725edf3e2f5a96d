"""Exported folders: fed with raw samples they measure what the run recorded, whichever method made the models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from coterie import api
from coterie.cli.app import app
from coterie.config import from_mapping
from coterie.errors import CheckpointError, ConfigError, CoterieError, RunFolderError
from coterie.results import Result
from coterie.results.export import Kind, export, kind, predict
from coterie.runs.builder import make_population
from coterie.runs.storage.kept_models import KEPT_MODELS, KeptModels, read_kept_models
from coterie.user_code import Copies
from tests.programs import load_program
from tests.small_runs import config_of

CLIENT = 2


def finished(name: str, path: Path, **more: Any) -> Path:
    api.run_config(config_of(name, rounds=3, threads=1, **more), out=path, progress=False)
    return path


def code_of(folder: Path) -> Any:
    return load_program(folder / "predict.py", "exported")


def accuracy(folder: Path, run: Path, client: int = CLIENT) -> float:
    """Measure the folder on the client's test samples, with nothing of the run but who holds what."""
    population = make_population(from_mapping(Result(run).config))
    mine = population.shares.test[client]
    outputs = code_of(folder).load(client, folder).probabilities(population.dataset.x[mine])
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
        ("per_fedavg", ("personal",)),
        ("fedpg", ("personal",)),
        ("fedrep", ("personal",)),
        ("fedacs", ("personal", "global")),
        ("apfl", ("personal",)),
        ("fedrod", ("personal", "global")),
        ("splitgp", ("personal", "global")),
        ("fedsgd", ("global",)),
    ],
)
def test_an_exported_model_measures_what_was_recorded(name: str, models: tuple[Kind, ...], tmp_path: Path) -> None:
    run = finished(name, tmp_path / "run", **({"model": "mlp:hidden=5-4"} if name == "splitgp" else {}))
    for model in models:
        found = export(run, tmp_path / model, clients=CLIENT, best=model)
        assert accuracy(found.folder, run) == pytest.approx(recorded(run, model), abs=1e-12)
        assert found.about["clients"][0]["kind"] == model
        if model == "personal":
            assert found.about["clients"][0]["test"]["accuracy"] == recorded(run, model)
    assert Result(run).finished  # nothing in the run was changed


@pytest.mark.parametrize("name", ["fedavg", "fedacs", "flame", "ditto"])
def test_an_exported_model_has_the_parts_that_stayed_with_the_client(name: str, tmp_path: Path) -> None:
    run = finished(name, tmp_path / "run", local="head")
    models: tuple[Kind, ...] = ("personal", "global")
    for model in models:
        found = export(run, tmp_path / model, clients=CLIENT, best=model)
        assert accuracy(found.folder, run) == pytest.approx(recorded(run, model), abs=1e-12)
    heads = [load_file(tmp_path / model / "client-2.safetensors")["head.weight"] for model in models]
    assert torch.equal(*heads)


@pytest.mark.parametrize(
    "model", ["mlp:hidden=5", "cnn_small", "cnn_mmnist", "resnet18_gn:stem=3x3", "nfresnet18_fedpg"]
)
def test_the_layers_of_coteries_own_models_are_written_down(model: str, tmp_path: Path) -> None:
    from coterie.models import build
    from coterie.models.problem import Problem
    from coterie.results.export.network_code import Form, network_source

    shape = (1, 8, 8) if model in ("mlp:hidden=5", "cnn_small") else (3, 32, 32)
    problem = Problem.of(build(model, shape, 10))
    (tmp_path / "network.py").write_text(network_source("it", model, problem.module, shape, 10, Form(), Copies({}, [])))
    shutil.copy(Path(__file__).parents[2] / "src/coterie/results/export/standalone/predict.py", tmp_path)
    made = code_of(tmp_path).make_network(tmp_path)
    made.load_state_dict(problem.module.state_dict())
    x = torch.sin(torch.arange(2.0 * np.prod(shape))).view(2, *shape)
    with torch.no_grad():
        torch.testing.assert_close(made.eval()(x), problem.module.eval()(x), rtol=0, atol=0)


def test_images_are_scaled_as_in_training(tmp_path: Path) -> None:
    run = finished("local", tmp_path / "run", data="digits", partition="iid", clients=5)
    found = export(run, tmp_path / "model", clients=CLIENT)
    assert accuracy(found.folder, run) == pytest.approx(recorded(run, "personal"), abs=1e-12)
    population = make_population(from_mapping(Result(run).config))
    np.save(tmp_path / "new.npy", population.dataset.x[population.shares.test[CLIENT]].numpy())
    scores = predict(found.folder, tmp_path / "new.npy")
    names = np.array(population.dataset.classes)[population.dataset.y[population.shares.test[CLIENT]].numpy()]
    assert (scores["predicted"].to_numpy() == names).mean() == pytest.approx(recorded(run, "personal"), abs=1e-12)


def test_the_hybrid_is_the_better_on_validation_samples(tmp_path: Path) -> None:
    run = finished("flame", tmp_path / "run", validation=0.4)
    found = export(run, tmp_path / "model", best="hybrid")
    assert [entry["client"] for entry in found.about["clients"]] == list(range(5))
    for client, entry in enumerate(found.about["clients"]):
        scores = {
            model: (
                recorded(run, model, client, "validation"),
                -recorded(run, model, client, "validation", "loss"),
            )
            for model in ("personal", "global")
        }
        assert entry["kind"] == max(scores, key=lambda model: scores[model])
        assert accuracy(found.folder, run, client) == pytest.approx(recorded(run, "hybrid", client), abs=1e-12)


def test_a_newcomers_model(tmp_path: Path) -> None:
    run = finished("fedavg", tmp_path / "run", hold_out=0.2)
    shares = Result(run).shares
    client = int(shares.loc[shares["role"] == "newcomer", "client"].item())
    found = export(run, tmp_path / "model", clients=client)
    assert accuracy(found.folder, run, client) == pytest.approx(recorded(run, "newcomer", client), abs=1e-12)
    assert read_kept_models(run, "newcomer") is not None and read_kept_models(run, "personal") is None


def test_a_global_model_is_written_once_and_serves_everybody(tmp_path: Path) -> None:
    run = finished("fedavg", tmp_path / "run")
    found = export(run, tmp_path / "model", best="global")
    assert [entry["client"] for entry in found.about["clients"]] == [None]
    assert sorted(path.name for path in found.folder.iterdir()) == [
        *("everyone.safetensors", "model.json", "network.py", "predict.py")
    ]
    for client in range(5):
        assert accuracy(found.folder, run, client) == pytest.approx(recorded(run, "global", client), abs=1e-12)
    mean = np.mean([recorded(run, "global", client) for client in range(5)])
    assert found.about["clients"][0]["test"]["accuracy"] == pytest.approx(mean)


def test_what_was_too_large_to_keep_is_made_again_from_the_data(tmp_path: Path) -> None:
    run = finished("fedavg_ft", tmp_path / "run")
    kept = export(run, tmp_path / "kept", clients=CLIENT)
    (run / KEPT_MODELS).unlink()
    again = export(run, tmp_path / "again", clients=CLIENT)
    one, two = (load_file(found.folder / "client-2.safetensors") for found in (kept, again))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_more_than_is_kept_is_not_kept(tmp_path: Path) -> None:
    models = KeptModels(lambda kind: kind == "personal", largest=2 * 3 * 4)
    models.add("other", torch.tensor([0]), {"w": torch.ones(1, 3)})
    models.add("personal", torch.tensor([0]), {"w": torch.ones(1, 3)})
    models.add("personal", torch.tensor([4]), {"w": torch.zeros(1, 3)})
    models.write(tmp_path)
    clients, rows = read_kept_models(tmp_path, "personal") or (None, {})
    assert clients is not None and clients.tolist() == [0, 4] and rows["w"].tolist() == [[1.0] * 3, [0.0] * 3]
    assert read_kept_models(tmp_path, "other") is None
    models.add("personal", torch.tensor([7]), {"w": torch.ones(1, 3)})
    models.add("personal", torch.tensor([8]), {"w": torch.ones(1, 3)})
    (tmp_path / KEPT_MODELS).unlink()
    models.write(tmp_path)
    assert not (tmp_path / KEPT_MODELS).exists()
    (tmp_path / KEPT_MODELS).write_bytes(b"no models")
    with pytest.raises(RunFolderError, match="is damaged"):
        read_kept_models(tmp_path, "personal")


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
    found = export(run, tmp_path / "model", clients=CLIENT)
    assert accuracy(found.folder, run) == pytest.approx(recorded(run, "personal"), abs=1e-12)
    tensors = load_file(found.folder / "client-2.safetensors")
    assert tensors["first.weight"].equal(tensors["again.weight"]) and "frozen.weight" in tensors


@pytest.mark.parametrize(
    ("name", "best", "sentence"),
    [
        ("local", "global", "Local has no global model: use --best personal"),
        ("local", "hybrid", "best is hybrid, but"),
        ("fedsgd", "personal", "FedSGD has no personal model: use --best global"),
    ],
)
def test_what_cannot_be_exported_is_refused(name: str, best: Kind, sentence: str, tmp_path: Path) -> None:
    run = finished(name, tmp_path / "run")
    with pytest.raises(ConfigError, match=sentence) as refused:
        export(run, tmp_path / "model", clients=CLIENT, best=best)
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


OWN_RULE = """
from typing import ClassVar
from coterie.algorithms.local import Local

class Doubled(Local):
    \"\"\"Doubles what the network gives.\"\"\"
    name: ClassVar[str] = "doubled"
    title: ClassVar[str] = "Doubled"

    def predict(self, net, rows, x):
        return 2 * super().predict(net, rows, x)
"""


def test_a_rule_of_prediction_that_no_module_has_is_refused(tmp_path: Path) -> None:
    (tmp_path / "doubled.py").write_text(OWN_RULE)
    run = finished(str(tmp_path / "doubled.py"), tmp_path / "run")
    with pytest.raises(ConfigError, match="the personal model of Doubled is more than the model 'mlp:hidden=5'"):
        export(run, tmp_path / "model", clients=CLIENT)
    assert not (tmp_path / "model").exists()


def test_mistakes(tmp_path: Path) -> None:
    run = finished("local", tmp_path / "run")
    out = tmp_path / "model"
    with pytest.raises(ConfigError, match="clients 0 to 4"):
        export(run, out, clients=5)
    with pytest.raises(ConfigError, match="clients is empty"):
        export(run, out, clients=[])
    with pytest.raises(RunFolderError, match="there is no folder"):
        export(run, tmp_path / "nowhere/model")
    with pytest.raises(ConfigError, match="must be personal, global, hybrid"):
        kind("median")
    with pytest.raises(RunFolderError, match="there is no exported model in"):
        predict(run, tmp_path / "new.csv")
    out.write_text("")
    with pytest.raises(RunFolderError, match="is there already"):
        export(run, out)
    out.unlink()
    out.mkdir()
    export(run, out)  # which is empty
    with pytest.raises(RunFolderError, match="is there already"):
        export(run, out)
    shutil.rmtree(out)
    for path in (run / "checkpoint").iterdir():
        (path / "state.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="whole"):
        export(run, out)
    (run / "summary.json").unlink()
    with pytest.raises(RunFolderError, match="not finished"):
        export(run, out)


def test_the_command(tmp_path: Path) -> None:
    run = finished("fedavg", tmp_path / "run")
    out = tmp_path / "m"
    words = ["export", str(run), "--client", str(CLIENT), "--client", "4", "--out", str(out)]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    for client in (CLIENT, 4):
        loss = recorded(run, "personal", client, metric="loss")
        assert f"client {client}: personal model, on test samples: loss {loss:.4f}" in done.stderr
    assert sorted(path.name for path in out.iterdir()) == [
        *("client-2.safetensors", "client-4.safetensors", "model.json", "network.py", "predict.py")
    ]
    assert json.loads((out / "model.json").read_text())["run"] == "run"
    with pytest.raises(CoterieError, match="is there already"):
        CliRunner().invoke(app, words, catch_exceptions=False)
