"""A federation in one process to which everything happens that happens to machines, by a seeded schedule.

What was lost is written down on the way: a simulation that loses the same replies is the oracle, bit for bit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from coterie.compute.engine import Call
from coterie.federation.node import Node
from coterie.federation.transport import Failure
from coterie.federation.wire import pack, unpack
from tests.federation.grid import Local
from tests.small_runs import Killed

LIMIT = 2**30
FAULTS = (
    "killed before",
    "killed at a file",
    "killed after",
    "stopped",
    "message cut",
    "reply cut",
    "disk full",
    "garbage",
    "stale",
    "error",
    "away",
)


def seeds(text: str) -> range:
    """Read which schedules to play: so many from 0 on, or ``FIRST-LAST``."""
    first, dash, last = text.partition("-")
    return range(int(first), int(last) + 1) if dash else range(int(text))


@dataclass
class Disk:
    """Counts the moments at which a file becomes durable, and fails at one of them."""

    left: int = -1
    error: Callable[[], BaseException] = Killed

    def moment(self) -> None:
        if self.left == 0:
            self.left = -1
            raise self.error()
        self.left -= self.left > 0

    @contextlib.contextmanager
    def failing(self, left: int, error: Callable[[], BaseException]) -> Iterator[None]:
        self.left, self.error = left, error
        try:
            yield
        finally:
            self.left = -1


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def watch_disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk, replace, fsync = Disk(), os.replace, os.fsync

    def replacing(*given: Any, **more: Any) -> None:
        disk.moment()
        replace(*given, **more)

    def syncing(file: int) -> None:
        disk.moment()
        fsync(file)

    monkeypatch.setattr(os, "replace", replacing)
    monkeypatch.setattr(os, "fsync", syncing)
    return disk


class Clock:
    """The wall's clock, which may jump; what measures how long something takes does not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead, now = 0.0, time.time
        monkeypatch.setattr(time, "time", lambda: now() + self.ahead)


@dataclass
class ChaosGrid:
    """A transport over nodes of this process; ``draw`` decides what happens to whom."""

    local: Local
    draw: np.random.Generator
    disk: Disk
    clock: Clock
    rate: float
    server_kills: int
    last_round: int
    happened: list[str] = field(default_factory=list)
    lost: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    held: dict[int, bytes] = field(default_factory=dict)
    before: dict[int, bytes] = field(default_factory=dict)

    def nodes(self) -> dict[int, str]:
        return dict.fromkeys(range(len(self.local.datasets)), "")

    def exchange(
        self, messages: Mapping[int, bytes], deadline: float, patience: frozenset[int]
    ) -> dict[int, bytes | Failure]:
        header = unpack(next(iter(messages.values())), LIMIT).header
        # A hello, and the evaluation after the last round, pass: what nodes then hold is what is compared.
        calm = header["kind"] == "hello" or header.get("purpose") != "round"
        if not calm and self.server_kills and self.draw.random() < 0.15:
            self._kill_server("before an exchange")
        if not calm and self.draw.random() < 0.2:
            self.clock.ahead += float(self.draw.choice([-1e6, -3600.0, 3600.0, 1e6, 1e9]))
            self.happened.append("clock")
        replies: dict[int, bytes | Failure] = {}
        for client, message in messages.items():
            reply = self._answer(client, message, calm)
            if reply is not None:
                replies[client] = reply
        if not calm:
            good = {client for client, reply in replies.items() if self._is_good(client, reply)}
            self.lost[header["round"], header["exchange"]] = set(self.nodes()) - good
            if self.server_kills and self.draw.random() < 0.15:
                self._kill_server("after an exchange")
        return replies

    def oracle(self, clients: Tensor, call: Call) -> Tensor:
        """Say which replies a simulation is to lose."""
        lost = self.lost.get((call.round, call.exchange), set())
        return Tensor([int(client) in lost for client in clients.tolist()]).bool()

    def _kill_server(self, when: str) -> None:
        self.server_kills -= 1
        self.happened.append(f"server killed {when}")
        raise Killed

    def _is_good(self, client: int, reply: bytes | Failure) -> bool:
        return reply is self.before.get(client)

    def _handle(self, client: int, message: bytes) -> bytes | None:
        """Have a node answer, first what it was stopped over; note its own reply."""
        if client in self.held:
            self.local.grid.nodes_[client].handle(self.held.pop(client))
        reply = self.local.grid.nodes_[client].handle(message)
        self.before[client] = reply
        return reply if not unpack(reply, LIMIT).header.get("error") else self._spoilt(client, reply)

    def _spoilt(self, client: int, reply: bytes) -> bytes:
        del self.before[client]
        return reply

    def _restart(self, client: int) -> None:
        old = self.local.grid.nodes_[client]
        self.held.pop(client, None)
        self.local.grid.nodes_[client] = Node(old.agreement, client, self.local.datasets[client], old.folder)

    def _answer(self, client: int, message: bytes, calm: bool) -> bytes | Failure | None:
        stale = self.before.pop(client, None)
        if calm or self.draw.random() >= self.rate:
            return self._handle(client, message)
        fault = str(self.draw.choice(FAULTS))
        self.happened.append(fault)
        if fault == "away":
            return Failure("its connection was cut", gone=True)
        if fault == "error":
            return Failure("Flower's error 2")
        if fault == "killed before":
            self._restart(client)
            return None
        if fault == "stopped":
            self.held[client] = message
            return None
        if fault == "message cut":
            cut = message[: int(self.draw.integers(0, len(message)))]
            reply = self.local.grid.nodes_[client].handle(cut)
            assert unpack(reply, LIMIT).header["error"]
            return reply
        if fault == "disk full":
            with self.disk.failing(int(self.draw.integers(0, 6)), full):
                return self._handle(client, message)
        if fault == "killed at a file":
            try:
                with self.disk.failing(int(self.draw.integers(0, 6)), Killed):
                    return self._handle(client, message)
            except Killed:
                self.before.pop(client, None)
                self._restart(client)
                return None
        reply = self._handle(client, message)
        self.before.pop(client, None)
        assert reply is not None
        if fault == "killed after":
            self._restart(client)
            return None
        if fault == "reply cut":
            return reply[: int(self.draw.integers(0, len(reply)))]
        if fault == "stale":
            return stale if stale is not None else None
        return self._garbage(reply)

    def _garbage(self, reply: bytes) -> bytes:
        envelope = unpack(reply, LIMIT)
        header, tensors = dict(envelope.header), dict(envelope.tensors)
        kind = int(self.draw.integers(0, 5))
        if kind == 0:
            return self.draw.bytes(int(self.draw.integers(0, 4096)))
        if kind == 1:
            header["token"] = "another"
        elif kind == 2:
            header["client"] = (int(header["client"]) + 1) % len(self.local.datasets)
        elif kind == 3:
            tensors = {f"{name}x": value for name, value in tensors.items()}
            tensors["reply/none"] = Tensor([1.0])
        else:
            place = int(self.draw.integers(0, len(reply)))
            return reply[:place] + self.draw.bytes(8) + reply[place:]
        return pack(header, tensors)
