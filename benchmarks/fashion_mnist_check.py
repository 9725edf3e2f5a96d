"""Five runs on Fashion-MNIST beside what a first, independent prototype gave, written to a JSON file.

    COTERIE_DATA=... python benchmarks/fashion_mnist_check.py [results/fashion_mnist_check.json]

Takes about five minutes with one thread. See docs/reproduction.md.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import coterie

COMMON: dict[str, Any] = {
    "data": "fashion_mnist:norm=own",
    "partition": "dirichlet:0.5,min_samples=100",
    "clients": 100,
    "scarcity": 50,
    "max_test": 200,
    "validation": 0,
    "model": "mlp:hidden=100",
    "rounds": 60,
    "eval_every": 5,
    "seed": 1,
    "threads": 1,
}
LOCAL = {"local_epochs": 5, "batch_size": 10, "lr": 0.05}

# method, its settings, which model, and what the prototype gave on one seed, in percent
RUNS: list[tuple[str, dict[str, Any], str, float]] = [
    ("local", {}, "personal", 77.0),
    ("fedavg", {}, "global", 83.5),
    ("fedavg_ft", {}, "personal", 87.0),
    ("fedacs", {"p": 0.5}, "personal", 85.0),
    ("fedacs", {"p": 0.0}, "personal", 87.0),
]
BOUND = 2.0


def check(folder: Path) -> dict[str, Any]:
    rows = []
    for algorithm, settings, model, prototype in RUNS:
        out = folder / "-".join([algorithm, *(f"{key}{value}" for key, value in settings.items())])
        result = coterie.run(algorithm, out=out, settings=LOCAL | settings, **COMMON)
        final = {
            name: round(100 * result.summary[name]["final"]["mean"], 2)
            for name in ("personal", "global")
            if result.summary[name]
        }
        rows.append(
            {
                "algorithm": algorithm,
                "settings": settings,
                "model": model,
                "measured": final[model],
                "prototype": prototype,
                "difference": round(final[model] - prototype, 2),
                "all_models": final,
                "seconds": round(result.summary["seconds"]["total"], 1),
            }
        )
        print(f"{algorithm} {settings or ''} {model}: {final[model]} (prototype {prototype})")
    return {
        "what": "mean over clients of the test accuracy after the last round, in percent, one seed",
        "bound": BOUND,
        "within_bound": all(abs(row["difference"]) <= BOUND for row in rows),
        "config": COMMON | LOCAL,
        "runs": rows,
        "versions": {"coterie": coterie.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def main() -> None:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "results/fashion_mnist_check.json")
    with tempfile.TemporaryDirectory() as folder:
        found = check(Path(folder))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    sys.exit(0 if found["within_bound"] else 1)


if __name__ == "__main__":
    main()
