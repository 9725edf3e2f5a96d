"""The exchange of a federation: requests go to nodes as messages, and what comes back in time becomes the replies.

Evaluation travels with the first exchange of the next round: nodes return the metrics of the models after the last
round together with their first reply.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms import registry
from coterie.algorithms.base import Message, Replies
from coterie.compute.engine import Call, Engine, take
from coterie.compute.loop import LoopEngine
from coterie.compute.samples import Samples
from coterie.config import ExperimentConfig
from coterie.errors import ConfigError
from coterie.federation.agreement import Agreement
from coterie.federation.membership import Membership
from coterie.federation.node import WORK
from coterie.federation.party_data import blank_population, engine_of, fresh_row
from coterie.federation.schema import EVALUATE, GLOBAL, LAST
from coterie.federation.transport import Failure, Transport
from coterie.federation.wire import Envelope, Rejected, TensorSpec, check, check_header, pack, unpack
from coterie.rows import Rows
from coterie.runs.population import Population
from coterie.runs.storage.events import Event, Listener
from coterie.simulation.client_states import ClientStates
from coterie.simulation.exchange import NoReplies, Request
from coterie.simulation.scoring import Score
from coterie.simulation.simulation import Simulation


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
class _Evaluation:
    """The evaluation of the state after a round, which waits for the next exchange."""

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


class _ReplySchema:
    """What replies must look like, found by running their tasks on one blank sample."""

    def __init__(self, engine: Engine, tasks: Mapping[str, Any], state: Rows) -> None:
        self._engine, self._tasks, self._state = engine, tasks, state
        self._known: dict[object, dict[str, TensorSpec]] = {}

    def of(self, task: str, message: Rows, call: Call) -> dict[str, TensorSpec]:
        key = (task, tuple((name, TensorSpec.of(value)) for name, value in message.items()))
        if key not in self._known:
            rows = {name: value.unsqueeze(0) for name, value in message.items()}
            state = {name: value.clone() for name, value in self._state.items()}
            with torch.no_grad():
                _, reply = self._engine.run(self._tasks[task], torch.tensor([0]), state, rows, call)
            self._known[key] = {name: TensorSpec.of(value[0]) for name, value in reply.items()}
        return self._known[key]


class RemoteExchange:
    """Sends requests to nodes.

    Parameters
    ----------
    agreement
        What all parties agreed on.
    transport
        What carries messages.
    membership
        Who is there; members that are not yet count no samples.
    header
        What every message of the run says.
    terms
        How long to wait, and for how many.
    report
        Told of every event.
    replies
        What replies must look like.

    Attributes
    ----------
    counted
        For each client, the token of the last of its replies that counts: what it changed on the node is committed.
    scores
        The last evaluation that came in, with its round, until somebody takes it.
    bytes_down, bytes_up
        What was sent and received so far, headers included.
    replied
        How many nodes had a part in the last round.
    epsilon
        The privacy loss that each node says it has spent in this run.
    """

    def __init__(
        self,
        agreement: Agreement,
        transport: Transport,
        membership: Membership,
        header: Mapping[str, Any],
        terms: Terms,
        report: Listener,
        replies: _ReplySchema,
    ) -> None:
        self.agreement, self.membership, self.terms = agreement, membership, terms
        self._transport, self._common, self._report, self._replies = transport, dict(header), report, replies
        self.session = secrets.token_hex(4)  # tells this server's tokens from those of one that was killed
        self.counted: dict[int, str] = {}
        self.scores: tuple[int, list[Score]] | None = None
        self.bytes_down = self.bytes_up = self.replied = 0
        self.epsilon: dict[int, float] = {}
        self._accepted: dict[int, str] = {}  # tokens of replies that count once the round does
        self._void = False
        self._suspects: set[int] = set()  # who did not reply last time is not waited for
        self._evaluation: _Evaluation | None = None

    # --------------------------------------------------------------------------------------------------- around a round

    def begin_round(self) -> None:
        self._accepted, self._void = {}, False

    def end_round(self, round_number: int) -> None:
        """Let what nodes replied count, unless the round was void."""
        self.replied = len(self._accepted)
        if self._void:
            self._report(Event(round_number, "void round", None, f"fewer than {self.terms.minimum} replied"))
        else:
            self.counted |= self._accepted
        self._accepted = {}

    def prepare_evaluation(self, simulation: Simulation, clients: Tensor, round_number: int) -> None:
        """Let the evaluation of the state after a round, which is in a checkpoint, travel with the next exchange."""
        self._accepted = {}
        try:
            message = simulation.last_message(clients, round_number)
        except NoReplies:
            self._report(Event(round_number, "no evaluation", None, "nobody took part in making personal models"))
            return
        shared = simulation.algorithm.global_model(simulation.server) or {}
        others = simulation.algorithm.other_models(simulation.server)
        self._evaluation = _Evaluation(round_number, clients, message, shared, others, dict(self._accepted))
        self._accepted = {}

    def evaluate_now(self) -> None:
        """Send the evaluation that is waiting without a task: after the last round nothing else goes out."""
        if self._evaluation is not None:
            self._send(Call(self._evaluation.round, EVALUATE, 0), None, {})

    # ----------------------------------------------------------------------------------------------------- one exchange

    def deliver(self, request: Request) -> Replies:
        call, message = request.call, request.message
        messages = {
            client: message.shared | {name: value[place] for name, value in message.each.items()}
            for place, client in enumerate(request.clients.tolist())
        }
        replies = self._send(call, request.task, messages)
        if len(replies) < min(self.terms.minimum, len(messages)) or not replies:
            self._void = self._void or call.purpose == "round"
            raise NoReplies
        self._accepted |= {client: self._token(call) for client in replies}
        first = next(iter(replies.values()))
        rows = {name: torch.stack([reply[name] for reply in replies.values()]) for name in first}
        return Replies(torch.tensor(list(replies)), rows)

    def _token(self, call: Call) -> str:
        return f"{self.session}-{call.round}-{call.purpose}-{call.exchange}".replace(" ", "-")

    def _send(self, call: Call, task: str | None, messages: Mapping[int, Rows]) -> dict[int, Rows]:
        """Send messages, and the evaluation that is waiting; give the replies that are what they must be."""
        present = self.membership.present
        evaluation = self._evaluation if call.purpose in ("round", EVALUATE) else None
        self._evaluation = None if evaluation is not None else self._evaluation
        blocks = {}
        for client in present:
            if client in messages or evaluation is not None:
                mine = messages.get(client)
                blocks[client] = self._pack(call, client, task if mine is not None else None, mine or {}, evaluation)
        self.bytes_down += sum(map(len, blocks.values()))
        for client in sorted(messages.keys() - present.keys()):
            self.membership.mark_missing(client)
            self._report(Event(call.round, "no reply", client, "it is not there"))
        patience = frozenset(present[client] for client in blocks if client not in self._suspects)
        sent = {present[client]: block for client, block in blocks.items()}
        answers = self._transport.exchange(sent, self.terms.deadline, patience or frozenset(sent))
        replies: dict[int, Rows] = {}
        told: dict[tuple[str, str, str], dict[int, float | None]] = {}
        for client in blocks:
            expected = self._replies.of(task, messages[client], call) if task and client in messages else {}
            try:
                envelope = self._open(answers.get(present[client]), client, call, expected)
            except _Lost as lost:
                if lost.what == "no reply":
                    self._suspects.add(client)
                    self.membership.mark_missing(client)
                # Who was only to be evaluated costs the round nothing.
                told_as = (lost.what, lost.why) if client in messages else ("no evaluation", f"{lost.what}: {lost.why}")
                self._report(Event(call.round, told_as[0], client, told_as[1]))
                continue
            self._suspects.discard(client)
            self.membership.mark_replied(client, call.round)
            if client in messages:
                replies[client] = envelope.under("reply")
            spent = envelope.header.get("epsilon")
            if isinstance(spent, int | float) and spent >= 0:
                self.epsilon[client] = float(spent)
            for key, value in _scores(envelope):
                told.setdefault(key, {})[client] = value
        if evaluation is not None:
            self.scores = (evaluation.round, list(_collected(told)))
        return replies

    def _pack(self, call: Call, client: int, task: str | None, message: Rows, evaluation: _Evaluation | None) -> bytes:
        tensors = {f"message/{name}": value for name, value in message.items()}
        base = self._accepted.get(client, "")
        keep, evaluate = [base] if base else [], None
        if evaluation is not None:
            evaluate, more = evaluation.of(client)
            tensors |= more
            keep += [evaluate["base"]] if evaluate["base"] else []
        if self._evaluation is not None and client in self._evaluation.bases:
            keep.append(self._evaluation.bases[client])
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
        self.bytes_up += len(answer)
        try:
            envelope = unpack(answer, self.agreement.limit)
            if envelope.header.get("error"):
                raise _Lost("error", str(envelope.header["error"]))
            check_header(envelope.header, {"run": self._common["run"], "client": client, "token": self._token(call)})
            check(envelope.tensors, {f"reply/{name}": shape for name, shape in expected.items()})
        except Rejected as reason:
            raise _Lost("garbage", str(reason)) from reason
        return envelope


@dataclass(frozen=True)
class Federation:
    """The server's half of a federation: a simulation whose clients are nodes.

    Parameters
    ----------
    agreement
        What all parties agreed on.
    population
        Who holds how many samples, as far as members have told; the samples themselves are blank.
    simulation
        The method with the server's state; the clients' states lie at the nodes.
    remote
        The simulation's exchange.
    """

    agreement: Agreement
    population: Population
    simulation: Simulation
    remote: RemoteExchange

    def learn_sizes(self) -> None:
        """Take over the sizes of members that joined since."""
        engine = self.simulation.engine
        for client, sizes in self.remote.membership.sizes.items():
            for split in engine.sizes:
                engine.sizes[split][client] = engine.host_sizes[split][client] = sizes[split]


def make_federation(
    config: ExperimentConfig,
    agreement: Agreement,
    transport: Transport,
    membership: Membership,
    header: Mapping[str, Any],
    terms: Terms,
    report: Listener,
) -> Federation:
    """Put the server's half together.

    A ``ConfigError`` says that the method starts from every member's number of samples, and one is not there.
    """
    members = len(agreement.members)
    sizes = {
        split: [membership.sizes.get(client, {}).get(split, 0) for client in range(members)]
        for split in ("train", "validation", "test")
    }
    population = blank_population(agreement, sizes)
    algorithm = registry.make(config.algorithm, config.settings)
    everyone = population.roles.trainers

    def fresh(client: int) -> Tensor:
        return fresh_row(config, agreement, client)

    local = config.local_patterns
    simulation = Simulation(algorithm, engine_of(config, population), fresh=fresh, members=everyone, local=local)
    begin = simulation.clients.rows
    small = blank_population(agreement, {split: [1] * members for split in sizes})
    engine = simulation.engine
    samples = Samples.of(small.dataset, small.shares, seed=config.seed, dtype=engine.samples.dtype)
    blank = LoopEngine(engine.problem, samples, config.seed)
    # Nodes make their first state themselves. They are told everybody's sizes only where it depends on them.
    plain = Simulation(algorithm, blank, fresh=fresh, members=everyone, local=local).clients.rows
    common = dict(header)
    if any(not torch.equal(plain[name], rows) for name, rows in begin.items()):
        if not all(sizes["train"]):
            raise ConfigError(
                f"{algorithm.title} with these settings starts from every member's number of samples, but not all "
                "members are there: start them first"
            )
        common["sizes"] = sizes["train"]
    # Of the clients' first state only shapes matter here: the state itself lies at the nodes.
    replies = _ReplySchema(blank, simulation.tasks, take(begin, slice(0, 1)))
    remote = RemoteExchange(agreement, transport, membership, common, terms, report, replies)
    simulation.exchange, simulation.clients = remote, ClientStates({})
    return Federation(agreement, population, simulation, remote)


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
