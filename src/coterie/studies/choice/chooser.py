"""Choosing a method for the user's data, in a folder.

::

    DIR/
      plan.yaml       who competes, complete, and the budget; another plan is refused
      runs/NAME/      a folder for each candidate's run
      diverged.json   candidates that became NaN or infinite, with the sentence that says so
      stages.json     how far it has come: who played which stage, how they stood, and who stayed
      choice.yaml     what to run, written at the end
      choice.html     the page, written last
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from coterie.errors import ConfigError
from coterie.runs.storage.atomic_files import write_text
from coterie.studies.choice import words
from coterie.studies.choice.candidates import Candidates, make_candidates
from coterie.studies.choice.decision import Decision, decide, settings_of
from coterie.studies.choice.halving import ETA
from coterie.studies.choice.page import write_page, yaml_text
from coterie.studies.choice.stages import Budget, Stage, StagePlayer
from coterie.studies.choice.validation import ScoreReader
from coterie.studies.comparison.plan_folder import RUNS, locked
from coterie.studies.comparison.runner import refuse_objects_side_by_side, refuse_several_processes
from coterie.studies.progress import study_progress
from coterie.tables import Table

ROUNDS = 50
"""Rounds of the last stage, unless a budget says otherwise."""

MOST_ROUNDS = 1000
"""Rounds of the last stage at most, where minutes are the budget."""

PAGE = "choice.html"


@dataclass(frozen=True)
class Choice:
    """Whether to federate and with which method, for the clients of a data set.

    Parameters
    ----------
    path
        The folder that holds everything.
    decision
        What was found, with all numbers.
    stages
        The stages of successive halving, with who played and how they stood.
    """

    path: Path
    decision: Decision
    stages: tuple[Stage, ...]

    @property
    def federate(self) -> bool:
        """Whether to federate; otherwise clients are as well off alone."""
        return self.decision.federate

    @property
    def method(self) -> str:
        """The method to run, ``"local"`` where clients should train alone."""
        return self.decision.config.algorithm

    @property
    def settings(self) -> dict[str, Any]:
        """Its parameters that are not at their defaults."""
        return settings_of(self.decision.config)

    @property
    def config(self) -> dict[str, Any]:
        """What to run, as :func:`coterie.run` takes it; also in :attr:`file`."""
        return self.decision.config.plain()

    @property
    def sure(self) -> float:
        """How often the best federated candidate's method has the best score if validation samples are drawn anew."""
        return self.decision.sure

    @property
    def gain(self) -> tuple[float, float, float]:
        """The mean gain of the best federated candidate over training alone on test samples, and its 95 % interval."""
        return self.decision.gain, self.decision.low, self.decision.high

    @property
    def clients(self) -> pd.DataFrame:
        """What each client gains by it, with its interval and whether that is beyond chance."""
        return self.decision.clients.clients

    @property
    def page(self) -> Path:
        """The page."""
        return self.path / PAGE

    @property
    def file(self) -> Path:
        """The file that ``coterie run`` and ``coterie federate run`` take."""
        return self.path / words.FILE

    def sentences(self) -> list[str]:
        """Give the answer in sentences, the shortest first.

        Returns
        -------
        list of str
            What to do, why, and what was found.
        """
        decision = self.decision
        return [
            words.headline(decision),
            *words.reasons(decision),
            *words.findings(decision),
            words.cost(decision),
        ]

    def tables(self, most: int | None = None) -> list[Table]:
        """Give the answer's numbers.

        Parameters
        ----------
        most
            How many clients are shown at most.

        Returns
        -------
        list of Table
            Whom it helps and harms, and the best of every method.
        """
        return [words.client_table(self.decision, most), words.method_table(self.decision)]

    def _repr_html_(self) -> str:
        said = "".join(f"<li>{html.escape(each)}</li>" for each in self.sentences())
        return f"<ul>{said}</ul>" + "".join(each.html() for each in self.tables())


