"""The fastest way of computing convolutions: by a clock of the test's own, so that nothing is timed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import coterie
from coterie.api import run_config
from coterie.compute import autotune, batched
from coterie.compute.autotune import convolution_times
from coterie.config import from_mapping
from coterie.errors import Interrupted
from coterie.models import build
from coterie.models.problem import Problem
from coterie.results import Result
from coterie.runs.experiment import Watcher
from tests.support import DEVICE, classification

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="the ways that a CPU has are looked at")

CONVOLUTIONS = [(way, rows) for way in autotune.CONVOLUTIONS["cpu"] for rows in (1, 5)]


class Clock:
    """Tells given seconds, way after way; each is looked at six times, of which the first does not count."""

    def __init__(self, *seconds: float) -> None:
        self._seconds, self.calls = iter(seconds), 0
        self._now, self._left = 0.0, 0

    def __call__(self, function: Callable[[], Any], device: torch.device) -> float:
        function()
        self.calls += 1
        if not self._left:
            self._now, self._left = next(self._seconds), 5
            return 1e9  # whatever is built the first time
        self._left -= 1
        return self._now


def problem_of(name: str = "cnn_small") -> Problem:
    return Problem.of(build(name, (1, 8, 8), 3), dtype=torch.float64)


def samples_of(clients: int = 5) -> Any:
    samples = classification(clients)
    x = samples.x.repeat(1, 64)[:, :64].reshape(-1, 1, 8, 8)
    return type(samples)(**{**samples.__dict__, "x": x})


def test_every_way_is_timed_for_each_client_and_the_fastest_is_first() -> None:
    # 1 client at once, then 5, for each way: seconds of all that are computed at once
    clock = Clock(3.0, 11.0, 4.0, 10.0, 2.5, 20.0)
    times = convolution_times(problem_of(), samples_of(), 4, clock=clock)
    assert times == {
        ("grouped", 5): 2.0,
        ("single", 5): 2.2,
        ("unfold", 1): 2.5,
        ("single", 1): 3.0,
        ("grouped", 1): 4.0,
        ("unfold", 5): 4.0,
    }
    assert list(times.values()) == sorted(times.values())
    assert clock.calls == len(CONVOLUTIONS) * 6


def test_what_is_hopeless_is_looked_at_twice() -> None:
    seen: list[int] = [0]

    def clock(function: Callable[[], Any], device: torch.device) -> float:
        function()
        seen[0] += 1
        return 1.0 if seen[0] <= 6 else 3.5  # single, one client: five times 1 s; everything after it takes 3.5

    times = convolution_times(problem_of(), samples_of(1), 4, clock=clock)
    assert times == {("single", 1): 1.0, ("grouped", 1): 3.5, ("unfold", 1): 3.5}
    assert seen[0] == 6 + 2 + 2


def test_a_way_that_fails_or_gives_other_numbers_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = autotune.agrees

    def agrees(net: Any, *rest: Any) -> bool:
        return bool(net.convolution != "unfold" and real(net, *rest))

    def clock(function: Callable[[], Any], device: torch.device) -> float:
        if function.func.__self__.net.convolution == "grouped":  # type: ignore[attr-defined]
            raise RuntimeError("no memory")
        return 1.0

    monkeypatch.setattr(autotune, "agrees", agrees)
    assert {way for way, _ in convolution_times(problem_of(), samples_of(), 4, clock=clock)} == {"single"}


def test_a_model_without_convolutions_has_nothing_to_choose() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    times = convolution_times(Problem.of(module, dtype=torch.float64), samples_of(), 4, clock=Clock())
    assert times == {}


def test_steps_that_are_timed_change_nothing() -> None:
    problem, samples = problem_of(), samples_of()
    before = problem.start.clone(), samples.x.clone()
    convolution_times(problem, samples, 0, clock=lambda function, device: float(function() is not None) + 1.0)
    assert torch.equal(problem.start, before[0]) and torch.equal(samples.x, before[1])


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Measuring finds unfolding for three clients at once the fastest; the batches that it was asked for."""
    asked: list[int] = []

    def times(problem: Problem, samples: Any, batch: int, **_: Any) -> autotune.Times:
        asked.append(batch)
        return {("unfold", 3): 0.25, ("single", 1): 0.5}

    monkeypatch.setattr(batched, "convolution_times", times)
    yield asked


SETTINGS: dict[str, Any] = {
    "clients": 5,
    "rounds": 2,
    "model": "cnn_small",
    "threads": 1,
    "checkpoint_every": 1,
}


def played(path: Path, progress: bool | Watcher = False, **more: Any) -> Result:
    settings = {"local_epochs": 1, "batch_size": 12}
    config = from_mapping({"algorithm": "fedavg", "settings": settings, **SETTINGS, **more})
    return run_config(config, out=path, progress=progress)


def test_a_run_keeps_what_was_measured(tmp_path: Path, chosen: list[int]) -> None:
    run = played(tmp_path / "measured", convolution="measured")
    assert chosen == [12]
    choices = json.loads((tmp_path / "measured/choices.json").read_text())
    assert (choices["convolution"], choices["chunk"]) == ("unfold", 3)
    assert choices["measured_seconds"] == {"unfold, 3 at once": 0.25, "single, 1 at once": 0.5}
    told = played(tmp_path / "told", convolution="unfold", chunk=3)
    assert run.metrics.equals(told.metrics)
    assert chosen == [12]


def test_a_resumed_run_does_not_measure_again(tmp_path: Path, chosen: list[int]) -> None:
    def stop(round_number: int, mean: float | None) -> None:
        raise KeyboardInterrupt

    whole = played(tmp_path / "whole", convolution="measured")
    path = tmp_path / "stopped"
    with pytest.raises(Interrupted):
        played(path, stop, convolution="measured")
    again = coterie.resume(path, progress=False)
    assert chosen == [12, 12]  # once for each run that was begun
    assert json.loads((path / "choices.json").read_text())["convolution"] == "unfold"
    assert again.metrics.equals(whole.metrics)
