"""Runs that play together end as each of them does alone."""

from __future__ import annotations

import functools
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from coterie import api
from coterie.algorithms.base import Minibatches, Task
from coterie.algorithms.fedavg_ft import FedAvgFT
from coterie.algorithms.local_training import Optimiser, ProximalTraining
from coterie.compute import strips
from coterie.compute.batched import BatchedEngine
from coterie.compute.finiteness import Finiteness
from coterie.compute.joint import JointEngine, SampleStore, join_samples, signature
from coterie.compute.joint import prediction as joint_prediction
from coterie.compute.joint.tasks import JointTask
from coterie.compute.samples import Samples, Split
from coterie.config import from_mapping
from coterie.data.partitions import Ragged
from coterie.data.shelf import DatasetShelf
from coterie.errors import AlgorithmError, CoterieError, Diverged, Interrupted, RunFolderError
from coterie.rows.host_copies import LateRead
from coterie.runs.model_builder import make_engine
from coterie.runs.rounds import draw_cohort
from coterie.runs.storage import RunFolder
from coterie.studies.comparison import compare, make_plan
from coterie.studies.comparison.plan import PlannedRun
from coterie.studies.comparison.together import joined, run_together
from coterie.studies.joint import Meeting, meeting
from coterie.studies.joint.seat import FiniteAsk
from tests.conformance_table import TABLE
from tests.small_runs import SMALL, last_state, same


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many runs each call of a joint engine was for."""
    found: list[int] = []
    run = JointEngine.run

    def counting(self: JointEngine, asks: Sequence[Any]) -> Any:
        found.append(len(asks))
        return run(self, asks)

    monkeypatch.setattr(JointEngine, "run", counting)
    return found


def planned(algorithm: str, settings: dict[str, Any], seed: int, name: str, **more: Any) -> PlannedRun:
    values = {**SMALL, "rounds": 2, "threads": 1, "dtype": "float64", "checkpoint_every": None, **more}
    config = from_mapping({**values, "algorithm": algorithm, "settings": settings, "seed": seed})
    return PlannedRun(name, algorithm, {}, {}, config)


def play_all(runs: Sequence[PlannedRun], folder: Path, share: float = 1.0) -> None:
    def play(run: PlannedRun, watch: Any, processes: Any = None) -> None:
        api.play_config(run.config, processes, out=folder / run.name, progress=watch)

    ends = list(run_together(runs, play, lambda run, number, mean: None, share=share))
    assert {run.name for run, _ in ends} == {run.name for run in runs}
    for _, found in ends:
        if isinstance(found, CoterieError):
            raise found


def play_alone(runs: Sequence[PlannedRun], folder: Path) -> None:
    for run in runs:
        api.run_config(run.config, out=folder / run.name, progress=False)


def assert_alike(one: Path, two: Path, exactly: bool) -> None:
    states = [last_state(path) for path in (one, two)]
    for part in ("server", "clients"):
        a, b = (getattr(state, part) for state in states)
        if exactly:
            assert same(a, b), part
            continue
        assert list(a) == list(b)
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-10, atol=1e-10, msg=f"{part} {name}")
    frames = [pd.read_parquet(path / "metrics.parquet") for path in (one, two)]
    pd.testing.assert_frame_equal(*frames, check_exact=exactly, rtol=1e-10, atol=1e-10)


def varied(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """The same method with every number that is not a whole one a little smaller, so that it keeps its range."""
    own = api.from_mapping({"algorithm": name, "settings": settings}).settings
    return settings | {
        key: value * 0.9
        for key, value in own.items()
        if isinstance(value, float) and value and key not in ("fraction", "threshold")
    }


@pytest.mark.parametrize("name", TABLE)
def test_every_method_is_what_it_is_alone(name: str, tmp_path: Path, calls: list[int]) -> None:
    row = TABLE[name]
    runs = [
        planned(name, row.settings, 1, "first"),
        planned(name, row.settings, 2, "second"),
        planned(name, varied(row.settings, name), 1, "third"),
        *(planned(name, row.settings | each, 3, f"variant-{k}") for k, each in enumerate(row.variants)),
    ]
    play_all(runs, tmp_path / "joint")
    play_alone(runs, tmp_path / "alone")
    for run in runs:
        assert_alike(tmp_path / "joint" / run.name, tmp_path / "alone" / run.name, exactly=False)
    if name not in ("lp_proj", "admm_lp_proj"):  # each run projects with a matrix of its own
        assert max(calls) >= 3


@pytest.mark.parametrize("name", ["fedavg", "flame", "pfedme", "ditto"])
def test_runs_with_different_epochs_are_what_they_are_alone(name: str, tmp_path: Path, calls: list[int]) -> None:
    runs = [
        planned(name, TABLE[name].settings | {"local_epochs": epochs}, seed, f"seed{seed}-epochs{epochs}")
        for seed, epochs in ((1, 1), (1, 3), (2, 2))  # those of one seed begin alike
    ]
    play_all(runs, tmp_path / "joint")
    play_alone(runs, tmp_path / "alone")
    for run in runs:
        assert_alike(tmp_path / "joint" / run.name, tmp_path / "alone" / run.name, exactly=False)
    assert max(calls) == 3


def test_runs_that_fine_tune_for_different_epochs_are_what_they_are_alone(tmp_path: Path) -> None:
    settings = TABLE["fedavg_ft"].settings
    runs = [planned("fedavg_ft", settings | {"fine_tune_epochs": epochs}, 1, f"epochs{epochs}") for epochs in (1, 2)]
    play_all(runs, tmp_path / "joint")
    play_alone(runs, tmp_path / "alone")
    for run in runs:
        assert_alike(tmp_path / "joint" / run.name, tmp_path / "alone" / run.name, exactly=False)


@pytest.mark.parametrize("name", ["fedavg", "fedrod", "splitgp", "local"])
def test_models_that_are_applied_together_are_what_they_are_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[bool, int]] = []
    outputs = JointEngine.outputs

    def counting(self: JointEngine, predict: Any, asks: Sequence[Any]) -> Any:
        asked.append((asks[0].shared, len(asks)))
        return outputs(self, predict, asks)

    monkeypatch.setattr(JointEngine, "outputs", counting)
    monkeypatch.setattr(Meeting, "as_on_a_gpu", True)
    # A client's samples are 6 numbers each: blocks of two runs, and of a global model of some places at a time.
    monkeypatch.setattr("coterie.compute.joint.prediction._BLOCK_ELEMENTS", 2 * 5 * 7 * 6)
    runs = [planned(name, SETTINGS, seed, f"seed{seed}", hold_out=0.2, eval_train=True) for seed in (1, 2, 3)]
    play_all(runs, tmp_path / "joint")
    play_alone(runs, tmp_path / "alone")
    for run in runs:
        assert_alike(tmp_path / "joint" / run.name, tmp_path / "alone" / run.name, exactly=False)
    assert {width for _, width in asked} == {3} and any(shared for shared, _ in asked) == (name != "local")


def test_models_of_clients_of_very_different_sizes_are_scored_as_they_are_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Meeting, "as_on_a_gpu", True)
    monkeypatch.setattr(strips, "_LITTLE", 0)
    cuts: list[int] = []
    original = joint_prediction.strips
    monkeypatch.setattr(
        joint_prediction, "strips", lambda *given: [cuts.append(len(found := original(*given))), found][1]
    )
    runs = [planned("flame", TABLE["flame"].settings, seed, f"seed{seed}", partition="quantity:0.3") for seed in (1, 2)]
    play_all(runs, tmp_path / "joint")
    assert max(cuts) >= 3
    monkeypatch.undo()
    play_alone(runs, tmp_path / "alone")
    for run in runs:
        assert_alike(tmp_path / "joint" / run.name, tmp_path / "alone" / run.name, exactly=False)


@pytest.fixture(params=[1, 2], ids=["one-thread", "two-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_with_the_same_chunks_every_bit_is_what_it_is_alone(tmp_path: Path, calls: list[int]) -> None:
    same_chunks = {"dtype": "float32", "chunk": 1, "rounds": 3}
    settings = {"lr": 0.1, "local_epochs": 2, "batch_size": 4}
    runs = [
        planned("fedavg", settings, 1, "fedavg", **same_chunks),
        planned("fedacs", settings | {"lr": 0.07}, 2, "fedacs", **same_chunks),
        planned("local", settings, 1, "local", **same_chunks),
        planned("fedprox", settings | {"mu": 0.3}, 1, "fedprox", **same_chunks),
        planned("fedamp", settings | {"prox": 0.7}, 3, "fedamp", **same_chunks),
        planned("fedavg", settings | {"momentum": 0.5, "weight_decay": 0.01}, 1, "heavy", **same_chunks),
        planned("fedavg", settings | {"momentum": 0.3, "weight_decay": 0.1}, 1, "light", **same_chunks),
        planned("ditto", settings | {"lam": 0.2}, 1, "ditto", **same_chunks),
        planned("ditto", settings | {"lam": 0.5}, 2, "other-ditto", **same_chunks),
    ]
    play_all(runs, tmp_path / "joint")
    play_alone(runs, tmp_path / "alone")
    for run in runs:
        assert_alike(tmp_path / "joint" / run.name, tmp_path / "alone" / run.name, exactly=True)
    # Plain training, with a proximal term, with momentum, and Ditto's: what differs is a number for each row.
    assert sorted(calls) == sorted(3 * [3, 2, 2, 2])


SETTINGS = {"lr": 0.1, "local_epochs": 1, "batch_size": 4}


@pytest.mark.parametrize(
    "more",
    [
        {"attack": "sign_flip:0.4"},
        {"attack": "label_poisoning:0.4"},
        {"privacy": "clip=1.0,noise=0.5"},
        {"hold_out": 0.2},
        {"matrix": True},
        {"local": "head"},
        {"keep": "disk"},
        {"keep_samples": "disk"},
        {"data": "digits", "partition": "quality", "clients": 5},
        {"data": "digits", "partition": "quality:redraw=true", "clients": 5},
    ],
    ids=lambda more: "-".join(more),
)
def test_whatever_stands_around_the_exchange_is_what_it_is_alone(more: dict[str, Any], tmp_path: Path) -> None:
    runs = [planned("fedavg", SETTINGS, seed, f"seed{seed}", **more) for seed in (1, 2)]
    play_all(runs, tmp_path / "joint")
    play_alone(runs, tmp_path / "alone")
    for run in runs:
        assert_alike(tmp_path / "joint" / run.name, tmp_path / "alone" / run.name, exactly=False)


def test_recorded_steps_are_taken_for_all_runs(
    tmp_path: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BatchedEngine, "__init__", functools.partialmethod(BatchedEngine.__init__, record=True))
    settings = SETTINGS | {"momentum": 0.5}
    runs = [
        planned("fedavg", settings, 1, "one"),
        planned("fedavg", settings | {"momentum": 0.3}, 2, "two"),
        planned("fedacs", settings, 3, "three"),
    ]
    play_all(runs, tmp_path / "joint")
    play_alone(runs, tmp_path / "alone")
    for run in runs:
        assert_alike(tmp_path / "joint" / run.name, tmp_path / "alone" / run.name, exactly=False)
    assert calls == [3, 3]


def test_runs_of_different_federations_play_together(tmp_path: Path, calls: list[int]) -> None:
    runs = [
        planned("fedavg", SETTINGS, 1, "all", participation=1.0),
        planned("fedavg", SETTINGS, 1, "some", participation=0.4, rounds=3),
        planned("fedacs", SETTINGS, 2, "seldom", eval_every=2),
        planned("fedpg", {"lr": 0.1}, 1, "other-task"),
    ]
    play_all(runs, tmp_path / "joint")
    play_alone(runs, tmp_path / "alone")
    for run in runs:
        assert_alike(tmp_path / "joint" / run.name, tmp_path / "alone" / run.name, exactly=False)
    assert calls == [3, 3]  # the third round of one run is its own


def test_a_run_that_fails_leaves_the_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [planned("fedavg", SETTINGS, seed, f"seed{seed}") for seed in (1, 2, 3)]
    start = ProximalTraining.start

    def failing(self: ProximalTraining, context: Any, state: Any, message: Any) -> Any:
        if context.seed == 2 and context.round == 2:
            raise ZeroDivisionError("one of three")
        return start(self, context, state, message)

    with (
        monkeypatch.context() as patched,
        pytest.raises(AlgorithmError, match=r"FedAvg, task 'train' failed.*of three"),
    ):
        patched.setattr(ProximalTraining, "start", failing)
        play_all(runs, tmp_path / "joint")
    assert not (tmp_path / "joint/seed2/summary.json").exists() and last_state(tmp_path / "joint/seed2").round == 1
    play_alone(runs, tmp_path / "alone")
    for name in ("seed1", "seed3"):
        assert_alike(tmp_path / "joint" / name, tmp_path / "alone" / name, exactly=False)
    api.resume(tmp_path / "joint/seed2", progress=False)
    assert_alike(tmp_path / "joint/seed2", tmp_path / "alone/seed2", exactly=False)


def test_where_memory_runs_out_fewer_are_computed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [planned("fedavg", SETTINGS, seed, f"seed{seed}") for seed in (1, 2, 3, 4)]
    run, widths = JointEngine.run, list[int]()

    def small(self: JointEngine, asks: Sequence[Any]) -> Any:
        widths.append(len(asks))
        if len(asks) > 2:
            raise torch.OutOfMemoryError("too many")
        return run(self, asks)

    monkeypatch.setattr(JointEngine, "run", small)
    play_all(runs, tmp_path / "joint")
    assert widths == [4, 2, 2, 2, 2]  # it is tried once
    play_alone(runs, tmp_path / "alone")
    for one in runs:
        assert_alike(tmp_path / "joint" / one.name, tmp_path / "alone" / one.name, exactly=False)


def test_as_many_play_together_as_there_is_room_for(
    tmp_path: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Five clients of a model of 6·5 + 5 + 5·3 + 3 = 53 numbers of 8 bytes, of which 3 train.
    states, rows = 3 * 5 * 53 * 8, 16 * 3 * 53 * 8
    room = 2 * (states + rows) - 5 * 53 * 8
    runs = [planned("fedavg", SETTINGS, seed, f"seed{seed}") for seed in (1, 2, 3)]
    for free, widths in ((room / 0.6 + 1, [2, 2]), (room / 0.6 - 1, [])):
        for share, name in ((1.0, "all"), (0.25, "a quarter")):  # of four processes each has as much room in four times
            calls.clear()
            monkeypatch.setattr(
                "coterie.studies.comparison.together.free_memory", lambda found=free / share: math.ceil(found)
            )
            play_all(runs, tmp_path / f"{len(widths)}" / name, share)
            assert calls == widths


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_and_the_same_command_goes_on(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {**SMALL, "rounds": 4, "threads": 1, "settings": SETTINGS, "checkpoint_every": None}
    plan = make_plan({"methods": ["fedavg", "fedacs"], "seeds": [1, 2], **shared})
    compare(plan, tmp_path / "whole", progress=False)
    run, count = JointEngine.run, 0

    def stopped(self: JointEngine, asks: Sequence[Any]) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            os.kill(os.getpid(), number)
        return run(self, asks)

    with monkeypatch.context() as patched, pytest.raises(Interrupted, match="0 of 4 runs are finished") as stop:
        patched.setattr(JointEngine, "run", stopped)
        compare(plan, tmp_path / "stopped", progress=False)
    assert stop.value.signal_number == number
    assert [last_state(tmp_path / "stopped/runs" / one.name).round for one in plan.runs] == [2] * 4
    compare(plan, tmp_path / "stopped", progress=False)
    for one in plan.runs:
        assert_alike(tmp_path / "whole/runs" / one.name, tmp_path / "stopped/runs" / one.name, exactly=True)


@pytest.mark.parametrize(
    ("batch", "more"),
    [
        (4, {"data": "synthetic:clients=5,samples=40,features=6,classes=3"}),
        # Clients of 6 to over 200 samples: batches of several widths, some of which one client alone has.
        (50, {"data": "digits", "partition": "dirichlet:0.3", "clients": 12, "participation": 0.5, "model": "linear"}),
        (0, {"data": "digits", "partition": "dirichlet:0.3", "clients": 12, "participation": 0.5, "model": "linear"}),
    ],
    ids=["small-batches", "batches-of-many-widths", "all-samples"],
)
@pytest.mark.usefixtures("threads")
def test_the_last_bits_do_not_depend_on_who_else_plays(batch: int, more: dict[str, Any], tmp_path: Path) -> None:
    settings, more = SETTINGS | {"batch_size": batch}, {"dtype": "float32", "rounds": 3, **more}
    runs = [planned("fedavg", settings, seed, f"seed{seed}", **more) for seed in (1, 2, 3, 4)]
    play_all(runs, tmp_path / "four")
    play_all(runs[:2], tmp_path / "two")
    play_all(runs[2:], tmp_path / "two")
    for one in runs:
        assert_alike(tmp_path / "four" / one.name, tmp_path / "two" / one.name, exactly=True)


@pytest.mark.usefixtures("threads")
def test_the_last_bits_of_a_lonely_client_do_not_depend_on_who_else_plays(tmp_path: Path) -> None:
    """With one client a round, steps that two runs share are one row, and those of two runs apart are two."""
    more = {"data": "digits", "partition": "dirichlet:0.5", "clients": 10, "participation": 0.1, "rounds": 4}
    more |= {"dtype": "float32", "model": "mlp:hidden=32"}
    named = [("fedavg", 1, "one"), ("fedavg_ft", 1, "alike"), ("fedavg", 2, "other")]
    runs = {name: planned(method, SETTINGS | {"batch_size": 20}, seed, name, **more) for method, seed, name in named}
    for company in (["one", "alike"], ["one", "other"]):
        play_all([runs[name] for name in company], tmp_path / company[1])
    assert_alike(tmp_path / "alike/one", tmp_path / "other/one", exactly=True)


def test_what_runs_have_in_common_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[str, int]] = []

    def counting(config: Any, *args: Any) -> Any:
        built.append((config.algorithm, config.seed))
        return make_engine(config, *args)

    monkeypatch.setattr("coterie.runs.builder.make_engine", counting)
    runs = [
        planned("fedavg", SETTINGS, 1, "first"),
        planned("fedavg", SETTINGS | {"lr": 0.2}, 1, "other rate"),
        planned("fedacs", SETTINGS, 1, "other method", participation=0.5, eval_every=2),
        planned("fedavg", SETTINGS, 2, "other seed"),
        planned("fedavg", SETTINGS, 1, "other partition", partition="dirichlet:5"),
        planned("fedavg", SETTINGS | {"batch_size": 5}, 1, "other batches"),
        planned("local", SETTINGS, 1, "learns alone"),
    ]
    play_all(runs, tmp_path / "joint")
    assert built == [("fedavg", 1), ("fedavg", 2), ("fedavg", 1), ("fedavg", 1), ("local", 1)]
    monkeypatch.undo()
    play_alone(runs, tmp_path / "alone")
    for run in runs:
        assert_alike(tmp_path / "joint" / run.name, tmp_path / "alone" / run.name, exactly=False)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Of each exchange its purpose and round, and for how many runs steps were taken."""
    found: list[tuple[str, int, int]] = []
    run = JointEngine.run

    def counting(self: JointEngine, asks: Sequence[Any]) -> Any:
        engine, inner = self._all, self._all.run

        def counted(task: Task, clients: Tensor, work: Any, message: Any, call: Any) -> Any:
            found.append((asks[0].call.purpose, asks[0].call.round, len(call.asks)))
            return inner(task, clients, work, message, call)

        with monkeypatch.context() as context:
            context.setattr(engine, "run", counted)
            return run(self, asks)

    monkeypatch.setattr(JointEngine, "run", counting)
    return found


