"""A run between machines: rounds, records and checkpoints in the same run folder as a simulation's."""

from __future__ import annotations

import contextlib
import secrets
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from pydantic import BaseModel, ConfigDict, Field

from coterie.config import ExperimentConfig
from coterie.errors import ConfigError, RunFolderError
from coterie.evaluation import metrics as metric_table
from coterie.federation.agreement import Agreement
from coterie.federation.membership import Membership
from coterie.federation.remote_exchange import Federation, Terms
from coterie.federation.transport import Transport
from coterie.results import summarise
from coterie.runs.builder import Assembly
from coterie.runs.launch import Experiment, Watcher, draw_cohort, threads
from coterie.runs.storage import EVERYONE, RunFolder, settled
from coterie.runs.storage.events import Event, EventLog, Listener
from coterie.simulation.scoring import Scorer
from coterie.tracking import TrackerObserver, TrackerWarning, make_all


class Plan(BaseModel):
    """What a server is asked to run; the rest was agreed on in ``federation.yaml``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    algorithm: str = Field(description="the method's name")
    settings: dict[str, Any] = Field(default_factory=dict, description="the method's own parameters")
    rounds: int = Field(10, ge=1, description="how many rounds are played")
    participation: float = Field(1.0, gt=0, le=1, description="fraction of the members that take part in a round")
    eval_every: int = Field(1, ge=1, description="evaluate after every so many rounds (and after the last)")
    deadline: float = Field(600.0, gt=0, description="seconds that nodes have for an exchange")
    minimum: int = Field(1, ge=1, description="replies that an exchange needs; with fewer the round is void")
    wait: float = Field(120.0, ge=0, description="seconds to wait for members before the first round")
    track: tuple[str, ...] = Field((), description="trackers that the server tells how it goes")

    def experiment(self, agreement: Agreement) -> ExperimentConfig:
        """Give the configuration of the run.

        Parameters
        ----------
        agreement
            What all parties agreed on.

        Returns
        -------
        ExperimentConfig
            The configuration.

        Raises
        ------
        ConfigError
            If more replies are needed than there are members.
        """
        if self.minimum > len(agreement.members):
            raise ConfigError(f"minimum is {self.minimum}, but the federation has {len(agreement.members)} members")
        own = {"rounds": self.rounds, "participation": self.participation, "eval_every": self.eval_every}
        return agreement.experiment(self.algorithm, self.settings, **own)


class FederatedExperiment(Experiment):
    """An experiment whose clients are nodes.

    Parameters
    ----------
    config
        The configuration.
    folder
        The run's folder, open for writing.
    federation
        The server's half.
    """

    simulation: Federation

    def __init__(self, config: ExperimentConfig, folder: RunFolder, federation: Federation) -> None:
        everyone = federation.population.roles.trainers
        scorer = Scorer(federation, everyone, torch.zeros(0, dtype=torch.int64))
        fingerprint = {"federation": federation.agreement.digest}
        parts = Assembly(
            population=federation.population,
            simulation=federation,
            scorer=scorer,
            crossing=None,
            fingerprint=fingerprint,
        )
        super().__init__(config, folder, parts)
        self._known: dict[int, dict[str, int]] = {}
        self._tell: Callable[[int], None] = lambda number: None

    def restore(self) -> int:
        """Go back to the newest checkpoint, and to which replies of each node count by then.

        Returns
        -------
        int
            The last round that is kept, 0 if there is no checkpoint.
        """
        kept = super().restore()
        found = self.folder.checkpoints.latest() if kept else None
        if found is not None:
            self.simulation.counted = {int(client): str(token) for client, token in found.extra["counted"].items()}
        return kept

    def run(self, watch: Watcher | None = None, tell: Callable[[int], None] | None = None) -> None:
        """Play all rounds that are left; see :meth:`Experiment.run`.

        Parameters
        ----------
        watch
            Told after each round.
        tell
            Told of each round when its records are complete: with its evaluation, which comes in with the next.
        """
        self._tell = tell or self._tell
        self._record_shares()
        with threads(self._threads):
            self._catch_up()
        super().run(watch)

    def _record_shares(self) -> None:
        """Keep what the server knows of what each member holds: sizes, and no more; of an absent one nothing."""
        members, sizes = self.simulation.agreement.members, self.simulation.roll.sizes
        if self.simulation.agreement.privacy is not None:  # then nodes do not tell
            return
        known = {client: sizes.get(client, {}) for client in range(len(members))}
        if known == self._known:
            return
        self._known = known
        columns: dict[str, Any] = {
            "client": list(known),
            "role": ["honest"] * len(members),
            "member": [member.name for member in members],
        }
        columns |= {split: [each.get(split, 0) for each in known.values()] for split in ("train", "validation", "test")}
        self.folder.write_shares(pd.DataFrame(columns))

    def _catch_up(self) -> None:
        # The evaluation of a round comes in with the next one, so after a stop it may be missing.
        last = self.completed
        if last and self._due(last):
            metrics = self.folder.metrics.read()
            if not bool(((metrics["round"] == last) & (metrics["model"] != "federation")).any()):
                self.simulation.prepare_evaluation(last)
        if last == self.config.rounds:
            self._close()

    def _due(self, round_number: int) -> bool:
        return round_number % self.config.eval_every == 0 or round_number == self.config.rounds

    def _checkpoint(self) -> None:
        federation = self.simulation
        extra = {
            **self.parts.fingerprint,
            "counted": {str(client): token for client, token in federation.counted.items()},
            "sizes": {str(client): sizes for client, sizes in federation.roll.sizes.items()},
        }
        self.folder.checkpoint(self.completed, federation.server, {}, extra)
        self._checkpointed = self.completed

    def _round(self, round_number: int) -> float | None:
        federation = self.simulation
        began = time.perf_counter()
        federation.roll.refresh(round_number)
        federation.learn_sizes()
        self._record_shares()
        cohort = draw_cohort(self.config.seed, round_number, self.trainers, self.config.participation)
        down, up = federation.traffic.down, federation.traffic.up
        wire_down, wire_up = federation.wire_down, federation.wire_up
        self._in_round = True
        info = federation.play_round(cohort, round_number)
        self._in_round = False
        federation.server = settled(federation.server)
        mean = self._record_evaluation()
        if round_number > 1:
            self._tell(round_number - 1)
        if self._due(round_number):
            self._record_info(round_number, info, cohort)
        traffic = federation.traffic
        self.folder.metrics.append_bytes(round_number, up=traffic.up - up, down=traffic.down - down)
        wire = {"down": federation.wire_down - wire_down, "up": federation.wire_up - wire_up}
        for name, count in (wire | {"replies": federation.replied}).items():
            self.folder.metrics.append(round_number, "federation", "server", f"wire_{name}", [float(count)], [EVERYONE])
        if federation.epsilon:
            self._record_epsilon(round_number, max(federation.epsilon.values()))
        self.folder.timings.append(round_number, training=time.perf_counter() - began)
        self.completed = round_number
        # Before anything goes out that says that the round counts: nodes commit on hearing it, and never go back.
        self._checkpoint()
        if self._due(round_number):
            federation.prepare_evaluation(round_number)
        if round_number == self.config.rounds:
            mean = self._close()
        return mean

    def _close(self) -> float | None:
        self.simulation.evaluate_now()
        mean = self._record_evaluation()
        self._tell(self.config.rounds)
        self.folder.flush()
        return mean

    def _record_evaluation(self) -> float | None:
        if self.simulation.scores is None:
            return None
        (round_number, scores), self.simulation.scores = self.simulation.scores, None
        self._record(round_number, scores)
        return self._headline(scores)


def serve(
    agreement: Agreement,
    transport: Transport,
    plan: Plan,
    out: Path,
    *,
    listener: Listener | None = None,
    watch: Watcher | None = None,
) -> Path:
    """Run a plan to its end, or go on with one that was stopped.

    Parameters
    ----------
    agreement
        What all parties agreed on.
    transport
        What carries messages.
    plan
        What to run.
    out
        The run's folder; if it holds the same run, unfinished, that run goes on from its last round.
    listener
        Told of every event.
    watch
        Told after each round.

    Returns
    -------
    Path
        The run's folder.
    """
    config = plan.experiment(agreement)
    trackers = make_all(plan.track, new=None if (out / "config.yaml").exists() else out)
    with contextlib.ExitStack() as stack:
        folder, run, is_new = _open(config, agreement, out)
        stack.enter_context(folder)
        stack.enter_context(threads(config.threads))
        report = EventLog(folder.path, listener)
        header = {
            "run": run,
            "federation": agreement.digest,
            "algorithm": config.algorithm,
            "settings": config.plain()["settings"],
        }
        roll = Membership(agreement, transport, header, report, plan.deadline)
        _gather(roll, agreement, plan)
        before = folder.checkpoints.latest()
        for client, sizes in (before.extra["sizes"] if before is not None else {}).items():
            roll.sizes.setdefault(int(client), sizes)  # of members that are not there now
        terms = Terms(plan.deadline, plan.minimum)
        federation = Federation(config, agreement, transport, roll, header, terms, report)
        playing = FederatedExperiment(config, folder, federation)
        kept = playing.restore()
        report(Event(kept, "began" if is_new else "resumed", None, f"run {run}"))
        primary = playing.scorer.primary
        stack.enter_context(_as_events(playing, report))
        # The last round's evaluation was still to come when it was stopped.
        after, honest = max(kept - 1, 0), federation.population.roles.honest
        observer = stack.enter_context(TrackerObserver(trackers, folder, after, honest, primary, stored=kept))
        playing.run(watch, observer.round)
        summary = summarise(
            folder.metrics.read(),
            algorithm=federation.algorithm.name,
            seed=config.seed,
            rounds=playing.completed,
            seconds=folder.timings.total(),
            metric=primary,
            higher_is_better=metric_table.get(primary).higher_is_better,
            privacy=config.privacy,
            measured=agreement.privacy is None or agreement.privacy.tell_metrics,
        )
        folder.finish(summary)
        observer.end(summary)
    return folder.path


@contextlib.contextmanager
def _as_events(playing: FederatedExperiment, report: Listener) -> Iterator[None]:
    """Make an event of a tracker that fails: a server's warnings are seen by nobody."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", TrackerWarning)
        show = warnings.showwarning

        def told(message: Warning | str, category: type[Warning], *more: Any, **options: Any) -> None:
            if issubclass(category, TrackerWarning):
                report(Event(playing.completed, "tracker failed", None, str(message)))
            else:
                show(message, category, *more, **options)

        warnings.showwarning = told
        yield


