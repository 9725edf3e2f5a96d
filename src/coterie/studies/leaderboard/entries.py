"""What the leaderboard keeps of a method in a setting: enough to compare it with any other, client by client."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from coterie.algorithms import registry
from coterie.errors import ConfigError
from coterie.results import Result
from coterie.studies.comparison import ComparisonPlan
from coterie.studies.comparison.standings import Tuned
from coterie.studies.leaderboard.protocol import Setting

Counts = tuple[tuple[int, ...], ...]
"""Whole numbers for each seed and client."""


class Harm(BaseModel):
    """How many clients a method helps and harms beyond chance against training alone, by seed, and the greatest loss.

    Each client by McNemar's exact test on its own test samples, adjusted by Benjamini and Hochberg for all clients of
    all seeds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    helped: tuple[int, ...]
    harmed: tuple[int, ...]
    worst: float = Field(description="the least gain in accuracy, negative if a client loses")


class LeaderboardEntry(BaseModel):
    """A method in a setting, by the candidate that was best on validation data.

    Clients are those that have test samples, in the order of their numbers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    setting: str
    method: str
    title: str
    model: str = Field(description="whose answers count: personal, newcomer, or global where there is no other")
    seeds: tuple[int, ...]
    rounds: int
    chosen: dict[str, Any] | None = Field(description="the candidate that counts; null if each diverged with a seed")
    tried: tuple[tuple[dict[str, Any], float | None], ...] = Field(
        description="every candidate and its mean on validation data, null if a seed of it diverged"
    )
    edges: tuple[str, ...] = Field(description="which chosen numbers are the least or the greatest that were tried")
    diverged: int = Field(description="how many runs became infinite or NaN")
    runs: int = Field(description="of how many")
    tests: Counts = Field(description="test samples")
    right: Counts = Field(description="those that were answered rightly")
    answers: tuple[str, ...] = Field((), description="a bit for each test sample, clients in order: base64, by seed")
    harm: Harm | None = Field(None, description="whom it helps and harms, where the answers are not kept")
    global_model: tuple[float, ...] = Field(
        (), description="mean accuracy over clients of the global model, if there is another besides; by seed"
    )
    sent: dict[str, float] = Field(description="bytes that a client that takes part receives and sends in a round")
    seconds: float

    @model_validator(mode="after")
    def _complete(self) -> LeaderboardEntry:
        if self.chosen is None:
            return self
        shapes = [len(counts) for counts in (self.tests, self.right)]
        each = all(len(one) == len(other) for one, other in zip(self.tests, self.right, strict=False))
        if shapes != [len(self.seeds)] * 2 or not each or len(self.answers) not in (0, len(self.seeds)):
            raise ValueError("tests, right and answers must have an entry for each seed, and for each client")
        return self

    def scores(self) -> list[NDArray[np.float64]]:
        """Give the accuracy of each client, for each seed."""
        return [
            np.array(right, dtype=np.float64) / np.array(tests, dtype=np.float64)
            for right, tests in zip(self.right, self.tests, strict=True)
        ]

    def means(self) -> list[float]:
        """Give the mean over clients, for each seed."""
        return [float(scores.mean()) for scores in self.scores()]

    def worst_tenths(self) -> list[float]:
        """Give the mean over the worst tenth of the clients, at least one, for each seed."""
        return [float(np.sort(scores)[: max(1, len(scores) // 10)].mean()) for scores in self.scores()]

    def bits(self, seed: int) -> NDArray[np.bool_]:
        """Give for every test sample of a seed, by its place among the seeds, whether it was answered rightly."""
        packed = np.frombuffer(base64.b64decode(self.answers[seed]), dtype=np.uint8)
        return np.unpackbits(packed, count=sum(self.tests[seed])).astype(bool)

    def plain(self) -> dict[str, Any]:
        """Give it as plain JSON types."""
        found: dict[str, Any] = self.model_dump(mode="json")
        return found


def make_entry(
    setting: Setting,
    plan: ComparisonPlan,
    runs: Sequence[Result],
    tuned: Tuned | None,
    played: Sequence[Result | None],
) -> LeaderboardEntry:
    """Sum up a method in a setting: the ``runs`` that count, one for each seed of the plan, of all that were played."""
    config = plan.runs[0].config
    algorithm = registry.get(config.algorithm)
    model = setting.model if algorithm.has_personal else "global"
    finished = [result for result in played if result is not None]
    found = [_answered(result, model) for result in runs]
    return LeaderboardEntry(
        setting=setting.name,
        method=algorithm.name,
        title=algorithm.title,
        model=model,
        seeds=plan.seeds,
        rounds=config.rounds,
        chosen=(None if tuned is None else tuned.chosen) if runs else None,
        tried=() if tuned is None else tuple((values, _finite(score)) for values, score in tuned.scores),
        edges=() if tuned is None else tuned.edges,
        diverged=len(played) - len(finished),
        runs=len(played),
        tests=tuple(tests for tests, _, _ in found),
        right=tuple(right for _, right, _ in found),
        answers=tuple(bits for _, _, bits in found),
        global_model=_global_means(runs) if algorithm.has_global and model == "personal" else (),
        sent=_sent(runs),
        seconds=round(sum(result.summary["seconds"]["total"] for result in finished), 1),
    )


def _answered(result: Result, model: str) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Count the test samples of each client and those that were answered rightly, and give all answers."""
    answers = result.answers
    own = None if answers is None else answers[answers["model"] == model]
    if own is None or own.empty:
        raise ConfigError(f"the run in {result.path} has no answers of {model} models: it must measure accuracy")
    right = (own["answer"] > 0).to_numpy()
    _, place = np.unique(own["client"].to_numpy(), return_inverse=True)
    if (np.diff(place) < 0).any():
        raise ConfigError(f"the answers in {result.path} are not in the order of clients")
    bits = base64.b64encode(np.packbits(right).tobytes()).decode("ascii")
    return tuple(np.bincount(place).tolist()), tuple(np.bincount(place[right], minlength=place[-1] + 1).tolist()), bits


def _global_means(runs: Sequence[Result]) -> tuple[float, ...]:
    found = [(result.summary.get("global") or {}).get("final") for result in runs]
    return tuple(round(float(each["mean"]), 6) for each in found if each is not None and each["mean"] is not None)


def _sent(runs: Sequence[Result]) -> dict[str, float]:
    if not runs:
        return {}
    config = runs[0].config
    training = config["clients"] - round(config["hold_out"] * config["clients"])
    taking_part = config["rounds"] * max(1, round(config["participation"] * training))
    return {way: round(total / taking_part) for way, total in runs[0].summary["bytes"].items()}


def _finite(score: float) -> float | None:
    return round(score, 6) if math.isfinite(score) else None


def read_entry(path: Path) -> LeaderboardEntry:
    """Read an entry from its file."""
    try:
        return LeaderboardEntry(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, ValidationError) as error:
        raise ConfigError(f"{str(path)!r} is no entry of the leaderboard: {error}") from error
