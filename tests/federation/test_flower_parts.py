"""What surrounds Flower: command lines, environment, certificates, processes that end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")

from coterie.engines.flower import processes
from coterie.engines.flower.blocks import content_of
from coterie.federation import project


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
from coterie.engines.flower import processes
child = processes.start([sys.executable, "-S", "-c", "import time; time.sleep(600)"], {}, Path(sys.argv[1]))
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_what_is_started_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path / "log")], stdout=subprocess.PIPE)
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
    expected = f"the SuperNode ended with code 1 (No connection. wrong name): see {tmp_path / 'log'}"
    assert processes.how_it_ended("SuperNode", process, tmp_path / "log") == expected
