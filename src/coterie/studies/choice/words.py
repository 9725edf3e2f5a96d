"""A choice in words and tables, the same on the page, in the terminal and in the file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import pandas as pd

from coterie.config import ExperimentConfig
from coterie.results.labels import method_title
from coterie.studies.choice.candidates import Candidates
from coterie.studies.choice.decision import Decision, settings_of
from coterie.studies.choice.stages import Stage
from coterie.studies.comparison.standings import format_values
from coterie.tables import ABSENT, Cell, Row, Table, numbers, words
from coterie.units import format_bytes

FILE = "choice.yaml"
"""The file that is ready to be run."""


def headline(decision: Decision) -> str:
    """Say what to do, in one sentence."""
    if not decision.federate:
        return "Train alone."
    own = settings_of(decision.config)
    settings = f" ({format_values(own)})" if own else ""
    which = {"personal": "each client with its personal model", "global": "all clients with the one global model"}
    method = f"{method_title(decision.config.algorithm)}{settings}"
    return f"Federate with {method} for {decision.config.rounds} rounds, {which[decision.model]}."


def reasons(decision: Decision) -> list[str]:
    """Say why, in sentences."""
    return [f"{each[:1].upper()}{each[1:]}." for each in decision.reasons]


def findings(decision: Decision) -> list[str]:
    """Say what was found, in sentences with their numbers."""
    best, alone = decision.best, decision.alone
    lines = [
        f"Mean gain of {best.title} after {best.round} rounds over training alone ({alone.title}, {alone.round} "
        "rounds), on test samples: "
        f"{_signed(decision.gain)}, 95 % interval {_signed(decision.low)} to {_signed(decision.high)} "
        f"({decision.metric} {best.test:.4f} against {alone.test:.4f}).",
    ]
    if decision.clients.test:
        lines += [
            f"Helped beyond chance: {_named(decision.clients.clients, 'helped')}.",
            f"Harmed beyond chance: {_named(decision.clients.clients, 'harmed')}.",
        ]
    else:
        lines.append(f"Who is helped or harmed beyond chance can be said of accuracy alone, not of {decision.metric}.")
    what = "validation samples" if decision.by_samples else "clients"
    least = f"validation samples alone could not have told less than {decision.detectable:.4f} from chance"
    if not decision.detectable > 0:
        least = "on validation samples the two do not differ at all"
    method = best.title.partition(",")[0]
    lines += [
        f"How sure the method is: {method} has the best score of all that federate in {_percent(decision.sure)} of the "
        f"draws of other {what}.",
        f"Chance would give the best of so many candidates such a gain on validation samples in "
        f"{_percent(decision.validation_pvalue)} of the cases, and this one such a gain on test samples in "
        f"{_percent(decision.test_pvalue)}; {least}.",
        *(f"{edge}." for edge in decision.edges),
    ]
    return lines


def cost(decision: Decision) -> str:
    """Say what the best federated candidate sends."""
    each = f"{format_bytes(decision.up)} up and {format_bytes(decision.down)} down"
    rounds, present = decision.best.round, decision.participation
    whole = format_bytes((decision.up + decision.down) * rounds * present)
    if present == 1:
        return f"{decision.best.title} sends {each} for each client in a round: {whole} in {rounds} rounds."
    return (
        f"{decision.best.title} sends {each} for each client in a round that it takes part in: {whole} in {rounds} "
        f"rounds, of which it takes part in {_percent(present)}."
    )


def commands(config: ExperimentConfig, path: str, federate: bool) -> list[str]:
    """Give the commands that run what was chosen."""
    found = [f"coterie run {shlex.quote(path)}"]
    return [*found, f"coterie federate run FEDERATION {shlex.quote(path)}"] if federate else found


def client_table(decision: Decision, most: int | None = None) -> Table:
    """Show what each client gains by the best federated candidate; of many, those at both ends."""
    rows, frame = [], decision.clients.clients
    shown = list(range(len(frame)))
    if most is not None and len(frame) > most:
        shown = [*shown[: most // 2], *shown[len(frame) - most // 2 :]]
    for place in reversed(shown):
        own = frame.iloc[place]
        interval = ABSENT if pd.isna(own["low"]) else f"{own['low']:+.3f} to {own['high']:+.3f}"
        scores = (f"{own[name]:.3f}" for name in ("reference", "score"))
        said = Cell(str(own["verdict"]) or ABSENT, emphasis="best" if own["verdict"] else "")
        rows.append(Row((str(own["name"]), str(own["samples"]), *scores, f"{own['gain']:+.3f}", interval, said)))
    columns = (*words("client"), *numbers("samples", "alone", "federated", "gain", "95 % interval"), *words("verdict"))
    left = f"{len(shown)} of {len(frame)} clients, those that gain most and least" if len(shown) < len(frame) else ""
    title = f"{decision.best.title} against {decision.alone.title}" + (f": {left}" if left else "")
    notes = ("helped, harmed: beyond chance, by its own test samples; samples: those that it was tested on",)
    return Table(columns, tuple(rows), title, notes if decision.clients.test else ())


def method_table(decision: Decision) -> Table:
    """Show the best of every method."""
    rows = []
    for each in decision.methods:
        chosen = each.run == (decision.best if decision.federate else decision.alone).run
        numbers_of = (str(each.round), f"{each.validation:.4f}", f"{each.test:.4f}")
        rows.append(Row((Cell(each.title, "best" if chosen else ""), each.model, *numbers_of)))
    columns = (*words("the best of each method", "model"), *numbers("rounds", "validation", "test"))
    title = f"Methods: {decision.metric}, by validation samples"
    note = "of those that are as good as the best within one standard error, the one with the least loss goes first"
    return Table(columns, tuple(rows), title, (note,))


def stage_table(candidates: Candidates, stages: Sequence[Stage]) -> Table:
    """Show how far every candidate came, and what was its best."""
    last: dict[str, tuple[int, str, str]] = {}
    for stage in stages:
        for each in stage.ranking:
            last[each.run] = (stage.rounds, str(each.round), f"{each.score:.4f}")
        for run in stage.diverged:
            last[run] = (stage.rounds, ABSENT, "diverged")
    order = [each.run for stage in reversed(stages) for each in stage.ranking]
    order += [run for stage in stages for run in stage.diverged]
    rows = [Row((candidates.title(run), str(last[run][0]), *last[run][1:])) for run in dict.fromkeys(order)]
    columns = (*words("candidate"), *numbers("played to round", "best at round", "validation score"))
    return Table(columns, tuple(rows), _title(stages))


def _title(stages: Sequence[Stage]) -> str:
    played, total = 0, 0
    parts = []
    for stage in stages:
        total += len(stage.runs) * (stage.rounds - played)
        parts.append(f"{len(stage.runs)} to round {stage.rounds}")
        played = stage.rounds
    grid = len(stages[0].runs) * stages[-1].rounds
    return f"Candidates by stage ({', '.join(parts)}): {total:,} rounds in all, where a grid takes {grid:,}"


def _percent(share: float) -> str:
    return "less than 0.1 %" if share < 0.001 else f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


def _signed(value: float) -> str:
    return f"{value:+.4f}"


def _named(clients: pd.DataFrame, verdict: str) -> str:
    own = [str(name) for name in clients.loc[clients["verdict"] == verdict, "name"]][::-1]
    if not own:
        return "nobody"
    shown = own if len(own) <= 12 else [*own[:12], f"{len(own) - 12} more"]
    return f"{len(own)} of {len(clients)} ({', '.join(shown)})"
