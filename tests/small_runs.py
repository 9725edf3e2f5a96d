"""Small runs, ways to stop them, and ways to compare their ends."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from coterie import api
from coterie.config import ExperimentConfig, from_mapping
from coterie.errors import Interrupted
from coterie.results import Result
from coterie.runs.experiment import Experiment
from coterie.runs.storage import Checkpoint, RunFolder
from tests.conformance_table import TABLE

SMALL: dict[str, Any] = {
    "data": "synthetic:clients=5,samples=14,features=6,classes=3",
    "partition": "natural",
    "clients": 5,
    "rounds": 5,
    "participation": 0.6,
    "model": "mlp:hidden=5",
    "checkpoint_every": 2,
    "device": os.environ.get("COTERIE_TEST_DEVICE", "cpu"),  # the promise is the same on every device
}


def config_of(name: str, **more: Any) -> ExperimentConfig:
    settings = TABLE[name].settings if name in TABLE else {}
    return from_mapping({"algorithm": name, **SMALL, "settings": settings, **more})


def finish(playing: Experiment) -> Result:
    return api._finish(playing, progress=False)


def last_state(path: Path) -> Checkpoint:
    with RunFolder.open(path) as folder:
        found = folder.checkpoints.latest()
    assert found is not None
    return found


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    """Names, order, types and every bit, those of NaN included."""
    return list(one) == list(two) and all(
        one[name].dtype == two[name].dtype
        and one[name].shape == two[name].shape
        and one[name].contiguous().view(-1).view(torch.uint8).equal(two[name].contiguous().view(-1).view(torch.uint8))
        for name in one
    )


def assert_same_end(one: Path, two: Path) -> None:
    assert (one / "metrics.parquet").read_bytes() == (two / "metrics.parquet").read_bytes()
    first, second = last_state(one), last_state(two)
    assert first.round == second.round
    assert same(first.server, second.server) and same(first.clients, second.clients)
    weights = [Result(path) for path in (one, two)]
    assert weights[0].weight_rounds == weights[1].weight_rounds
    for number in weights[0].weight_rounds:
        pd.testing.assert_frame_equal(*(result.weights(number) for result in weights), check_exact=True)
    summaries = [{**result.summary, "seconds": None} for result in weights]
    assert summaries[0] == summaries[1]


class Killed(BaseException):
    """Stands for SIGKILL: nothing is written on the way out."""


def when(
    round_number: int, playing: Experiment, error: type[BaseException], then: Callable[..., Any]
) -> Callable[..., Any]:
    """Do as before, but raise once that round has got so far."""

    def instead(*args: Any, **kwargs: Any) -> Any:
        result = then(*args, **kwargs)
        if playing.completed + 1 == round_number:
            raise error
        return result

    return instead


def stop(playing: Experiment, place: str, round_number: int, error: type[BaseException] = KeyboardInterrupt) -> None:
    """Let an experiment be stopped at a place of a round, play it until then, and leave its folder."""
    owner: Any
    owner, name = {
        "in a round": (playing.simulation.exchange, "deliver"),
        "after a round": (playing.simulation, "play_round"),
        "in evaluation": (playing.parts.engine, "predict_all"),
        "while recording": (playing.folder.metrics, "append_bytes"),
        "before a checkpoint": (playing.folder.timings, "append"),
    }[place]
    setattr(owner, name, when(round_number, playing, error, getattr(owner, name)))
    if error is Killed:
        playing.keep = lambda: None  # type: ignore[method-assign]
    with playing.folder, pytest.raises(Interrupted if error is KeyboardInterrupt else error):
        playing.run()


# A step multiplies the error by about lr |x|² = 40 · 6: a few rounds of ten steps pass float32's 10³⁸.
FAR_TOO_FAST = {"lr": 40.0, "local_epochs": 1, "batch_size": 1}

OWN = """
from typing import ClassVar
import torch
from coterie.algorithms.base import Ask, Message
from coterie.algorithms.local_training import GlobalTraining

class Turned(GlobalTraining):
    \"\"\"Keeps its state as views that a checkpoint does not keep.\"\"\"
    name: ClassVar[str] = "turned"
    title: ClassVar[str] = "Turned"
    citation: ClassVar[str] = "nobody"

    def init(self, start):
        w = start.rows()
        return {"w": start.row.expand(3, -1).t()[:, 0], "all": w}, {"w": w}

    def round(self, server, cohort):
        replies = yield Ask("train", Message(shared={"w": server["w"].clone()}))
        own = server["all"].t().contiguous().t()
        own = own.index_copy(0, replies.clients, replies["w"]).t().contiguous().t()
        return {"w": (own.t() @ torch.full((len(own), 2), 1 / len(own)).to(own))[:, 0], "all": own}, {}
"""
