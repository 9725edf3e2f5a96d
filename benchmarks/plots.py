"""The results of the benchmarks as pictures for docs/performance.md.

    python benchmarks/plots.py [--results benchmarks/results] [--out docs/performance]

Reads whichever of ``side_by_side_*.json``, ``scaling_*.json``, ``overhead_*.json`` and ``many_clients_*.json`` exist,
writes an SVG file of the same name for each, and prints the rows of the page's tables. Pictures have no background and
use greys and hues that can be read on white and on black. The same results give the same files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
INK = "#808080"
COLOURS = {
    "ours": "#1a9850",
    "ours, tf32": "#66bd63",
    "loop": "#e08214",
    "pfl": "#8073ac",
    "flower": "#d6604d",
}
NAMES = {"ours": "Coterie", "ours, tf32": "Coterie, TF32", "loop": "plain loop", "pfl": "pfl 0.6", "flower": "Flower"}
PARTS = {
    "evaluation": "#4393c3",
    "records": "#e08214",
    "checkpoints": "#8073ac",
    "closing": "#1a9850",
    "other": "#a0a0a0",
}
PLACES = {"device": "#1a9850", "host": "#4393c3", "disk": "#e08214"}
SERIES = {
    "clients": "clients that take part",
    "parameters": "parameters",
    "samples": "samples of each client",
    "idle": "clients, of which 20 take part",
}
STYLE = {
    "svg.hashsalt": "coterie",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


def _milliseconds(value: float, _: Any = None) -> str:
    return f"{value / 1e3:,.0f} s" if value >= 1000 else f"{value:,.4g} ms"


def _time(result: dict[str, Any]) -> str:
    return "processor time of a round" if result["clock"] == "processor" else "a round"


def side_by_side(result: dict[str, Any], plt: Any) -> Any:
    """Draw a group of bars for each work, one for each that played, on a logarithmic scale."""
    rows, clock = result["rows"], "processor_" if result["clock"] == "processor" else ""
    seconds, ratios = f"{clock}seconds", f"{clock}ratios"
    players = [name for name in COLOURS if any(name in row[seconds] for row in rows)]
    height = 0.8 / len(players)
    figure, axes = plt.subplots(figsize=(7.2, 0.55 + 0.17 * len(players) * len(rows)), layout="constrained")
    for place, player in enumerate(players):
        at = [(index, row[seconds][player]) for index, row in enumerate(rows) if player in row[seconds]]
        middles = [times["median"] * 1e3 for _, times in at]
        errors = [
            [middle - times["lower"] * 1e3 for middle, (_, times) in zip(middles, at, strict=True)],
            [times["upper"] * 1e3 - middle for middle, (_, times) in zip(middles, at, strict=True)],
        ]
        y = [index + (place - (len(players) - 1) / 2) * height for index, _ in at]
        axes.barh(y, middles, height, color=COLOURS[player], label=NAMES[player])
        axes.errorbar(middles, y, xerr=errors, fmt="none", ecolor=INK, elinewidth=1)
        for spot, (index, times) in zip(y, at, strict=True):
            if player == "ours":
                continue
            ratio = rows[index][ratios][player]["median"]  # as in the table: of rounds that followed each other
            text = f"{ratio:.2g}×" if ratio < 100 else f"{ratio:,.0f}×"
            end = times["upper"] * 1e3
            axes.annotate(text, (end, spot), (4, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), [_title(row) for row in rows])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(_milliseconds)
    axes.xaxis.set_minor_formatter(lambda value, place: "")
    axes.margins(x=0.12)
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    axes.set_xlabel(f"{_time(result)} of FedAvg, median and quartiles; ×: how many times Coterie's")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(players))
    return figure


def _title(row: dict[str, Any]) -> str:
    model = {"linear": "linear", "mlp": "MLP", "cnn_pfllib": "CNN", "cnn_pfl": "pfl's CNN"}[row["model"]]
    return f"{model}, batch {row['batch']}\n{row['cohort']} clients"


def scaling(result: dict[str, Any], plt: Any) -> Any:
    """Draw each series against what grows in it, both on logarithmic scales."""
    shown = [series for series in SERIES if any(row["series"] == series for row in result["rows"])]
    figure, panels = plt.subplots(2, 2, figsize=(7.2, 5.2), layout="constrained")
    for axes, series in zip(panels.flat, SERIES, strict=True):
        axes.set_visible(series in shown)
        points = [row for row in result["rows"] if row["series"] == series]
        for player in ("ours", "loop"):
            mine = [row for row in points if player in row["seconds"]]
            x = [row["parameters"] if series == "parameters" else row["value"] for row in mine]
            times = [row["seconds"][player] for row in mine]
            middles = [entry["median"] * 1e3 for entry in times]
            axes.plot(x, middles, "o-", color=COLOURS[player], markersize=3, label=NAMES[player])
            bounds = [[entry[side] * 1e3 for entry in times] for side in ("lower", "upper")]
            axes.fill_between(x, *bounds, color=COLOURS[player], alpha=0.2, linewidth=0)
        _times_against_counts(axes)
        axes.set_xlabel(SERIES[series])
    panels[0, 0].legend()
    for axes in panels[:, 0]:
        axes.set_ylabel(f"{_time(result)} of FedAvg")
    return figure


def _times_against_counts(axes: Any) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(_milliseconds)
    axes.yaxis.set_minor_formatter(lambda value, place: "")
    axes.xaxis.set_major_formatter(lambda value, place: f"{value:,.0f}")
    axes.xaxis.set_minor_formatter(lambda value, place: "")
    axes.grid()


def _shares(result: dict[str, Any]) -> str:
    return "processor_shares" if result["clock"] == "processor" else "shares"


def overhead(result: dict[str, Any], plt: Any) -> Any:
    """Draw what a run costs beside its rounds as one bar a run, cut by what it is spent on."""
    rows = result["rows"]
    figure, axes = plt.subplots(figsize=(7.2, 0.9 + 0.24 * len(rows)), layout="constrained")
    left = [0.0] * len(rows)
    for part, colour in PARTS.items():
        shares = [100 * row[_shares(result)][part] for row in rows]
        axes.barh(range(len(rows)), shares, 0.7, left, color=colour, label=part)
        left = [begin + share for begin, share in zip(left, shares, strict=True)]
    axes.axvline(100 * result["reach"], color=INK, linestyle="--", linewidth=1)
    names = [f"{row['case'].partition('-')[0]}, {row['clients']} clients, {row['method']}" for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    axes.set_xlabel(f"percent of the rounds' own time; the line is at {100 * result['reach']:.0f}")
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=len(PARTS))
    return figure


def many_clients(result: dict[str, Any], plt: Any) -> Any:
    """Draw a round of a cohort that stays the same against the number of clients, by where their rows are kept."""
    measured = [row for row in result["rows"] if "round_s" in row]
    # Of several cohorts, that which was measured with the most numbers of clients.
    sizes = {cohort: {row["clients"] for row in measured if row["cohort"] == cohort} for cohort in _cohorts(measured)}
    cohort = max(sizes, key=lambda known: len(sizes[known]))
    methods = list(dict.fromkeys(row["method"] for row in measured))
    figure, panels = plt.subplots(1, len(methods), figsize=(7.2, 2.8), layout="constrained", sharey=True, squeeze=False)
    for axes, method in zip(panels.flat, methods, strict=True):
        for place, colour in PLACES.items():
            mine = {row["clients"]: row["round_s"] for row in measured if _is(row, method, cohort, place)}
            x = sorted(mine)
            if not x:
                continue
            axes.plot(x, [1e3 * mine[at]["median"] for at in x], "o-", color=colour, markersize=3, label=place)
            bounds = [[1e3 * mine[at][side] for at in x] for side in ("lower", "upper")]
            axes.fill_between(x, *bounds, color=colour, alpha=0.2, linewidth=0)
        _times_against_counts(axes)
        axes.set_title(f"{method}, {cohort:,} clients a round", fontsize=9)
        axes.set_xlabel("clients")
    panels[0, 0].set_ylabel("a round")
    panels[0, 0].legend(title="rows kept on")
    return figure


def _cohorts(rows: list[dict[str, Any]]) -> list[int]:
    return list(dict.fromkeys(row["cohort"] for row in rows))


def _is(row: dict[str, Any], method: str, cohort: int, place: str) -> bool:
    return (row["method"], row["cohort"], row["keep"]) == (method, cohort, place)


def table(kind: str, result: dict[str, Any]) -> list[str]:
    """Give the rows of a result's Markdown table, as they stand in docs/performance.md."""
    rows = {"side_by_side": _played, "overhead": _spent}.get(kind)
    return [] if rows is None else [rows(row, result["clock"]) for row in result["rows"]]


