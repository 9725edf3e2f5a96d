"""Run folders with everything that a report can show, written without training anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from coterie import randomness
from coterie.config import from_mapping
from coterie.results import Result, summarise
from coterie.runs.storage import EVERYONE, RunFolder
from coterie.runs.storage.events import Event, EventLog
from coterie.simulation.attacks import choose_attackers

CLIENTS = 6
GROUPS = np.array([1, 0, 1, 0, 1, 0])
EVENTS = (Event(0, "began", None, "run 1"), Event(2, "no reply", 4, "no answer within 5 s"))


def weights_of(round_number: int, clients: int = CLIENTS) -> npt.NDArray[np.float64]:
    """Weights that differ from round to round and within each from client to client."""
    drawn = randomness.stream(9, "weights", round_number).random((clients, clients))
    return np.asarray(drawn / drawn.sum(1, keepdims=True))


def write_run(
    path: Path,
    algorithm: str = "fedacs",
    seed: int = 1,
    *,
    clients: int = CLIENTS,
    rounds: int = 3,
    models: Sequence[str] = ("personal", "global"),
    classes: Sequence[str] = ("cat", "dog", "eel"),
    level: float = 0.5,
    shares: bool = True,
    groups: bool = True,
    weights: bool = True,
    matrix: bool = False,
    traffic: bool = True,
    federated: bool = False,
    finish: bool = True,
    **config: Any,
) -> Result:
    """Write a run; scores rise from ``level`` by a tenth over the rounds."""
    named = {"algorithm": algorithm, "seed": seed, "clients": clients, "rounds": rounds, "matrix": matrix, **config}
    everyone = np.arange(clients)
    draw = randomness.stream(seed, f"report {algorithm}")
    attack = config.get("attack")
    attackers = choose_attackers(clients, float(str(attack).partition(":")[2]), seed) if attack else ()
    with RunFolder.create(path, from_mapping(named).plain()) as folder:
        if shares:
            counts = draw.integers(0, 20, (clients, len(classes)))
            held: dict[str, Any] = {"client": everyone, "role": np.full(clients, "honest", dtype=object)}
            held["role"][list(attackers)] = "attacker"
            held |= {"train": counts.sum(1), "validation": 2, "test": 5}
            held |= {"group": everyone % 2 if clients != CLIENTS else GROUPS} if groups else {}
            folder.write_shares(pd.DataFrame(held | {f"class {name}": counts[:, k] for k, name in enumerate(classes)}))
        for number in range(1, rounds + 1):
            for model in models:
                scores = level + 0.1 * number / rounds + 0.05 * draw.random(clients)
                for split in ("validation", "test"):
                    folder.metrics.append(number, model, split, "loss", 1 - scores, everyone)
                    folder.metrics.append(number, model, split, "accuracy", scores, everyone)
            if weights:
                folder.collaboration_weights.append(number, weights_of(number, clients), everyone)
            sent = 1_000_000 if traffic else 0
            folder.metrics.append_bytes(number, up=sent, down=2 * sent)
            for way in ("wire_up", "wire_down") if federated else ():
                folder.metrics.append(number, "federation", "server", way, [1.5 * sent], [EVERYONE])
            folder.timings.append(number, training=0.5, evaluation=0.1)
        if matrix:
            folder.accuracy_matrices.append(rounds, weights_of(0, clients), everyone)
        if federated:
            log = EventLog(path)
            for event in EVENTS:
                log(event)
        folder.flush()
        if finish:
            honest = [client for client in range(clients) if client not in attackers]
            folder.finish(
                summarise(
                    folder.metrics.read(), algorithm=algorithm, seed=seed, rounds=rounds, seconds=1.0, clients=honest
                )
            )
    return Result(path)