def test_what_runs_ask_alike_is_computed_once(tmp_path: Path, computed: list[tuple[str, int, int]]) -> None:
    more = {"rounds": 3, "participation": 0.6, "chunk": 1, "eval_every": 3}
    runs = [
        planned("fedavg", SETTINGS, 1, "fedavg", **more),
        planned("fedavg_ft", SETTINGS | {"fine_tune_epochs": 2}, 1, "fine-tuned", **more),
        planned("fedavg", SETTINGS | {"aggregator": "median"}, 1, "median", **more),  # apart from round 2 on
        planned("fedavg_ft", SETTINGS | {"lr": 0.05}, 1, "other rate", **more),
        planned("fedavg_ft", SETTINGS, 2, "other seed", **more),
    ]
    play_all(runs, tmp_path / "joint")
    rounds = [(number, count) for purpose, number, count in computed if purpose == "round"]
    assert rounds == [(1, 3), (2, 4), (3, 4)]
    play_alone(runs, tmp_path / "alone")
    for run in runs:
        assert_alike(tmp_path / "joint" / run.name, tmp_path / "alone" / run.name, exactly=True)


def test_what_only_begins_and_ends_rows_may_differ_where_steps_are_shared(
    tmp_path: Path, computed: list[tuple[str, int, int]]
) -> None:
    more = {"rounds": 3, "participation": 0.6}
    settings = [{}, {"gamma": 1.0}, {"drift": False}, {"fair": False}]
    runs = [planned("fedpg", each, 1, f"fedpg{number}", **more) for number, each in enumerate(settings)]
    play_all(runs, tmp_path / "joint")
    # Without fairness the global model is another from round 2 on; personal models are another run's in no case.
    gradients = [(number, count) for purpose, number, count in computed if purpose == "round"][::2]
    assert gradients == [(1, 1), (2, 2), (3, 2)]
    play_alone(runs, tmp_path / "alone")
    for run in runs:
        assert_alike(tmp_path / "joint" / run.name, tmp_path / "alone" / run.name, exactly=False)
    ends = [last_state(tmp_path / "joint" / run.name).clients["w"] for run in runs]
    assert not any(torch.equal(ends[0], other) for other in ends[1:])