def _played(row: dict[str, Any], clock: str) -> str:
    seconds, ratios = ("processor_seconds", "processor_ratios") if clock == "processor" else ("seconds", "ratios")
    model = {"linear": "linear", "mlp": "MLP", "cnn_pfllib": "CNN", "cnn_pfl": "pfl's CNN"}[row["model"]]
    cells = [f"{model}, {row['parameters']:,}", f"{row['batch']}", f"{row['cohort']}"]
    for player in (name for name in NAMES if name in row[seconds]):
        text = f"{row[seconds][player]['median'] * 1e3:,.0f} ms"
        if player in row[ratios]:
            ratio = row[ratios][player]
            text += f" ({ratio['median']:.2f}: {ratio['lower']:.2f} to {ratio['upper']:.2f})"
        cells.append(text)
    ours = row[seconds]["ours"]["median"]
    cells += [f"{row['samples'] / ours:,.0f}", f"{row['floor']['seconds'] / ours:.0%}"]
    return "| " + " | ".join(cells) + " |"


def _spent(row: dict[str, Any], clock: str) -> str:
    start = "processor_" if clock == "processor" else ""
    alone = row["round_alone_processor_seconds" if clock == "processor" else "round_alone_seconds"]
    what = f"{row['case'].partition('-')[0]}, {row['clients']}"
    counts = row["samples_a_round"]
    cells = [what, row["method"], f"{alone['median'] * 1e3:,.0f} ms", f"{row[f'{start}overhead']:.1%}"]
    cells += [f"{row[f'{start}shares'][part]:.1%}" for part in PARTS]
    cells += [f"{counts['evaluated'] / counts['trained']:.0%}"]
    return "| " + " | ".join(cells) + " |"


KINDS: dict[str, Callable[[dict[str, Any], Any], Any]] = {
    "side_by_side": side_by_side,
    "scaling": scaling,
    "overhead": overhead,
    "many_clients": many_clients,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Draw all results that there are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "performance")
    args = parser.parse_args(argv)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    args.out.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        for kind, draw in KINDS.items():
            for path in sorted(args.results.glob(f"{kind}_*.json")):
                result = json.loads(path.read_text(encoding="utf-8"))
                figure = draw(result, plt)
                target = args.out / f"{path.stem}.svg"
                figure.savefig(target, transparent=True, metadata={"Date": None})
                plt.close(figure)
                print(f"{path.name} -> {target.name}")
                for line in table(kind, result):
                    print(line)


if __name__ == "__main__":
    main()
