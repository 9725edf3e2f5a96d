"""The part of a report about who gains and who loses, wherever runs have a reference among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from coterie.errors import CoterieError
from coterie.results import ClientGains, Result, figures, gains
from coterie.results.client_gains import LEVEL, REFERENCES
from coterie.results.figures import Line
from coterie.results.labels import recorded_name
from coterie.results.report.elements import Markup, Plot, Variant, table
from coterie.results.report.sources import ReportData
from coterie.tables import ABSENT, Cell, Row, Table, numbers, words


class LineGains(NamedTuple):
    """What clients gain by the method of a line over the reference of its setting."""

    line: Line
    reference: Line
    found: ClientGains


def gains_of(found: ReportData) -> dict[str, list[LineGains]]:
    """Compare each line with the references of its setting, by the reference's name; unfinished runs are left out."""
    if found.undecided:
        return {}
    runs: dict[Line, list[Result]] = {}
    for line, result in zip(found.runs.lines, found.runs.results, strict=True):
        if result.finished and result.has_shares:
            runs.setdefault(line, []).append(result)
    made: dict[str, list[LineGains]] = {}
    for name in REFERENCES:
        for setting in found.runs.settings:
            here = {line: own for line, own in runs.items() if line.setting == setting}
            against = next((line for line, own in here.items() if recorded_name(own[0]) == name), None)
            for line, own in here.items():
                if against is None or line == against:
                    continue
                try:
                    made.setdefault(name, []).append(LineGains(line, against, gains(own, here[against])))
                except CoterieError:
                    continue  # other seeds, or clients that hold other samples: nothing to compare
    return made


def sections_parts(found: ReportData) -> Iterator[Markup | Plot]:
    """Draw the gains over each reference: all methods, then each by itself with the clients' names, then numbers."""
    for name, lines in gains_of(found).items():
        reference, metric = lines[0].reference.method, lines[0].found.metric
        what = f"gain in test {metric} over {reference}"
        settings = list(dict.fromkeys(each.line.setting for each in lines))
        overviews = []
        for setting in settings:
            own = {each.line.name: each.found.clients for each in lines if each.line.setting == setting}
            overviews.append(Variant(setting or "none", figures.sorted_gains(own, what, found.runs.styles)))
        caption = (
            f"How much better each client is served than by {reference}, after the last round, from the greatest loss "
            "to the greatest gain. Below zero a client is better off without the method."
        )
        yield Plot(f"gains-{name}", f"Gains over {reference}", caption, tuple(overviews), "Setting")
        each_line = tuple(Variant(each.line.name, figures.gains_by_client(each.found.clients, what)) for each in lines)
        yield Plot(f"who-gains-{name}", f"Client by client, against {reference}", _how(lines), each_line, "Method")
        yield table(_table(lines))


def _how(lines: list[LineGains]) -> str:
    tests = {each.found.test for each in lines}
    if tests == {""}:
        return f"What is beyond chance can be said of accuracy alone, not of {lines[0].found.metric}."
    caption = (
        "Colours say whether a client's own test samples tell the two models apart: McNemar's exact test, with at most "
        f"{LEVEL:.0%} false discoveries expected among those called helped or harmed (Benjamini and Hochberg)."
    )
    if "bound" in tests:
        caption += (
            " Some runs did not record answers to single samples; for these as many as accuracies allow are taken to "
            "be answered differently, so that more clients may be helped or harmed than are called so."
        )
    return caption


def _table(lines: list[LineGains]) -> Table:
    settings = len({each.line.setting for each in lines}) > 1
    head = ["clients", "helped", "harmed", "mean gain", "worst", "best"]
    rows = []
    for line, _, found in lines:
        counts = [str(count) if found.test else ABSENT for count in (found.helped, found.harmed)]
        who = [f"{name}, seed {seed}" for name, seed in zip(found.clients["name"], found.clients["seed"], strict=True)]
        ends: list[Cell | str] = [ABSENT, ABSENT]
        if len(found):
            greatest = float(found.clients["gain"].iloc[-1])
            ends = [Cell(f"{found.worst:+.4f}", tooltip=who[0]), Cell(f"{greatest:+.4f}", tooltip=who[-1])]
        labels = [line.method, *([line.setting or ABSENT] if settings else [])]
        rows.append(Row((*labels, str(len(found)), *counts, f"{found.mean:+.4f}", *ends)))
    return Table((*words("method", *(["setting"] if settings else [])), *numbers(*head)), tuple(rows))
