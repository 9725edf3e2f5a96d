"""What surrounds Flower: command lines, environment, certificates, processes that end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")

from flwr.app import Message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.task_identity import TaskIdentity

from coterie.federation import project
from coterie.federation.flower import apps, processes
from coterie.federation.flower.messages import content_of, take_block


def test_nobody_but_this_machine_reaches_the_superlink(tmp_path: Path) -> None:
    command = processes.superlink(9093, tmp_path)
    assert command[command.index("--host") + 1] == "127.0.0.1"


def test_flower_adds_little_to_a_block() -> None:
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    block = os.urandom(2**20)
    sent = sum(len(each.deflate()) for each in get_all_nested_objects(content_of(block)).values())
    assert len(block) < sent < 1.05 * len(block)


def test_what_is_started_neither_phones_home_nor_installs(tmp_path: Path) -> None:
    env = processes.environment(tmp_path)
    assert env["FLWR_TELEMETRY_ENABLED"] == "0"
    assert env["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert env["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert "--disable-runtime-dependency-installation" in processes.superlink(1, tmp_path)


def test_a_project_says_what_to_replace(tmp_path: Path) -> None:
    project.init(tmp_path / "p", ["a", "b"], host="example.org", port=443)
    assert yaml.safe_load((tmp_path / "p" / "server" / "server.yaml").read_text())["host"] == "0.0.0.0"
    for file in ("federation.yaml", "server/server.yaml", "nodes/a/node.yaml"):
        text = (tmp_path / "p" / file).read_text().lower()
        assert "replace" in text or "in production" in text
    for secret in ("server/server.key", "authority/ca.key", "nodes/a/node.key"):
        assert (tmp_path / "p" / secret).stat().st_mode & 0o077 == 0
    assert project.open_node(tmp_path / "p" / "nodes" / "b").client == 1


PARENT = """
import sys, time
from pathlib import Path
from coterie.federation.flower import processes
child = processes.start([sys.executable, "-S", "-c", "import time; time.sleep(600)"], {}, Path(sys.argv[1]))
print(child.pid, flush=True)
time.sleep(600)
"""


TESTS = """
import os, signal, sys, time
from pathlib import Path
from tests.federation import running
running.coterie = lambda *words: [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
child = running.Federation(Path(sys.argv[1]).with_suffix("")).start("node")
time.sleep(1)
os.kill(child.pid, signal.SIGSTOP)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
@pytest.mark.parametrize("code", [PARENT, TESTS], ids=["program", "tests"])
def test_what_is_started_ends_when_its_parent_is_killed(tmp_path: Path, code: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "log")], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(0.2)
        os.kill(child, 0)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        parent.stdout.close()  # type: ignore[union-attr]
    until = time.monotonic() + 60
    while _runs(child):
        assert time.monotonic() < until
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_and_what_it_started_in_other_groups_are_stopped(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time; "
        "p = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'], start_new_session=True); "
        "print(p.pid, flush=True); time.sleep(600)"
    )
    log = tmp_path / "log"
    process = processes.start([sys.executable, "-S", "-c", code], {}, log)
    until = time.monotonic() + 60
    while not log.read_text().strip():
        assert time.monotonic() < until
        time.sleep(0.05)
    child = int(log.read_text())
    processes.stop(process)
    assert not _runs(child)
    assert process.poll() is not None


def test_a_superlink_that_ends_at_once_is_said_to_have(tmp_path: Path) -> None:
    from coterie.errors import ConfigError

    process = processes.start([sys.executable, "-c", "raise SystemExit(7)"], {}, tmp_path / "log")
    with pytest.raises(ConfigError, match=r"the SuperLink ended with code 7: see .*log"):
        processes.wait_for_port(1, process, "SuperLink", tmp_path / "log")


def test_the_reason_why_flower_ended_is_told(tmp_path: Path) -> None:
    said = [
        "INFO: begin",
        "ERROR: Exit Code: 305",
        "No connection.",
        "wrong name",
        "",
        "For more information: x",
        "end",
    ]
    (tmp_path / "log").write_text("\n".join(said))
    process = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(1)"])
    process.wait()
    expected = f"the SuperLink ended with code 1 (No connection. wrong name): see {tmp_path / 'log'}"
    assert processes.how_it_ended("SuperLink", process, tmp_path / "log") == expected
    begin = (tmp_path / "log").stat().st_size  # what another process wrote before is not this one's reason
    said_by_none = f"the SuperLink ended with code 1: see {tmp_path / 'log'}"
    assert processes.how_it_ended("SuperLink", process, tmp_path / "log", begin) == said_by_none


