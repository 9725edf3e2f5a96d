"""The comparisons behind docs/choose_a_method.md: which method does well where, and what it sends.

    python benchmarks/methods.py FOLDER [results/methods.json]

Runs every plan of benchmarks/plans in a folder of its own under FOLDER: about a thousand short runs on embedded data,
which take one thread half an hour. A stopped run of this program goes on with the same command. Beside the JSON file it
writes the tables as Markdown: those of the page, and those of ``coterie compare``.
"""

from __future__ import annotations

import json
import math
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import coterie
from coterie.studies import comparison
from coterie.yaml_file import read_yaml

PLANS = Path(__file__).parent / "plans"
_BLANK = "\u00a0"  # at which no line is broken

# What the page calls a setting, the plan, and the point of its grid: those that the leaderboard does not have.
SETTINGS: dict[str, tuple[str, dict[str, str]]] = {
    "iid": ("partitions", {"partition": "iid"}),
    "other answers": ("disagreement", {}),
    "ten samples": ("scarce", {}),
}
ATTACKS: dict[str, tuple[str, dict[str, str]]] = {
    "nobody attacks": ("partitions", {"partition": "dirichlet:0.5"}),
    "noise": ("attackers", {"attack": "gaussian:0.2"}),
    "random labels": ("attackers", {"attack": "label_poisoning:0.2"}),
}
NEWCOMERS: dict[str, tuple[str, dict[str, str]]] = {"newcomers": ("newcomers", {})}


# --------------------------------------------------------------------------------------------------------- measuring


def bytes_of(folder: Path, plan: comparison.ComparisonPlan, method: str) -> dict[str, int]:
    """What a client that takes part receives and sends in a round."""
    run = next(
        run for run in plan.runs if run.method == method and (folder / "runs" / run.name / "summary.json").exists()
    )
    summary, config = coterie.load(folder / "runs" / run.name).summary, run.config
    training = config.clients - round(config.hold_out * config.clients)
    cohorts = config.rounds * max(1, round(config.participation * training))
    return {way: round(total / cohorts) for way, total in summary["bytes"].items()}


def number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 6)


def rows(folder: Path, plan: comparison.ComparisonPlan, found: comparison.Standings) -> list[dict[str, Any]]:
    return [
        {
            "setting": row.setting,
            "method": row.method,
            "tuned": row.tuned,
            "models": {
                model: {"mean": number(score.mean), "std": number(score.std), "p": number(score.pvalue)}
                for model, score in row.scores.items()
            },
            "bytes": bytes_of(folder, plan, row.method),
        }
        for row in found.rows
    ]


# ------------------------------------------------------------------------------------------------ the page's tables


def cells(plans: dict[str, Any], where: tuple[str, dict[str, str]], model: str) -> dict[str, str]:
    """A cell for each method: percent, in bold if no other method is better beyond chance (p < 0.05)."""
    plan, setting = where
    found = {
        row["method"]: row["models"][model]
        for row in plans[plan]
        if row["setting"] == setting and model in row["models"]
    }
    shown = {name: f"{100 * cell['mean']:.1f}{_BLANK}±{_BLANK}{100 * cell['std']:.1f}" for name, cell in found.items()}
    return {
        name: f"**{text}**" if found[name]["p"] is None or found[name]["p"] >= 0.05 else text
        for name, text in shown.items()
    }


def table(plans: dict[str, Any], settings: dict[str, tuple[str, dict[str, str]]], model: str) -> Iterator[str]:
    columns = {title: cells(plans, where, model) for title, where in settings.items()}
    methods = dict.fromkeys(name for column in reversed(list(columns.values())) for name in column)
    yield f"| method | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for name in methods:
        shown, _, variant = name.partition(", ")
        label = f"`{shown}`" + (f", {variant}" if variant else "")
        yield f"| {label} | {' | '.join(column.get(name, '–') for column in columns.values())} |"


def costs(plans: dict[str, Any]) -> Iterator[str]:
    sent = {row["method"]: row["bytes"] for row in plans["partitions"] if row["setting"] == SETTINGS["iid"][1]}
    one = sent["fedavg"]["up"]
    yield "| method | receives | sends |"
    yield "|---|---|---|"
    for name, ways in sent.items():
        yield f"| `{name}` | {ways['down'] / one:.2f} | {ways['up'] / one:.2f} |"


def tables(found: dict[str, Any]) -> dict[str, str]:
    """The tables of docs/choose_a_method.md."""
    plans = found["plans"]
    made = {
        "Personal models": table(plans, SETTINGS, "personal"),
        "Global models": table(plans, SETTINGS, "global"),
        "Attackers, personal models": table(plans, ATTACKS, "personal"),
        "Attackers, global models": table(plans, ATTACKS, "global"),
        "Newcomers": table(plans, NEWCOMERS, "newcomer"),
        "Bytes": costs(plans),
    }
    return {title: "\n".join(lines) for title, lines in made.items()}


def main() -> None:
    folder = Path(sys.argv[1])
    target = Path(sys.argv[2] if len(sys.argv) > 2 else "results/methods.json")
    plans, whole = {}, []
    for path in sorted(PLANS.glob("*.yaml")):
        plan = comparison.make_plan(read_yaml(path))
        found = comparison.compare(plan, folder / path.stem)
        plans[path.stem] = rows(folder / path.stem, plan, found)
        whole.append(f"## {path.stem}\n\n{comparison.table(found).markdown()}")
    versions = {"coterie": coterie.__version__, "torch": torch.__version__, "python": platform.python_version()}
    what = "test accuracy after the last round: mean over clients, then mean and standard deviation over seeds"
    measured = {"what": what, "plans": plans, "versions": versions}
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    short = [f"## {title}\n\n{text}\n" for title, text in tables(measured).items()]
    target.with_suffix(".md").write_text("\n".join(["# Methods compared\n", *short, *whole]), encoding="utf-8")


if __name__ == "__main__":
    main()