def test_a_run_that_changes_its_replies_changes_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, computed: list[tuple[str, int, int]]
) -> None:
    join = FedAvgFT.join

    def careless(self: FedAvgFT, models: Tensor, shares: Tensor) -> Tensor:
        found = join(self, models, shares)
        models.zero_()
        return found

    runs = [planned(name, SETTINGS, 1, name, rounds=3) for name in ("fedavg_ft", "fedavg", "fedprox_ft")]
    play_alone(runs, tmp_path / "alone")
    monkeypatch.setattr(FedAvgFT, "join", careless)
    play_all(runs[:2], tmp_path / "joint")
    assert [count for purpose, _, count in computed if purpose == "round"] == [1, 1, 1]
    for run in runs[:2]:
        assert same(last_state(tmp_path / "joint" / run.name).server, last_state(tmp_path / "alone" / run.name).server)


def test_a_task_that_ends_in_place_ends_each_runs_rows_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, computed: list[tuple[str, int, int]]
) -> None:
    finish = ProximalTraining.finish

    def halved(self: ProximalTraining, context: Any, work: Any) -> Any:
        work["w"].mul_(0.5)
        return finish(self, context, work)

    monkeypatch.setattr(ProximalTraining, "finish", halved)
    runs = [planned(name, SETTINGS, 1, name, rounds=3) for name in ("fedavg", "fedavg_ft", "fedprox")]
    play_alone(runs[:2], tmp_path / "alone")
    play_all(runs[:2], tmp_path / "joint")
    assert [count for purpose, _, count in computed if purpose == "round"] == [1, 1, 1]
    for run in runs[:2]:
        assert same(last_state(tmp_path / "joint" / run.name).server, last_state(tmp_path / "alone" / run.name).server)


