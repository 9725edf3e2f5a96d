"""A node's half of a federation: from a message to a reply, with its own data and its own state."""

from __future__ import annotations

import hashlib
import math
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from coterie.algorithms.local_part import LOCAL_PART
from coterie.compute.engine import Call
from coterie.config import ExperimentConfig
from coterie.data import Dataset
from coterie.errors import CoterieError, Diverged
from coterie.federation.agreement import FILE, Agreement
from coterie.federation.node_state import NodeState
from coterie.federation.party_data import make_simulation, own_population
from coterie.federation.privacy_ledger import Ledger
from coterie.federation.schema import EVALUATE, GLOBAL, LAST, Seen, check_message, observe
from coterie.federation.wire import Envelope, Rejected, check_header, pack, unpack
from coterie.rows import Rows
from coterie.runs.builder import Population
from coterie.runs.experiment import threads
from coterie.runs.storage.atomic_files import replacing, write_json
from coterie.simulation.scoring import Score, Scorer
from coterie.simulation.simulation import Simulation

HELLO, WORK = "hello", "work"


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
    """

    def __init__(
        self, agreement: Agreement, client: int, dataset: Dataset, folder: Path, lost_is_fine: bool = False
    ) -> None:
        self.agreement, self.client, self.folder = agreement, client, folder
        self._dataset, self._lost_is_fine = dataset, lost_is_fine
        self._seen: tuple[ExperimentConfig, list[Seen]] | None = None
        self._ledger = None if agreement.privacy is None else Ledger(folder, agreement.privacy)

    def handle(self, block: bytes) -> bytes:
        """Answer a message, or say why not. Whatever is wrong with it, the node's state stays whole."""
        header: dict[str, Any] = {}
        try:
            with threads(self.agreement.threads), torch.no_grad():
                envelope = unpack(block, self.agreement.limit)
                header = envelope.header
                return self._answer(envelope, hashlib.blake2b(block).digest())
        except (CoterieError, Rejected) as error:
            reason = str(error)
        except Exception as error:  # only its kind is told: the text of a foreign error may quote the node's own data
            reason = f"an unexpected {type(error).__name__} on the node; its log says more"
            self._log(error)
        return pack({**_returned(header), "client": self.client, "error": reason}, {})

    def _log(self, error: Exception) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "errors.log").open("a", encoding="utf-8") as file:
            file.writelines(traceback.format_exception(error))

    def _answer(self, envelope: Envelope, digest: bytes) -> bytes:
        header = envelope.header
        if header.get("federation") != self.agreement.digest:
            raise Rejected(f"its {FILE} is not the node's: all parties must have the same file")
        config = self.agreement.experiment(str(header.get("algorithm")), dict(header.get("settings") or {}))
        population = own_population(self._dataset, self.client, config)
        if header.get("kind") == HELLO:
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
        simulation = make_simulation(config, self.agreement, population, everybody)
        mine = slice(self.client, self.client + 1)
        begin = {name: value[mine].clone() for name, value in simulation.clients.rows.items()}
        state = NodeState(self.folder / "state", str(header.get("run")), begin, self._lost_is_fine)
        state.settle(str(header.get("counted") or ""), list(header.get("keep") or ()))
        one = torch.tensor([self.client])
        # Settled state first, then the evaluation that rides on this message, then the task.
        scores: list[Score] = []
        if header.get("evaluate") is not None:
            wanted = header["evaluate"]
            scores = self._evaluate(envelope, config, simulation, state.rows(str(wanted["base"] or "")), one)
        reply: Rows = {}
        if header.get("task") is not None:
            reply = self._work(envelope, config, simulation, state, one, digest)
        told: dict[str, Any] = {"client": self.client}
        if self._ledger is None or self._ledger.promise.tell_metrics:
            told["scores"] = [[score.model, score.split, score.metric, _finite(score.values)] for score in scores]
            told["seconds"] = time.perf_counter() - began
        if self._ledger is not None:
            told["epsilon"] = _number(self._ledger.epsilon(str(header.get("run"))))
        return pack({**_returned(header), **told}, {f"reply/{name}": value[0] for name, value in reply.items()})

    def _told(self, size: int) -> int:
        """Say how many samples there are; under a promise, only whether there are any."""
        return size if self._ledger is None else min(size, 1)

    def _work(
        self,
        envelope: Envelope,
        config: ExperimentConfig,
        simulation: Simulation,
        state: NodeState,
        one: Tensor,
        digest: bytes,
    ) -> Rows:
        header = envelope.header
        purpose, task = str(header["purpose"]), str(header["task"])
        message = envelope.under("message")
        self._check(message, config, purpose, task)
        call = Call(int(header["round"]), purpose, int(header["exchange"]))
        before = state.rows(str(header.get("base") or ""))
        rows = {name: value.unsqueeze(0) for name, value in message.items()}
        changes, reply = simulation.engine.run(simulation.tasks[task], one, before, rows, call)
        after = before | {name: value.to(before[name].dtype) for name, value in changes.items()}
        for value in (*after.values(), *reply.values()):
            if value.is_floating_point() and not bool(value.isfinite().all()):
                raise Diverged(call.round, [self.client])
        if self._ledger is not None and reply:
            reply = self._ledger.release(reply, rows, simulation.tasks[task].references, str(header["run"]), digest)
        state.put(str(header["token"]), after)
        return reply

    def _evaluate(
        self, envelope: Envelope, config: ExperimentConfig, simulation: Simulation, state: Rows, one: Tensor
    ) -> list[Score]:
        algorithm = simulation.algorithm
        round_number = int(envelope.header["evaluate"]["round"])
        models: dict[str, Rows] = {}
        if algorithm.has_personal:
            message = envelope.under(f"{EVALUATE}/{LAST}")
            self._check(message, config, EVALUATE, LAST)
            context = simulation.engine.client_context(one, Call(round_number, "personal"))
            rows = {name: value.unsqueeze(0) for name, value in message.items()}
            models["personal"] = algorithm.personal(context, state, rows)
        shared = envelope.under(f"{EVALUATE}/{GLOBAL}")
        if algorithm.has_global and shared:
            self._check(shared, config, EVALUATE, GLOBAL)
            models[GLOBAL] = {name: value.unsqueeze(0) for name, value in shared.items()}
        for other in sorted(
            {each.task for each in self._observed(config) if each.purpose == EVALUATE} - {LAST, GLOBAL}
        ):
            own = envelope.under(f"{EVALUATE}/{other}")
            self._check(own, config, EVALUATE, other)
            models[other] = {name: value.unsqueeze(0) for name, value in own.items()}
        if simulation.part is not None:  # the server sends what is shared, and the rest of each model lies here
            complete, local = simulation.part.complete, state[LOCAL_PART]
            models |= {name: complete(rows, local) for name, rows in models.items() if name != "personal"}
        scores = Scorer(simulation, one, torch.zeros(0, dtype=torch.int64)).score(models)
        kind = "personal" if models.get("personal") else GLOBAL
        own_model = {name: value[0] for name, value in models.get(kind, {}).items()}
        self._keep(envelope.header, config, simulation, kind, own_model, scores)
        return scores

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
                tensors |= layout.state_dict(row)
            else:
                tensors[key] = row.detach().clone().contiguous()
        round_number = int(header["evaluate"]["round"])
        facts = {"algorithm": config.algorithm, "model": config.model, "kind": kind, "round": str(round_number)}
        with replacing(folder / "model.safetensors") as draft:
            save_file(tensors, draft, metadata=facts)
        measured: dict[str, dict[str, dict[str, float | None]]] = {}
        for score in scores:
            measured.setdefault(score.model, {}).setdefault(score.split, {})[score.metric] = _finite(score.values)
        known = {"federation": self.agreement.name, "member": self.agreement.members[self.client].name}
        more: dict[str, Any] = {"settings": config.plain()["settings"], "round": round_number, "metrics": measured}
        if self._ledger is not None:
            spent = self._ledger.epsilon(str(header["run"])), self._ledger.epsilon()
            more["privacy"] = {"epsilon": _number(spent[0]), "epsilon_of_all_runs": _number(spent[1])}
        write_json(folder / "metrics.json", {**known, **facts, **more})

    def _sizes(self, told: object, population: Population) -> list[int] | None:
        """Read what the server says of everybody's training samples, where the method starts from that."""
        if told is None:
            return None
        mine = self._told(int(population.shares.train.sizes[self.client]))
        good = isinstance(told, list) and all(type(size) is int and 0 < size < 2**40 for size in told)
        if not isinstance(told, list) or not good or len(told) != len(population.shares) or told[self.client] != mine:
            raise Rejected(f"it says that members have {told!r} samples, but this node has {mine}")
        return told

    def _check(self, tensors: Rows, config: ExperimentConfig, purpose: str, task: str) -> None:
        check_message(tensors, self._observed(config), purpose, task, len(self.agreement.members))

    def _observed(self, config: ExperimentConfig) -> list[Seen]:
        if self._seen is None or self._seen[0] != config:
            self._seen = (config, observe(config, self.agreement))
        return self._seen[1]


def _returned(header: dict[str, Any]) -> dict[str, Any]:
    """Give what a reply says back, so that the server can tell which message it answers."""
    return {name: header.get(name) for name in ("run", "round", "purpose", "exchange", "token")}


def _finite(values: Tensor) -> float | None:
    return _number(float(values[0]))


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
