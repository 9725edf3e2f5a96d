"""The leaderboard as a page of the documentation, sentences of judgement included, and as tables for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from coterie.evaluation import over_seeds
from coterie.studies.leaderboard import advice
from coterie.studies.leaderboard.board import Board, Placing, unbeaten_in
from coterie.studies.leaderboard.entries import LeaderboardEntry
from coterie.studies.leaderboard.protocol import REFERENCE, Contestant, Setting
from coterie.studies.leaderboard.record import Leaderboard
from coterie.studies.leaderboard.wording import count, listed, percent, some, with_reach
from coterie.tables import ABSENT, Cell, Column, Row, Table, escape_markdown, numbers, words

PLAINEST = "fedavg_ft"
_NAMED = 4  # of a list of methods, so many are named


# -------------------------------------------------------------------------------------------------- over all settings


def mean_ranks(found: Leaderboard, settings: Sequence[str] | None = None) -> dict[str, float]:
    """Give each method's mean rank over all settings or some, best first; where one diverged it is last."""
    ranks: dict[str, list[float]] = {method: [] for method in found.methods}
    for board in [found.boards[name] for name in settings or found.boards]:
        for placing in board.placings:
            ranks[placing.entry.method].append(placing.rank)
        for entry in board.diverged:
            ranks[entry.method].append(float(len(board.placings) + len(board.diverged)))
    means = {method: float(np.mean(each)) for method, each in ranks.items() if each}
    return dict(sorted(means.items(), key=lambda pair: (pair[1], pair[0])))


def totals(found: Leaderboard, method: str) -> tuple[int, int, int]:
    """Count the clients of all settings and seeds that a method helps and harms, and how many there are."""
    harms = [
        (placing.harm, sum(map(len, placing.entry.tests)))
        for board in found.boards.values()
        if (placing := board.of(method)) is not None and placing.harm is not None
    ]
    return (
        sum(sum(harm.helped) for harm, _ in harms),
        sum(sum(harm.harmed) for harm, _ in harms),
        sum(clients for _, clients in harms),
    )


def overview(found: Leaderboard) -> Table:
    """Make the table over all settings: mean rank, where unbeaten, whom it harms, what tuning met."""
    rows = []
    for method, rank in mean_ranks(found).items():
        entries = [entry for entry in found.entries if entry.method == method]
        helped, harmed, clients = totals(found, method)
        share = "" if not clients else f" ({percent(harmed / clients)} %)"
        rows.append(
            Row(
                (
                    found.methods[method],
                    f"{rank:.1f}",
                    f"{unbeaten_in(found.boards, method)} of {len(entries)}",
                    f"{helped}" if clients else ABSENT,
                    f"{harmed}{share}" if clients else ABSENT,
                    f"{sum(bool(entry.edges) for entry in entries)} of {len(entries)}",
                    f"{sum(entry.diverged for entry in entries)} of {sum(entry.runs for entry in entries)}",
                )
            )
        )
    heads = (
        "mean rank",
        "unbeaten in",
        "clients helped",
        "clients harmed",
        "tuned to an edge in",
        "runs that diverged",
    )
    return Table((*words("method"), *numbers(*heads)), tuple(rows))


def sentences(found: Leaderboard) -> Iterator[str]:
    """Say in short what was found."""
    ranks, settings = mean_ranks(found), len(found.boards)
    first = next(iter(ranks))
    unbeaten = {method: unbeaten_in(found.boards, method) for method in ranks}
    most = max(unbeaten.values())
    those = listed([found.methods[method] for method, times in unbeaten.items() if times == most])
    yield (
        f"No method is better than {those} beyond chance in {_of(most, settings)} settings, more often than any other; "
        f"by mean rank {found.methods[first]} is first ({ranks[first]:.1f} of {len(ranks)})."
        if most < settings or sum(times == most for times in unbeaten.values()) < len(ranks)
        else "No method is better than any other beyond chance."
    )
    for place, there in places(found).items():
        best = list(mean_ranks(found, [setting.name for setting in there]).items())[:3]
        said = listed([f"{found.methods[method]} ({rank:.1f})" for method, rank in best])
        yield f"{place}: the best mean ranks are those of {said}."
    never = [found.methods[method] for method, times in unbeaten.items() if not times]
    if never:
        verb = "is" if len(never) == 1 else "are"
        yield f"{_capital(count(len(never)))} of {len(ranks)} methods {verb} beaten in every setting: {_some(never)}."
    if REFERENCE in ranks:
        yield from _about_harm(found)
        below = [
            sum(placing.rank > alone.rank for placing in board.placings)
            for board in found.boards.values()
            if (alone := board.of(REFERENCE)) is not None
        ]
        if PLAINEST in ranks:
            _, harmed, clients = totals(found, PLAINEST)
            yield (
                f"{found.methods[PLAINEST]}, the plainest way to personalise, is unbeaten in "
                f"{_of(unbeaten[PLAINEST], settings)} settings and harms {percent(harmed / clients)} % of the clients."
            )
        yield (
            f"Training alone ({found.methods[REFERENCE]}) is above {_range(below)} of the {len(ranks) - 1} other "
            f"methods, depending on the setting, and unbeaten in {_of(unbeaten[REFERENCE], settings)}."
        )
    edges = sum(bool(entry.edges) for entry in found.entries)
    diverged, runs = (sum(getattr(entry, name) for entry in found.entries) for name in ("diverged", "runs"))
    yield (
        f"In {edges} of {len(found.entries)} cases a chosen value is the least or the greatest that was tried: there a "
        f"wider grid may give more. {diverged:,} of {runs:,} runs diverged and lost their candidate its chance."
    )


