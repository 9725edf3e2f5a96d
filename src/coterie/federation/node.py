"""A node's half of a federation: from a message to a reply, with its own data and its own state."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms import registry
from coterie.algorithms.base import Task
from coterie.algorithms.running_statistics import STATISTICS
from coterie.compute.engine import Call
from coterie.config import ExperimentConfig
from coterie.data import Dataset
from coterie.errors import CoterieError, Diverged
from coterie.federation.agreement import FILE, Agreement
from coterie.federation.message_header import check_types
from coterie.federation.node_state import NodeState, save_sealed
from coterie.federation.party_data import own_population
from coterie.federation.privacy_ledger import Ledger
from coterie.federation.resident import Means, Resident, Residents, check_code, limited
from coterie.federation.schema import ANSWERS, EVALUATE, GLOBAL, LAST, check_message, kind_of
from coterie.federation.wire import Envelope, Rejected, TensorSpec, check_header, pack, unpack, without_folders
from coterie.models.batch_norm import statistics_state
from coterie.rows import Rows
from coterie.runs.builder import Population
from coterie.runs.experiment import threads
from coterie.runs.storage.atomic_files import append_lines, write_json
from coterie.simulation.scoring import Score, Scorer
from coterie.simulation.simulation import Simulation

HELLO, WORK = "hello", "work"
_LOG_LIMIT = 2**24  # bytes after which nothing is added: whoever sends a node nonsense must not fill its disk


class Node:
    """One party's half.

    Parameters
    ----------
    agreement
        What all parties agreed on.
    client
        The node's number in the roster.
    dataset
        Its own samples, which never leave it.
    folder
        Where its states and models lie.
    lost_is_fine
        Whether to begin anew where the state that the server counts on is not there.
    means
        What it computes with, and what it lets itself be asked.

    Attributes
    ----------
    while_computing
        Entered while a task runs: a process that is a node and nothing else may treat its memory differently then.
    """

    def __init__(
        self,
        agreement: Agreement,
        client: int,
        dataset: Dataset,
        folder: Path,
        lost_is_fine: bool = False,
        means: Means | None = None,
    ) -> None:
        self.agreement, self.client, self.folder = agreement, client, folder
        self.means = means or Means()
        check_code(agreement, self.means)
        self.while_computing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self._dataset, self._lost_is_fine = dataset, lost_is_fine
        self._residents = Residents(agreement, client, self.means, folder)
        self._populations: dict[bool, Population] = {}  # of methods that federate, and of others
        self._ledger = None if agreement.privacy is None else Ledger(folder, agreement.privacy)

    def handle(self, block: bytes) -> bytes:
        """Answer a message, or say why not. Whatever is wrong with it, the node's state stays whole."""
        header: dict[str, Any] = {}
        try:
            with threads(self.means.threads or self.agreement.threads), torch.no_grad():
                envelope, digest = unpack(block, self.agreement.limit), hashlib.blake2b(block).digest()
                del block  # a model: there may not be room for it beside the copies that are worked with
                header = envelope.header
                return self._answer(envelope, digest)
        except (CoterieError, Rejected) as error:
            reason = without_folders(str(error), self.folder, Path.cwd(), Path.home(), known=repr(header))
            if reason != str(error):
                self._log(error)
        except OSError as error:  # a full disk, most likely
            reason = f"the node cannot read or write its files: {error.strerror or type(error).__name__}"
            self._log(error)
        except Exception as error:  # only its kind is told: the text of a foreign error may quote the node's own data
            reason = f"an unexpected {type(error).__name__} on the node; its log says more"
            self._log(error)
        return pack({**_returned(header), "client": self.client, "error": reason}, {})

    def _log(self, error: Exception) -> None:
        with contextlib.suppress(OSError):  # on a full disk there is no room for this either
            log = self.folder / "errors.log"
            self.folder.mkdir(parents=True, exist_ok=True)
            if not log.exists() or log.stat().st_size < _LOG_LIMIT:
                append_lines(log, traceback.format_exception(error))

    def _answer(self, envelope: Envelope, digest: bytes) -> bytes:
        header = envelope.header
        if header.get("federation") != self.agreement.digest:
            raise Rejected(f"its {FILE} is not the node's: all parties must have the same file")
        check_types(header, header.get("kind") != HELLO)
        config = self.agreement.experiment(str(header.get("algorithm")), dict(header.get("settings") or {}))
        population = self._population(config)
        if header.get("kind") == HELLO:
            self._residents.observed(config)  # now, while no model of the run is in memory
            shares = {
                "train": population.shares.train,
                "validation": population.shares.validation,
                "test": population.shares.test,
            }
            sizes = {split: self._told(int(ragged.sizes[self.client])) for split, ragged in shares.items()}
            return pack({**_returned(header), "client": self.client, "sizes": sizes}, {})
        check_header(header, {"kind": WORK, "client": self.client})
        began = time.perf_counter()
        everybody = self._sizes(header.get("sizes"), population)
        resident = self._residents.get(str(header.get("run")), config, population, everybody)
        method = json.dumps([config.algorithm, config.plain()["settings"]], sort_keys=True)
        state = NodeState(self.folder / "state", str(header.get("run")), resident.begin, self._lost_is_fine, method)
        state.settle(str(header.get("counted") or ""), list(header.get("keep") or ()))
        # Settled state first, then the evaluation that rides on this message, then the task.
        scores: list[Score] = []
        if header.get("evaluate") is not None:
            scores = self._evaluate(envelope, resident, state)
        envelope = Envelope(header, {f"message/{name}": value for name, value in envelope.under("message").items()})
        reply: Rows = {}
        if header.get("task") is not None:
            reply = self._work(envelope, resident, state, digest)
        told: dict[str, Any] = {"client": self.client}
        if self._ledger is None or self._ledger.promise.tell_metrics:
            told["scores"] = [[score.model, score.split, score.metric, _finite(score.values)] for score in scores]
            told["seconds"] = time.perf_counter() - began
        if self._ledger is not None:
            told["epsilon"] = _number(self._ledger.epsilon(str(header.get("run"))))
        tensors = {f"reply/{name}": value[0] for name, value in reply.items()}
        for score in scores:
            if score.answers is not None and bool(score.answers.isfinite().all()):
                tensors[f"{ANSWERS}/{score.split}/{score.model}"] = score.answers.cpu()
        return pack({**_returned(header), **told}, tensors)

    @property
    def _tells_answers(self) -> bool:
        """Whether the silo lets its samples' answers be told; under a promise not even their number is."""
        return self.means.tell_answers and self._ledger is None

    def _population(self, config: ExperimentConfig) -> Population:
        federates = registry.get(config.algorithm).federates
        if federates not in self._populations:
            self._populations[federates] = own_population(self._dataset, self.client, config)
        return self._populations[federates]

    def _told(self, size: int) -> int:
        """Say how many samples there are; under a promise, only whether there are any."""
        return size if self._ledger is None else min(size, 1)

    def _work(self, envelope: Envelope, resident: Resident, state: NodeState, digest: bytes) -> Rows:
        header = envelope.header
        call, task = Call(int(header["round"]), str(header["purpose"]), int(header["exchange"])), str(header["task"])
        message, purpose = envelope.under("message"), kind_of(call)
        known = {each.purpose for each in resident.seen if each.task == task and not each.up}
        if task not in resident.simulation.tasks or (known and purpose not in known):
            raise Rejected(f"it asks for the task {task!r} in {purpose!r}, where the method has none of that name")
        self._check(message, resident, purpose, task)
        before = state.rows(str(header.get("base") or ""))
        rows = {name: value.unsqueeze(0) for name, value in message.items()}
        if self._ledger is None:
            after, reply = self._compute(resident, task, before, rows, call)
        else:
            # That it failed would tell of its samples, so a node that promised privacy answers in any case: with no
            # change, under the same noise and at the same price. What that looks like depends on the message alone.
            nothing = _nothing(resident.replies.of(task, message, call), rows, resident.simulation.tasks[task])
            try:
                after, reply = self._compute(resident, task, before, rows, call)
                if {name: TensorSpec.of(value) for name, value in reply.items()} != {
                    name: TensorSpec.of(value) for name, value in nothing.items()
                }:
                    raise Rejected("the reply is not of the shape that its task gives on other samples")
            except Exception as error:
                self._log(error)
                after, reply = before, nothing
            if reply:
                references = resident.simulation.tasks[task].references
                reply = self._ledger.release(reply, rows, references, str(header["run"]), digest)
        state.put(str(header["token"]), after)
        return reply

    def _compute(self, resident: Resident, task: str, before: Rows, rows: Rows, call: Call) -> tuple[Rows, Rows]:
        """Run a task; give the node's state after it, and the reply."""
        engine = resident.simulation.engine
        one = torch.tensor([self.client], device=engine.device)
        with engine.rounding(), self.while_computing(), limited(engine, self.means.max_seconds):
            own = resident.simulation.tasks[task]
            changes, reply = engine.run(own, one, _moved(before, engine.device), _moved(rows, engine.device), call)
        after = before | {name: value.to(before[name].device, before[name].dtype) for name, value in changes.items()}
        reply = _moved(reply, torch.device("cpu"))
        for value in (*after.values(), *reply.values()):
            if value.is_floating_point() and not bool(value.isfinite().all()):
                raise Diverged(call.round, [self.client])
        return after, reply

    def _evaluate(self, envelope: Envelope, resident: Resident, state: NodeState) -> list[Score]:
        simulation, wanted = resident.simulation, envelope.header["evaluate"]
        algorithm, device = simulation.algorithm, simulation.engine.device
        before = state.rows(str(wanted["base"] or ""))
        received = self._received(envelope, resident)
        try:
            one = torch.tensor([self.client], device=device)
            models: dict[str, Rows] = {}
            if algorithm.has_personal:
                context = simulation.engine.client_context(one, Call(int(wanted["round"]), "personal"))
                rows = _moved({name: value.unsqueeze(0) for name, value in received[LAST].items()}, device)
                models["personal"] = algorithm.personal(context, _moved(before, device), rows)
            for other in sorted(received.keys() - {LAST}, key=lambda kind: (kind != GLOBAL, kind)):
                models[other] = _moved({name: value.unsqueeze(0) for name, value in received[other].items()}, device)
            # The server sends what is shared, and the rest of each model lies here.
            for other in models.keys() - {"personal"}:
                models[other] = simulation.completed(models[other], lambda name: before[name].to(device))
            scores = Scorer(simulation, one, one.new_zeros(0)).score(models, wanted["answers"] and self._tells_answers)
            for score in scores:
                has_samples = bool(simulation.engine.host_sizes[score.split][self.client] > 0)
                if score.metric == "loss" and has_samples and bool(score.values.isnan().any()):
                    what = f"{score.split} loss of the {score.model} model"
                    raise Diverged(int(wanted["round"]), [self.client], what)
            kind = "personal" if models.get("personal") else GLOBAL
            model = {name: value[0] for name, value in models.get(kind, {}).items()}
            self._keep(envelope.header, resident.config, simulation, kind, model, scores)
        except Exception as error:
            if self._ledger is None:
                raise
            self._log(error)  # that models cannot be evaluated on its samples tells of them
            return []
        return scores

    def _received(self, envelope: Envelope, resident: Resident) -> dict[str, Rows]:
        """Give the models that came to be evaluated, or what they are made of, each checked."""
        algorithm, out = resident.simulation.algorithm, {}
        for kind in sorted({each.task for each in resident.seen if each.purpose == EVALUATE} | {LAST}):
            tensors = envelope.under(f"{EVALUATE}/{kind}")
            if kind == LAST and not algorithm.has_personal:
                continue
            if kind == GLOBAL and not (algorithm.has_global and tensors):
                continue
            self._check(tensors, resident, EVALUATE, kind)
            out[kind] = tensors
        return out

    def _keep(
        self,
        header: dict[str, Any],
        config: ExperimentConfig,
        simulation: Simulation,
        kind: str,
        model: Rows,
        scores: list[Score],
    ) -> None:
        """Leave the node its own model with its metrics; what the run has made of it so far."""
        if not model:
            return
        folder = self.folder / "models" / str(header["run"])
        layout = simulation.engine.net.layout
        tensors: dict[str, Tensor] = {}
        for key, row in model.items():
            if key == "w" and row.shape == (layout.size,):
                tensors |= layout.views(row)
            elif key == STATISTICS:
                tensors |= statistics_state(simulation.engine.problem.module, row)
            else:
                tensors[key] = row
        round_number = int(header["evaluate"]["round"])
        facts = {"algorithm": config.algorithm, "model": config.model, "kind": kind, "round": str(round_number)}
        save_sealed(folder / "model.safetensors", tensors, facts)
        measured: dict[str, dict[str, dict[str, float | None]]] = {}
        for score in scores:
            measured.setdefault(score.model, {}).setdefault(score.split, {})[score.metric] = _finite(score.values)
        known = {"federation": self.agreement.name, "member": self.agreement.members[self.client].name}
        more: dict[str, Any] = {"settings": config.plain()["settings"], "round": round_number, "metrics": measured}
        if self._ledger is not None:
            spent = self._ledger.epsilon(str(header["run"])), self._ledger.epsilon()
            more["privacy"] = {"epsilon": _number(spent[0]), "epsilon_of_all_runs": _number(spent[1])}
        write_json(folder / "metrics.json", {**known, **facts, **more}, sealed=True)

    def _sizes(self, told: object, population: Population) -> list[int] | None:
        """Read what the server says of everybody's training samples, where the method starts from that."""
        if told is None:
            return None
        mine = self._told(int(population.shares.train.sizes[self.client]))
        good = isinstance(told, list) and all(type(size) is int and 0 < size < 2**40 for size in told)
        if not isinstance(told, list) or not good or len(told) != len(population.shares) or told[self.client] != mine:
            raise Rejected(f"it says that members have {told!r} samples, but this node has {mine}")
        return told

    def _check(self, tensors: Rows, resident: Resident, purpose: str, task: str) -> None:
        check_message(tensors, resident.seen, purpose, task, len(self.agreement.members))


def _moved(rows: Rows, device: torch.device) -> Rows:
    return {name: value.to(device) for name, value in rows.items()}


def _nothing(shapes: Mapping[str, TensorSpec], message: Rows, task: Task) -> Rows:
    """Make the reply that says that nothing has changed: the tensors of the message, and zeros for differences."""
    out = {}
    for name, spec in shapes.items():
        source = task.references.get(name, name)
        base = None if source is None else message.get(source)
        fits = base is not None and TensorSpec.of(base[0]) == spec
        out[name] = base.clone() if base is not None and fits else torch.zeros(1, *spec.shape, dtype=spec.dtype)
    return out


def _returned(header: dict[str, Any]) -> dict[str, Any]:
    """Give what a reply says back, so that the server can tell which message it answers."""
    return {name: header.get(name) for name in ("run", "round", "purpose", "exchange", "token")}


def _finite(values: Tensor) -> float | None:
    return _number(float(values[0]))


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
