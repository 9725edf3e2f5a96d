"""The exchange of a federation: requests go to nodes as messages, and what comes back in time becomes the replies.

Evaluation travels with the first exchange of the next round: nodes return the metrics of the models after the last
round together with their first reply.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.base import Message, Replies
from coterie.compute.engine import Call
from coterie.evaluation import metrics as metric_table
from coterie.federation.agreement import Agreement
from coterie.federation.membership import Membership
from coterie.federation.node import WORK
from coterie.federation.outgoing import PackedWhenSent
from coterie.federation.reply_schema import ReplySchema
from coterie.federation.schema import ANSWERS, EVALUATE, GLOBAL, LAST, WELCOME
from coterie.federation.transport import Failure, Transport
from coterie.federation.update_bound import sent_norms, too_large, update_norms
from coterie.federation.wire import Envelope, Rejected, TensorSpec, check, check_header, pack, sentence, unpack
from coterie.rows import Rows
from coterie.runs.storage.events import Event, Listener
from coterie.simulation.exchange import NoReplies, Request
from coterie.simulation.scoring import Score
from coterie.simulation.simulation import Simulation

_MODELS = frozenset({"personal", GLOBAL, "hybrid", "hybrid_oracle"})
_LARGEST = float(torch.finfo(torch.float32).max)  # that a member may tell: a mean over members must be finite
_ROUNDING = 1 + 1e-9  # of a mean over samples


@dataclass(frozen=True)
class Terms:
    """How long a server waits, and for how many.

    Parameters
    ----------
    deadline
        Seconds that nodes have for an exchange.
    minimum
        Replies that an exchange needs; with fewer the round is void.
    max_update
        How many times the members' median a reply may change what was sent.
    """

    deadline: float = 600.0
    minimum: int = 1
    max_update: float = 100.0


@dataclass(frozen=True)
class _Evaluation:
    """The evaluation of the state after a round, which waits for the next exchange."""

    round: int
    clients: Tensor
    message: Message
    shared: Rows
    others: dict[str, Rows]
    bases: dict[int, str]
    answers: bool

    def of(self, client: int) -> tuple[dict[str, Any], Rows]:
        place = int(torch.searchsorted(self.clients, client))
        rows = self.message.shared | {name: value[place] for name, value in self.message.each.items()}
        tensors = {f"{EVALUATE}/{LAST}/{name}": value for name, value in rows.items()}
        tensors |= {f"{EVALUATE}/{GLOBAL}/{name}": value for name, value in self.shared.items()}
        for model, own in self.others.items():
            tensors |= {f"{EVALUATE}/{model}/{name}": value[client] for name, value in own.items()}
        return {"round": self.round, "base": self.bases.get(client, ""), "answers": self.answers}, tensors


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
    answers
        With it, for each split, model and client how that client's samples were answered, of those that told.
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
        replies: ReplySchema,
    ) -> None:
        self.agreement, self.membership, self.terms = agreement, membership, terms
        self._transport, self._common, self._report, self._replies = transport, dict(header), report, replies
        self._metrics = {"loss": (-_LARGEST, _LARGEST)} | {
            name: (0.0, min(metric_table.METRICS[name].most * _ROUNDING, _LARGEST))
            for name in metric_table.names(agreement.data.task)
        }
        self.session = secrets.token_hex(4)  # tells this server's tokens from those of one that was killed
        self.counted: dict[int, str] = {}
        self.scores: tuple[int, list[Score]] | None = None
        self.answers: dict[str, dict[str, dict[int, Tensor]]] = {}
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

    def prepare_evaluation(
        self, simulation: Simulation, clients: Tensor, round_number: int, answers: bool = False
    ) -> None:
        """Let the evaluation of the state after a round, which is in a checkpoint, travel with the next exchange.

        ``answers`` asks for those to single samples too, of nodes that let them be told.
        """
        self._accepted = {}
        try:
            message = simulation.last_message(clients, round_number)
        except NoReplies:
            self._report(Event(round_number, "no evaluation", None, "nobody took part in making personal models"))
            return
        shared = simulation.algorithm.global_model(simulation.server) or {}
        others = simulation.algorithm.other_models(simulation.server)
        bases = dict(self._accepted)
        self._evaluation = _Evaluation(round_number, clients, message, shared, others, bases, answers)
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
        replies = self._bounded(request, self._send(call, request.task, messages))
        if len(replies.clients) < min(self.terms.minimum, len(messages)) or not len(replies.clients):
            self._void = self._void or call.purpose == "round"
            if call.purpose == WELCOME:  # then what they replied before does not count either
                for client in messages:
                    self._accepted.pop(client, None)
            raise NoReplies
        self._accepted |= {client: self._token(call) for client in replies.clients.tolist()}
        return replies

    def _bounded(self, request: Request, found: dict[int, Rows]) -> Replies:
        """Put the replies together, without those that change far more than the others."""
        clients, rows = torch.tensor(list(found), dtype=torch.int64), _stacked(found)
        if not rows:
            return Replies(clients, rows)
        sent = request.only(torch.isin(request.clients, clients)).rows
        references = self._replies.tasks[request.task].references
        norms = update_norms(rows, sent, references)
        longest = self._replies.longest
        large = too_large(norms, self.terms.max_update, lambda: sent_norms(rows, sent, references, longest))
        if not large:
            return Replies(clients, rows)
        for place, why in large.items():
            self._report(Event(request.call.round, "garbage", int(clients[place]), why))
        good = torch.tensor([place for place in range(len(clients)) if place not in large])
        return Replies(clients[good], {name: value[good] for name, value in rows.items()})

    def _token(self, call: Call) -> str:
        return f"{self.session}-{call.round}-{call.purpose}-{call.exchange}".replace(" ", "-")

    def _send(self, call: Call, task: str | None, messages: Mapping[int, Rows]) -> dict[int, Rows]:
        """Send messages, and the evaluation that is waiting; give the replies that are what they must be."""
        present = self.membership.present
        evaluation = self._evaluation if call.purpose in ("round", EVALUATE) else None
        self._evaluation = None if evaluation is not None else self._evaluation
        asked = [client for client in present if client in messages or evaluation is not None]
        waiting = self._evaluation

        def packer(client: int) -> Callable[[], bytes]:
            mine = messages.get(client)
            asks_for = task if mine is not None else None
            return lambda: self._pack(call, client, asks_for, mine or {}, evaluation, waiting)

        sent = PackedWhenSent({present[client]: packer(client) for client in asked})
        for client in sorted(messages.keys() - present.keys()):
            self.membership.mark_missing(client)
            self._report(Event(call.round, "no reply", client, "it is not there"))
        if call.purpose == EVALUATE and evaluation is not None:
            # Nor do they hear that their last reply counts, until another run or a resumed one tells them.
            for client in sorted({*evaluation.clients.tolist()} - present.keys()):
                self._report(Event(call.round, "no evaluation", client, "it is not there"))
        patience = frozenset(present[client] for client in asked if client not in self._suspects)
        answers = self._transport.exchange(sent, self.terms.deadline, patience or frozenset(sent))
        self.bytes_down += sum(sent.sizes.values())
        replies: dict[int, Rows] = {}
        told: dict[tuple[str, str, str], dict[int, float | None]] = {}
        known = frozenset(evaluation.others) if evaluation is not None else frozenset()
        self.answers = {}
        for client in asked:
            expected = self._replies.of(task, messages[client], call) if task and client in messages else {}
            try:
                envelope = self._open(answers.pop(present[client], None), client, call, expected)
                scores = dict(_scores(envelope.header.get("scores"), self._metrics, known))
                samples = envelope.under(ANSWERS)
                self._check_answers(samples, client, known, evaluation is not None and evaluation.answers)
            except (_Lost, Rejected) as error:
                lost = error if isinstance(error, _Lost) else _Lost("garbage", str(error))
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
            promised = self.agreement.privacy is not None
            if promised and isinstance(spent, int | float) and 0 <= spent <= _LARGEST:
                self.epsilon[client] = float(spent)
            for key, value in scores.items():
                told.setdefault(key, {})[client] = value
            for name, given in samples.items():
                split, _, model = name.partition("/")
                self.answers.setdefault(split, {}).setdefault(model, {})[client] = given
        if evaluation is not None:
            self.scores = (evaluation.round, list(_collected(told)))
        return replies

    def _check_answers(self, found: Rows, client: int, models: frozenset[str], wanted: bool) -> None:
        """Reject answers that nobody asked for, or that are not one for each of a member's samples."""
        sizes = self.membership.sizes.get(client, {})
        for name, values in found.items():
            split, _, model = name.partition("/")
            known = split in ("validation", "test") and (model in _MODELS or model in models)
            fits = TensorSpec.of(values) == TensorSpec((sizes.get(split, 0),), torch.float32)
            if not (wanted and known and fits) or bool((values.abs() > 1).any()):
                raise Rejected(f"it tells answers of {sentence(name)!r} that are not one for each of its samples")

    def _pack(
        self,
        call: Call,
        client: int,
        task: str | None,
        message: Rows,
        evaluation: _Evaluation | None,
        waiting: _Evaluation | None,
    ) -> bytes:
        """Pack a message with an evaluation; another may be waiting still, and needs the state that it is of."""
        tensors = {f"message/{name}": value for name, value in message.items()}
        base = self._accepted.get(client, "")
        keep, evaluate = [base] if base else [], None
        if evaluation is not None:
            evaluate, more = evaluation.of(client)
            tensors |= more
            keep += [evaluate["base"]] if evaluate["base"] else []
        if waiting is not None and client in waiting.bases:
            keep.append(waiting.bases[client])
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
            told = {name for name in envelope.tensors if name.startswith(f"{ANSWERS}/")}
            rest = {name: value for name, value in envelope.tensors.items() if name not in told}
            check(rest, {f"reply/{name}": shape for name, shape in expected.items()})
        except Rejected as reason:
            raise _Lost("garbage", str(reason)) from reason
        except (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
            # Of no kind that is known; but what a member sends must not end everybody's run.
            raise _Lost("garbage", f"it cannot be read ({type(error).__name__})") from error
        return envelope


class _Lost(Exception):
    """There is no reply that can be used; says what happened, in the words of events."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(why)
        self.what, self.why = what, why


def _stacked(found: dict[int, Rows]) -> Rows:
    """Put rows one under another, and let go of each as soon as it is there."""
    out: Rows = {}
    for name in list(next(iter(found.values()), {})):
        first = next(iter(found.values()))[name]
        out[name] = first.new_empty(len(found), *first.shape)
        for place, rows in enumerate(found.values()):
            out[name][place] = rows.pop(name)
    return out


def _scores(
    found: object, metrics: Mapping[str, tuple[float, float]], models: frozenset[str]
) -> Iterator[tuple[tuple[str, str, str], float | None]]:
    """Read the metrics that a member tells of; ``models`` are those of the method's own, beside what all have.

    ``metrics`` gives the smallest and the largest value that each can have.
    """
    if found is None:
        return
    entries: list[Any] = found if isinstance(found, list) else [found]
    for entry in entries:
        good = isinstance(entry, list) and len(entry) == 4 and all(isinstance(word, str) for word in entry[:3])
        model, split, metric, value = entry if good else ("", "", "", None)
        known = (model in _MODELS or model in models) and metric in metrics and split in ("validation", "test")
        if not known or isinstance(value, bool) or not isinstance(value, int | float | None):
            raise Rejected(f"it tells the score {entry!r}, which is of no model and metric that is evaluated")
        least, most = metrics[metric]
        if value is not None and not least <= value <= most:
            raise Rejected(f"it tells the {metric} {value!r}, but that is between {least:g} and {most:g}")
        yield (model, split, metric), None if value is None else float(value)


def _collected(told: Mapping[tuple[str, str, str], Mapping[int, float | None]]) -> Iterator[Score]:
    for (model, split, metric), values in told.items():
        numbers = [float("nan") if value is None else value for value in values.values()]
        clients = torch.tensor(list(values))
        yield Score(model, split, metric, torch.tensor(numbers, dtype=torch.float64), clients)  # type: ignore[arg-type]
