"""What to try where, by the leaderboard: the table of the page about choosing a method."""

from __future__ import annotations

from coterie.studies.leaderboard.board import Board, Placing
from coterie.studies.leaderboard.page import percent
from coterie.studies.leaderboard.protocol import REFERENCE
from coterie.studies.leaderboard.record import Leaderboard

NAMED = 5
"""Methods that are named in a row at most."""


def harmed(placing: Placing) -> int:
    """Count the clients of all seeds that a method harms."""
    return 0 if placing.harm is None else sum(placing.harm.harmed)


def advised(board: Board) -> list[Placing]:
    """Give the methods that no other beats beyond chance, those that harm fewest clients first."""
    unbeaten = [placing for placing in board.placings if not placing.beaten_by]
    return sorted(unbeaten, key=lambda placing: (harmed(placing), placing.rank))


def markdown(found: Leaderboard) -> str:
    """Write the table, a row for each setting that has results."""
    lines = ["| where you are | try | why |", "|---|---|---|"]
    for setting in found.settings:
        board = found.boards[setting.name]
        good = advised(board)
        names = ", ".join(f"`{placing.entry.method}`" for placing in good[:NAMED])
        more = f" and {len(good) - NAMED} more" if len(good) > NAMED else ""
        lines.append(f"| {setting.words} ({setting.data}) | {names}{more} | {_why(found, board, good)} |")
    return "\n".join(lines)


def _why(found: Leaderboard, board: Board, good: list[Placing]) -> str:
    first, alone = board.placings[0], board.of(REFERENCE)
    said = [f"`{first.entry.method}` has {percent(first.mean.mean)} %"]
    if alone is not None and alone is not first:
        said[0] += f", `{REFERENCE}` {percent(alone.mean.mean)} %"
    clients = sum(map(len, first.entry.tests))
    if found.methods.get(REFERENCE) and good[0].entry.method != REFERENCE:
        said.append(f"`{good[0].entry.method}` harms {harmed(good[0])} of {clients} clients")
    others = len(board.placings) - len(good)
    said.append(f"the other {others} are beaten beyond chance")
    return "; ".join(said)
