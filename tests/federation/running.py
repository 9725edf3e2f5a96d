"""A federation of real processes: a server, nodes and runs, started as a user starts them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.federation.flower import processes
from coterie.federation.flower.control import Control
from coterie.federation.project import read_server

PATIENCE = 600.0  # seconds: the machine may be busy with other work


def coterie(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from coterie.cli import main; main()", *arguments]


def wait_until(condition: Callable[[], object], what: str, process: subprocess.Popen[bytes] | None = None) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert process is None or process.poll() is None, f"ended with {process.returncode} before {what}"
        assert time.monotonic() < until, what
        time.sleep(0.1)


def free_pair() -> int:
    """Find a port that is free, and so is the next one: `init` gives both away."""
    while True:
        port = processes.free_port()
        if port < 65535 and is_free(port + 1):
            return port


def is_free(port: int) -> bool:
    import socket

    with socket.socket() as found, contextlib.suppress(OSError):
        found.bind(("127.0.0.1", port))
        return True
    return False


def flwr(home: Path, address: str, ca: Path, *arguments: str) -> dict[str, Any]:
    """Run a command of Flower's own command line against a SuperLink; give its answer."""
    home.mkdir(parents=True, exist_ok=True)
    lines = ["[superlink.there]", f'address = "{address}"', f"root-certificates = {json.dumps(str(ca))}"]
    (home / "config.toml").write_text("\n".join(lines) + "\n")
    command = [str(Path(sys.executable).parent / "flwr"), *arguments, "there", "--format", "json"]
    done = subprocess.run(
        command, env=processes.environment(home), capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    return dict(json.loads(done.stdout[done.stdout.find("{") :]))


@dataclass
class Federation:
    """A project folder and the processes that run in it; ``close`` ends them all."""

    folder: Path
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1"}

    def log(self, name: str) -> Path:
        return self.folder.parent / f"{self.folder.name}-logs" / name

    def said(self, name: str) -> str:
        return self.log(name).read_text(errors="replace") if self.log(name).exists() else ""

    def start(
        self, name: str, *arguments: str, within: Sequence[str] = (), cwd: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command of Coterie's under a name, by default in the folder that holds the project."""
        # Killed, as it may be stopped when whoever runs the tests is killed; what it started itself then ends too.
        command = processes.tied([*within, *coterie(*arguments)], signal.SIGKILL)
        log = self.log(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            process = subprocess.Popen(
                command,
                env=self.env,
                cwd=cwd or self.folder.parent,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self.started[name] = process
        return process

    def serve(self) -> None:
        self.log("server").unlink(missing_ok=True)
        process = self.start("server", "federate", "server", self.folder.name)
        wait_until(lambda: "ready" in self.said("server"), "the server is ready", process)

    def node(self, member: str) -> None:
        self.start(member, "federate", "node", f"{self.folder.name}/nodes/{member}")

    def wait_for_nodes(self, count: int) -> None:
        """Wait until so many nodes are connected, as the server sees it; a node that ends meanwhile is a failure."""
        control = Control(self.folder / "server", read_server(self.folder).superlink_port)

        def connected() -> bool:
            ended = {name: self.said(name) for name, process in self.started.items() if process.poll() is not None}
            assert not ended, ended
            return list(control.statuses().values()).count("online") == count

        wait_until(connected, f"{count} nodes are connected")

    def run(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        return self.start(name, "federate", "run", self.folder.name, *arguments)

    def end(self, name: str) -> None:
        """Wait for a command that ends by itself, well."""
        code = self.started.pop(name).wait(timeout=PATIENCE)
        assert code == 0, self.said(name)

    def kill(self, name: str) -> None:
        """End a process and all that it started at once, as a power cut does."""
        process = self.started.pop(name)
        groups = processes._groups(process.pid)
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        process.wait(timeout=PATIENCE)

    def stop(self, name: str) -> None:
        processes.stop(self.started.pop(name))

    def close(self) -> None:
        for process in self.started.values():  # all at once, or each would be waited for in turn
            process.terminate()
        for name in reversed(list(self.started)):
            self.stop(name)

    def abandon(self) -> None:
        """End everything at once, without waiting for goodbyes."""
        for name in reversed(list(self.started)):
            self.kill(name)