def _open(config: ExperimentConfig, agreement: Agreement, out: Path) -> tuple[RunFolder, str, bool]:
    if not (out / "config.yaml").exists():
        run = secrets.token_hex(8)
        folder = RunFolder.create(out, config.plain())
        folder.write_choices({"engine": "loop", "threads": config.threads, "federation": agreement.name, "run": run})
        return folder, run, True
    folder = RunFolder.open(out)
    try:
        if folder.summary() is not None:
            raise RunFolderError(f"{out} is finished: choose another --out")
        theirs, ours = ({**each, "data": None} for each in (folder.config, config.plain()))
        differ = [name for name in ours if theirs.get(name) != _listed(ours[name])]
        if differ:
            raise RunFolderError(f"{out} holds a run with another {', '.join(differ)}: choose another --out")
        known = folder.choices.get("run")
        if not isinstance(known, str):
            raise RunFolderError(f"{out} holds a run that is not a federation's: choose another --out")
    except BaseException:
        folder.close()
        raise
    return folder, known, False


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _gather(roll: Membership, agreement: Agreement, plan: Plan) -> None:
    until = time.monotonic() + plan.wait
    while True:
        roll.refresh(0)
        here = len(roll.present)
        if here == len(agreement.members):
            return
        if time.monotonic() >= until:
            break
        time.sleep(min(0.5, plan.wait))
    if here < plan.minimum:
        raise ConfigError(
            f"{here} of {len(agreement.members)} members came within {plan.wait:g} s, but minimum is {plan.minimum}: "
            "start the others, or wait longer"
        )