def test_what_runs_of_a_round_have_in_common_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, int]] = []
    scaled: list[int] = []

    def counting(seed: int, number: int, *args: Any) -> Tensor:
        drawn.append((seed, number))
        return draw_cohort(seed, number, *args)

    held = SampleStore.hold

    def holding(self: SampleStore, found: Samples) -> Samples:
        scaled.append(id(found.x))
        return held(self, found)

    monkeypatch.setattr("coterie.runs.rounds.draw_cohort", counting)
    monkeypatch.setattr(SampleStore, "hold", holding)
    of_rates = [(rate, seed) for rate in (0.1, 0.2, 0.3) for seed in (1, 2)]
    of_data = {"data": "digits", "partition": "dirichlet:5"}  # that are not drawn
    runs = [planned("fedavg", SETTINGS | {"lr": rate}, seed, f"{rate} {seed}", **of_data) for rate, seed in of_rates]
    runs.append(planned("fedavg", SETTINGS, 1, "fewer", **of_data, participation=0.3))  # which is another cohort
    play_all(runs, tmp_path)
    assert sorted(drawn) == [(1, 1), (1, 1), (1, 2), (1, 2), (2, 1), (2, 2)]
    assert len(scaled) == 2 and len(set(scaled)) == 1  # the inputs of both seeds, which are the same


