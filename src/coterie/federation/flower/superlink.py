"""A server's SuperLink, on this machine alone, and what starts it again where it ends."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from coterie.errors import ConfigError
from coterie.federation.flower import certificates, processes
from coterie.federation.flower.control import Control
from coterie.federation.flower.launcher import launching

_SHORT = 60.0  # a SuperLink that ends sooner than that has not been of use
_TRIES = 5  # short lives in a row


class SuperLink:
    """A SuperLink that lets in nodes with some keys only, started again where it ends by itself.

    Parameters
    ----------
    folder
        The server's folder.
    port
        Its port.
    keys
        Public keys in OpenSSH's form, by the members' names.
    say
        Told where it is started again.
    """

    def __init__(self, folder: Path, port: int, keys: Mapping[str, str], say: Callable[[str], None]) -> None:
        self._folder, self._port, self._keys, self._say = folder, port, keys, say
        self._log = folder / "superlink.log"
        self._env = processes.environment(folder / "flower")
        self._done, self._ready = threading.Event(), threading.Event()
        # Linux ends a process together with the thread that started it, so one thread starts each of them.
        self._thread = threading.Thread(target=self._work, name="superlink")
        self.failure: Exception | None = None
        """Why there is none any more; ``None`` while there is one."""

    def start(self) -> None:
        """Start it and wait until nodes can come; what is wrong is raised here."""
        self._thread.start()
        self._ready.wait()
        if self.failure is not None:
            self._thread.join()
            raise self.failure

    def stop(self) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        short_lives = 0
        try:
            while not self._done.is_set():
                began = time.monotonic()
                how = self._live()
                if self._done.is_set():
                    return
                short_lives = short_lives + 1 if time.monotonic() - began < _SHORT else 0
                if short_lives > _TRIES:
                    raise ConfigError(how)
                self._say(f"{how}; starting it again; a run that was under way goes on with --out of that run")
                self._done.wait(2.0**short_lives - 1)
        except Exception as error:
            self.failure = error
        finally:
            self._ready.set()

    def _live(self) -> str:
        """Run one SuperLink until it ends, or is to end; say how it ended."""
        begin = self._log.stat().st_size if self._log.exists() else 0
        for path in self._folder.glob("superlink.db*"):  # of servers that left it readable to others
            path.chmod(0o600)
        command = processes.superlink(self._port, self._folder)
        process = processes.start(command, self._env, self._log, private=True)
        try:
            processes.wait_for_port(self._port, process, "SuperLink", self._log)
            control = Control(self._folder, self._port)
            control.stop_unfinished()
            control.enrol(self._keys)
            self._ready.set()
            while process.poll() is None and not self._done.wait(0.5):
                pass
        except ConfigError:
            if process.poll() is None or not self._ready.is_set():  # it is not the SuperLink that ended
                raise
        finally:
            processes.stop(process)
        return processes.how_it_ended("SuperLink", process, self._log, begin)


@contextlib.contextmanager
def superlink(folder: Path, port: int, keys: Mapping[str, str], say: Callable[[str], None]) -> Iterator[SuperLink]:
    """Run a SuperLink that lets in nodes with these keys only, and the launcher of its runs, while the context is open.

    ``keys`` are public keys in OpenSSH's form, by the members' names; ``say`` is told where it has to be started again.
    """
    inside = processes.internal_certificates(folder)
    certificates.make_inside(inside)
    processes.avoid_proxies()
    found = SuperLink(folder, port, keys, say)
    try:
        found.start()
        with launching(f"127.0.0.1:{port}", inside, processes.environment(folder / "flower"), folder):
            yield found
    finally:
        found.stop()