def choose(
    data: Any = "digits",
    *,
    rounds: int | None = None,
    minutes: float | None = None,
    methods: Sequence[Any] | None = None,
    tune: Mapping[str, list[Any]] | None = None,
    eta: int = ETA,
    out: str | os.PathLike[str] = "choice",
    data_dir: str | os.PathLike[str] | None = None,
    jobs: int = 1,
    progress: bool = True,
    **settings: Any,
) -> Choice:
    """Say whether federating helps the clients of a data set, whom, and with which method and settings.

    Training alone, FedAvg-FT and other methods play with several learning rates as one computation, by successive
    halving on validation samples; test samples are looked at once, at the end. Whenever it is stopped, the same call
    goes on. What is wrong with a setting is a ``ConfigError``.

    Parameters
    ----------
    data
        The data set, as text or as an object, as :func:`coterie.run` takes it.
    rounds
        Rounds that the last candidates play, by default 50; with ``minutes``, the most that they may. With rounds alone
        the same call gives the same bits.
    minutes
        How long it may take. How many rounds fit is found out as it goes; two rounds of all candidates are played in
        any case.
    methods
        The methods that compete, by default those of ``coterie.studies.choice.METHODS``; each a name, a class, an
        object, or a mapping with ``algorithm``, ``settings`` and ``tune``. ``"local"`` is added where it is missing.
    tune
        Parameters with values to try for all methods, by default ``{"lr": [0.01, 0.03, 0.1, 0.3]}``; with a
        ``participation`` below 1 also ``returning``, what who was away comes back to, where a method lets one choose.
    eta
        One in so many candidates stays after each stage, and plays on to so many times the rounds.
    out
        The folder for everything, in which the same call goes on.
    data_dir
        Where data sets lie.
    jobs
        How many processes play runs side by side.
    progress
        Show progress.
    **settings
        As for :func:`coterie.run`: fields of the configuration (``partition``, ``clients``, ``model``, ``seed``, …) and
        what is to be said of data that are objects (``label=``, ``client=``, …).

    Returns
    -------
    Choice
        The answer; its page and its file are written.

    Examples
    --------
    >>> import coterie
    >>> found = coterie.choose(frame, label="readmitted", client="hospital", minutes=10)  # doctest: +SKIP
    >>> found.federate, found.method, found.settings, found.sure  # doctest: +SKIP
    (True, 'fedacs', {'lr': 0.1}, 0.83)
    >>> coterie.run(**found.config | {"data": frame})  # doctest: +SKIP
    """
    budget = make_budget(rounds, minutes)
    candidates = make_candidates({"data": data, "methods": methods, "tune": tune, **settings}, eta)
    return play(candidates, budget, Path(out), data_dir=data_dir, jobs=jobs, progress=progress)


def play(
    candidates: Candidates,
    budget: Budget,
    folder: Path,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    jobs: int = 1,
    progress: bool = True,
) -> Choice:
    """Play what is left of a choice, decide, and write its page and its file."""
    refuse_several_processes()
    refuse_objects_side_by_side(candidates.plan, jobs)
    plain = candidates.plan.plain() | {
        "budget": {"rounds": budget.rounds, "minutes": budget.minutes, "eta": candidates.eta}
    }
    with locked(plain, folder):
        with study_progress("choice", progress, each_run=False) as study:
            reader = ScoreReader(folder / RUNS)
            stages = StagePlayer(folder, candidates, budget, reader, study, data_dir, jobs).play()
        decision = decide(reader, candidates, stages)
        found = Choice(folder, decision, tuple(stages))
        write_text(found.file, yaml_text(decision))
        write_text(found.page, write_page(decision, candidates, stages, str(found.file)))
    return found


def make_budget(rounds: int | None, minutes: float | None) -> Budget:
    """Read a budget; what is wrong with it is a ``ConfigError``."""
    if rounds is not None and (not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1):
        raise ConfigError(f"rounds is {rounds!r}, but must be a whole number of at least 1")
    if minutes is None:
        return Budget(ROUNDS if rounds is None else rounds)
    if isinstance(minutes, bool) or not isinstance(minutes, int | float) or not 0 < minutes < float("inf"):
        raise ConfigError(f"minutes is {minutes!r}, but must be a number above 0")
    return Budget(MOST_ROUNDS if rounds is None else rounds, float(minutes))
