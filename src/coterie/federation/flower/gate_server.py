"""Serves the gate: the one port that nodes reach, under the certificate that is in the server's folder by now."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import ssl
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType

import uvicorn

from coterie import signals
from coterie.errors import ConfigError
from coterie.federation.flower import processes
from coterie.federation.flower.bells import of_messages, of_replies
from coterie.federation.flower.callers import Callers, listen
from coterie.federation.flower.expiry import read_certificate, warnings_of
from coterie.federation.flower.gate import Gate
from coterie.federation.flower.held_calls import HeldCalls
from coterie.federation.flower.pushed_bytes import PushedBytes
from coterie.federation.flower.renewal import check_pair
from coterie.federation.flower.superlink_door import HEADER, pass_of

_LOOK = 1.0  # seconds between looks at the certificate and at what is behind the gate
_DAY = 86400.0
_REPLIES = 4  # of the largest size that a member may send before a run asks again: of some runs, or after a cut
_KEEP_ALIVE = 75  # seconds that a node's connection stays open between two calls; longer than nodes keep it


class GateServer:
    """The gate at a host and a port.

    Parameters
    ----------
    folder
        The server's folder, with ``server.crt`` and ``server.key``.
    place
        Host and port.
    superlink_port
        The SuperLink's port on this machine.
    keys
        The members' public keys in OpenSSH's form: only calls that are signed with one of them are let through.
    limit
        Bytes that a call may have.
    say
        Told of certificates that end soon, and of one that was taken up.
    callers
        Bounds the connections.
    """

    def __init__(
        self,
        folder: Path,
        place: tuple[str, int],
        superlink_port: int,
        keys: Collection[str],
        limit: int,
        say: Callable[[str], None],
        callers: Callers | None = None,
    ) -> None:
        self._folder, self._place, self._say, self._callers = folder, place, say, callers or Callers()
        check_pair(folder)
        inside = processes.internal_certificates(folder)
        known = {HEADER: pass_of((inside / "secret").read_bytes())}
        held = HeldCalls(of_messages(folder), of_replies(folder))
        pushed = PushedBytes(of_messages(folder), _REPLIES * limit)
        address = f"https://127.0.0.1:{superlink_port}"
        self._gate = Gate(address, str(inside / "ca.crt"), keys, limit, known, held, pushed, self._callers)
        self._files = folder / "server.crt", folder / "server.key"
        self._config = uvicorn.Config(
            self._gate,
            loop="asyncio",  # which accepts connections by way of our doors
            proxy_headers=False,  # who calls is whom we are connected with, whatever a call says
            ssl_certfile=str(self._files[0]),
            ssl_keyfile=str(self._files[1]),
            ws="none",
            log_level="warning",
            lifespan="on",
            timeout_keep_alive=_KEEP_ALIVE,
        )
        self._server = uvicorn.Server(self._config)

    def run(self, ready: Callable[[], None], is_over: Callable[[], bool]) -> None:
        """Serve until the process is told to stop, or ``is_over``; ``ready`` is called once nodes can connect."""

        def stop(number: int, frame: FrameType | None) -> None:
            self._server.should_exit = True

        doors = listen(*self._place, self._callers)
        watch = threading.Thread(target=self._watch, args=(ready, is_over), daemon=True)
        watch.start()
        # Ours rather than uvicorn's, which raises the signal again and would leave the SuperLink running.
        with signals.handled(stop, signal.SIGINT, signal.SIGTERM), contextlib.suppress(KeyboardInterrupt):
            self._server.run(list(doors))
        if not self._server.started:
            host, port = self._place
            raise ConfigError(f"the gate cannot listen on {host}:{port}: is another server running?")

    def _watch(self, ready: Callable[[], None], is_over: Callable[[], bool]) -> None:
        pause = threading.Event()
        while not self._server.started and not self._server.should_exit:
            pause.wait(0.05)
        if self._server.started:
            ready()
        seen, warned = self._stamps(), -_DAY
        while not self._server.should_exit:
            if is_over():
                self._server.should_exit = True
            if time.monotonic() - warned >= _DAY:
                warned = time.monotonic()
                self._warn()
            if (now := self._stamps()) != seen and self._take_up():
                seen = now
            with contextlib.suppress(RuntimeError):  # it has just ended
                self._gate.loop().call_soon_threadsafe(self._callers.sweep)
            pause.wait(_LOOK)

    def _stamps(self) -> list[int]:
        return [path.stat().st_mtime_ns if path.exists() else 0 for path in self._files]

    def _warn(self) -> None:
        known = {str(path): path for path in (self._files[0], self._folder / "ca.crt") if path.exists()}
        with contextlib.suppress(ConfigError):  # one that is about to be replaced
            for warning in warnings_of(known):
                self._say(warning)

    def _take_up(self) -> bool:
        """Use the certificate that is there now for whoever connects from now on; say whether it can be used."""
        crt, key = map(str, self._files)
        try:
            check_pair(self._folder)  # of the two files one may be there before the other
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(crt, key)
        except (ConfigError, OSError):
            return False
        context = self._config.ssl
        assert context is not None
        # In the thread that begins connections with it, so that none begins with half of it.
        asyncio.run_coroutine_threadsafe(_load(context, crt, key), self._gate.loop()).result()
        end = read_certificate(self._files[0]).not_valid_after_utc
        self._say(f"took up the certificate {crt}, which holds until {end:%Y-%m-%d}")
        return True


async def _load(context: ssl.SSLContext, crt: str, key: str) -> None:
    context.load_cert_chain(crt, key)
