"""The library's own method: class frequencies in the loss, momentum, a mean of models, a mean of iterates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from coterie import api
from coterie.algorithms import registry
from coterie.compute.engine import Call
from coterie.compute.joint import JointEngine
from coterie.errors import ConfigError
from coterie.randomness import stream, torch_stream
from coterie.simulation.simulation import Simulation
from coterie.studies.comparison import compare, load_results, make_plan
from coterie.studies.leaderboard.protocol import load
from tests import small_runs
from tests.documents import ROOT, TEXT
from tests.programs import load_program
from tests.support import classification, everyone, play, samples_of, simulate, small_model

METHOD = str(Path(__file__).resolve().parents[2] / "benchmarks/own_method.py")
FEATURES, CLASSES = 4, 3
LABELS = ([0, 0, 1, 0, 0], [2, 1, 2, 2, 0, 1, 2], [1, 1, 1])  # client 0 lacks class 2; client 2 has class 1 alone
OWN = {"lr": 0.2, "local_epochs": 3, "batch_size": 0, "tau": 0.8, "smoothing": 0.5, "adaptation": 0.4}
SHARED = {"server_momentum": 0.6, "averaging": 0.55}
SMALL = {"lr": 0.1, "local_epochs": 2, "batch_size": 4}
FEDAVG = {"tau": 0.0, "server_momentum": 0.0, "averaging": 0.0}


def data() -> list[tuple[Tensor, Tensor]]:
    draw = stream(4, "own method data")
    return [(torch.from_numpy(draw.normal(size=(len(y), FEATURES))), torch.tensor(y)) for y in LABELS]


def model(outputs: int = CLASSES) -> nn.Module:
    with torch_stream(8, "own method model"):
        return nn.Linear(FEATURES, outputs)


def make(engine: str = "batched", lost: Any = None, **settings: Any) -> Simulation:
    samples = samples_of(data(), task="multiclass", classes=CLASSES)
    settings = OWN | SHARED | settings
    return simulate(METHOD, samples, model(), task="multiclass", engine=engine, settings=settings, lost=lost)


def small(method: str, engine: str = "batched", lost: Any = None, **settings: Any) -> Simulation:
    settings = SMALL | settings
    return simulate(
        method, classification(), small_model(), task="multiclass", engine=engine, settings=settings, lost=lost
    )


def softmax(logits: Any) -> Any:
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    return shifted / shifted.sum(1, keepdims=True)


class Reference:
    """The method in NumPy for full batches, with the gradient of a linear softmax model written out."""

    def __init__(self, row: Tensor) -> None:
        self.w = row.numpy().copy()
        self.step, self.mean = np.zeros_like(self.w), self.w.copy()

    def prior(self, i: int) -> Any:
        counts = np.array([LABELS[i].count(c) for c in range(CLASSES)], dtype=np.float64)
        return OWN["tau"] * np.log((counts + OWN["smoothing"]) / (len(LABELS[i]) + CLASSES * OWN["smoothing"]))

    def logits(self, row: Any, i: int) -> Any:
        weight, bias = row[:-CLASSES].reshape(CLASSES, FEATURES), row[-CLASSES:]
        return data()[i][0].numpy() @ weight.T + bias + self.prior(i)

    def iterates(self, row: Any, i: int, rate: float) -> list[Any]:
        x, hot = data()[i][0].numpy(), np.eye(CLASSES)[LABELS[i]]
        found = []
        for _ in range(OWN["local_epochs"]):
            to_logits = (softmax(self.logits(row, i)) - hot) / len(x)
            row = row - rate * np.append((to_logits.T @ x).ravel(), to_logits.sum(0))
            found.append(row)
        return found

    def round(self, number: int, cohort: list[int]) -> None:
        sizes = np.array([len(LABELS[i]) for i in cohort], dtype=np.float64)
        trained = [self.iterates(self.w, i, OWN["lr"])[-1] for i in cohort]
        moved = sum(p * row for p, row in zip(sizes / sizes.sum(), trained, strict=True)) - self.w
        away = (len(LABELS) - len(cohort)) / len(LABELS)
        self.step = SHARED["server_momentum"] * away * self.step + moved
        self.w = self.w + self.step
        # The mean of all models so far, until that forgets more slowly than γ says.
        kept = min(SHARED["averaging"], (number - 1) / number)
        self.mean = kept * self.mean + (1 - kept) * self.w

    def predictions(self, i: int) -> Any:
        path = self.iterates(self.mean, i, OWN["adaptation"] * OWN["lr"])
        return self.logits(np.mean(path, axis=0), i)


def personal_predictions(simulation: Simulation, number: int) -> Tensor:
    everybody = everyone(simulation)
    rows = simulation.personal(everybody, number)
    return simulation.engine.predict(simulation.algorithm.predict, rows, everybody, "test", False)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_rounds_equal_an_independent_implementation(engine: str) -> None:
    def lost(clients: Tensor, call: Call) -> Tensor:
        return (clients == 2) & (call.round == 2) & (call.purpose == "round")

    simulation = make(engine, lost)
    reference = Reference(simulation.engine.problem.start)
    rounds = [([0, 1, 2],) * 2, ([1, 2], [1]), ([0, 2],) * 2, ([0],) * 2]
    for number, (asked, answered) in enumerate(rounds, start=1):
        simulation.play_round(torch.tensor(asked), number)
        reference.round(number, answered)
        for name, wanted in (("w", reference.w), ("velocity", reference.step), ("mean", reference.mean)):
            np.testing.assert_allclose(simulation.server[name].numpy(), wanted, rtol=0, atol=1e-13, err_msg=name)
        wanted = np.concatenate([reference.predictions(i) for i in range(len(LABELS))])
        found = personal_predictions(simulation, number).numpy()
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-13)


# P(x | y): a row for each class over three inputs. Sixteen samples of it with the class frequencies of two clients.
SEEN = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.25, 0.5], [0.25, 0.5, 0.25]], dtype=torch.float64)
FREQUENCIES = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.25, 0.5]], dtype=torch.float64)


def by_bayes(tau: float) -> Simulation:
    """Two clients that differ in their class frequencies alone, and the model ``log P(x | y)``."""
    train = []
    for often in FREQUENCIES:
        counts = (16 * often.unsqueeze(1) * SEEN).round().long()  # [class, input], whole numbers
        y, x = (index.flatten().repeat_interleave(counts.flatten()) for index in _places())
        train.append((torch.eye(3, dtype=torch.float64)[x], y))
    module = nn.Linear(3, 3, bias=False).double()
    with torch.no_grad():
        module.weight.copy_(SEEN.log())
    settings = SMALL | {"tau": tau, "smoothing": 1e-12, "batch_size": 0, "server_momentum": 0.5}
    samples = samples_of(train, task="multiclass", classes=3)
    return simulate(METHOD, samples, module, task="multiclass", settings=settings)


def _places() -> tuple[Tensor, Tensor]:
    classes, inputs = torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij")
    return classes, inputs


def test_clients_that_differ_in_class_frequencies_alone_agree_on_one_model() -> None:
    simulation = by_bayes(1.0)
    before = simulation.server["w"].clone()
    play(simulation, 3)  # the gradient of every client is zero there
    torch.testing.assert_close(simulation.server["w"], before, rtol=0, atol=1e-11)
    joint = FREQUENCIES.unsqueeze(2) * SEEN  # P_i(y, x)
    posterior = (joint / joint.sum(1, keepdim=True)).transpose(1, 2)  # P_i(y | x)
    x = torch.eye(3, dtype=torch.float64).expand(2, -1, -1)
    outputs = simulation.algorithm.predict(simulation.engine.net, simulation.personal(everyone(simulation), 3), x)
    torch.testing.assert_close(outputs.softmax(2), posterior, rtol=0, atol=1e-10)


def test_without_class_frequencies_they_pull_that_model_apart() -> None:
    simulation = by_bayes(0.0)
    before = simulation.server["w"].clone()
    play(simulation, 1)
    assert float((simulation.server["w"] - before).abs().max()) > 1e-3


def test_without_its_parts_it_is_fedavg_and_its_fine_tuning() -> None:
    # One step over all samples: the mean of the iterates is the one there is.
    one = {"local_epochs": 1, "batch_size": 0}
    plain, tuned = small(METHOD, **FEDAVG, **one, adaptation=1.0), small("fedavg_ft", **one)
    for simulation in (plain, tuned):
        play(simulation, 3)
    for name in ("w", "mean"):
        torch.testing.assert_close(plain.server[name], tuned.server["w"], rtol=0, atol=1e-13)
    found = [personal_predictions(simulation, 3) for simulation in (plain, tuned)]
    torch.testing.assert_close(*found, rtol=0, atol=1e-13)


def test_minibatches_of_many_epochs_are_fedavgs_too() -> None:
    plain, average = small(METHOD, **FEDAVG), small("fedavg")
    for simulation in (plain, average):
        play(simulation, 3)
    torch.testing.assert_close(plain.server["w"], average.server["w"], rtol=0, atol=1e-13)


def test_where_nobody_is_away_there_is_no_momentum() -> None:
    both = [small(METHOD, server_momentum=factor) for factor in (0.0, 0.9)]
    for simulation in both:
        play(simulation, 3)
    torch.testing.assert_close(both[0].server["w"], both[1].server["w"], rtol=0, atol=0)
    for simulation in both:
        simulation.play_round(everyone(simulation)[:4], 4)
    assert float((both[0].server["w"] - both[1].server["w"]).abs().max()) > 1e-4


def test_at_the_rate_zero_personal_models_are_the_mean_and_the_frequencies() -> None:
    simulation = make(adaptation=0.0)
    play(simulation, 2)
    rows = simulation.personal(everyone(simulation), 2)
    torch.testing.assert_close(rows["w"], simulation.server["mean"].expand(3, -1), rtol=0, atol=0)
    reference = Reference(simulation.server["mean"])
    wanted = np.concatenate([reference.logits(reference.mean, i) for i in range(3)])
    np.testing.assert_allclose(personal_predictions(simulation, 2).numpy(), wanted, rtol=0, atol=1e-13)


def test_equal_class_counts_change_nothing() -> None:
    draw = stream(4, "own method equal counts")
    equal = [(torch.from_numpy(draw.normal(size=(6, FEATURES))), torch.tensor([0, 1, 2] * 2)) for _ in range(2)]
    samples = samples_of(equal, task="multiclass", classes=CLASSES)
    both = [
        simulate(METHOD, samples, model(), task="multiclass", settings=OWN | SHARED | {"tau": tau})
        for tau in (0.0, 1.0)
    ]
    for simulation in both:
        play(simulation, 2)
    torch.testing.assert_close(both[0].server["w"], both[1].server["w"], rtol=0, atol=1e-13)


@pytest.mark.parametrize("settings", [{}, {"optimiser": "adam", "lr": 0.01}, {"momentum": 0.5, "aggregator": "median"}])
def test_engines_agree_when_some_are_away_and_some_are_lost(settings: dict[str, Any]) -> None:
    def lost(clients: Tensor, call: Call) -> Tensor:
        return clients == 4

    loop, batched = (small(METHOD, engine, lost, **settings) for engine in ("loop", "batched"))
    for number, cohort in enumerate(([0, 2, 4], [1, 2, 3, 4], [0, 4]), start=1):
        for simulation in (loop, batched):
            simulation.play_round(torch.tensor(cohort), number)
        for name, value in loop.server.items():
            torch.testing.assert_close(value, batched.server[name], rtol=1e-10, atol=1e-10)
    found = [personal_predictions(simulation, 3) for simulation in (loop, batched)]
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


def test_candidates_that_play_together_are_what_they_are_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    play_them = JointEngine.run

    def counting(self: JointEngine, asks: Any) -> Any:
        asked.append(len(asks))
        return play_them(self, asks)

    monkeypatch.setattr(JointEngine, "run", counting)
    own = {"rounds": 2, "hold_out": 0.4, "validation": 0.3, "threads": 1, "dtype": "float64"}
    method = {"algorithm": METHOD, "settings": {"batch_size": 4}, "tune": {"lr": [0.1, 0.2], "adaptation": [0.3, 1.0]}}
    plan = make_plan({**small_runs.SMALL, **own, "seeds": [1], "methods": [method]})
    compare(plan, tmp_path / "joint", progress=False)
    assert max(asked) == 4
    for run in plan.runs:
        together = load_results(plan, tmp_path / "joint")[run.name]
        alone = api.run_config(run.config, out=tmp_path / run.name, progress=False)
        assert together is not None and "newcomer" in set(alone.metrics["model"])
        pd.testing.assert_frame_equal(together.metrics, alone.metrics, rtol=1e-10, atol=1e-10)


def test_two_classes_with_one_output_add_the_log_odds() -> None:
    # The client has one sample of the first class and three of the second: log-odds log(3 / 1), without smoothing.
    x, y = torch.zeros(4, FEATURES, dtype=torch.float64), torch.tensor([0, 1, 1, 1])
    samples = samples_of([(x, y)], task="binary", classes=2)
    settings = SMALL | {"smoothing": 1e-12, "adaptation": 0.0}
    simulation = simulate(METHOD, samples, model(1), task="binary", settings=settings)
    rows = simulation.personal(everyone(simulation), 0)
    with_it = simulation.engine.predict(simulation.algorithm.predict, rows, everyone(simulation), "test", False)
    without = simulation.engine.predict(
        simulation.algorithm.predict, {"w": rows["w"]}, everyone(simulation), "test", False
    )
    torch.testing.assert_close(with_it - without, torch.full_like(without, np.log(3.0)), rtol=0, atol=1e-10)
    play(simulation, 1)


def test_outputs_that_no_class_has_count_as_never_seen() -> None:
    samples = samples_of(data(), task="multiclass", classes=CLASSES)
    settings = OWN | {"tau": 1.0, "adaptation": 0.0}
    simulation = simulate(METHOD, samples, model(CLASSES + 2), task="multiclass", settings=settings)
    rows = simulation.personal(everyone(simulation), 0)
    x = torch.zeros(3, 1, FEATURES, dtype=torch.float64)
    bias = model(CLASSES + 2).double().bias.detach()
    added = simulation.algorithm.predict(simulation.engine.net, rows, x)[:, 0] - bias
    counts = torch.tensor([[4.0, 1, 0, 0, 0], [1, 2, 4, 0, 0], [0, 3, 0, 0, 0]], dtype=torch.float64)
    whole = torch.tensor([[5.0], [7], [3]], dtype=torch.float64) + 1.5
    torch.testing.assert_close(added, ((counts + 0.5) / whole).log(), rtol=0, atol=1e-12)


def test_numbers_without_classes_train_as_fedavg() -> None:
    draw = stream(4, "own method regression")
    clients = [tuple(torch.from_numpy(draw.normal(size=shape)) for shape in ((5, FEATURES), (5,))) for _ in range(2)]
    found = []
    for method, more in ((METHOD, {"server_momentum": 0.0}), ("fedavg", {})):
        simulation = simulate(method, samples_of(clients), model(1), settings=SMALL | more)
        play(simulation, 2)
        found.append(simulation.server["w"])
    torch.testing.assert_close(*found, rtol=0, atol=1e-13)


def test_what_cannot_work_is_refused() -> None:
    for wrong in ({"tau": -1}, {"smoothing": 0}, {"server_momentum": 1}, {"averaging": 1}, {"adaptation": -0.1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            registry.make(METHOD, wrong)


def parts_program() -> Any:
    return load_program(Path(METHOD).with_name("own_method_parts.py"))


def test_it_is_tuned_over_as_many_candidates_whatever_is_left_out() -> None:
    program = parts_program()
    protocol = load()
    assert not set(program.SEEDS) & set(protocol.seeds)  # it was made without the leaderboard's clients
    for part, fixed in program.PARTS.items():
        tune = program.TUNED if "adaptation" not in fixed else {"lr": protocol.rates}
        rules = protocol.with_method(METHOD, tune, fixed)  # refuses another number of candidates than all have
        plan = rules.plan(rules.setting("fmnist-dir0.1-all"), METHOD, {"seeds": [7]})
        assert len(plan.runs) == protocol.candidates, part


def test_the_table_of_parts_has_what_was_measured() -> None:
    program = parts_program()
    rows = [
        {"part": "whole", "setting": "a", "validation": 0.5, "test": 0.25},
        {"part": "whole", "setting": "b", "validation": 0.75, "test": 1.0},
        {"part": "less", "setting": "b", "validation": 0.125, "test": 0.0625},
    ]
    wanted = "| | a | b |\n|---|---:|---:|\n| whole | 50.0 / 25.0 | 75.0 / 100.0 |\n| less | – | 12.5 / 6.2 |"
    assert program.table(rows) == wanted


def test_the_page_has_what_the_parts_gave() -> None:
    program = parts_program()
    found = json.loads((ROOT / "results/own_method_parts.json").read_text(encoding="utf-8"))
    assert tuple(found["seeds"]) == program.SEEDS and {row["part"] for row in found["rows"]} == set(program.PARTS)
    assert program.table(found["rows"]) in TEXT["docs/own_method.md"]
