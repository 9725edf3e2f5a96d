"""Playing the stages of a choice, so that nothing is computed twice whenever it is stopped.

``stages.json`` has an entry for each stage: how far it is played and by whom, what it took, and, when it has come to
its end, how candidates stand on validation samples and who stays.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError
from coterie.runs.storage.atomic_files import read_json, write_json
from coterie.studies.choice.candidates import Candidates, is_alone
from coterie.studies.choice.halving import FEWEST_ROUNDS, Placed, cut
from coterie.studies.choice.validation import Contender, ScoreReader, ValidationScores
from coterie.studies.comparison.plan_folder import begun
from coterie.studies.comparison.runner import run_all
from coterie.studies.joint import Common
from coterie.studies.progress import StudyProgress

_ALWAYS = 2  # stages after which there is a next one in any case: so early, methods that begin slowly are still behind

STAGES = "stages.json"
"""The file that says how far a choice has come."""


@dataclass(frozen=True)
class Budget:
    """What a choice may cost.

    Parameters
    ----------
    rounds
        The last round of the last stage; with minutes, the latest that there may be.
    minutes
        How long all may take, ``None`` if rounds decide alone.
    """

    rounds: int
    minutes: float | None = None


@dataclass(frozen=True)
class Stage:
    """A stage.

    Parameters
    ----------
    number
        The stage's number, from 0.
    rounds
        The round to which it is played.
    runs
        The candidates that play it.
    seconds
        What it took so far.
    ranking
        When it has come to its end: the candidates by the best of their models on validation samples, after whichever
        round so far; the best first.
    diverged
        The candidates that became NaN or infinite.
    staying
        Who plays the next stage, if there is one.
    improved
        Whether the best of what federates, or of training alone, is better than the best of the same candidates was
        before it, so that more rounds are worth their time; with some clients away, also whether one has come up to it.
    ended
        Whether it has come to its end.
    """

    number: int
    rounds: int
    runs: tuple[str, ...]
    seconds: float = 0.0
    ranking: tuple[Contender, ...] = ()
    diverged: tuple[str, ...] = ()
    staying: tuple[str, ...] = ()
    improved: bool = True
    ended: bool = False


@dataclass
class StagePlayer:
    """Plays the stages of a choice in its folder.

    Parameters
    ----------
    folder
        The folder.
    candidates
        The candidates.
    budget
        What it may cost.
    reader
        Reads what runs gave.
    progress
        Told how it goes.
    data_dir
        Where data sets lie.
    jobs
        How many processes play runs side by side.
    stages
        The stages so far.
    common
        What the candidates of all stages have in common.
    """

    folder: Path
    candidates: Candidates
    budget: Budget
    reader: ScoreReader
    progress: StudyProgress
    data_dir: str | os.PathLike[str] | None = None
    jobs: int = 1
    stages: list[Stage] = field(default_factory=list)
    common: Common = field(default_factory=Common)

    def play(self) -> list[Stage]:
        """Play all that is left, and give the stages."""
        self.stages = read_stages(self.folder)
        for stage in self.stages:
            runs = self.candidates.stage(stage.runs, stage.rounds).runs if stage.ended else ()
            part = self.progress.part(f"stage {stage.number + 1}", runs)
            for run in runs:
                part.found_finished(run)
        while (following := self._next()) is not None:
            self._play(following)
        return self.stages

    def _next(self) -> Stage | None:
        """Give the stage that is to be played: the one that was begun, or a new one; ``None`` at the end."""
        if self.stages and not self.stages[-1].ended:
            return self.stages[-1]
        ladder, before = self.candidates.ladder, self.stages[-1] if self.stages else None
        played, number = (0, 0) if before is None else (before.rounds, before.number + 1)
        staying = tuple(run.name for run in self.candidates.plan.runs) if before is None else before.staying
        last = self._last_round(number, played)
        rung = ladder.next_rung(number, played, last)
        if rung is None or (before is not None and not before.improved):
            self.progress.rounds_to_come = 0
            return None
        self.progress.rounds_to_come = ladder.cost(number + 1, rung, last)
        stage = Stage(number, rung, staying)
        self.stages.append(stage)
        self._write()
        return stage

    def _last_round(self, number: int, played: int) -> int:
        if self.budget.minutes is None:
            return self.budget.rounds
        if number == 0:  # nothing is known of how long a round takes
            return min(FEWEST_ROUNDS, self.budget.rounds)
        spent = sum(stage.seconds for stage in self.stages)
        before = self.stages[-2].rounds if len(self.stages) > 1 else 0
        pace = self.stages[-1].seconds / (len(self.stages[-1].runs) * (played - before))
        left = 60 * self.budget.minutes - spent
        return self.candidates.ladder.affordable(number, played, self.budget.rounds, left / pace)

    def _play(self, stage: Stage) -> None:
        plan = self.candidates.stage(stage.runs, stage.rounds)
        began, spent = time.monotonic(), stage.seconds
        before = self.stages[-2].rounds if len(self.stages) > 1 else 0
        part = self.progress.part(f"stage {stage.number + 1}", plan.runs, before)
        self.progress.tell(f"stage {stage.number + 1}, {len(stage.runs)} candidates to round {stage.rounds}")
        try:
            diverged = run_all(
                plan,
                self.folder,
                self.data_dir,
                jobs=self.jobs,
                progress=part,
                common=self.common,
            )
        finally:  # also when it is stopped: what it took counts when it goes on
            self.stages[-1] = replace(stage, seconds=spent + time.monotonic() - began)
            self._write()
        lost = tuple(name for name in stage.runs if name in diverged)
        scores = self.reader.read(name for name in stage.runs if name not in lost)
        self.stages[-1] = self._ended(self.stages[-1], scores, lost)
        self._write()

    def _ended(self, stage: Stage, scores: ValidationScores, diverged: tuple[str, ...]) -> Stage:
        ranking = scores.ranking()
        alone = {run.name for run in self.candidates.plan.runs if is_alone(run)}
        federated = {run.name for run in self.candidates.plan.runs} - alone
        sides = {"training alone": alone, "what federates": federated}
        for words, side in sides.items():
            if not any(each.run in side for each in ranking):
                raise ConfigError(
                    f"{words} became NaN or infinite with all settings that were left, and there is nothing to compare "
                    "with: begin anew with lower learning rates (--tune lr=0.001,0.01)"
                )
        staying = tuple(each.run for each in ranking)
        ladder, following = self.candidates.ladder, stage.number + 1
        if following < len(ladder.counts):
            # To the end go the best of different methods: two learning rates of one say little about methods.
            of_each = ladder.of_each if stage.number == 0 else 1 if following + 1 == len(ladder.counts) else 0
            kept = {
                *cut(self._placed(scores, federated), ladder.counts[following].federated, of_each),
                *cut(self._placed(scores, alone), ladder.counts[following].alone),
            }
            staying = tuple(run for run in staying if run in kept)
        improved = stage.number < _ALWAYS or scores.improved(self.stages[-2].rounds, sides.values())
        if not improved and any(run.config.participation < 1 for run in self.candidates.plan.runs):
            # Who trains in few of the rounds is slow to show what it can: one that comes up to the best is waited for.
            improved = scores.climbs(self.stages[-2].rounds, federated)
        return replace(stage, ranking=tuple(ranking), diverged=diverged, staying=staying, improved=improved, ended=True)

    def _placed(self, scores: ValidationScores, runs: set[str]) -> list[Placed]:
        return [Placed(each.run, self.candidates.run(each.run).method) for each in scores.ranking(runs)]

    def _write(self) -> None:
        write_json(self.folder / STAGES, {"stages": [asdict(stage) for stage in self.stages]})


def read_stages(folder: Path) -> list[Stage]:
    """Read how far a choice has come."""
    if not (folder / STAGES).exists() or not begun(folder):
        return []
    return [_stage(entry) for entry in read_json(folder / STAGES)["stages"]]


def _stage(entry: Mapping[str, Any]) -> Stage:
    lists: dict[str, Sequence[Any]] = {name: entry[name] for name in ("runs", "diverged", "staying")}
    # JSON has no infinity.
    ranking = tuple(
        Contender(**{**each, "loss": math.inf if each["loss"] is None else each["loss"]}) for each in entry["ranking"]
    )
    return Stage(**{**entry, **{name: tuple(values) for name, values in lists.items()}, "ranking": ranking})
