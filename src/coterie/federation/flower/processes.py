"""Flower's own programs as processes: their command lines, their environment, and how they are stopped."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from coterie.errors import ConfigError

# On Linux a process can ask for a signal when its parent dies (PR_SET_PDEATHSIG is 1). Without it a SuperLink whose
# parent was killed would go on and keep its port.
_END_WITH_PARENT = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[2]))
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[3], sys.argv[3:])
"""


_SUPERLINK = "coterie.federation.flower.superlink_program"  # by its name, as importing Flower takes seconds


def environment(home: Path, threads: int = 1) -> dict[str, str]:
    """Give the environment of everything that is started: Flower must neither phone home nor install anything."""
    beside = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "OMP_NUM_THREADS": str(threads),
        "NO_PROXY": _no_proxy(),
    }


def avoid_proxies() -> None:
    """Let this process call others on this machine without a proxy."""
    os.environ["NO_PROXY"] = _no_proxy()


def _no_proxy() -> str:
    others = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
    return others if "127.0.0.1" in others.split(",") else ",".join(filter(None, [others, "127.0.0.1"]))


def internal_certificates(folder: Path) -> Path:
    """Give the folder of what a party's own processes know each other by; ``certificates.make_inside`` makes it.

    The certificate that nodes see is for the server's public name, not for this machine.
    """
    return folder / "inside"


def superlink(port: int, folder: Path) -> list[str]:
    """Give the command line of a SuperLink that only this machine reaches, and that starts no app itself."""
    inner = internal_certificates(folder)
    return [
        *(sys.executable, "-P", "-m", _SUPERLINK),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--ssl-ca-certfile", str(inner / "ca.crt")),
        *("--ssl-certfile", str(inner / "server.crt"), "--ssl-keyfile", str(inner / "server.key")),
        *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
        *("--isolation", "process", "--superexec-auth-secret-file", str(inner / "secret")),
    ]


def serverapp(address: str, ca: Path, token: Path) -> list[str]:
    """Give the command line of the process that runs a submitted app's server half.

    ``token`` is the file with the token of the task that was claimed for it.
    """
    return [
        _program("flwr-serverapp"),
        *("--runtime-api-address", address, "--root-certificates", str(ca), "--token-file", str(token)),
    ]


def tied(command: Sequence[str], number: signal.Signals = signal.SIGTERM) -> list[str]:
    """Give a command line that on Linux is sent a signal when the thread that starts it ends, and else the same."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _END_WITH_PARENT, str(os.getpid()), str(int(number)), *command]


def start(
    command: Sequence[str], env: Mapping[str, str], log: Path, *, private: bool = False
) -> subprocess.Popen[bytes]:
    """Start a process in a group of its own, its output in a file; on Linux it ends when this one does.

    The log, and what a ``private`` process writes, are for this user alone.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
        return subprocess.Popen(
            tied(command),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            umask=0o077 if private else -1,
        )


def stop(process: subprocess.Popen[bytes], patience: float = 10.0) -> None:
    """Stop a process and everything that it started; what is left after so many seconds is killed."""
    groups = _groups(process.pid)
    for number, wait in ((signal.SIGTERM, patience), (signal.SIGKILL, 5.0)):
        groups |= _groups(process.pid)
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)
        until = time.monotonic() + wait
        while time.monotonic() < until:
            process.poll()
            groups = {group for group in groups if _is_there(group)}
            if not groups:
                return
            time.sleep(0.1)


def _groups(root: int) -> set[int]:
    """Find the process groups of a process and all its descendants: Flower gives some of its helpers their own."""
    children: dict[int, list[tuple[int, int]]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            facts = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            children.setdefault(int(facts[1]), []).append((int(path.parent.name), int(facts[2])))
    groups, waiting = {root}, [root]
    while waiting:
        for child, group in children.get(waiting.pop(), ()):
            groups.add(group)
            waiting.append(child)
    return groups - {os.getpgrp()}


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def free_port() -> int:
    """Find a port of this machine on which nothing listens."""
    # Below those that systems give to outgoing calls: one of these may be taken again before it is listened on.
    for _ in range(1000):
        port = 20000 + secrets.randbelow(12000)
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    raise ConfigError("no free port was found on this machine: give one with --port")


def wait_for_port(port: int, process: subprocess.Popen[bytes], what: str, log: Path, seconds: float = 180.0) -> None:
    """Wait until a process listens on a port of this machine; ``what`` it is and its log are for the error message."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if process.poll() is not None:
            raise ConfigError(how_it_ended(what, process, log))
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise ConfigError(f"the {what} does not listen on port {port} after {seconds:g} s: see {log}")


def how_it_ended(what: str, process: subprocess.Popen[bytes], log: Path, begin: int = 0) -> str:
    """Say in one sentence how a program of Flower's ended by itself, with the reason that its log gives.

    ``begin`` is where the log of this process begins: what is before that was written by others.
    """
    from coterie.federation.flower._internals import reason_of_exit  # here, as importing Flower takes seconds

    said = log.read_bytes()[begin:].decode(errors="replace") if log.exists() else ""
    reason = reason_of_exit(said)
    return f"the {what} ended with code {process.returncode}{f' ({reason})' if reason else ''}: see {log}"


def _program(name: str) -> str:
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if found is None:
        raise ConfigError(f"there is no program {name!r}: install Coterie with its extra, coterie[federation]")
    return found