def _about_harm(found: Leaderboard) -> Iterator[str]:
    shares = {
        method: harmed / clients
        for method in found.methods
        for _, harmed, clients in [totals(found, method)]
        if clients
    }
    if not shares:
        return
    order = sorted(shares, key=lambda method: (shares[method], method))
    least, worst = order[0], order[-1]
    nobody = [found.methods[method] for method in order if not shares[method]]
    yield (
        f"{_some(nobody)} {'harm' if len(nobody) > 1 else 'harms'} no client beyond chance."
        if nobody
        else f"Every method harms some clients; {found.methods[least]} the fewest, {percent(shares[least])} %."
    )
    yield (
        f"{found.methods[worst]} harms most, {percent(shares[worst])} % of the clients; the median over methods is "
        f"{percent(float(np.median(list(shares.values()))))} %."
    )


def _some(names: Sequence[str]) -> str:
    return some(names, 2 * _NAMED, _NAMED)


def _of(number: int, total: int) -> str:
    return ("both" if total == 2 else f"all {total}") if number == total else f"{number} of {total}"


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if min(values) == max(values) else f"{min(values)} to {max(values)}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# ------------------------------------------------------------------------------------------------ setting by setting


def judgement(found: Leaderboard, board: Board) -> str:
    """Say in one sentence who is ahead in a setting, and who is not beaten."""
    setting = found.protocol.settings[board.setting]
    first, there = board.placings[0], len(board.placings)
    unbeaten = [found.methods[method] for method in board.unbeaten]
    alone = board.of(REFERENCE)
    rest = (
        ""
        if alone is None
        else f" {found.methods[REFERENCE]} has {percent(alone.mean.mean)} %, rank {alone.rank:g} of {there}."
    )
    return (
        f"**{setting.partition}**: {first.entry.title} is first with {percent(first.mean.mean)} %; "
        f"{count(len(unbeaten))} of {there} {'is' if len(unbeaten) == 1 else 'are'} not beaten beyond chance "
        f"({_some(unbeaten)}).{rest}"
    )


def place_table(found: Leaderboard, settings: Sequence[Setting], cell: Callable[[Placing], Cell]) -> Table:
    """Make a table with a row for each method and a column for each setting of one place."""
    boards = [found.boards[setting.name] for setting in settings]
    order = [method for method in mean_ranks(found) if any(_there(board, method) for board in boards)]
    rows = [Row((found.methods[method], *(_cell(board, method, cell) for board in boards))) for method in order]
    columns = tuple(Column(setting.partition, "right") for setting in settings)
    return Table((*words("method"), *columns), tuple(rows))


def _there(board: Board, method: str) -> bool:
    return board.of(method) is not None or any(entry.method == method for entry in board.diverged)


def _cell(board: Board, method: str, cell: Callable[[Placing], Cell]) -> Cell:
    placing = board.of(method)
    if placing is not None:
        return cell(placing)
    return Cell("diverged" if _there(board, method) else ABSENT)


def mean_cell(placing: Placing) -> Cell:
    """Show the mean over clients, bold where no method is better beyond chance."""
    return Cell(with_reach(placing.mean), "" if placing.beaten_by else "best", "†" if placing.entry.edges else "")


def worst_cell(placing: Placing) -> Cell:
    """Show the mean over the worst tenth of the clients."""
    return Cell(with_reach(placing.worst_tenth))


def harm_cell(placing: Placing) -> Cell:
    """Show the share of clients that are harmed, with its interval, and how many are helped."""
    if placing.harm is None:
        return Cell(ABSENT)
    sizes = [len(tests) for tests in placing.entry.tests]
    share = over_seeds([harmed / size for harmed, size in zip(placing.harm.harmed, sizes, strict=True)])
    return Cell(f"{sum(placing.harm.harmed)} ({with_reach(share)} %), {sum(placing.harm.helped)}")


