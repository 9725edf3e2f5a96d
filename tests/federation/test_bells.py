"""What makes an exchange quick: bells between processes, calls that the gate holds."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")

from flwr.app import Message, RecordDict

from coterie.federation.flower import apps, bells
from coterie.federation.flower._internals import HEARTBEAT_PATH, NODES_PATH, PULL_PATH
from coterie.federation.flower.bells import Bell
from coterie.federation.flower.held_calls import HeldCalls
from coterie.federation.flower.messages import content_of, take_block


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
    """Calls of members at a gate."""

    def __init__(self, folder: Path) -> None:
        self.sent, self.replied = Bell(folder / "sent"), Bell(folder / "replied")
        self.calls = HeldCalls(self.sent, self.replied, seconds=0.3)

    async def call(self, path: str, member: bytes = b"a", rings: float | None = None) -> str:
        """Make a call, with the bell ringing so many seconds later; say whether it was held, and until when."""
        began = time.monotonic()
        if rings is not None:
            asyncio.get_running_loop().call_later(rings, self.sent.ring)
        await self.calls.hold(member, path)
        took = time.monotonic() - began
        return "passed" if took < 0.01 else "rung" if rings is not None else "held" if took >= 0.29 else f"{took}"


def test_only_a_call_that_would_be_in_vain_is_held(tmp_path: Path) -> None:
    held = Held(tmp_path)

    async def play() -> None:
        assert await held.call(PULL_PATH) == "passed"  # there may be a message of before
        assert await held.call(PULL_PATH) == "held"
        assert await held.call(HEARTBEAT_PATH) == "passed"
        assert await held.call(PULL_PATH) == "held"  # a heartbeat says nothing of messages
        assert await held.call(PULL_PATH, b"b") == "passed"  # another member's first
        held.calls._seconds = 600.0
        assert await held.call(PULL_PATH, rings=0.05) == "rung"  # a message was sent
        held.calls._seconds = 0.3
        held.sent.ring()
        assert await held.call(PULL_PATH) == "passed"  # between two calls
        assert await held.call(PULL_PATH) == "held"
        assert await held.call(f"{NODES_PATH}push-object") == "passed"
        assert await held.call(PULL_PATH) == "passed"  # it had one, and may have another

    asyncio.run(play())


def test_one_ring_lets_all_held_calls_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, members = Held(tmp_path), [bytes([number]) for number in range(40)]
    looks: list[int] = []
    last = held.sent.last
    monkeypatch.setattr(held.sent, "last", lambda: (looks.append(0), last())[1])

    async def play() -> None:
        for member in members:
            await held.call(PULL_PATH, member)
        held.calls._seconds = 600.0
        asyncio.get_running_loop().call_later(0.3, held.sent.ring)
        began = time.monotonic()
        del looks[:]
        await asyncio.gather(*(held.call(PULL_PATH, member) for member in members))
        # Each call looks before and after it is held; while they are, one looks for all of them.
        assert len(looks) - 2 * len(members) <= (time.monotonic() - began) / bells.LOOK + 2

    asyncio.run(play())


def test_who_asks_for_the_next_message_has_sent_the_last_reply(tmp_path: Path) -> None:
    held = Held(tmp_path)

    async def play() -> None:
        await held.call(PULL_PATH)
        before = held.replied.last()
        await held.call(PULL_PATH)
        await held.call(f"{NODES_PATH}push-messages")
        await held.call(f"{NODES_PATH}push-object")
        assert held.replied.last() == before
        await held.call(PULL_PATH)
        assert held.replied.last() != before

    asyncio.run(play())


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
