"""What starts the server's half of a run, in the place of Flower's SuperExec: on a busy machine one, and not many.

A SuperLink gives a run to whoever claims it, and offers it again where thirty seconds pass without a sign of life. A
SuperExec gives none; the process that it starts does, once it has loaded. On a machine so busy that loading takes
longer, a process is given up before it can speak, another is started beside it, and the machine is busier still. Here
whoever claimed the run says so himself, from the claim to the end, and a process that lost its claim is ended before
there is another.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PushTaskOutputRequest, SendTaskHeartbeatRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient

from coterie.federation.flower import certificates, processes

_log = logging.getLogger(__name__)
_PAUSE = 1.0  # seconds between looks for a run; each costs the SuperLink some work
_BEAT = 10.0  # seconds between signs of life; a sign is good for sixty


@dataclass
class _App:
    """The process of a run, and the claim that it works under."""

    client: RuntimeHttpClient
    process: subprocess.Popen[bytes]
    spoke: float = -_BEAT


class Launcher:
    """Claims runs and starts a process for each.

    Parameters
    ----------
    connect
        Gives a client of the SuperLink, for a claim's token or for none.
    start
        Starts the process, from Flower's number of the run and the token.
    """

    def __init__(
        self,
        connect: Callable[[str | None], RuntimeHttpClient],
        start: Callable[[int, str], subprocess.Popen[bytes]],
    ) -> None:
        self._connect, self._start = connect, start
        self._client = connect(None)
        self._apps: dict[int, _App] = {}

    def once(self) -> bool:
        """Look after the processes that run, then start one if a run waits for it.

        Returns
        -------
        bool
            Whether one was started.
        """
        self._look_after()
        try:
            found = self._client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
            if not found.token:
                return False
            run = int(found.task.run_id)
            # A run that is offered again has lost its claim, and its process can do nothing any more.
            self._end(run)
            self._apps[run] = _App(self._connect(found.token), self._start(run, found.token))
        except (httpx.HTTPError, OSError) as error:  # a claim that nobody speaks for is offered again
            _log.warning("no run could be started: %s", error)
            return False
        self._look_after()
        return True

    def close(self) -> None:
        """End all processes, and let go of the SuperLink."""
        for run in list(self._apps):
            self._end(run)
        self._client.close()

    def _look_after(self) -> None:
        for run, app in list(self._apps.items()):
            code = app.process.poll()
            if code is not None:
                self._bury(run, f"its process ended with code {code}")
            elif time.monotonic() - app.spoke >= _BEAT:
                with contextlib.suppress(httpx.HTTPError):  # there is time for some more
                    app.client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
                    app.spoke = time.monotonic()

    def _end(self, run: int) -> None:
        if run in self._apps:
            processes.stop(self._apps[run].process)
            self._bury(run, "its process was stopped")

    def _bury(self, run: int, why: str) -> None:
        app = self._apps.pop(run)
        # One that was killed could not say so. One that did is finished, and the SuperLink refuses another word.
        with contextlib.suppress(httpx.HTTPError):
            app.client.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.FAILED, details=why))
        app.client.close()


@contextlib.contextmanager
def launching(address: str, ca: Path, env: dict[str, str], folder: Path) -> Iterator[None]:
    """Start what runs need while the context is open, in a thread of its own.

    Parameters
    ----------
    address
        The SuperLink's address, as ``127.0.0.1:9093``.
    ca
        The certificate of the authority that signed the SuperLink's.
    env
        The environment of the processes.
    folder
        Where tokens lie while their processes run, and where the processes' output goes.

    Yields
    ------
    None
        While runs are started.
    """

    def connect(token: str | None) -> RuntimeHttpClient:
        version = RuntimeVersionHttpInterceptor("SuperExec" if token is None else "flwr-serverapp")
        interceptors = (version,) if token is None else (version, RuntimeTokenHttpInterceptor(token))
        # Without a retry invoker: Flower's ends the process where the SuperLink refuses, and this process stays.
        return RuntimeHttpClient.from_server_address(address, False, ca.read_bytes(), interceptors)

    def start(run: int, token: str) -> subprocess.Popen[bytes]:
        file = folder / "tokens" / str(run)  # not on the command line, which everybody on the machine can read
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        certificates.write_secret(file, token.encode())
        return processes.start(processes.serverapp(address, ca, file), env, folder / "serverapp.log")

    launcher, done = Launcher(connect, start), threading.Event()

    def work() -> None:
        # Processes end with the thread that started them, so it must not end before its time.
        while not done.is_set():
            try:
                if launcher.once():
                    continue
            except Exception:
                _log.exception("no run could be started")
            done.wait(_PAUSE)
        launcher.close()

    thread = threading.Thread(target=work, name="launcher")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        shutil.rmtree(folder / "tokens", ignore_errors=True)
