"""An experiment from its configuration to its folder: roles, attacks, cadence, records."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

import coterie
from coterie import api
from coterie.config import from_mapping
from coterie.errors import ConfigError, CoterieError, Diverged, ModelError, PartitionError
from coterie.results import Result
from coterie.runs import launch
from coterie.runs.builder import Assembly
from coterie.runs.rounds import draw_cohort
from tests.conformance_table import TABLE
from tests.small_runs import OWN, SMALL, config_of, finish


def run(path: Path, name: str = "fedavg", **more: Any) -> Result:
    return finish(launch.begin(config_of(name, **more), path))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(tmp_path_factory.mktemp("plain") / "run")


# ------------------------------------------------------------------------------------------------ cadence and records


def test_cadence_of_evaluation_and_checkpoints(plain: Result, tmp_path: Path) -> None:
    playing = launch.begin(config_of("fedacs", eval_every=2, checkpoint_every=3, eval_train=True), tmp_path / "run")
    told: list[tuple[int, bool]] = []
    kept: list[int] = []
    checkpoint = playing.checkpoint

    def watch_checkpoint() -> None:
        checkpoint()
        kept.append(playing.completed)

    playing.checkpoint = watch_checkpoint  # type: ignore[method-assign]
    playing.run(lambda number, mean: told.append((number, mean is not None)))
    metrics = playing.folder.metrics.read()
    playing.folder.close()
    assert told == [(1, False), (2, True), (3, False), (4, True), (5, True)]
    assert kept == [3, 5]
    assert sorted(metrics[metrics["model"] == "personal"]["round"].unique()) == [2, 4, 5]
    assert sorted(metrics[metrics["metric"] == "bytes_up"]["round"]) == [1, 2, 3, 4, 5]
    assert set(metrics["split"]) == {"train", "validation", "test", "wire"}
    assert Result(tmp_path / "run").weight_rounds == [2, 4, 5]
    assert set(plain.metrics["split"]) == {"validation", "test", "wire"}


def test_evaluating_less_often_changes_no_number(plain: Result, tmp_path: Path) -> None:
    seldom = run(tmp_path / "run", eval_every=3).metrics
    often = plain.metrics
    often = often[(often["model"] == "federation") | often["round"].isin([3, 5])].reset_index(drop=True)
    for column in ("model", "split", "metric"):
        often[column], seldom[column] = often[column].astype(str), seldom[column].astype(str)
    pd.testing.assert_frame_equal(often, seldom, check_exact=True)


def test_the_summary_is_what_was_promised(plain: Result) -> None:
    summary = json.loads((plain.path / "summary.json").read_text())
    metrics = plain.metrics
    assert (summary["algorithm"], summary["seed"], summary["rounds"]) == ("fedavg", 1, 5)
    for model in ("personal", "global"):
        test = metrics.query(f"model == '{model}' and split == 'test' and metric == 'accuracy'")
        means = test.groupby("round")["value"].mean()
        last = test[test["round"] == 5]["value"]
        final, best = summary[model]["final"], summary[model]["best"]
        assert final["mean"] == pytest.approx(means[5]) and final["worst"] == last.min()
        assert final["std"] == pytest.approx(last.std(ddof=0))
        validation = metrics.query(f"model == '{model}' and split == 'validation' and metric == 'accuracy'")
        by_round = validation.groupby("round")["value"].mean()
        assert best == {"mean": pytest.approx(means[by_round.idxmax()]), "round": int(by_round.idxmax())}
    total = json.loads((plain.path / "timings.jsonl").read_text().splitlines()[0])
    assert summary["seconds"]["total"] > total["training"] > 0
    assert summary["seconds"]["per_round"] == pytest.approx(summary["seconds"]["total"] / 5)
    # FedAvg: a round with 3 of 5 clients sends and gets the model of 6·5 + 5 + 5·3 + 3 = 53 float32 each.
    assert summary["bytes"] == {"up": 5 * 3 * 53 * 4, "down": 5 * 3 * 53 * 4}


def test_a_method_without_a_global_model_says_so(tmp_path: Path) -> None:
    assert run(tmp_path / "run", "local").summary["global"] is None


def test_what_rounds_report_is_recorded_for_the_cohort(tmp_path: Path) -> None:
    result = run(tmp_path / "run", "fedpg")
    server = result.metrics.query("model == 'federation' and split == 'server'")
    config = config_of("fedpg")
    for number, rows in server[server["metric"] == "gamma"].groupby("round"):
        assert isinstance(number, int)
        assert rows["client"].tolist() == draw_cohort(config.seed, number, torch.arange(5), 0.6).tolist()
    assert set(server[server["metric"] == "lambda_fair"]["client"]) == {-1}


def test_a_report_of_the_wrong_shape_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN.replace('"all": own}, {}', '"all": own}, {"odd": torch.zeros(4)}'))
    playing = launch.begin(from_mapping({"algorithm": str(tmp_path / "own.py"), **SMALL}), tmp_path / "run")
    with pytest.raises(CoterieError, match=r"'odd' of shape \(4,\): it must be one number, or one for each of the 3"):
        finish(playing)


@pytest.mark.filterwarnings("ignore:auroc is not defined")
def test_undefined_metrics_are_left_out_and_the_rest_stays(tmp_path: Path) -> None:
    # Two classes a client, few samples: some clients' test samples are of one class, where no AUROC is defined.
    result = run(
        tmp_path / "run",
        data="digits",
        partition="pathological:2",
        clients=10,
        model="linear",
        metrics=["auroc", "accuracy"],
        rounds=1,
        scarcity=12,
        max_test=3,
        participation=0.2,
    )
    metrics = result.metrics.query("model == 'global' and split == 'test'")
    assert not metrics["value"].isna().any()
    counts = metrics.groupby("metric", observed=True)["client"].nunique()
    assert counts["accuracy"] == counts["loss"] == 10 > counts["auroc"] > 0
    assert result.summary["metric"] == "auroc" and result.summary["global"]["clients"] == counts["auroc"]


def test_nothing_piles_up_in_memory(tmp_path: Path) -> None:
    playing = launch.begin(config_of("fedamp", checkpoint_every=1, rounds=9), tmp_path / "run")

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(value), Tensor) for value in gc.get_objects())

    counts = []
    for number in range(1, 8):
        playing.rounds.play(number, lambda: None)
        counts.append(tensors())
    playing.folder.close()
    assert max(counts[2:]) <= counts[1]


# ------------------------------------------------------------------------------------------------ what cannot work


REFUSED: dict[str, tuple[dict[str, Any], type[CoterieError], str]] = {
    "more clients than samples": (
        {"data": "digits", "partition": "iid", "clients": 5000},
        PartitionError,
        "5000",
    ),
    "too few owners": ({"clients": 6}, PartitionError, "use at most 5 clients"),
    "no owners": ({"data": "digits"}, PartitionError, "does not say whose a sample is"),
    "too many classes": (
        {"data": "digits", "partition": "pathological:99"},
        PartitionError,
        "99",
    ),
    "a metric of another task": ({"metrics": ["rmse"]}, ConfigError, "'rmse' does not fit the multiclass task"),
    "a loss of another task": ({"loss": "squared_error"}, ConfigError, "'squared_error' does not fit the multiclass"),
    "an unknown model": ({"model": "mpl"}, ConfigError, "did you mean 'mlp'"),
    "a model for images": ({"model": "cnn_small"}, ModelError, "cnn_small"),
    "a device that is not there": ({"device": "cuda:99"}, ConfigError, "device is 'cuda:99', but PyTorch finds"),
    "no attacker": ({"attack": "gaussian:0.01"}, ConfigError, "0.01 of 5 clients"),
    "a file that is not there": ({"data": "npz:nowhere.npz"}, CoterieError, "nowhere.npz"),
    "a loss that is not there": ({"loss": "import:nowhere:loss"}, ConfigError, "cannot be imported"),
    "a loss without a function": ({"loss": "import:math"}, ConfigError, "must read import:package.module:function"),
    "a loss that fails": ({"loss": "import:math:sqrt"}, ModelError, "import:math:sqrt' fails on outputs of shape"),
    "a loss that sums": ({"loss": "import:torch.nn.functional:cross_entropy"}, ConfigError, "gives one number"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_work_is_refused_before_a_folder_is_made(what: str, tmp_path: Path) -> None:
    values, error, words = REFUSED[what]
    with pytest.raises(error, match=words) as caught:
        run(tmp_path / "new" / "run", **values)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()


OWN_MODELS = """
import torch
from torch import nn

