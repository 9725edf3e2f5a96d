"""The command that shows how a federation is doing, in a browser and for Prometheus."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from coterie import signals
from coterie.cli.console import err
from coterie.errors import ConfigError


def watch(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The project folder that `init` wrote.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0 for a free one.")] = 9095,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Whoever reaches another than 127.0.0.1 sees the page.")
    ] = "127.0.0.1",
) -> None:
    """Show members, rounds, bytes and events on a page that can change nothing, and at /metrics for Prometheus.

    Run it on the server's machine, beside `coterie federate server`.
    """
    if importlib.util.find_spec("flwr") is None:
        raise ConfigError("flwr is not installed: install Coterie with its extra, coterie[federation]")
    from coterie.federation import agreement, project
    from coterie.federation.flower.control import Control
    from coterie.federation.status import StatusReader
    from coterie.federation.status_server import StatusServer

    agreement.read(folder / agreement.FILE)  # what is wrong is said here
    control = Control(folder / "server", project.read_server(folder).superlink_port)
    try:
        server = StatusServer(host, port, StatusReader(folder, control.seen).read)
    except OSError as error:
        raise ConfigError(f"the page cannot be at {host}:{port} ({error.strerror}): choose another --port") from error

    def stop(number: int, frame: FrameType | None) -> None:
        # Not from this thread, which serves: shutdown waits until it has stopped.
        threading.Thread(target=server.shutdown).start()

    with signals.handled(stop, signal.SIGINT, signal.SIGTERM), contextlib.closing(server.socket):
        err.print(f"the page is at http://{host}:{server.server_address[1]}/", highlight=False)
        server.serve_forever(poll_interval=0.2)