def test_sums_of_several_types_are_told_apart() -> None:
    class Asking:
        ask: Any = None
        seconds = 0.0
        found: bool | None = None

        def answer(self, found: bool) -> None:
            self.found = found

    clients, nan, infinite = torch.arange(3), float("nan"), float("inf")
    sums = [[(1.0, "64"), (2.0, "32")], [(nan, "32"), (1.0, "64")], [], [(3.0, "32"), (infinite, "64")], [(4.0, "32")]]
    seats = [Asking() for _ in sums]
    finite, not_finite = (Finiteness([torch.tensor([[value]])]) for value in (1.0, nan))
    for seat, own in zip(seats, sums, strict=True):
        values = tuple(torch.tensor(value, dtype=getattr(torch, f"float{bits}")) for value, bits in own)
        seat.ask = FiniteAsk(values, clients, (finite, not_finite))
    meeting._LateAnswers(seats).give()  # type: ignore[arg-type]
    assert [seat.found for seat in seats] == [True, False, True, False, True]
    assert finite.known and not not_finite.known


def test_runs_write_their_folders_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both, checkpoint = threading.Barrier(2, timeout=60), RunFolder.checkpoint

    def met(self: RunFolder, *args: Any) -> None:
        both.wait()  # breaks if one run waits for the other to be done
        checkpoint(self, *args)

    monkeypatch.setattr(RunFolder, "checkpoint", met)
    runs = [planned("fedavg", SETTINGS, seed, f"seed{seed}", checkpoint_every=1) for seed in (1, 2)]
    play_all(runs, tmp_path / "joint")
    monkeypatch.undo()
    play_alone(runs, tmp_path / "alone")
    for run in runs:
        assert_alike(tmp_path / "joint" / run.name, tmp_path / "alone" / run.name, exactly=False)


