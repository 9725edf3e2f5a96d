"""What `coterie choose` finds on the hospital table, beside a whole grid of the same candidates, and what both cost.

The grid is every method with every learning rate that `coterie choose` considers, each to the last round and evaluated
after every round, as `coterie compare` plays it: as one computation, which is the quickest way that there is, and with
`--in-turn` also one run after another (`coterie compare --apart`). Time is the processor's, of processes of their own,
because machines are shared; with `--repeat` it is the least of several, for both. What the grid finds is the run that
is best on its validation samples, after the last round or after its best, as `coterie choose` has to find it; its test
accuracy is what counts. One to two minutes for each table and fraction, and four more for each with `--in-turn`.

    python benchmarks/choice.py --seed 1 2 3 --test-fraction 0.85 0.2 --in-turn
    python benchmarks/choice.py --seed 1 2 3 4 5 6 --json benchmarks/results/choice.json
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import measuring
import numpy as np

import coterie
from coterie.data.hospitals import draw_hospitals
from coterie.results import Result
from coterie.studies.choice import METHODS, RATES

MODEL, BATCH = "mlp:hidden=32", 32


def measured(words: list[str], out: Path, repeat: int = 1) -> float:
    """Run a command and give the processor's seconds that it took, the least of several times; the last one stays."""
    seconds = []
    for _ in range(repeat):
        shutil.rmtree(out, ignore_errors=True)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "coterie", *words, "--out", str(out), "-q"]
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return min(seconds)


def validation_and_test(run: Result, at_best: bool) -> tuple[float, float]:
    """Give a run's means over clients, of its better model and at its better round on validation samples."""
    frame = run.metrics
    own = frame[(frame["metric"] == "accuracy") & frame["model"].isin(["personal", "global"])]
    own = own if at_best else own[own["round"] == run.summary["rounds"]]
    means = own.groupby(["model", "round", "split"], observed=True)["value"].mean().unstack("split")
    best = means["validation"].to_numpy().argmax()
    return float(means["validation"].iloc[best]), float(means["test"].iloc[best])


def compared(folder: Path, rounds: int, fraction: float, seed: int, in_turn: bool, repeat: int) -> dict[str, Any]:
    table = folder / "hospitals.csv"
    draw_hospitals(seed=seed).to_csv(table, index=False)
    data = f"table:{table},label=readmitted,client=hospital"
    shared = ["--data", data, "--model", MODEL, "--rounds", str(rounds), "--batch-size", str(BATCH)]
    shared += ["--test-fraction", str(fraction), "--threads", "1"]
    grid, choice = folder / "grid", folder / "choice"
    compare = ["compare", *METHODS, *shared, "--validation", "0.25", "--tune", f"lr={','.join(map(str, RATES))}"]
    whole = measured(compare, grid, repeat)
    quick = measured(["choose", *shared], choice, repeat)
    found: dict[str, Any] = {"seconds": quick, "grid_seconds": whole, "share": quick / whole}
    if in_turn:
        apart = measured([*compare, "--apart"], folder / "apart")
        found |= {"grid_in_turn_seconds": apart, "share_in_turn": quick / apart}
    runs = [coterie.load(path) for path in sorted((grid / "runs").iterdir())]
    for name, at_best in (("last round", False), ("best round", True)):
        scores = [validation_and_test(run, at_best) for run in runs]
        best = int(np.argmax([score for score, _ in scores]))
        found[f"grid, {name}"] = {"run": runs[best].path.name, "test": scores[best][1]}
    settings = {"model": MODEL, "rounds": rounds, "batch_size": BATCH, "test_fraction": fraction, "threads": 1}
    read = coterie.choose(data, **settings, out=choice, progress=False)  # has ended, and is only read
    found["stages"] = [[len(stage.runs), stage.rounds] for stage in read.stages]
    best, alone = read.decision.best, read.decision.alone
    found["choice"] = {"answer": read.sentences()[0], "run": best.run, "round": best.round, "test": best.test}
    found["alone"] = {"run": alone.run, "round": alone.round, "test": alone.test}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--test-fraction", type=float, nargs="+", default=[0.85, 0.2])
    parser.add_argument("--seed", type=int, nargs="+", default=[1], help="of the table")
    parser.add_argument("--in-turn", action="store_true", help="play the grid one run after another too")
    parser.add_argument("--repeat", type=int, default=1, help="how often each is timed, of which the least counts")
    parser.add_argument("--json", type=Path, help="write the result here, too, after each table")
    given = parser.parse_args()
    rows = []
    for fraction in given.test_fraction:
        for seed in given.seed:
            with tempfile.TemporaryDirectory() as folder:
                found = compared(Path(folder), given.rounds, fraction, seed, given.in_turn, given.repeat)
            rows.append({"test_fraction": fraction, "seed": seed, **found})
            print(json.dumps(rows[-1]), flush=True)
            if given.json is not None:  # accuracies keep their digits, other than `measuring.write` would have it
                result = {"command": "benchmarks/choice.py", **measuring.facts(), "rows": rows}
                given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
