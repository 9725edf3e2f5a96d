"""The sections of a report, each of which is there only if the runs have what it shows."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator
from dataclasses import replace

import pandas as pd

from coterie.evaluation.metrics import BINS
from coterie.results import RunSet, figures, heat_maps
from coterie.results.figures import Chart, HeatMap
from coterie.results.report import gains, tables
from coterie.results.report.elements import Markup, Plot, Section, Variant, bullets, paragraph, table
from coterie.results.report.sources import ReportData

LINES = 8
"""Lines of a chart beyond which every setting has its own."""

NUMBERS = 500_000
"""Numbers in all heat maps of collaboration weights together, which decides how many rounds a slider has."""


def sections(found: ReportData) -> list[Section]:
    """Make the sections that the runs have something for."""
    made = (
        _summary(found),
        _section("gains", "Who gains, who loses", gains.sections_parts(found)),
        _section("curves", "Over rounds", _curves(found)),
        _section("clients", "Clients", _clients(found)),
        _section("fairness", "Fairness", _fairness(found)),
        _section("calibration", "Calibration", _calibration(found)),
        _section("weights", "Who listens to whom", _weights(found)),
        _section("others", "Personal models on other clients' samples", _on_other_clients(found)),
        _section("robustness", "Robustness", _robustness(found)),
        _section("shares", "Who has what", _shares(found)),
        _section("costs", "Bytes and seconds", _costs(found)),
        _section("events", "What happened in the federation", _events(found)),
        _section("numbers", "All numbers", _numbers(found)),
        Section("repeat", "Configuration, and how to repeat it", tuple(tables.repeat(found))),
    )
    return [section for section in made if section is not None]


def _section(key: str, title: str, parts: Iterator[Markup | Plot]) -> Section | None:
    made = tuple(parts)
    return Section(key, title, made) if made else None


def _over_seeds(found: ReportData) -> str:
    several = len(found.runs.results) > len(set(found.runs.lines))
    return " Lines are means over seeds, bands one standard deviation." if several else ""


def _drawn(found: ReportData, draw: Callable[..., Chart | None], *metric: str) -> tuple[Variant, ...]:
    """Draw all runs in one chart, or a chart for each setting where one would have too many lines."""
    runs, settings = found.runs, found.runs.settings
    apart = len(settings) > 1 and len(runs.styles) > LINES
    parts = [(name, runs.of_setting(name)) for name in settings] if apart else [("", runs)]
    charts = [(name, draw(part, *metric)) for name, part in parts]
    return tuple(Variant(name or "none", chart) for name, chart in charts if chart is not None)


def _plot(key: str, title: str, caption: str, variants: tuple[Variant, ...]) -> Iterator[Plot]:
    if variants:
        yield Plot(key, title, caption, variants, "Setting")


_ABOUT = (
    "Test {} of each model on the samples of the client that it serves, after the last round: the mean over clients, "
    "their standard deviation, the mean of the worst tenth, and the worst. “Best on validation” is the mean at the "
    "round that was best on validation samples. Clients that attack are not counted."
)


def _summary(found: ReportData) -> Section:
    parts: list[Markup | Plot] = []
    for comparison in found.comparisons:
        if comparison.table is not None:
            several = len(found.comparisons) > 1
            parts += [Markup(f"<h3>{html.escape(comparison.path.name)}</h3>")] if several else []
            parts.append(table(comparison.table))
    if not parts:
        parts += [
            paragraph(_ABOUT.format("/".join(found.runs.metric_names))),
            tables.summary(found, first_only=tables.is_long(found)),
        ]
    if found.left_out:
        parts += [Markup("<h3>What is missing</h3>"), bullets(found.left_out)]
    return Section("summary", "Summary", tuple(parts))


def _numbers(found: ReportData) -> Iterator[Markup | Plot]:
    """Give the long table, for which there is no room before the plots."""
    if tables.is_long(found) or any(comparison.table is not None for comparison in found.comparisons):
        yield paragraph(_ABOUT.format("/".join(found.runs.metric_names)))
        yield tables.summary(found)


def _calibration(found: ReportData) -> Iterator[Plot]:
    caption = (
        f"Right answers among those of like confidence, in {BINS} bins of equal width: test samples of all clients "
        "after the last round. Below the diagonal a model is surer than it is right; the metrics ece and brier say how "
        "much."
    )
    yield from _plot("reliability", "Accuracy against confidence", caption, _drawn(found, RunSet.reliability))


def _curves(found: ReportData) -> Iterator[Plot]:
    for metric in dict.fromkeys([*found.runs.metric_names, "loss"]):
        caption = f"Mean test {metric} over clients after each evaluated round.{_over_seeds(found)}"
        yield from _plot(f"curves-{metric}", f"Test {metric}", caption, _drawn(found, RunSet.curves, metric))


def _clients(found: ReportData) -> Iterator[Plot]:
    for metric in found.runs.metric_names:
        together = " Clients of all seeds are put together." if _over_seeds(found) else ""
        caption = f"Each client's test {metric} after the last round; the dashed line is the mean.{together}"
        title = f"Distribution of test {metric} over clients"
        yield from _plot(f"clients-{metric}", title, caption, _drawn(found, RunSet.distribution, metric))
        caption = f"The same numbers one by one. The left end is the clients that are served worst.{together}"
        title = f"Test {metric} of every client"
        yield from _plot(f"sorted-{metric}", title, caption, _drawn(found, RunSet.sorted_clients, metric))


def _fairness(found: ReportData) -> Iterator[Plot]:
    for metric in found.runs.metric_names:
        caption = (
            "Well and evenly served clients lie at the top left. The variance is over clients, after the last round. "
            f"The marker says which model: {_markers(found, metric)}."
        )
        if _over_seeds(found):
            caption += " Small markers are runs, large ones the mean over seeds."
        title = f"Mean test {metric} against its variance over clients"
        yield from _plot(f"fairness-{metric}", title, caption, _drawn(found, RunSet.fairness, metric))


def _markers(found: ReportData, metric: str) -> str:
    models = figures.shown_models(found.runs.metrics, metric)
    return ", ".join(f"a {symbol} for {model} ones" for model, symbol in zip(models, figures.SYMBOLS, strict=False))


def _weights(found: ReportData) -> Iterator[Plot]:
    having = [place for place in found.runs.firsts() if found.runs.results[place].weight_rounds]
    if not having:
        return
    variants = []
    for place in having:
        result = found.runs.results[place]
        clients = min(figures.BLOCKS, int(result.config.get("clients", figures.BLOCKS)))
        frames = max(3, min(heat_maps.FRAMES, NUMBERS // (len(having) * clients**2)))
        variants.append(Variant(_run_label(found, place), heat_maps.weights_map(result, frames)))
    caption = (
        "How much each client (a row) took from every other (a column). The slider goes through the rounds. "
        + _in_order(found, variants)
    )
    yield Plot("weights", "Collaboration weights", caption, tuple(variants))


def _on_other_clients(found: ReportData) -> Iterator[Plot]:
    having = [place for place in found.runs.firsts() if found.runs.results[place].matrix_rounds]
    if not having:
        return
    caption = (
        "Each personal model on test samples of its own client and of a fraction c of the others, drawn at random but "
        f"nested: how well it does on samples unlike its own.{_over_seeds(found)}"
    )
    yield from _plot("s-acc", "S-acc against c", caption, _drawn(found, RunSet.s_acc))
    charts = [heat_maps.matrix_map(found.runs.results[place]) for place in having]
    ends = min(chart.range[0] for chart in charts), max(chart.range[1] for chart in charts)
    variants = [
        Variant(_run_label(found, place), replace(chart, range=ends))
        for place, chart in zip(having, charts, strict=True)
    ]
    caption = "Each personal model (a row) on each client's test samples (a column). " + _in_order(found, variants)
    yield Plot("matrix", "Accuracy matrix", caption, tuple(variants))


def _robustness(found: ReportData) -> Iterator[Plot]:
    for metric in found.runs.metric_names:
        caption = f"Mean over honest clients after the last round, by how many clients attack.{_over_seeds(found)}"
        title = f"Test {metric} under attack"
        chart = found.runs.robustness(metric)
        yield from _plot(f"robustness-{metric}", title, caption, () if chart is None else (Variant("", chart),))


def _shares(found: ReportData) -> Iterator[Plot]:
    seen: list[pd.DataFrame] = []
    variants = []
    for place in found.runs.firsts():
        result = found.runs.results[place]
        if not result.has_shares:
            continue
        held = result.shares.drop(columns="role")
        if not any(held.equals(other) for other in seen):
            seen.append(held)
            variants.append(Variant(_run_label(found, place), heat_maps.shares_map(result)))
    if variants:
        one = " All methods had the same." if len(variants) == 1 and len(set(found.runs.lines)) > 1 else ""
        label = f" This is seed {_seed(found, found.runs.firsts()[0])}." if _over_seeds(found) else ""
        classes = any(figures.class_counts(held) is not None for held in seen)
        what = "Training samples of each class that each client holds" if classes else "How many each client holds"
        title = "Training samples by client and class" if classes else "Training samples by client"
        yield Plot("shares", title, f"{what}.{one}{label}", tuple(variants))


def _costs(found: ReportData) -> Iterator[Markup | Plot]:
    caption = (
        "Bytes of the methods' messages in each round, of all clients together. Where lines cover one another, methods "
        "send equally much."
    )
    yield from _plot("bytes", "Bytes in a round", caption, _drawn(found, RunSet.traffic))
    caption = f"Seconds of the machine that each run ran on.{_over_seeds(found)}"
    yield from _plot("seconds", "Seconds in a round", caption, _drawn(found, RunSet.seconds))
    yield tables.costs(found)


def _events(found: ReportData) -> Iterator[Markup | Plot]:
    variants = []
    for place, events in enumerate(found.events):
        if events:
            frame = pd.DataFrame([(each.round, each.client, each.what, each.reason) for each in events])
            frame.columns = pd.Index(["round", "client", "what", "reason"])
            variants.append(Variant(found.runs.results[place].path.name, figures.events(frame)))
    if variants:
        caption = "What was not supposed to happen, or is worth telling, by round and client."
        yield Plot("events", "Events", caption, tuple(variants))
        yield tables.events(found)


def _run_label(found: ReportData, place: int) -> str:
    return f"{found.runs.lines[place].name}, seed {_seed(found, place)}"


def _seed(found: ReportData, place: int) -> int:
    return int(found.runs.results[place].config.get("seed", 0))


def _in_order(found: ReportData, variants: list[Variant]) -> str:
    """Say how clients are ordered, by the axis of the first chart."""
    chart = variants[0].chart
    title = chart.rows.title if isinstance(chart, HeatMap) else ""
    by = title.partition(", by ")[2] or "number"
    first = " The first seed of each method is shown." if _over_seeds(found) else ""
    return f"Clients stand in the order of their {by}.{first}"
