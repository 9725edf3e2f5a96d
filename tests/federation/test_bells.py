"""What makes an exchange quick: bells between processes, calls that the gate holds, a SuperNode's pauses."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")

from flwr.app import Message, RecordDict

from coterie.federation.flower import apps, bells, pauses
from coterie.federation.flower._internals import HEARTBEAT_PATH, NODES_PATH, PULL_PATH
from coterie.federation.flower.bells import Bell
from coterie.federation.flower.held_calls import HeldCalls
from coterie.federation.flower.messages import content_of, take_block
from coterie.federation.flower.pauses import NodePauses


def test_a_bell_is_heard_by_who_waits_and_by_who_comes_later(tmp_path: Path) -> None:
    bell = Bell(tmp_path / "a.bell")
    before = bell.last()
    assert not bell.wait(before, 0.05)
    threading.Timer(0.1, bell.ring).start()
    began = time.monotonic()
    assert bell.wait(before, 30.0) and time.monotonic() - began < 10
    assert bell.wait(before, 0.0) and not bell.wait(bell.last(), 0.0)
    assert (tmp_path / "a.bell").stat().st_mode & 0o077 == 0
    Bell(tmp_path / "nowhere" / "a.bell").ring()  # who waits for it waits longer, and nothing else happens


class Held:
    """Calls of members at a gate, whose waiting is counted in looks and not in seconds."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent, self.replied = Bell(folder / "sent"), Bell(folder / "replied")
        self.calls = HeldCalls(self.sent, self.replied, seconds=1.0)
        self.looks, self.rings_at = 0, -1

        async def sleep(seconds: float) -> None:
            self.looks += 1
            if self.looks == self.rings_at:
                self.sent.ring()

        monkeypatch.setattr("coterie.federation.flower.held_calls.asyncio.sleep", sleep)

    def call(self, path: str, member: bytes = b"a") -> int:
        """Make a call; say how many looks it was held for."""
        self.looks = 0
        asyncio.run(self.calls.hold(member, path))
        return self.looks


def test_only_a_call_that_would_be_in_vain_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(tmp_path, monkeypatch)
    most = round(1.0 / bells.LOOK)
    assert held.call(PULL_PATH) == 0  # there may be a message of before
    assert held.call(PULL_PATH) == most
    assert held.call(HEARTBEAT_PATH) == 0 and held.call(PULL_PATH) == most  # a heartbeat says nothing of messages
    assert held.call(PULL_PATH, b"b") == 0  # another member's first
    held.rings_at = 7
    assert held.call(PULL_PATH) == 7  # a message was sent
    held.rings_at = -1
    held.sent.ring()
    assert held.call(PULL_PATH) == 0  # between two calls
    assert held.call(PULL_PATH) == most
    assert held.call(f"{NODES_PATH}push-object") == 0 and held.call(PULL_PATH) == 0  # it had one, and may have another


def test_who_asks_for_the_next_message_has_sent_the_last_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(tmp_path, monkeypatch)
    held.call(PULL_PATH)
    before = held.replied.last()
    held.call(PULL_PATH)
    held.call(f"{NODES_PATH}push-messages")
    held.call(f"{NODES_PATH}push-object")
    assert held.replied.last() == before
    held.call(PULL_PATH)
    assert held.replied.last() != before


def test_a_supernode_pauses_briefly_and_rings_where_it_has_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    clock = [100.0]
    monkeypatch.setattr(
        pauses.time, "sleep", lambda seconds: (slept.append(seconds), clock.append(clock[-1] + seconds))
    )
    monkeypatch.setattr(pauses.time, "monotonic", lambda: clock[-1])
    bell = Bell(tmp_path / "bell")
    made = NodePauses(bell)
    made.sleep(3)
    assert slept.pop() == pauses._LEAST and bell.last() == 0
    clock.append(clock[-1] + 0.2)  # the call took so long: the server is busy
    made.sleep(3)
    assert slept.pop() == pytest.approx(pauses._BUSY * 0.2)
    clock.append(clock[-1] + 3.0)  # the gate held the call
    made.sleep(3)
    assert slept.pop() == pauses._LEAST
    made.sleep(0.5)
    assert slept.pop() == pauses._REPLY and bell.last() > 0


@pytest.mark.parametrize("size", [0, 1, 2**20, 2**20 + 1])
def test_blocks_of_any_size_come_out_as_they_went_in(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("run_id", "node_id", "task_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)
    block = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    message = Message(content_of(block), dst_node_id=1, message_type="query")
    assert take_block(message) == block
    record: dict[str, Any] = {"coterie": message.content["coterie"]}
    assert len(RecordDict(record)) == 1


def test_a_reply_is_fetched_when_the_bell_rings_and_not_seconds_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apps, "_LONGEST_POLL", 60.0)
    monkeypatch.setattr(apps, "content_of", lambda block: block)
    monkeypatch.setattr(apps, "take_block", lambda message: message.block)
    monkeypatch.setattr(apps, "empty", lambda message: None)
    monkeypatch.setattr(apps, "Message", lambda content, **more: content)
    replied = bells.of_replies(tmp_path)

    class Reply:
        metadata = type("Metadata", (), {"reply_to_message_id": "one"})
        block = b"answer"

        def has_error(self) -> bool:
            return False

    class Slow:
        polls = 0

        def get_nodes(self) -> list[Any]:
            return []

        def push_messages(self, messages: list[Any]) -> list[str]:
            threading.Timer(0.3, replied.ring).start()
            return ["one"]

        def pull_messages(self, ids: list[str]) -> list[Any]:
            self.polls += 1
            return [Reply()] if replied.last() else []

    grid, began = Slow(), time.monotonic()
    sent = bells.of_messages(tmp_path)
    assert apps.FlowerGrid(cast(Any, grid), tmp_path).exchange({5: b"q"}, 60.0, frozenset({5})) == {5: b"answer"}
    assert time.monotonic() - began < 20 and grid.polls == 2 and sent.last() > 0