def global_cell(placing: Placing) -> Cell:
    """Show the mean of the global model."""
    found = placing.entry.global_model
    return Cell(with_reach(over_seeds(found)) if found else ABSENT)


def places(found: Leaderboard) -> dict[str, list[Setting]]:
    """Give the settings that have results by what they have in common."""
    groups: dict[str, list[Setting]] = {}
    for setting in found.settings:
        groups.setdefault(setting.place, []).append(setting)
    return groups


def _section(found: Leaderboard, place: str, settings: Sequence[Setting]) -> Iterator[str]:
    yield f"## {escape_markdown(place)}"
    yield "\n".join(f"- {judgement(found, found.boards[setting.name])}" for setting in settings)
    whose = "newcomers" if settings[0].model == "newcomer" else "clients"
    tables = (
        (f"Accuracy in percent, mean over {whose}; bold: beaten by no method beyond chance", mean_cell),
        (f"The worst tenth of the {whose}", worst_cell),
        (
            f"How many {whose} are harmed (which share of them), and how many are helped, against training alone",
            harm_cell,
        ),
        ("The global model, where there is one besides", global_cell),
    )
    for title, cell in tables:
        made = place_table(found, settings, cell)
        kept = tuple(row for row in made.rows if any(_text(each) != ABSENT for each in row.cells[1:]))
        if kept:
            yield f"**{title}**"
            yield Table(made.columns, kept).markdown().rstrip("\n")


def _text(cell: Cell | str) -> str:
    return cell if isinstance(cell, str) else cell.text


def tuning(found: Leaderboard) -> Table:
    """Make the table of what was tried of each method, what was fixed, and how often the edge of a grid was chosen."""
    rows = []
    for method, title in found.methods.items():
        entries = [entry for entry in found.entries if entry.method == method]
        known = found.protocol.methods.get(method, Contestant())
        fixed = ", ".join(f"{name}={value}" for name, value in known.settings.items())
        why = ": ".join(text for text in (fixed, known.why) if text)
        rows.append(Row((title, _tried(entries), why, _edges(entries))))
    return Table(words("method", "tried", "otherwise than most", "at the edge, in how many settings"), tuple(rows))


def _tried(entries: Sequence[LeaderboardEntry]) -> str:
    grid: dict[str, list[Any]] = {}
    for values, _ in (pair for entry in entries for pair in entry.tried):
        for name, value in values.items():
            known = grid.setdefault(name, [])
            known += [] if value in known else [value]
    return "; ".join(f"{name}: {', '.join(map(str, values))}" for name, values in grid.items())


def _edges(entries: Sequence[LeaderboardEntry]) -> str:
    edges = Counter(edge.removesuffix(" that was tried") for entry in entries for edge in entry.edges)
    return "; ".join(f"{edge}: {times}" for edge, times in edges.most_common())


def in_short(found: Leaderboard) -> str:
    """Write the sentences as a list."""
    return "\n".join(f"- {escape_markdown(each)}" for each in sentences(found))


def markdown(found: Leaderboard, picture: str = "") -> str:
    """Write the page's generated part; ``picture`` is the Markdown that shows the picture."""
    if not found.boards:
        rules = found.protocol
        runs = sum(map(rules.runs, rules.settings.values())) * len(rules.methods)
        work = f"There are {runs:,} runs of {rules.same['rounds']} rounds to play."
        return "\n\n".join(["## In short", f"Nothing has been played yet. {work}", *_missing(found)]) + "\n"
    blocks = ["## In short", in_short(found)]
    if picture:
        blocks.append(picture)
    blocks += [overview(found).markdown().rstrip("\n"), "## What to try where", advice.markdown(found)]
    for place, settings in places(found).items():
        blocks += _section(found, place, settings)
    blocks += ["## What was tried", tuning(found).markdown().rstrip("\n")]
    blocks += _missing(found)
    return "\n\n".join(blocks) + "\n"


def _missing(found: Leaderboard) -> list[str]:
    """Say which settings and which methods in them have no results."""
    lines = []
    groups: dict[str, list[str]] = {}
    for setting in found.not_run:
        groups.setdefault(setting.place, []).append(setting.partition)
    lines += [f"- {place}: {listed(partitions)}" for place, partitions in groups.items()]
    for setting in found.settings:
        there = {entry.method for entry in found.entries if entry.setting == setting.name}
        away = [method for method in found.protocol.methods if method not in there]
        if away:
            lines.append(f"- {setting.place}, {setting.partition}: {listed(away)}")
    return ["## Not run", "\n".join(map(escape_markdown, lines))] if lines else []
