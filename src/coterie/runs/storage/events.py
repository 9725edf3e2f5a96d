"""What happened in a federation that was not supposed to, or is worth telling: one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from coterie.errors import RunFolderError
from coterie.runs.storage.atomic_files import append_lines

FILE = "events.jsonl"


@dataclass(frozen=True)
class Event:
    """One event.

    Parameters
    ----------
    round
        The round in which it happened, 0 for before the first.
    what
        ``joined``, ``returned``, ``refused``, ``error``, ``garbage``, ``no reply``, ``void round``, ``no evaluation``,
        ``tracker failed``, ``began`` or ``resumed``.
    client
        The client it is about, ``None`` for the federation.
    reason
        One sentence.
    """

    round: int
    what: str
    client: int | None = None
    reason: str = ""

    def __str__(self) -> str:
        return self.told({})

    def told(self, names: Mapping[int, str]) -> str:
        """Say it in one line, with the client's name where it has one."""
        whose = "" if self.client is None else f" {names.get(self.client, f'client {self.client}')}"
        # Who joined is named as the reason too, which is for who has no list of names.
        reason = "" if self.client is not None and self.reason == names.get(self.client) else self.reason
        return f"round {self.round}:{whose} {self.what}" + (f" ({reason})" if reason else "")


Listener = Callable[[Event], None]


class EventLog:
    """The events of one run.

    Parameters
    ----------
    run
        The run's folder.
    listener
        Told of every event.
    """

    def __init__(self, run: Path, listener: Listener | None = None) -> None:
        self._path, self._listener = run / FILE, listener

    def __call__(self, event: Event) -> None:
        """Record an event and tell of it."""
        append_lines(self._path, [json.dumps(asdict(event)) + "\n"])
        if self._listener is not None:
            self._listener(event)


def read(run: Path) -> list[Event]:
    """Read the events of a run in order; a last line that a kill cut short is left out.

    Another line that is damaged is a ``RunFolderError``.
    """
    path = run / FILE
    if not path.exists():
        return []
    with path.open(encoding="utf-8", errors="replace") as file:
        return [_parsed(path, line) for line in file if line.endswith("\n")]


def _parsed(path: Path, line: str) -> Event:
    try:
        entry = json.loads(line)
        found = Event(**entry)
        whose = found.client is None or type(found.client) is int
        if type(found.round) is int and whose and isinstance(found.what, str) and isinstance(found.reason, str):
            return found
        raise TypeError("a field of another type")
    except (ValueError, TypeError, RecursionError) as error:
        raise RunFolderError(
            f"{path} is damaged (a line reads {line.strip()[:80]!r}): each must hold a round and what happened in it"
        ) from error