def test_a_run_that_cannot_write_leaves_the_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = RunFolder.finish

    def full(self: RunFolder, summary: Any) -> None:
        if self.path.name == "seed1":
            raise RunFolderError("no space is left")
        finish(self, summary)

    monkeypatch.setattr(RunFolder, "finish", full)
    runs = [planned("fedavg", SETTINGS, seed, f"seed{seed}") for seed in (1, 2)]
    with pytest.raises(RunFolderError, match="no space is left"):
        play_all(runs, tmp_path)
    assert [api.load(tmp_path / run.name).finished for run in runs] == [False, True]


@pytest.mark.parametrize("name", ["fedavg", "fedacs", "fedpg", "fedavg_ft"])
@pytest.mark.parametrize("as_on_a_gpu", [False, True])
def test_a_run_that_diverges_is_found_out_among_others(
    name: str, as_on_a_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Meeting, "as_on_a_gpu", as_on_a_gpu)
    monkeypatch.setattr(meeting, "_FEWEST", 1)  # each run in a party of its own
    settings = TABLE[name].settings
    runs = [planned(name, settings | {"lr": lr}, 1, f"lr{lr}") for lr in (0.1, 1e300)]

    def play(run: PlannedRun, watch: Any, processes: Any = None) -> None:
        api.play_config(run.config, processes, out=tmp_path / run.name, progress=watch)

    ends = {run.name: said for run, said in run_together(runs, play, lambda run, number, mean: None)}
    with pytest.raises(Diverged) as alone:
        api.run_config(runs[1].config, out=tmp_path / "alone", progress=False)
    assert ends == {"lr0.1": None, "lr1e+300": str(alone.value)}
    play_alone(runs[:1], tmp_path / "first")
    assert_alike(tmp_path / "lr0.1", tmp_path / "first/lr0.1", exactly=False)


