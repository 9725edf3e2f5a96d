"""The tables of a report: the result in short, what it cost, what happened, and how to repeat it."""

from __future__ import annotations

import html
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from coterie.results import MODELS
from coterie.results.figures import Line
from coterie.results.report.elements import Markup, table
from coterie.results.report.sources import ReportData
from coterie.tables import ABSENT, Cell, Row, Table, numbers, words
from coterie.units import format_bytes

_MISSING = object()
_SETTINGS = "settings."
_ROWS = 20  # of a table that stands before the plots
_EVENTS = 200  # rows of the table of events


def is_long(found: ReportData) -> bool:
    """Say whether the summary of all lines and models has more rows than a reader wants before the plots."""
    return sum(len(_having(found, model)) for model in MODELS) > _ROWS


def summary(found: ReportData, first_only: bool = False) -> Markup:
    """Summarise all lines: a row for each line and model, means over seeds, the best mean of each model in bold.

    ``first_only`` leaves all but the first model of each line out.
    """
    several = len(found.summaries) > len(set(found.runs.lines))
    measured = {each["metric"] for each in found.summaries}
    settings = len(found.runs.settings) > 1
    tuned = {line: found.tuned[places[0]] for line, places in _places(found).items()}
    labels = [
        "method",
        *(["setting"] if settings else []),
        *(["tuned"] if any(tuned.values()) else []),
        "model",
        *(["metric"] if len(measured) > 1 else []),
    ]
    scores = ["mean ± std over seeds" if several else "mean", "std over clients", "worst tenth", "worst client"]
    columns = (*words(*labels), *numbers(*scores, "best on validation", "clients", "seeds", "rounds"))
    rows: list[Row] = []
    seen: set[Line] = set()
    for model in MODELS:
        having = {line: own for line, own in _having(found, model).items() if not first_only or line not in seen}
        seen |= having.keys()
        winners = set() if found.undecided else _winners(having, model)
        for line, summaries in sorted(having.items(), key=lambda each: found.runs.settings.index(each[0].setting)):
            finals = [each[model]["final"] for each in summaries]
            best = [each[model]["best"] for each in summaries]
            rows.append(
                Row(
                    (
                        line.method,
                        *([line.setting or ABSENT] if settings else []),
                        *([tuned[line] or ABSENT] if any(tuned.values()) else []),
                        model.replace("_", " "),
                        *([summaries[0]["metric"]] if len(measured) > 1 else []),
                        Cell(_spread([each["mean"] for each in finals]), "best" if line in winners else ""),
                        _mean([each["std"] for each in finals]),
                        _mean([each[model]["fairness"]["worst_decile"] for each in summaries]),
                        _mean([each["worst"] for each in finals]),
                        ABSENT if None in best else _spread([each["mean"] for each in best]),
                        _counted([each[model] for each in summaries]),
                        str(len(summaries)),
                        _range(each["rounds"] for each in summaries),
                    )
                )
            )
    return table(Table(columns, tuple(rows)))


def costs(found: ReportData) -> Markup:
    """List the seconds and bytes of each line, means over seeds."""
    wire = found.runs.metrics[found.runs.metrics["metric"].isin(["wire_up", "wire_down"])]
    head = ["seconds", "seconds a round", "up", "up a round", "down", "down a round"]
    head += ["up with overhead", "down with overhead"] if len(wire) else []
    rows = []
    for line, places in _places(found).items():
        summaries = [found.summaries[place] for place in places]
        rounds = float(np.mean([each["rounds"] for each in summaries]))
        spent = float(np.mean([each["seconds"]["total"] for each in summaries]))
        row = [line.name, f"{spent:.1f}", f"{spent / max(1.0, rounds):.3f}"]
        for way in ("up", "down"):
            sent = float(np.mean([each["bytes"][way] for each in summaries]))
            row += [format_bytes(sent), format_bytes(sent / max(1.0, rounds))]
        if len(wire):
            of_line = wire[wire["run"].isin(places)]
            for way in ("wire_up", "wire_down"):
                values = of_line.loc[of_line["metric"] == way, "value"]
                row.append(format_bytes(float(values.sum()) / len(places)) if len(values) else ABSENT)
        rows.append(Row(tuple(row)))
    return table(Table((*words("method"), *numbers(*head)), tuple(rows)))


def events(found: ReportData) -> Markup:
    """List the events of federations between machines, up to a limit that the title states."""
    rows = []
    for result, recorded in zip(found.runs.results, found.events, strict=True):
        for event in recorded:
            client = "" if event.client is None else result.client_names.get(event.client, str(event.client))
            rows.append(Row((result.path.name, str(event.round), client, event.what, event.reason)))
    title = f"the first {_EVENTS} of {len(rows)} events" if len(rows) > _EVENTS else ""
    return table(Table(words("run", "round", "client", "what", "why"), tuple(rows[:_EVENTS]), title))


