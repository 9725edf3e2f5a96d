"""The leaderboard's record: one JSON file with the protocol and every entry, from which page and picture are made.

Single answers are kept of the reference alone, so that a method that comes later can be compared with it client by
client; of the others the counts that came of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coterie.errors import ConfigError
from coterie.runs.storage.atomic_files import write_text
from coterie.studies.leaderboard.board import Board, boards
from coterie.studies.leaderboard.entries import Entry
from coterie.studies.leaderboard.playing import read_entries
from coterie.studies.leaderboard.protocol import REFERENCE, LeaderboardProtocol, Setting


@dataclass(frozen=True)
class Leaderboard:
    """The protocol and what was found by it.

    Parameters
    ----------
    protocol
        What was compared, and how.
    entries
        What was found.
    boards
        The same in order, by setting, in the protocol's order.
    """

    protocol: LeaderboardProtocol
    entries: tuple[Entry, ...]
    boards: dict[str, Board]

    @property
    def settings(self) -> list[Setting]:
        """The settings that have results."""
        return [setting for name, setting in self.protocol.settings.items() if name in self.boards]

    @property
    def not_run(self) -> list[Setting]:
        """The settings that have none."""
        return [setting for name, setting in self.protocol.settings.items() if name not in self.boards]

    @property
    def methods(self) -> dict[str, str]:
        """The titles of all methods that have results, by name."""
        return {entry.method: entry.title for entry in self.entries}


def make_leaderboard(protocol: LeaderboardProtocol, entries: Iterable[Entry]) -> Leaderboard:
    """Order what was found; of a method that is there twice in a setting, the later one counts."""
    found = {(entry.setting, entry.method): entry for entry in entries}
    order = list(protocol.settings)
    for setting, method in found:
        if setting not in order:
            raise ConfigError(f"the entry of {method} is of the setting {setting!r}, which the protocol does not have")
    kept = sorted(found.values(), key=lambda entry: order.index(entry.setting))
    return Leaderboard(protocol, tuple(kept), boards(kept, REFERENCE))


def read(paths: Sequence[Path], protocol: LeaderboardProtocol) -> Leaderboard:
    """Read records and folders of entries, the later over the earlier."""
    entries: list[Entry] = []
    for path in paths:
        if path.is_dir():
            entries += read_entries(path)
            continue
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            entries += [Entry(**each) for each in values["entries"]]
        except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
            raise ConfigError(f"{str(path)!r} is no record of a leaderboard: {error}") from error
    if not entries:
        raise ConfigError(f"there are no entries in {', '.join(map(str, paths))}: `coterie leaderboard run` makes them")
    return make_leaderboard(protocol, entries)


def plain(found: Leaderboard) -> dict[str, Any]:
    """Give the record as plain JSON types."""
    harms = {
        (name, placing.entry.method): placing.harm for name, board in found.boards.items() for placing in board.placings
    }
    return {
        "protocol": found.protocol.model_dump(mode="json"),
        "entries": [
            (
                entry
                if entry.method == REFERENCE
                else entry.model_copy(update={"answers": (), "harm": harms.get((entry.setting, entry.method))})
            ).plain()
            for entry in found.entries
        ],
    }


def write(found: Leaderboard, path: Path) -> None:
    """Write the record, an entry a line."""
    values = plain(found)
    lines = ",\n".join(f"  {json.dumps(entry, separators=(',', ':'))}" for entry in values["entries"])
    write_text(path, f'{{\n "protocol": {json.dumps(values["protocol"])},\n "entries": [\n{lines}\n ]\n}}\n')
