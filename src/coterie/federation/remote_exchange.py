"""The server's half of a federation: the same rounds as in a simulation, with an exchange that sends messages.

The seam is :meth:`Federation._deliver`: an ask goes out to the nodes as one message each, and what comes back in time
and is what it must be becomes the replies. Evaluation rides on the first exchange of the next round: nodes return the
metrics of the models after the last round together with their first reply.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms import registry
from coterie.algorithms.base import Ask, Cohort, Info, Message, Replies
from coterie.compute.engine import Call, take
from coterie.compute.loop import LoopEngine
from coterie.compute.samples import Samples
from coterie.config import ExperimentConfig
from coterie.errors import AlgorithmError, ConfigError
from coterie.federation.agreement import Agreement
from coterie.federation.membership import Membership
from coterie.federation.node import WORK
from coterie.federation.party_data import blank_population, engine_of, fresh_row
from coterie.federation.schema import EVALUATE, GLOBAL, LAST
from coterie.federation.transport import Failure, Transport
from coterie.federation.wire import Envelope, Rejected, TensorSpec, check, check_header, pack, payload, unpack
from coterie.rows import Rows
from coterie.runs.builder import Population
from coterie.runs.storage.events import Event, Listener
from coterie.simulation.client_states import ClientStates
from coterie.simulation.scoring import Score
from coterie.simulation.simulation import NoReplies, Simulation, play


@dataclass(frozen=True)
class Terms:
    """How long a server waits, and for how many.

    Parameters
    ----------
    deadline
        Seconds that nodes have for an exchange.
    minimum
        Replies that an exchange needs; with fewer the round is void.
    """

    deadline: float = 600.0
    minimum: int = 1


@dataclass(frozen=True)
class _Ride:
    """An evaluation that waits for the next exchange."""

    round: int
    clients: Tensor
    message: Message
    shared: Rows
    others: dict[str, Rows]
    bases: dict[int, str]

    def of(self, client: int) -> tuple[dict[str, Any], Rows]:
        place = int(torch.searchsorted(self.clients, client))
        rows = self.message.shared | {name: value[place] for name, value in self.message.each.items()}
        tensors = {f"{EVALUATE}/{LAST}/{name}": value for name, value in rows.items()}
        tensors |= {f"{EVALUATE}/{GLOBAL}/{name}": value for name, value in self.shared.items()}
        for model, own in self.others.items():
            tensors |= {f"{EVALUATE}/{model}/{name}": value[client] for name, value in own.items()}
        return {"round": self.round, "base": self.bases.get(client, "")}, tensors


class Federation(Simulation):
    """An algorithm whose clients are nodes.

    Parameters
    ----------
    config
        The run's configuration.
    agreement
        What all parties agreed on.
    transport
        What carries messages.
    roll
        Who is there; members that are not yet count no samples.
    header
        What every message of the run says.
    terms
        How long to wait, and for how many.
    report
        Told of every event.

    Raises
    ------
    ConfigError
        If the method starts from every member's number of samples, and one is not there.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        agreement: Agreement,
        transport: Transport,
        roll: Membership,
        header: Mapping[str, Any],
        terms: Terms,
        report: Listener,
    ) -> None:
        self.agreement, self.roll, self.terms = agreement, roll, terms
        self._transport, self._common, self._report = transport, dict(header), report
        sizes = {
            split: [roll.sizes.get(client, {}).get(split, 0) for client in range(len(agreement.members))]
            for split in ("train", "validation", "test")
        }
        self.population: Population = blank_population(agreement, sizes)
        algorithm = registry.make(config.algorithm, config.settings)
        everyone = self.population.roles.trainers

        def fresh(client: int) -> Tensor:
            return fresh_row(config, agreement, client)

        super().__init__(algorithm, engine_of(config, self.population), fresh=fresh, members=everyone)
        begin = self.clients.rows
        self._rows = take(begin, slice(0, 1))  # of which only shapes matter: the state lies at the nodes
        self.clients = ClientStates({})
        small = blank_population(agreement, {split: [1] * len(agreement.members) for split in sizes})
        samples = Samples.of(small.dataset, small.shares, seed=config.seed, dtype=self.engine.samples.dtype)
        self._dry = LoopEngine(self.engine.problem, samples, config.seed)
        # Nodes make their first state themselves. They are told everybody's sizes only where it depends on them.
        plain = Simulation(algorithm, self._dry, fresh=fresh, members=everyone).clients.rows
        if any(not torch.equal(plain[name], rows) for name, rows in begin.items()):
            if not all(sizes["train"]):
                raise ConfigError(
                    f"{algorithm.title} with these settings starts from every member's number of samples, but not all "
                    "members are there: start them first"
                )
            self._common["sizes"] = sizes["train"]
        self._shapes: dict[object, dict[str, TensorSpec]] = {}
        self.session = secrets.token_hex(4)  # tells this server's tokens from those of one that was killed
        self.counted: dict[int, str] = {}
        self._accepted: dict[int, str] = {}
        self._void = False
        self._suspects: set[int] = set()
        self._ride: _Ride | None = None
        self.scores: tuple[int, list[Score]] | None = None
        self.wire_down = self.wire_up = 0
        self.replied = 0  # nodes that had a part in the last round
        self.epsilon: dict[int, float] = {}  # what each node says that it has spent in this run

    def learn_sizes(self) -> None:
        """Take over the sizes of members that joined since."""
        for client, sizes in self.roll.sizes.items():
            for split in self.engine.sizes:
                self.engine.sizes[split][client] = self.engine.host_sizes[split][client] = sizes[split]

    def play_round(self, clients: Tensor, round_number: int) -> Info:
        """Play one round; see :meth:`Simulation.play_round`. What nodes replied counts only if the round does."""
        self._accepted, self._void = {}, False
        info = super().play_round(clients, round_number)
        self.replied = len(self._accepted)
        if self._void:
            reason = f"fewer than {self.terms.minimum} replied"
            self._report(Event(round_number, "void round", None, reason))
        else:
            self.counted |= self._accepted
        self._accepted = {}
        return info

    def prepare_evaluation(self, round_number: int) -> None:
        """Let the evaluation of the state after a round ride on the next exchange.

        Parameters
        ----------
        round_number
            The round that was played last, which must be in a checkpoint.
        """
        clients = self.population.roles.trainers
        cohort = self.cohort(clients, round_number)
        self._accepted = {}
        try:
            with self._trial():
                message = play(self.algorithm.personalise(self.server, cohort), self.exchange(cohort, "personalise"))
        except NoReplies:
            self._report(Event(round_number, "no evaluation", None, "nobody took part in making personal models"))
            return
        shared = self.algorithm.global_model(self.server) or {}
        others = self.algorithm.other_models(self.server)
        self._ride = _Ride(round_number, clients, message, shared, others, dict(self._accepted))
        self._accepted = {}

    def evaluate_now(self) -> None:
        """Send the evaluation that is waiting without a task: after the last round nothing else goes out."""
        if self._ride is not None:
            self._exchange(Call(self._ride.round, EVALUATE, 0), None, {})

    def _deliver(self, ask: Ask, cohort: Cohort, call: Call) -> Replies:
        asked = cohort.clients if ask.clients is None else ask.clients
        if ask.task not in self.tasks:
            raise AlgorithmError(f"{self.algorithm.title} asked for the task {ask.task!r}; it has {list(self.tasks)}")
        for name, value in ask.message.each.items():
            if len(value) != len(asked):
                raise AlgorithmError(f"the message {name!r} has {len(value)} rows for {len(asked)} clients")
        messages = {
            client: ask.message.shared | {name: value[place] for name, value in ask.message.each.items()}
            for place, client in enumerate(asked.tolist())
        }
        self.traffic.down += ask.message.bytes_each * len(asked)
        replies = self._exchange(call, ask.task, messages)
        if len(replies) < min(self.terms.minimum, len(asked)) or not replies:
            self._void = self._void or call.purpose == "round"
            raise NoReplies
        self._accepted |= {client: self._token(call) for client in replies}
        self.traffic.up += sum(payload(rows) for rows in replies.values())
        first = next(iter(replies.values()))
        rows = {name: torch.stack([reply[name] for reply in replies.values()]) for name in first}
        return Replies(torch.tensor(list(replies)), rows)

    def _token(self, call: Call) -> str:
        return f"{self.session}-{call.round}-{call.purpose}-{call.exchange}".replace(" ", "-")

    def _exchange(self, call: Call, task: str | None, messages: Mapping[int, Rows]) -> dict[int, Rows]:
        """Send the messages, and the evaluation that is waiting; give the replies that are what they must be."""
        present = self.roll.present
        ride = self._ride if call.purpose in ("round", EVALUATE) else None
        self._ride = None if ride is not None else self._ride
        blocks = {}
        for client in present:
            if client in messages or ride is not None:
                mine = messages.get(client)
                blocks[client] = self._pack(call, client, task if mine is not None else None, mine or {}, ride)
        self.wire_down += sum(map(len, blocks.values()))
        for client in sorted(messages.keys() - present.keys()):
            self.roll.mark_missing(client)
            self._report(Event(call.round, "no reply", client, "it is not there"))
        patience = frozenset(present[client] for client in blocks if client not in self._suspects)
        sent = {present[client]: block for client, block in blocks.items()}
        answers = self._transport.exchange(sent, self.terms.deadline, patience or frozenset(sent))
        replies: dict[int, Rows] = {}
        told: dict[tuple[str, str, str], dict[int, float | None]] = {}
        for client in blocks:
            answer = answers.get(present[client])
            expected = self._expected(task, messages[client], call) if task and client in messages else {}
            try:
                envelope = self._open(answer, client, call, expected)
            except _Lost as lost:
                if lost.what == "no reply":
                    self._suspects.add(client)
                    self.roll.mark_missing(client)
                # Who was only to be evaluated costs the round nothing.
                told_as = (lost.what, lost.why) if client in messages else ("no evaluation", f"{lost.what}: {lost.why}")
                self._report(Event(call.round, told_as[0], client, told_as[1]))
                continue
            self._suspects.discard(client)
            self.roll.mark_replied(client, call.round)
            if client in messages:
                replies[client] = envelope.under("reply")
            spent = envelope.header.get("epsilon")
            if isinstance(spent, int | float) and spent >= 0:
                self.epsilon[client] = float(spent)
            for key, value in _scores(envelope):
                told.setdefault(key, {})[client] = value
        if ride is not None:
            self.scores = (ride.round, list(_collected(told)))
        return replies

    def _pack(self, call: Call, client: int, task: str | None, message: Rows, ride: _Ride | None) -> bytes:
        tensors = {f"message/{name}": value for name, value in message.items()}
        base = self._accepted.get(client, "")
        keep, evaluate = [base] if base else [], None
        if ride is not None:
            evaluate, more = ride.of(client)
            tensors |= more
            keep += [evaluate["base"]] if evaluate["base"] else []
        if self._ride is not None and client in self._ride.bases:
            keep.append(self._ride.bases[client])
        header = {
            **self._common,
            "kind": WORK,
            "client": client,
            "round": call.round,
            "purpose": call.purpose,
            "exchange": call.exchange,
            "task": task,
            "token": self._token(call),
            "counted": self.counted.get(client, ""),
            "base": base,
            "keep": keep,
            "evaluate": evaluate,
        }
        return pack(header, tensors)

    def _open(
        self, answer: bytes | Failure | None, client: int, call: Call, expected: Mapping[str, TensorSpec]
    ) -> Envelope:
        if answer is None:
            raise _Lost("no reply", f"not within {self.terms.deadline:g} s")
        if isinstance(answer, Failure):
            raise _Lost("no reply" if answer.gone else "error", answer.reason)
        self.wire_up += len(answer)
        try:
            envelope = unpack(answer, self.agreement.limit)
            if envelope.header.get("error"):
                raise _Lost("error", str(envelope.header["error"]))
            check_header(envelope.header, {"run": self._common["run"], "client": client, "token": self._token(call)})
            check(envelope.tensors, {f"reply/{name}": shape for name, shape in expected.items()})
        except Rejected as reason:
            raise _Lost("garbage", str(reason)) from reason
        return envelope

    def _expected(self, task: str, message: Rows, call: Call) -> dict[str, TensorSpec]:
        """Find what a reply must look like by running the task on one blank sample."""
        key = (task, tuple((name, TensorSpec.of(value)) for name, value in message.items()))
        if key not in self._shapes:
            rows = {name: value.unsqueeze(0) for name, value in message.items()}
            state = {name: value.clone() for name, value in self._rows.items()}
            with torch.no_grad():
                _, reply = self._dry.run(self.tasks[task], torch.tensor([0]), state, rows, call)
            self._shapes[key] = {name: TensorSpec.of(value[0]) for name, value in reply.items()}
        return self._shapes[key]


class _Lost(Exception):
    """There is no reply that can be used; says what happened, in the words of events."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(why)
        self.what, self.why = what, why


def _scores(envelope: Envelope) -> Iterator[tuple[tuple[str, str, str], float | None]]:
    found = envelope.header.get("scores") or []
    for entry in found if isinstance(found, list) else []:
        if not isinstance(entry, list) or len(entry) != 4 or not all(isinstance(word, str) for word in entry[:3]):
            continue
        model, split, metric, value = entry
        if split in ("train", "validation", "test") and (value is None or isinstance(value, int | float)):
            yield (model, split, metric), None if value is None else float(value)


def _collected(told: Mapping[tuple[str, str, str], Mapping[int, float | None]]) -> Iterator[Score]:
    for (model, split, metric), values in told.items():
        numbers = [float("nan") if value is None else value for value in values.values()]
        clients = torch.tensor(list(values))
        yield Score(model, split, metric, torch.tensor(numbers, dtype=torch.float64), clients)  # type: ignore[arg-type]
