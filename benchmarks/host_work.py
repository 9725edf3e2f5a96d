"""Which part of a study that plays together is the host's work, in milliseconds for each run and round.

    python benchmarks/host_work.py
    python benchmarks/host_work.py --device cuda --rounds 60

The runs of ``benchmarks/study.py``, together, in this process. What a part takes is processor time of the thread that
it is done in, without the parts within it; so nothing that other programs do makes it longer, but to wait for a GPU is
to look at it again and again, and counts. Parts that a run has once (its beginning, its end, its last checkpoint) are
divided by the rounds too: with more rounds they are less.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import measuring
import study as studies

from coterie.compute import batched
from coterie.compute.joint import engine as joint_engine
from coterie.rows.host_copies import LateRead
from coterie.runs import experiment, launch, rounds
from coterie.runs.storage import RunFolder
from coterie.runs.storage.checkpoints import Checkpoints
from coterie.simulation import server_half, simulation
from coterie.simulation.client_states import ClientStates
from coterie.simulation.exchange import LocalExchange
from coterie.simulation.processes import OneProcess
from coterie.simulation.scoring import Scorer
from coterie.studies.comparison import compare, make_plan, runner
from coterie.studies.joint import Meeting, Seat, SeatedProcess

PARTS: dict[str, Sequence[tuple[Any, str]]] = {
    "beginning of a run": [(launch, "begin")],
    "cohort": [(rounds.SimulatedRounds, "_cohort")],
    "server's half": [(server_half, "play")],
    "request and reply": [(LocalExchange, "deliver"), (simulation.Request, "of")],
    "changed rows, until they count": [(ClientStates, "scatter"), (simulation.Simulation, "commit")],
    "whether all is finite": [(SeatedProcess, "are_finite"), (joint_engine, "_finite")],
    "waiting for the device": [(LateRead, "values")],
    "rest of a round": [(rounds.SimulatedRounds, "play"), (simulation.Simulation, "play_round")],
    "records of a round": [(OneProcess, "write")],
    "scores, of a run by itself": [(Scorer, "scores")],
    "scores, together": [(Meeting, "_measured")],
    "records to the disk": [(RunFolder, "flush")],
    "checkpoints": [(experiment.Experiment, "checkpoint"), (Checkpoints, "save")],
    "end of a run": [(experiment.Experiment, "finish")],
    "schedules of batches": [(batched, "make_schedule")],
    "start and end of tasks": [(joint_engine.JointEngine, "run")],
    "training": [(batched.BatchedEngine, "run")],
    "whose turn it is": [(Meeting, "play"), (Seat, "go_on"), (Seat, "wait_for"), (Seat, "_play")],
    "table": [(runner, "standings")],
}


class Spent:
    """Processor time of parts, each without what lies within it."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._threads = threading.local()

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Have a function or method add what it takes to a part."""
        found = vars(owner)[name]
        plain = found.__func__ if isinstance(found, classmethod) else found
        setattr(owner, name, type(found)(self._timed(plain, part)) if plain is not found else self._timed(plain, part))

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            within: list[float] = vars(self._threads).setdefault("within", [])
            within.append(0.0)
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                taken = time.thread_time() - began
                self.seconds[part] += taken - within.pop()
                self.calls[part] += 1
                if within:
                    within[-1] += taken

        return timed


def main(argv: Sequence[str] | None = None) -> None:
    """Play the study and print the parts, the largest first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data-dir", type=Path, default=None, help="where Fashion-MNIST lies")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args(argv)
    if args.data_dir is not None:
        os.environ["COTERIE_DATA"] = str(args.data_dir.absolute())
    study = replace(studies.GPU if args.device == "cuda" else studies.CPU, rounds=args.rounds, seeds=args.seeds)
    spent, facts = Spent(), measuring.facts(args.device)
    for part, functions in PARTS.items():
        for owner, name in functions:
            spent.watch(owner, name, part)
    with tempfile.TemporaryDirectory() as place:
        source, called = studies.source_for(args.device, args.data_dir, Path(place), studies.IMAGES)
        wall, processor = time.perf_counter(), time.process_time()
        compare(make_plan(study.plan(source, args.device)), Path(place) / "study", progress=False)
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
    times = study.runs * study.rounds
    parts = {part: {"ms": 1e3 * seconds / times, "calls": spent.calls[part]} for part, seconds in spent.seconds.items()}
    for part, found in sorted(parts.items(), key=lambda item: -item[1]["ms"]):
        print(f"{found['ms']:8.3f} ms  {found['calls'] / times:7.3f} calls  {part}")
    own = sum(found["ms"] for part, found in parts.items() if part not in ("training", "scores, together"))
    print(f"{own:8.3f} ms  of a run and round beside training and scores that are computed together")
    print(f"{1e3 * processor / times:8.3f} ms  of processors, {1e3 * wall / times:.3f} ms by the wall's clock, in all")
    row = {"data": called, "runs": study.runs, "rounds": study.rounds, "wall": wall, "processor": processor}
    measuring.write(args.json, {"command": "benchmarks/host_work.py", **facts, "rows": [{**row, "parts": parts}]})


if __name__ == "__main__":
    main()
