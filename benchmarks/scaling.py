"""What a round costs as clients, parameters and samples grow: ours and the plain loop, in turn.

    python benchmarks/scaling.py [--device cuda] [--only clients parameters samples idle] [--loop-steps N] [--json FILE]

Four series, each from one starting point (20 clients of 50 samples, the MLP 784-200-10, batch 10, all take part):
``clients`` that take part; ``parameters``, by the width of the MLP's hidden layer; ``samples`` of each client;
``idle``, clients of which 20 take part, with a linear model. Seconds are medians over rounds taken in turn, of FedAvg.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import measuring
from rivals import Federation, Work
from rivals.ours import Ours
from rivals.plain import PlainLoop

from coterie.memory import keep_freed_memory

START = Work("mlp", (1, 28, 28), (50,) * 20, 20, 10)
LADDERS = {
    "cpu": {
        "clients": (5, 20, 80, 320, 1000),
        "parameters": (10, 40, 200, 800, 3000),
        "samples": (10, 40, 160, 640),
        "idle": (20, 200, 2000, 20000),
    },
    "cuda": {
        "clients": (5, 20, 80, 320, 1280, 5000),
        "parameters": (10, 40, 200, 800, 3000, 12000),
        "samples": (10, 40, 160, 640, 2560),
        "idle": (20, 200, 2000, 20000, 100000),
    },
}
LOOP_STEPS = 20_000  # of a round, beyond which the loop is not waited for


def work_of(series: str, value: int) -> Work:
    """Give the work of one point."""
    if series == "clients":
        return replace(START, sizes=(50,) * value, cohort=value)
    if series == "parameters":
        return replace(START, model=f"mlp:hidden={value}")
    if series == "samples":
        return replace(START, sizes=(value,) * 20)
    return replace(START, model="linear", sizes=(10,) * value)


def measure(
    series: str, value: int, device: str, repeats: int, clock: str = "wall", loop_steps: int = LOOP_STEPS
) -> dict[str, Any]:
    """Time rounds of one point."""
    work = work_of(series, value)
    federation = Federation(work, device)
    players: dict[str, Any] = {"ours": Ours(federation)}
    if work.steps <= loop_steps:
        players["loop"] = PlainLoop(federation)
    with measuring.Others() as others:
        plays = {name: player.play for name, player in players.items()}
        seconds = measuring.interleaved(plays, repeats, 2, device, measuring.CLOCKS[clock])
    return {
        "series": series,
        "value": value,
        "clients": len(work.sizes),
        "cohort": work.cohort,
        "parameters": sum(parameter.numel() for parameter in federation.module().parameters()),
        "samples_each": work.sizes[0],
        "batch": work.batch,
        "steps": work.steps,
        "samples": work.samples,
        "seconds": seconds,
        "others_share_of_cores": others.share,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Climb the ladders that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(LADDERS["cpu"]), default=list(LADDERS["cpu"]))
    parser.add_argument("--device", choices=list(LADDERS), default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--loop-steps", type=int, default=LOOP_STEPS, help="longer rounds the loop does not play")
    parser.add_argument("--smallest", action="store_true", help="the two lowest rungs, once: a trial")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--clock", choices=list(measuring.CLOCKS), default="wall")
    parser.add_argument("--add", action="store_true", help="keep the file's rows that are not measured again")
    args = parser.parse_args(argv)
    if args.smallest:
        args.threads, args.repeats = 1, 1
    keep_freed_memory()  # as the command line does; whoever plays in this process profits
    torch.set_num_threads(args.threads)
    rows = measuring.kept(args.json, "series", args.only) if args.add else []
    result = {"command": "benchmarks/scaling.py", **measuring.facts(args.device), "clock": args.clock, "rows": rows}
    for series in args.only:
        for value in LADDERS[args.device][series][: 2 if args.smallest else None]:
            row = measure(series, value, args.device, args.repeats, args.clock, args.loop_steps)
            rows.append(row)
            rows.sort(key=lambda known: list(LADDERS["cpu"]).index(known["series"]))
            shown = "".join(f"  {name} {times['median'] * 1e3:>9.2f} ms" for name, times in row["seconds"].items())
            print(f"{series:<11}{value:>8}{shown}", flush=True)
            measuring.write(args.json, result)
            if args.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
