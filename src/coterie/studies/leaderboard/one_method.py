"""One method on the leaderboard: where nobody is better beyond chance, who is, and whom it harms."""

from __future__ import annotations

from coterie.errors import UnknownName
from coterie.studies.leaderboard.board import unbeaten_in
from coterie.studies.leaderboard.page import totals
from coterie.studies.leaderboard.record import Leaderboard
from coterie.studies.leaderboard.wording import percent, some, with_reach
from coterie.tables import ABSENT, Row, Table, numbers, words

_NAMED = 3  # of those that are better, so many are named


def table(found: Leaderboard, method: str) -> Table:
    """Make the table of a method: a row a setting, with the best of the others beside it."""
    if method not in found.methods:
        raise UnknownName("method with results called", method, found.methods)
    rows = []
    for setting in found.settings:
        board = found.boards[setting.name]
        own = board.of(method)
        others = [placing for placing in board.placings if placing is not own]
        if own is None:
            continue
        better = [found.methods[name] for name in own.beaten_by]
        rows.append(
            Row(
                (
                    setting.name,
                    with_reach(own.mean),
                    f"{others[0].entry.title} {with_reach(others[0].mean)}" if others else ABSENT,
                    f"{own.rank:g} of {len(board.placings)}",
                    some(better, _NAMED, _NAMED) if better else "nobody",
                    ABSENT if own.harm is None else f"{sum(own.harm.harmed)}/{sum(map(len, own.entry.tests))}",
                )
            )
        )
    heads = (*words("setting"), *numbers(found.methods[method]), *words("best of the others"), *numbers("rank"))
    return Table((*heads, *words("beaten by"), *numbers("harms")), tuple(rows))


def sentence(found: Leaderboard, method: str) -> str:
    """Say in one sentence where a method stands."""
    settings = sum(board.of(method) is not None for board in found.boards.values())
    _, harmed, clients = totals(found, method)
    harm = f", and harms {harmed} of {clients:,} clients ({percent(harmed / clients)} %)" if clients else ""
    return f"{found.methods[method]} is unbeaten in {unbeaten_in(found.boards, method)} of {settings} settings{harm}."