@pytest.mark.parametrize("name", ["fedpg", "scaffold", "ditto"])
def test_the_device_is_asked_once_a_round_whether_all_is_finite(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()

    class Counting(LateRead):
        def __init__(self, values: Tensor) -> None:
            asked.append(len(values))
            super().__init__(values)

    def closely(self: Finiteness) -> bool:
        assert self.total is None, "a device is waited for"
        return True

    monkeypatch.setattr(Meeting, "as_on_a_gpu", True)
    monkeypatch.setattr(meeting, "LateRead", Counting)
    monkeypatch.setattr(Finiteness, "known", property(closely))
    runs = [planned(name, TABLE[name].settings, seed, f"seed{seed}") for seed in (1, 2, 3)]
    play_all(runs, tmp_path / "joint")
    monkeypatch.undo()
    assert len(asked) == 2 and min(asked) > 3  # in each of two rounds: something of each run, and of all together
    play_alone(runs, tmp_path / "alone")
    for run in runs:
        assert_alike(tmp_path / "joint" / run.name, tmp_path / "alone" / run.name, exactly=False)


@pytest.mark.parametrize("name", ["fedacs", "fedpg", "local"])
def test_one_party_goes_on_while_the_device_computes_for_the_other(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[int]
) -> None:
    said, parties = list[str](), list[LateRead]()

    class Telling(LateRead):
        def __init__(self, values: Tensor) -> None:
            super().__init__(values)
            parties.append(self)
            said.append(f"asked {(len(parties) - 1) % 2}")

        def values(self) -> Tensor:
            said.append(f"read {parties.index(self) % 2}")
            return super().values()

    monkeypatch.setattr(Meeting, "as_on_a_gpu", True)
    monkeypatch.setattr(meeting, "_FEWEST", 2)
    monkeypatch.setattr(meeting, "LateRead", Telling)
    runs = [planned(name, TABLE[name].settings, seed, f"seed{seed}", rounds=3) for seed in (1, 2, 3, 4, 5)]
    play_all(runs, tmp_path / "joint")
    # Whatever is read, the device has been given what the other party asks for.
    assert said == ["asked 0", "asked 1", *2 * ["read 0", "asked 0", "read 1", "asked 1"], "read 0", "read 1"]
    assert set(calls) == {2, 3}
    play_alone(runs, tmp_path / "alone")
    for run in runs:
        assert_alike(tmp_path / "joint" / run.name, tmp_path / "alone" / run.name, exactly=False)


def test_seconds_are_each_runs_own(tmp_path: Path) -> None:
    runs = [planned("fedavg", SETTINGS, seed, f"seed{seed}") for seed in (1, 2, 3)]
    began = time.perf_counter()
    play_all(runs, tmp_path)
    took = time.perf_counter() - began
    seconds = [api.load(tmp_path / one.name).summary["seconds"]["total"] for one in runs]
    assert 0 < sum(seconds) < took


# -------------------------------------------------------------------------------------------------------- who may join


def test_what_may_play_together() -> None:
    plain = planned("fedavg", SETTINGS, 1, "plain")
    others = [
        planned("fedacs", {"lr": 0.3}, 2, "other method"),
        planned("fedavg", SETTINGS, 1, "other model", model="linear"),
        planned("fedavg", SETTINGS, 1, "loop", engine="loop"),
        planned("fedavg", SETTINGS, 1, "another loop", engine="loop"),
        planned("fedavg", SETTINGS, 1, "other type", dtype="float32"),
    ]
    names = [[run.name for run in group] for group in joined([plain, *others])]
    assert names == [["plain", "other method"], ["other model"], ["loop"], ["another loop"], ["other type"]]


def training(**more: Any) -> ProximalTraining:
    return ProximalTraining(**({"optimiser": Optimiser(), "data": Minibatches(4)} | more))


class Sharper(ProximalTraining):
    """A task of a user's own, whose step may use what it inherits in any way."""


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (training(), training(optimiser=Optimiser(lr=0.3, lr_decay=0.9)), True),
        (training(), training(from_own=True, reply=False), True),
        (training(prox=0.1), training(prox=0.2), True),
        (training(), training(prox=0.2), False),
        (training(optimiser=Optimiser(momentum=0.1)), training(optimiser=Optimiser(momentum=0.9)), True),
        (training(), training(optimiser=Optimiser(momentum=0.9)), False),
        (training(), training(optimiser=Optimiser(kind="adam")), False),
        (training(), training(data=Minibatches(5)), False),
        (training(), training(data=Minibatches(4, epochs=2)), True),
        (training(), training(data=Minibatches(4, epochs=2, draws=2)), False),
        (Sharper(Optimiser(), Minibatches(4)), Sharper(Optimiser(), Minibatches(4)), True),
        (Sharper(Optimiser(), Minibatches(4)), Sharper(Optimiser(), Minibatches(4), reply=False), False),
        (Sharper(Optimiser(), Minibatches(4)), Sharper(Optimiser(), Minibatches(4, epochs=2)), False),
        (Sharper(Optimiser(), Minibatches(4), prox=0.1), Sharper(Optimiser(), Minibatches(4), prox=0.2), False),
        (training(), Sharper(Optimiser(), Minibatches(4)), False),
    ],
)
def test_whose_steps_are_taken_together(one: Task, other: Task, alike: bool) -> None:
    assert (signature(one) == signature(other)) is alike


