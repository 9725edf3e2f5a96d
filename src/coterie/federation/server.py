"""A run between machines: rounds, records and checkpoints in the same run folder as a simulation's."""

from __future__ import annotations

import contextlib
import secrets
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from coterie.config import ExperimentConfig
from coterie.errors import ConfigError, RunFolderError
from coterie.federation.agreement import Agreement
from coterie.federation.federated_simulation import Federation, make_federation
from coterie.federation.membership import Membership
from coterie.federation.plan import Plan
from coterie.federation.remote_exchange import Terms
from coterie.federation.transport import Transport
from coterie.federation.wire import sentence
from coterie.rows import Rows
from coterie.runs.builder import Assembly
from coterie.runs.experiment import Experiment, Watcher, threads
from coterie.runs.model_inputs import INPUTS, describe_inputs
from coterie.runs.records import Recorder
from coterie.runs.rounds import draw_cohort, due
from coterie.runs.storage import Checkpoint, RunFolder, as_restored
from coterie.runs.storage.events import Event, EventLog, Listener
from coterie.simulation.scoring import Scorer
from coterie.tracking import TrackerObserver, TrackerWarning, make_all

RoundTold = Callable[[int], None]
"""Told of each round when its records are complete: with its evaluation, which comes in with the next."""


class FederatedRounds:
    """Rounds whose clients are nodes.

    The evaluation of a round comes in with the next one, and is recorded then. ``tell`` hears of a round once its
    records are complete.
    """

    def __init__(
        self, config: ExperimentConfig, folder: RunFolder, parts: Assembly, federation: Federation, tell: RoundTold
    ) -> None:
        self.config, self.folder, self.federation, self.tell = config, folder, federation, tell
        self.simulation, self.remote = federation.simulation, federation.remote
        self.recorder, self.trainers = Recorder(config, folder, parts), federation.population.roles.trainers
        privacy = federation.agreement.privacy
        self.measured = privacy is None or privacy.tell_metrics
        self.in_round = False
        self._known_sizes: dict[int, dict[str, int]] = {}

    def begin(self, completed: int) -> None:
        self._record_shares()
        if completed and due(self.config, completed):
            metrics = self.folder.metrics.read()
            if not bool(((metrics["round"] == completed) & (metrics["model"] != "federation")).any()):
                self._prepare_evaluation(completed)
        if completed == self.config.rounds:
            self._end()

    def play(self, round_number: int, close: Callable[[], None]) -> float | None:
        config, simulation, remote, recorder = self.config, self.simulation, self.remote, self.recorder
        began = time.perf_counter()
        remote.membership.refresh(round_number)
        self.federation.learn_sizes()
        self._record_shares()
        members, newcomers = self._members()
        cohort = draw_cohort(config.seed, round_number, members, config.participation)
        down, up = simulation.traffic.down, simulation.traffic.up
        bytes_down, bytes_up = remote.bytes_down, remote.bytes_up
        self.in_round = True
        remote.begin_round()
        info = simulation.play_round(cohort, round_number, newcomers)
        remote.end_round(round_number)
        self.in_round = False
        simulation.server = as_restored(simulation.server)
        mean = self._record_evaluation()
        if round_number > 1:
            self.tell(round_number - 1)
        if due(config, round_number):
            recorder.info(round_number, info, cohort)
        traffic = simulation.traffic
        self.folder.metrics.append_bytes(round_number, up=traffic.up - up, down=traffic.down - down)
        recorder.number(round_number, "wire_down", float(remote.bytes_down - bytes_down))
        recorder.number(round_number, "wire_up", float(remote.bytes_up - bytes_up))
        recorder.number(round_number, "wire_replies", float(remote.replied))
        if remote.epsilon:
            recorder.epsilon(round_number, max(remote.epsilon.values()))
        self.folder.timings.append(round_number, training=time.perf_counter() - began)
        # Before anything goes out that says that the round counts: nodes commit on hearing it, and never go back.
        close()
        if due(config, round_number):
            self._prepare_evaluation(round_number)
        return self._end() if round_number == config.rounds else mean

    def _members(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Give who is a member, and who has come since."""
        known = self._known()
        new = sorted(self.remote.membership.present.keys() - known)
        if len(known) == len(self.trainers):
            return self.trainers, None
        return torch.tensor(sorted(known)), torch.tensor(new) if new else None

    def _known(self) -> set[int]:
        """Give who was there when the run began, and those whose first round is over."""
        return {*self.federation.members, *self.remote.counted}

    def state(self) -> tuple[Rows, Rows, dict[str, Any]]:
        more = {
            "members": sorted(self._known()),
            "counted": {str(client): token for client, token in self.remote.counted.items()},
            "sizes": {str(client): sizes for client, sizes in self.remote.membership.sizes.items()},
        }
        return self.simulation.server, {}, more  # the clients' states lie at the nodes

    def restore(self, found: Checkpoint) -> None:
        self.remote.counted = {int(client): str(token) for client, token in found.extra["counted"].items()}

    def _prepare_evaluation(self, round_number: int) -> None:
        last = round_number == self.config.rounds
        self.remote.prepare_evaluation(self.simulation, self.trainers, round_number, answers=last)

    def _end(self) -> float | None:
        self.remote.evaluate_now()
        mean = self._record_evaluation()
        found = {
            split: {
                model: (
                    np.concatenate([np.full(len(told[client]), client, np.int32) for client in sorted(told)]),
                    np.concatenate([told[client].numpy() for client in sorted(told)]),
                )
                for model, told in models.items()
            }
            for split, models in self.remote.answers.items()
        }
        self.folder.record_answers(self.config.rounds, found)
        self.tell(self.config.rounds)
        self.folder.flush()
        return mean

    def _record_evaluation(self) -> float | None:
        if self.remote.scores is None:
            return None
        (round_number, scores), self.remote.scores = self.remote.scores, None
        self.recorder.scores(round_number, scores)
        return self.recorder.headline(scores)

    def _record_shares(self) -> None:
        """Keep what the server knows of what each member holds: sizes, and no more; of an absent one nothing."""
        members, sizes = self.federation.agreement.members, self.remote.membership.sizes
        if self.federation.agreement.privacy is not None:  # then nodes do not tell
            return
        known = {client: sizes.get(client, {}) for client in range(len(members))}
        if known == self._known_sizes:
            return
        self._known_sizes = known
        columns: dict[str, Any] = {
            "client": list(known),
            "role": ["honest"] * len(members),
            "member": [member.name for member in members],
        }
        columns |= {split: [each.get(split, 0) for each in known.values()] for split in ("train", "validation", "test")}
        self.folder.write_shares(pd.DataFrame(columns))


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
        report = _shown(EventLog(folder.path, listener))
        header = {
            "run": run,
            "federation": agreement.digest,
            "algorithm": config.algorithm,
            "settings": config.plain()["settings"],
        }
        membership = Membership(agreement, transport, header, report, plan.deadline, plan.max_samples)
        _wait_for_members(membership, agreement, plan)
        before = folder.checkpoints.latest()
        for client, sizes in (before.extra["sizes"] if before is not None else {}).items():
            membership.sizes.setdefault(int(client), sizes)  # of members that are not there now
        terms = Terms(plan.deadline, plan.minimum, plan.max_update)
        known = set(membership.present)
        if before is not None:  # a run that was begun by an earlier version had everybody as a member
            known = set(before.extra.get("members", range(len(agreement.members))))
        federation = make_federation(config, agreement, transport, membership, header, terms, report, known)
        population, simulation = federation.population, federation.simulation
        if is_new:
            folder.write_facts(INPUTS, describe_inputs(population))
        parts = Assembly(
            population=population,
            simulation=simulation,
            scorer=Scorer(simulation, population.roles.trainers, torch.zeros(0, dtype=torch.int64)),
            matrix_scorer=None,
            fingerprint={"federation": agreement.digest},
            trainers=population.roles.trainers,
        )
        rounds = FederatedRounds(config, folder, parts, federation, lambda number: None)
        experiment = Experiment(config, folder, parts, rounds)
        kept = experiment.restore()
        report(Event(kept, "began" if is_new else "resumed", None, f"run {run}"))
        stack.enter_context(_as_events(experiment, report))
        # The last round's evaluation was still to come when it was stopped.
        after, primary = max(kept - 1, 0), parts.scorer.primary
        observer = stack.enter_context(
            TrackerObserver(trackers, folder, after, population.roles.honest, primary, stored=kept)
        )
        rounds.tell = observer.round
        experiment.run(watch)
        experiment.finish(observer.end)
    return folder.path


def _shown(log: Listener) -> Listener:
    """Make the reasons of events, which may be what a member says, fit for a log and a terminal."""
    return lambda event: log(replace(event, reason=sentence(event.reason)))


@contextlib.contextmanager
def _as_events(experiment: Experiment, report: Listener) -> Iterator[None]:
    """Make an event of a tracker that fails: a server's warnings are seen by nobody."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", TrackerWarning)
        show = warnings.showwarning

        def told(message: Warning | str, category: type[Warning], *more: Any, **options: Any) -> None:
            if issubclass(category, TrackerWarning):
                report(Event(experiment.completed, "tracker failed", None, str(message)))
            else:
                show(message, category, *more, **options)

        warnings.showwarning = told
        yield


def _open(config: ExperimentConfig, agreement: Agreement, out: Path) -> tuple[RunFolder, str, bool]:
    if not (out / "config.yaml").exists():
        folder = RunFolder.create(out, config.plain())
        return folder, _name(folder, config, agreement), True
    folder = RunFolder.open(out)
    try:
        if folder.summary() is not None:
            raise RunFolderError(f"{out} is finished: choose another --out")
        theirs, ours = ({**each, "data": None} for each in (folder.config, config.plain()))
        differ = [name for name in ours if theirs.get(name) != _listed(ours[name])]
        if differ:
            raise RunFolderError(f"{out} holds a run with another {', '.join(differ)}: choose another --out")
        if not folder.choices:  # the server ended just after it had made the folder
            return folder, _name(folder, config, agreement), True
        known = folder.choices.get("run")
        if not isinstance(known, str):
            raise RunFolderError(f"{out} holds a run that is not a federation's: choose another --out")
    except BaseException:
        folder.close()
        raise
    return folder, known, False


def _name(folder: RunFolder, config: ExperimentConfig, agreement: Agreement) -> str:
    """Give a new run its name, and write down whose it is."""
    try:
        run = secrets.token_hex(8)
        folder.write_client_names([member.name for member in agreement.members])
        folder.write_choices({"engine": "loop", "threads": config.threads, "federation": agreement.name, "run": run})
        return run
    except BaseException:
        folder.close()
        raise


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _wait_for_members(membership: Membership, agreement: Agreement, plan: Plan) -> None:
    until = time.monotonic() + plan.wait
    while True:
        membership.refresh(0)
        here = len(membership.present)
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