class Grid:
    """Stands for Flower's grid: a node that is killed with its message, restarted, and answers what it gets then."""

    def __init__(self, loses: int) -> None:
        self.sent: list[Message] = []
        self.loses, self.activated, self.looks = loses, "1", 0

    def get_nodes(self) -> list[Any]:
        self.looks += 1
        self.activated = "2" if self.looks > 2 else "1"
        return [SimpleNamespace(node_id=5, last_activated_at=self.activated, public_key=b"")]

    def push_messages(self, messages: list[Message]) -> list[str]:
        for message in messages:
            proto = message_to_proto(message)
            proto.metadata.message_id = f"m{len(self.sent)}"  # as a SuperLink does
            self.sent.append(message_from_proto(proto))
        return [f"m{len(self.sent) - 1}"]

    def pull_messages(self, identifiers: list[str]) -> list[Message]:
        found = [message for message in self.sent[self.loses :] if message.metadata.message_id in identifiers]
        return [Message(content_of(b"answer"), reply_to=message) for message in found]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process of Flower's, which knows for which run it is; and without its pauses."""
    for name in ("run_id", "node_id", "task_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)
    monkeypatch.setattr(apps, "_POLL", 0.01)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("loses", "sent"), [(0, 1), (1, 2)])
def test_a_node_that_is_restarted_in_an_exchange_gets_its_message_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, loses: int, sent: int
) -> None:
    monkeypatch.setattr(apps, "_RESTARTS", 0.0)
    grid = Grid(loses)
    answers = apps.FlowerGrid(cast(Any, grid), tmp_path).exchange({5: b"question"}, 60.0, frozenset({5}))
    assert answers == {5: b"answer"}
    assert [take_block(message) for message in grid.sent] == [b"question"] * sent


class LateGrid(Grid):
    """A node that answers a message when it has got the next."""

    def __init__(self) -> None:
        super().__init__(0)
        self.fetched: list[str] = []

    def pull_messages(self, identifiers: list[str]) -> list[Message]:
        found = [message for message in self.sent[:-1] if message.metadata.message_id in identifiers]
        self.fetched += [message.metadata.message_id for message in found]
        return [Message(content_of(message.metadata.message_id.encode()), reply_to=message) for message in found]


@pytest.mark.usefixtures("quick")
def test_a_reply_that_comes_too_late_is_fetched_and_dropped(tmp_path: Path) -> None:
    """A SuperLink would hold it in memory to the end of the run."""
    grid = LateGrid()
    transport = apps.FlowerGrid(cast(Any, grid), tmp_path)
    for _ in range(3):
        assert transport.exchange({5: b"question"}, 0.2, frozenset({5})) == {}
    assert grid.fetched == ["m0", "m1"]  # each once; the last is still to come


class PatientGrid(Grid):
    """Two nodes, of which one answers at once and the other never; notes who is asked, and for how long."""

    def __init__(self) -> None:
        super().__init__(0)
        self.asked: list[tuple[list[str], float]] = []

    def pull_messages(self, identifiers: list[str]) -> list[Message]:
        assert pull_objects.__kwdefaults__ is not None
        self.asked.append((identifiers, pull_objects.__kwdefaults__["max_time"]))
        return [Message(content_of(b"answer"), reply_to=self.sent[0])] if "m0" in identifiers else []


@pytest.mark.usefixtures("quick")
def test_parts_that_never_come_are_waited_for_no_longer_than_the_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apps, "_GRACE", 0.1)
    monkeypatch.setitem(cast(Any, pull_objects.__kwdefaults__), "max_time", 7200.0)
    grid = PatientGrid()
    found = apps.FlowerGrid(cast(Any, grid), tmp_path).exchange({5: b"a", 6: b"b"}, 60.0, frozenset({5}))
    assert found == {5: b"answer"}
    assert grid.asked[0][0] == ["m0"] and 0 < grid.asked[0][1] <= 60  # who was late before waits for the others
    assert {tuple(asked) for asked, _ in grid.asked[1:]} == {("m1",)} and grid.asked[1][1] < 5


class BlockedGrid(PatientGrid):
    """Two nodes: one whose reply never has all its parts, and one that answers while they are waited for."""

    def pull_messages(self, identifiers: list[str]) -> list[Message]:
        assert pull_objects.__kwdefaults__ is not None
        self.asked.append((identifiers, pull_objects.__kwdefaults__["max_time"]))
        if len(self.asked) == 1:
            time.sleep(self.asked[0][1])
            return []
        return [Message(content_of(b"answer"), reply_to=self.sent[0])] if "m0" in identifiers else []


@pytest.mark.usefixtures("quick")
def test_what_came_while_another_was_waited_for_counts(tmp_path: Path) -> None:
    grid = BlockedGrid()
    found = apps.FlowerGrid(cast(Any, grid), tmp_path).exchange({5: b"a", 6: b"b"}, 0.3, frozenset({5, 6}))
    assert found == {5: b"answer"}


@pytest.mark.usefixtures("quick")
def test_a_node_that_is_not_there_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    began = time.monotonic()
    assert apps.FlowerGrid(cast(Any, Grid(9)), tmp_path).exchange({5: b"question"}, 0.3, frozenset({5})) == {}
    assert 0.3 <= time.monotonic() - began < 5
