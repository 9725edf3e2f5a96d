"""One server app for a run, however long it takes to load: against Flower's own book of claims, on a clock of ours."""

from __future__ import annotations

import datetime
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")

from flwr.common.constant import Status, SubStatus
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    AcquireTaskResponse,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
    SendTaskHeartbeatResponse,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.corestate import in_memory_corestate
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.servicer.runtime import runtime_handlers
from flwr.supernode.nodestate import NodeStateFactory

from coterie.federation.flower import launcher, processes
from coterie.federation.flower._internals import TaskQueue
from coterie.federation.flower.launcher import Launcher

RUN = 7


class Link:
    """Flower's book of who claimed which run, without the network; and the processes that were started."""

    def __init__(self) -> None:
        self.book = NodeStateFactory(ObjectStoreFactory()).state()
        self.task = self.book.create_task(task_type=TaskType.SERVER_APP, run_id=RUN, fab_hash="x")
        self.started: list[tuple[str, subprocess.Popen[bytes]]] = []
        self.answers = True

    def client(self, token: str | None) -> Any:
        return Client(self, token)

    def runs(self) -> TaskQueue:
        return TaskQueue(self.client)

    def start(self, run: int, token: str) -> subprocess.Popen[bytes]:
        assert run == RUN
        process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
        self.started.append((token, process))
        return process

    def status(self) -> tuple[str, str, str]:
        assert self.task is not None
        (found,) = self.book.get_tasks(task_ids=[self.task])
        return found.status.status, found.status.sub_status, found.status.details

    def running(self) -> int:
        return sum(process.poll() is None for _, process in self.started)


class Client:
    def __init__(self, link: Link, token: str | None) -> None:
        self._link, self._token = link, token

    def AcquireTask(self, request: AcquireTaskRequest) -> AcquireTaskResponse:
        self._reach()
        return runtime_handlers.acquire_task(request, self._link.book)

    def SendTaskHeartbeat(self, request: SendTaskHeartbeatRequest) -> SendTaskHeartbeatResponse:
        return runtime_handlers.send_task_heartbeat(request, self._link.book, self._own())

    def PushTaskOutput(self, request: PushTaskOutputRequest) -> None:
        assert self._link.book.finish_task(self._own().task_id, request.sub_status, request.details)

    def close(self) -> None:
        pass

    def _reach(self) -> None:
        if not self._link.answers:
            raise httpx.ConnectError("busy")

    def _own(self) -> Any:
        self._reach()
        task = self._link.book.get_task_by_token(cast(str, self._token))
        if task is None:
            raise httpx.HTTPError("401: no such claim")
        return task


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds

    def now(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self.seconds, tz=datetime.UTC)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(in_memory_corestate, "now", found.now)
    monkeypatch.setattr(launcher, "time", SimpleNamespace(monotonic=found))
    return found


@pytest.fixture
def link() -> Iterator[Link]:
    found = Link()
    yield found
    for _, process in found.started:
        process.kill()
        process.wait()


def test_an_app_that_takes_minutes_to_load_is_the_only_one(link: Link, clock: Clock) -> None:
    launcher = Launcher(link.runs(), link.start)
    assert launcher.once()
    for _ in range(300):  # Flower's SuperExec would have started one every thirty of these seconds
        clock.seconds += 1.0
        assert not launcher.once()
    ((token, _),) = link.started
    assert link.status()[0] == Status.STARTING
    assert link.book.get_task_by_token(token) is not None  # so the app, once it has loaded, can begin
    launcher.close()
    assert link.running() == 0


def test_without_a_sign_of_life_a_run_is_offered_again(link: Link, clock: Clock) -> None:
    """Flower's own rule, on which the launcher rests."""
    request = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
    assert link.client(None).AcquireTask(request).token
    clock.seconds += 29.0
    assert not link.client(None).AcquireTask(request).token
    clock.seconds += 2.0
    assert link.client(None).AcquireTask(request).token


def test_an_app_that_lost_its_claim_is_ended_before_there_is_another(link: Link, clock: Clock) -> None:
    launcher = Launcher(link.runs(), link.start)
    launcher.once()
    link.answers = False  # too busy to hear anybody, for longer than a claim holds
    for _ in range(10):
        clock.seconds += 9.0
        assert not launcher.once()
    link.answers = True
    assert launcher.once()
    (_, first), (_, second) = link.started
    assert first.poll() is not None
    assert second.poll() is None
    launcher.close()


def test_an_app_that_was_killed_ends_its_run(link: Link, clock: Clock) -> None:
    launcher = Launcher(link.runs(), link.start)
    launcher.once()
    link.started[0][1].kill()
    link.started[0][1].wait()
    assert not launcher.once()
    assert link.status() == (Status.FINISHED, SubStatus.FAILED, "its process ended with code -9")
    assert not launcher.once()
    assert len(link.started) == 1


def test_what_an_app_said_of_its_end_stands(link: Link, clock: Clock) -> None:
    launcher = Launcher(link.runs(), link.start)
    launcher.once()
    assert link.task is not None
    link.book.activate_task(link.task)
    link.book.finish_task(link.task, SubStatus.COMPLETED, "")
    link.started[0][1].kill()
    link.started[0][1].wait()
    launcher.once()
    assert link.status()[:2] == (Status.FINISHED, SubStatus.COMPLETED)


def test_the_superlink_starts_none_itself_and_tokens_are_not_for_all_to_see(tmp_path: Path) -> None:
    command = processes.superlink(9093, tmp_path)
    assert command[command.index("--isolation") + 1] == "process"
    command = processes.serverapp("127.0.0.1:9093", tmp_path / "ca.crt", tmp_path / "token")
    assert "--token" not in command
    assert command[command.index("--token-file") + 1] == str(tmp_path / "token")
