"""A server: Flower's SuperLink on this machine alone, and the gate in front of it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import FrameType

import uvicorn

from coterie.errors import ConfigError
from coterie.federation.flower import processes
from coterie.federation.flower.control import Control
from coterie.federation.flower.gate import Gate
from coterie.federation.flower.launcher import launching


@contextlib.contextmanager
def superlink(folder: Path, port: int, keys: Mapping[str, str]) -> Iterator[None]:
    """Run a SuperLink that lets in nodes with these keys only, and the launcher of its runs, while the context is open.

    ``keys`` are public keys in OpenSSH's form, by the members' names.
    """
    home, address, ca = folder / "flower", f"127.0.0.1:{port}", processes.internal_certificates(folder) / "ca.crt"
    env = processes.environment(home)
    processes.avoid_proxies()
    log = folder / "superlink.log"
    process = processes.start(processes.superlink(port, folder), env, log)
    try:
        processes.wait_for_port(port, process, "SuperLink", log)
        control = Control(folder, port)
        control.stop_unfinished()
        control.enrol(keys)
        with launching(address, ca, env, folder):
            yield
    finally:
        processes.stop(process)


def run_gate(
    folder: Path,
    place: tuple[str, int],
    superlink_port: int,
    keys: Collection[str],
    limit: int,
    ready: Callable[[], None],
) -> None:
    """Run the gate at a host and a port until the process is told to stop.

    It lets through calls of at most ``limit`` bytes that are signed with one of the ``keys``, which are public keys in
    OpenSSH's form. ``ready`` is called once nodes can connect.
    """
    host, port = place
    ca = str(processes.internal_certificates(folder) / "ca.crt")
    gate = Gate(f"https://127.0.0.1:{superlink_port}", ca, keys, limit)
    config = uvicorn.Config(
        gate,
        host=host,
        port=port,
        ssl_certfile=str(folder / "server.crt"),
        ssl_keyfile=str(folder / "server.key"),
        log_level="warning",
        lifespan="on",
    )
    server = uvicorn.Server(config)

    def stop(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    watch = threading.Thread(target=_when_started, args=(server, ready), daemon=True)
    watch.start()
    # Ours rather than uvicorn's, which raises the signal again and would leave the SuperLink running.
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with contextlib.suppress(KeyboardInterrupt):
            server.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if not server.started:
        raise ConfigError(f"the gate cannot listen on {host}:{port}: is another server running?")


def _when_started(server: uvicorn.Server, ready: Callable[[], None]) -> None:
    pause = threading.Event()
    while not server.started and not server.should_exit:
        pause.wait(0.05)
    if server.started:
        ready()