class Counts(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.layer = nn.Linear(6, outputs)
        self.register_buffer("seen", torch.zeros(()))
    def forward(self, x):
        self.seen += len(x)
        return self.layer(x)

class Narrow(nn.Linear):
    def __init__(self):
        super().__init__(6, 2)

class Wrong(nn.Linear):
    def __init__(self, outputs):
        super().__init__(7, outputs)

def Normed(outputs):
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, outputs))

def good(outputs):
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, outputs))

def twice(outputs, targets):
    return 2 * nn.functional.cross_entropy(outputs, targets, reduction="none")
"""


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("Counts", "buffer 'seen' changes in forward"),
        ("Narrow", r"outputs of shape \(2,\) for a sample, but .* needs 3"),
        ("Wrong", r"fails on inputs of shape \(6,\) \(RuntimeError: mat1 and mat2 shapes"),
        ("Normed", "BatchNorm1d.* keeps no running statistics.*track_running_stats=True"),
    ],
)
def test_models_are_tried_on_real_samples(model: str, words: str, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "coterie_own_models.py").write_text(OWN_MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelError, match=words):
        run(tmp_path / "run", model=f"import:coterie_own_models:{model}")
    assert not (tmp_path / "run").exists()


def test_models_and_losses_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "coterie_own_models.py").write_text(OWN_MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = "import:coterie_own_models:good"
    one = run(tmp_path / "one", "local", model=model, settings={"lr": 0.2}).metrics
    two = run(
        tmp_path / "two", "local", model=model, loss="import:coterie_own_models:twice", settings={"lr": 0.1}
    ).metrics
    values = [frame.query("metric == 'accuracy'")["value"] for frame in (one, two)]
    assert np.array_equal(*values)  # twice the loss at half the rate is the same step, powers of two being exact
    losses = [frame.query("metric == 'loss'")["value"].to_numpy() for frame in (one, two)]
    np.testing.assert_array_equal(2 * losses[0], losses[1])


def test_divergence_of_the_servers_own_state_makes_sense() -> None:
    assert str(Diverged(3, [])).startswith("round 3: the server's state is no longer finite; ")
    assert str(Diverged(3, [4])).startswith("round 3: the model of client 4 is no longer finite; ")
    assert str(Diverged(3, range(12))).startswith("round 3: the models of 12 clients are no longer finite (0, 1, ")


def test_the_servers_state_is_watched(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN.replace("1 / len(own)", "1e38 * cohort.round ** 9"))
    playing = launch.begin(from_mapping({"algorithm": str(tmp_path / "own.py"), **SMALL}), tmp_path / "run")
    with pytest.raises(Diverged):
        finish(playing)
    assert all(bool(value.isfinite().all()) for value in playing.simulation.server.values())


# ------------------------------------------------------------------------------------------------ from Python


def test_run_load_and_resume_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.chdir(tmp_path)
    settings = TABLE["fedacs"].settings
    result = coterie.run("fedacs", **{**SMALL, "rounds": 2}, settings=settings, progress=False)
    assert result.path == Path("runs/fedacs-synthetic-seed1") and result.finished
    again = coterie.run("fedacs", **{**SMALL, "rounds": 2}, settings=settings, progress=False)
    assert again.path == Path("runs/fedacs-synthetic-seed1-2")
    pd.testing.assert_frame_equal(coterie.load(result.path).metrics, again.metrics, check_exact=True)
    assert "<table" in result._repr_html_() and "0." in result._repr_html_()
    with pytest.raises(ConfigError, match="there is no data set 'digit': did you mean 'digits'"):
        coterie.run("fedacs", data="digit")
    with pytest.raises(PartitionError):
        coterie.run("fedacs", partition="natural")
    assert sorted(path.name for path in Path("runs").iterdir()) == [
        "fedacs-synthetic-seed1",
        "fedacs-synthetic-seed1-2",
    ]
    assert capfd.readouterr() == ("", "")


def test_two_runs_at_once_get_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_of("local")
    assert api._new_folder(config) != api._new_folder(config)


def test_a_folder_that_holds_a_run_is_refused_before_anything_is_loaded(
    plain: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Assembly:
        raise AssertionError("the data were loaded")

    monkeypatch.setattr(launch, "assemble", never)
    with pytest.raises(CoterieError, match="holds a run already: choose another --out, or `coterie resume"):
        launch.begin(config_of("local"), plain.path)


def test_the_configuration_repeats_the_run(plain: Result, tmp_path: Path) -> None:
    again = finish(launch.begin(from_mapping(plain.config), tmp_path / "again"))
    assert again.config == plain.config
    pd.testing.assert_frame_equal(plain.metrics, again.metrics, check_exact=True)
