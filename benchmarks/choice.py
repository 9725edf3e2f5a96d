"""What `coterie choose` finds on the hospital table, beside a whole grid of the same candidates, and what both cost.

Time is the processor's, of processes of their own, because machines are shared. The grid is one computation too
(`coterie compare`), which is the quickest way to play it that there is. What it finds is the method that is best on its
validation samples, as `coterie choose` has to find it; its test accuracy is what counts.

    python benchmarks/choice.py --rounds 50 --test-fraction 0.2 0.85
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import coterie
from coterie.data.hospitals import draw_hospitals
from coterie.results import Result
from coterie.studies.choice import METHODS, RATES

MODEL, BATCH = "mlp:hidden=32", 32


def measured(words: list[str]) -> float:
    """Run a command and give the processor's seconds that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "coterie", *words, "-q"], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def validation_and_test(run: Result, at_best: bool) -> tuple[float, float]:
    """Give a run's means over clients, of its better model and at its better round on validation samples."""
    frame = run.metrics
    own = frame[(frame["metric"] == "accuracy") & frame["model"].isin(["personal", "global"])]
    own = own if at_best else own[own["round"] == run.summary["rounds"]]
    means = own.groupby(["model", "round", "split"], observed=True)["value"].mean().unstack("split")
    best = means["validation"].to_numpy().argmax()
    return float(means["validation"].iloc[best]), float(means["test"].iloc[best])


def compared(folder: Path, rounds: int, fraction: float, seed: int) -> dict[str, Any]:
    table = folder / "hospitals.csv"
    draw_hospitals(seed=seed).to_csv(table, index=False)
    shared = ["--data", f"table:{table},label=readmitted,client=hospital", "--model", MODEL, "--rounds", str(rounds)]
    shared += ["--batch-size", str(BATCH), "--test-fraction", str(fraction), "--threads", "1"]
    rates = ",".join(map(str, RATES))
    grid, choice = folder / "grid", folder / "choice"
    whole = measured(
        ["compare", *METHODS, *shared, "--validation", "0.25", "--tune", f"lr={rates}", "--out", str(grid)]
    )
    quick = measured(["choose", *shared, "--out", str(choice)])
    runs = [coterie.load(path) for path in sorted((grid / "runs").iterdir())]
    found = {"seconds": quick, "grid_seconds": whole, "share": quick / whole}
    for name, at_best in (("last round", False), ("best round", True)):
        scores = [validation_and_test(run, at_best) for run in runs]
        best = int(np.argmax([score for score, _ in scores]))
        found[f"grid, {name}"] = {"run": runs[best].path.name, "test": scores[best][1]}
    chosen = json.loads((choice / "stages.json").read_text())
    found["stages"] = [[len(stage["runs"]), stage["rounds"]] for stage in chosen["stages"]]
    found["choice"] = (choice / "choice.yaml").read_text().splitlines()[:4]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--test-fraction", type=float, nargs="+", default=[0.2, 0.85])
    parser.add_argument("--seed", type=int, default=1, help="of the table")
    given = parser.parse_args()
    for fraction in given.test_fraction:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps({"test_fraction": fraction, **compared(Path(folder), given.rounds, fraction, given.seed)}))


if __name__ == "__main__":
    main()
