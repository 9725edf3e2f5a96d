"""Clients that come late and clients that were away: the measurements behind docs/newcomers.md.

    COTERIE_DATA=... python benchmarks/latecomers.py FOLDER [results/latecomers.json]

Digits in the settings of docs/choose_a_method.md (*newcomers* and *a tenth takes part*), three groups that give other
answers with newcomers, and Fashion-MNIST, which COTERIE_DATA must hold, with both. Every method plays as in its paper
and with each way to treat those who come late. Learning rates, the methods' main parameters and how fast models age are
chosen on validation samples of the clients that train. A stopped run of this program goes on with the same command;
one thread takes about half an hour.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import coterie
from coterie.studies import comparison

SEEDS = [1, 10, 100]
TUNE = {"lr": [0.1, 0.5], "lam": [0.1, 1.0], "prox": [0.1, 1.0], "p": [0.0, 0.5]}
AGES = {"freshness": [0.5, 0.8]}
SMALL = {"local_epochs": 3, "batch_size": 20, "model": "mlp:hidden=50", "threads": 1}
DIGITS = SMALL | {"data": "digits", "partition": "dirichlet:0.5"}
FASHION = SMALL | {"data": "fashion_mnist:norm=own", "partition": "dirichlet:0.5,min_samples=50", "scarcity": 50}
FASHION |= {"max_test": 200, "lr": 0.1, "tune": {name: TUNE[name] for name in ("lam", "prox", "p")}}


def variant(algorithm: str, tune: dict[str, list[Any]] | None = None, **settings: Any) -> dict[str, Any]:
    """A method with some of its parameters, named by them."""
    name = ", ".join([algorithm, *(str(value) for value in settings.values())])
    return {"algorithm": algorithm, "name": name, "settings": settings, **({"tune": tune} if tune else {})}


# As much work for a newcomer as FLAME's does with "averaged": three epochs in its round, and twelve of fine-tuning; and
# as much as those do that have two exchanges.
LONGER = [
    {"algorithm": "fedavg_ft", "name": f"fedavg_ft, {epochs} epochs", "settings": {"fine_tune_epochs": epochs - 3}}
    for epochs in (15, 30)
]
WELCOMED = [
    "fedavg_ft",
    *LONGER,
    *(variant("ditto", newcomers=how) for how in ("initial", "global")),
    *(variant("flame", newcomers=how) for how in ("initial", "global", "averaged")),
    *(
        variant(name, newcomers=how)
        for name in ("fedacs", "fedamp", "heurfedamp")
        for how in ("initial", "mean", "mixture", "averaged")
    ),
]


def returning(names: tuple[str, ...], tune: dict[str, list[Any]] | None) -> list[Any]:
    """Methods as in their papers, and with clients that were away starting from what the present know."""
    flame = [variant("flame", returning=how) for how in ("own", "consensus")]
    mixed = [[variant(name, returning="own"), variant(name, tune, returning="mixture")] for name in names]
    return ["fedavg_ft", *flame, *(each for pair in mixed for each in pair)]


# What the page calls a setting: the methods, what differs from the others, and the model that is measured.
PLANS: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "newcomers, digits": (WELCOMED, DIGITS | {"clients": 20, "rounds": 40, "hold_out": 0.3}, "newcomer"),
    "newcomers, other answers": (
        WELCOMED,
        SMALL | {"data": "synthetic", "partition": "natural", "clients": 30, "rounds": 40, "hold_out": 0.3},
        "newcomer",
    ),
    "newcomers, Fashion-MNIST": (WELCOMED, FASHION | {"clients": 20, "rounds": 40, "hold_out": 0.3}, "newcomer"),
    "a tenth takes part, digits": (
        returning(("fedacs", "fedamp", "heurfedamp"), AGES),
        DIGITS | {"clients": 50, "rounds": 150, "participation": 0.1},
        "personal",
    ),
    "a tenth takes part, Fashion-MNIST": (
        returning(("fedacs", "fedamp"), None),
        FASHION | {"clients": 50, "rounds": 150, "participation": 0.1},
        "personal",
    ),
}


def measured(folder: Path) -> Iterator[dict[str, Any]]:
    """Play every plan; a row for each method of each."""
    for setting, (methods, differs, model) in PLANS.items():
        rounds = differs["rounds"]
        shared = {"seeds": SEEDS, "tune": TUNE, "eval_every": rounds, "checkpoint_every": rounds}
        plan = comparison.make_plan({"methods": methods, **shared, **differs})
        # On a small machine the rows of all runs on images would not be in its caches.
        together = not differs["data"].startswith("fashion_mnist")
        found = comparison.compare(plan, folder / setting.replace(", ", "-").replace(" ", "_"), together=together)
        for row in found.rows:
            score = row.scores[model]
            yield {
                "setting": setting,
                "method": row.method,
                "tuned": row.tuned,
                "model": model,
                "mean": round(score.mean, 6),
                "std": round(score.std, 6),
            }


def table(rows: list[dict[str, Any]], kind: str) -> str:
    """The page's table of one kind of setting: percent, mean ± standard deviation over seeds."""
    settings = [setting for setting in PLANS if setting.startswith(kind)]
    cells = {(row["method"], row["setting"]): f"{100 * row['mean']:.1f} ± {100 * row['std']:.1f}" for row in rows}
    methods = dict.fromkeys(row["method"] for row in rows if row["setting"] in settings)
    lines = [f"| method | {' | '.join(setting.split(', ')[1] for setting in settings)} |"]
    lines.append("|---" * (len(settings) + 1) + "|")
    for method in methods:
        name, *how = method.split(", ")
        label = f"`{name}`" + (f", {how[0]}" if how else "")
        lines.append(f"| {label} | {' | '.join(cells.get((method, setting), '–') for setting in settings)} |")
    return "\n".join(lines)


def tables(rows: list[dict[str, Any]]) -> dict[str, str]:
    """The tables of docs/newcomers.md."""
    return {"Newcomers": table(rows, "newcomers"), "Absent clients": table(rows, "a tenth")}


def main() -> None:
    folder = Path(sys.argv[1])
    target = Path(sys.argv[2] if len(sys.argv) > 2 else "results/latecomers.json")
    rows = list(measured(folder))
    versions = {"coterie": coterie.__version__, "torch": torch.__version__, "python": platform.python_version()}
    what = "test accuracy after the last round: mean over clients, then mean and standard deviation over seeds"
    target.write_text(json.dumps({"what": what, "rows": rows, "versions": versions}, indent=1) + "\n", encoding="utf-8")
    for title, text in tables(rows).items():
        print(f"\n## {title}\n\n{text}")


if __name__ == "__main__":
    main()