def test_only_numbers_that_differ_are_given_to_rows() -> None:
    tasks = [training(prox=prox, optimiser=Optimiser(momentum=0.5)) for prox in (0.1, 0.2)]
    (column,) = JointTask(tasks).columns([2, 1], torch.device("cpu")).values()
    assert column.tolist() == [[0.1], [0.1], [0.2]]
    assert not JointTask([training(), training()]).columns([1, 1], torch.device("cpu"))


def test_a_meeting_that_is_left_ends_its_runs(tmp_path: Path) -> None:
    runs = [planned("fedavg", SETTINGS, seed, f"seed{seed}", rounds=50) for seed in (1, 2)]

    def play(run: PlannedRun, watch: Any, processes: Any = None) -> None:
        api.play_config(run.config, processes, out=tmp_path / run.name, progress=watch)

    class Left(Exception):
        pass

    def leave(run: PlannedRun, number: int, mean: float | None) -> None:
        if number == 3:
            raise Left

    with pytest.raises(Left):
        list(run_together(runs, play, leave))
    assert {last_state(tmp_path / run.name).round for run in runs} <= {50, 3, 2}
    for run in runs:  # nobody holds its folder
        assert api.resume(tmp_path / run.name, progress=False).finished


# ------------------------------------------------------------------------------------------------------------- the data


def test_a_data_set_is_read_once_unless_it_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[str, int]] = []

    def load(name: str, *, data_dir: Path | None = None, seed: int = 0) -> str:
        read.append((name, seed))
        return f"{name} {seed}"

    monkeypatch.setattr("coterie.data.shelf.load", load)
    shelf = DatasetShelf()
    found = [shelf.load(name, seed=seed) for name in ("mnist", "synthetic") for seed in (1, 2, 1)]
    assert read == [("mnist", 1), ("synthetic", 1), ("synthetic", 2)]
    assert found == ["mnist 1", "mnist 1", "mnist 1", "synthetic 1", "synthetic 2", "synthetic 1"]


def samples(x: list[float], y: list[int], split: list[list[int]]) -> Samples:
    shares = Ragged.of([torch.tensor(each) for each in split])
    nothing = Ragged.of([torch.tensor([], dtype=torch.int64)] * len(split))
    splits: dict[Split, Ragged] = {"train": shares, "validation": nothing, "test": nothing}
    counts = torch.zeros(len(split), 2)
    one = torch.ones(1)
    return Samples(torch.tensor(x), torch.tensor(y), one, one, splits, counts, None, torch.float32)


def test_equal_samples_are_held_once_and_others_beside_them() -> None:
    store = SampleStore()
    runs = [
        store.hold(samples([1.0, 2.0, 3.0], [0, 1, 0], [[0], [2, 1]])),
        store.hold(samples([1.0, 2.0, 3.0], [0, 1, 0], [[1, 0], [2]])),
        store.hold(samples([1.0, 2.0, 3.0], [1, 1, 1], [[0, 1, 2]])),
    ]
    assert runs[1].x is runs[0].x and runs[1].y is runs[0].y and runs[2].x is runs[0].x
    joint = join_samples(runs)
    assert joint.clients == 5 and len(joint.y) == 6
    targets = [joint.y[joint.splits["train"][client]].tolist() for client in range(5)]
    assert targets == [[0], [0, 1], [1, 0], [0], [1, 1, 1]]
    inputs = [joint.x[joint.splits["train"][client]].tolist() for client in range(5)]
    assert inputs == [[1.0], [3.0, 2.0], [2.0, 1.0], [3.0], [1.0, 2.0, 3.0]]
