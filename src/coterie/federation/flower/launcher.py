"""Starts the process of a run's server half, in the place of Flower's SuperExec, and never two for one run.

A SuperLink gives a run to whoever claims it, and offers it again after thirty seconds without a heartbeat. A SuperExec
sends none; the process that it starts does, once it has loaded. On a machine so busy that loading takes longer, the
SuperLink gives the process up before it can speak, the SuperExec starts another beside it, and the machine is busier
still. The launcher sends heartbeats itself, from the claim to the end, and ends a process that lost its claim before it
starts another.
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

from coterie.federation.flower import certificates, processes
from coterie.federation.flower._internals import FlowerTask, TaskQueue, runs_of

_log = logging.getLogger(__name__)
_PAUSE = 1.0  # seconds between looks for a run; each costs the SuperLink some work
_HEARTBEAT = 10.0  # seconds between heartbeats; one is good for sixty


@dataclass
class _App:
    """The process of a run, and the task that it works under."""

    task: FlowerTask
    process: subprocess.Popen[bytes]
    last_heartbeat: float = -_HEARTBEAT


class Launcher:
    """Claims runs and starts a process for each.

    Parameters
    ----------
    runs
        The runs that a SuperLink offers.
    start
        Starts the process, from Flower's number of the run and the task's token.
    """

    def __init__(self, runs: TaskQueue, start: Callable[[int, str], subprocess.Popen[bytes]]) -> None:
        self._runs, self._start = runs, start
        self._apps: dict[int, _App] = {}

    def once(self) -> bool:
        """Check the processes that run, then start one if a run waits for it; say whether one was started."""
        self._check_apps()
        try:
            task = self._runs.claim()
            if task is None:
                return False
            # A run that is offered again has lost its claim, and its process can do nothing any more.
            self._stop(task.run)
            self._apps[task.run] = _App(task, self._start(task.run, task.token))
        except (httpx.HTTPError, OSError) as error:  # without heartbeats the run is offered again
            _log.warning("no run could be started: %s", error)
            return False
        self._check_apps()
        return True

    def close(self) -> None:
        """End all processes, and disconnect from the SuperLink."""
        for run in list(self._apps):
            self._stop(run)
        self._runs.close()

    def _check_apps(self) -> None:
        for run, app in list(self._apps.items()):
            code = app.process.poll()
            if code is not None:
                self._remove(run, f"its process ended with code {code}")
            elif time.monotonic() - app.last_heartbeat >= _HEARTBEAT:
                try:
                    app.task.heartbeat()
                    app.last_heartbeat = time.monotonic()
                except httpx.HTTPStatusError as error:
                    if error.response.status_code < 500:  # the run is over, as after a restart of the SuperLink
                        self._stop(run)
                except httpx.HTTPError:  # there is time for some more
                    pass

    def _stop(self, run: int) -> None:
        if run in self._apps:
            processes.stop(self._apps[run].process)
            self._remove(run, "its process was stopped")

    def _remove(self, run: int, why: str) -> None:
        app = self._apps.pop(run)
        # A process that was killed could not report its end. Of one that did, the SuperLink refuses a second report.
        with contextlib.suppress(httpx.HTTPError):
            app.task.fail(why)
        app.task.close()


@contextlib.contextmanager
def launching(address: str, inside: Path, env: dict[str, str], folder: Path) -> Iterator[None]:
    """Start the processes that runs need while the context is open, in a thread of its own.

    ``inside`` holds what the SuperLink is known by, and knows this process by. ``folder`` gets the processes' output
    and, while they run, the tokens of their tasks.
    """
    ca = inside / "ca.crt"

    def start(run: int, token: str) -> subprocess.Popen[bytes]:
        file = folder / "tokens" / str(run)  # not on the command line, which everybody on the machine can read
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        certificates.write_secret(file, token.encode())
        return processes.start(processes.serverapp(address, ca, file), env, folder / "serverapp.log")

    runs = runs_of(address, ca.read_bytes(), (inside / "secret").read_bytes())
    launcher, done = Launcher(runs, start), threading.Event()

    def work() -> None:
        # Linux ends the processes together with the thread that started them, so one thread starts them all.
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