def repeat(found: ReportData) -> list[Markup]:
    """Show what runs have in common, in what they differ, and each run's configuration and command in full."""
    configs = [_flat(result.config) for result in found.runs.results]
    names = list(dict.fromkeys(name for config in configs for name in config))
    common = [name for name in names if all(each.get(name, _MISSING) == configs[0].get(name) for each in configs)]
    parts = []
    if len(configs) > 1:
        shared = _nested({name: configs[0][name] for name in common})
        parts.append(Markup(f"<h3>What all runs have in common</h3>\n{_code(_yaml(shared))}"))
        differ = [name for name in names if name not in common and not name.startswith(_SETTINGS)]
        rows = []
        for result, config in zip(found.runs.results, configs, strict=True):
            own = {name: value for name, value in config.items() if name not in common and name.startswith(_SETTINGS)}
            settings = ", ".join(f"{name.removeprefix(_SETTINGS)}={_word(value)}" for name, value in own.items())
            rows.append(Row((result.path.name, *(_word(config.get(name, ABSENT)) for name in differ), settings)))
        shown = table(Table(words("run", *differ, "settings"), tuple(rows)))
        parts.append(Markup(f"<h3>In what they differ</h3>\n{shown.text}\n<h3>Each run</h3>"))
    for place, result in enumerate(found.runs.results):
        inside = [f"<p>{_how(found, place)}</p>", _code(_yaml(result.config))]
        if found.tuned[place]:
            inside.insert(0, f"<p>Chosen on validation samples: {html.escape(found.tuned[place])}.</p>")
        if found.choices[place]:
            chosen = ", ".join(f"{name} {_word(value)}" for name, value in found.choices[place].items())
            inside.append(f"<p>What the engine chose here: {html.escape(chosen)}.</p>")
        opened = " open" if len(configs) == 1 else ""
        parts.append(
            Markup(
                f"<details{opened}><summary><code>{html.escape(str(result.path))}</code></summary>\n"
                + "\n".join(inside)
                + "\n</details>"
            )
        )
    return parts


def command(config: Mapping[str, Any], path: Path, choices: Mapping[str, Any], federated: bool) -> str:
    """Give the command that repeats a run; a federation's is for the machine that has its project folder."""
    if not federated:
        words = ["coterie", "run", str(path / "config.yaml"), "--out", f"{path.name}-again"]
        words += ["--data-dir", str(choices["data_dir"])] if "data_dir" in choices else []
        return shlex.join(words)
    words = ["coterie", "federate", "run", "DIR", str(config["algorithm"])]
    for option in ("rounds", "participation", "eval_every"):
        words += [f"--{option.replace('_', '-')}", str(config[option])]
    for name, value in (config.get("settings") or {}).items():
        words += ["--set", f"{name}={_word(value)}"]
    return shlex.join(words)


def _how(found: ReportData, place: int) -> str:
    result, federated = found.runs.results[place], bool(found.events[place])
    line = f"<code>{html.escape(command(result.config, result.path, found.choices[place], federated))}</code>"
    if federated:
        return f"Between machines; with DIR the folder of its federation, again by {line}, on the same data."
    return f"Again by {line}, or by <code>coterie run</code> with this as a file:"


def _places(found: ReportData) -> dict[Line, list[int]]:
    places: dict[Line, list[int]] = {}
    for place, line in enumerate(found.runs.lines):
        places.setdefault(line, []).append(place)
    return places


def _having(found: ReportData, model: str) -> dict[Line, list[dict[str, Any]]]:
    all_of = {line: [found.summaries[place] for place in places] for line, places in _places(found).items()}
    having = {line: [each for each in theirs if each.get(model)] for line, theirs in all_of.items()}
    return {line: theirs for line, theirs in having.items() if theirs}


def _winners(having: Mapping[Line, Sequence[Mapping[str, Any]]], model: str) -> set[Line]:
    """Give the best of those that are measured alike: by one metric, in one setting, and not alone there."""
    best: dict[tuple[str, str], list[tuple[float, Line]]] = {}
    for line, summaries in having.items():
        means = [each[model]["final"]["mean"] for each in summaries]
        if None in means or any(math.isnan(mean) for mean in means):
            continue
        sign = 1.0 if summaries[0]["higher_is_better"] else -1.0
        best.setdefault((summaries[0]["metric"], line.setting), []).append((sign * float(np.mean(means)), line))
    return {
        line
        for theirs in best.values()
        if len(theirs) > 1
        for score, line in theirs
        if score == max(each for each, _ in theirs)
    }


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and not math.isnan(value)]


def _mean(values: Iterable[float | None]) -> str:
    known = _known(values)
    return f"{float(np.mean(known)):.4f}" if known else ABSENT


def _spread(values: Sequence[float | None]) -> str:
    known = _known(values)
    deviation = f" ± {float(np.std(known, ddof=1)):.4f}" if len(known) > 1 else ""
    return _mean(values) + deviation


def _counted(models: Sequence[Mapping[str, Any]]) -> str:
    """Say over how many clients a mean is, and of how many, where these differ."""
    counted, there = ([int(each.get(key, each["clients"])) for each in models] for key in ("clients", "of_clients"))
    return _range(counted) if counted == there else f"{_range(counted)} of {_range(there)}"


def _range(values: Iterable[int]) -> str:
    there = sorted(set(values))
    return str(there[0]) if len(there) == 1 else f"{there[0]} to {there[-1]}"


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    settings = config.get("settings") or {}
    out = {name: value for name, value in config.items() if name != "settings"}
    return out | {f"{_SETTINGS}{name}": value for name, value in settings.items()}


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    settings = {name.removeprefix(_SETTINGS): value for name, value in flat.items() if name.startswith(_SETTINGS)}
    out = {name: value for name, value in flat.items() if not name.startswith(_SETTINGS)}
    return out | ({"settings": settings} if settings else {})


def _yaml(config: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)


def _word(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    return "+".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _code(text: str) -> str:
    return f'<div class="code"><button type="button" class="copy">Copy</button><pre>{html.escape(text)}</pre></div>'
