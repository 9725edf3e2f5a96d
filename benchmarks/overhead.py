"""What a whole run costs beside its rounds: evaluation, records, checkpoints.

    python benchmarks/overhead.py [--cases digits-20 ...] [--methods fedavg fedacs flame] [--repeats 3] [--json FILE]

Each case is played in two ways, in turn. *Rounds alone*: the simulation of the configuration, driven round by round and
nothing else. *The run*: ``coterie.run`` with its default cadence (every client evaluated after every round, checkpoints
as often as takes a fiftieth of the time), without the progress bar. Both begin with the same set-up (reading the data,
dealing it out, building the engine), which is reported apart and is in neither figure.

Clocks in the run say what a round, an evaluation, a checkpoint, a write of records take. A share is the median of one
such call times their number, in parts of the median round times the number of rounds, so that a burst of other work on
the machine spoils no figure. The overhead is the sum of the shares; the same by processor time, which does not count
waiting for a disk or for a core, and the plain ratio of the two wall clocks are given beside it. Evaluation of all
clients after every round is by definition a forward pass over all validation and test samples for each model: how many
samples that is, against those trained on, is given too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import operator
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
import measuring

from coterie import randomness
from coterie.api import run_config
from coterie.config import ExperimentConfig, from_mapping
from coterie.memory import keep_freed_memory
from coterie.runs import launch
from coterie.runs.builder import assemble
from coterie.runs.rounds import draw_cohort
from coterie.runs.storage import RunFolder
from coterie.simulation.scoring import Scorer
from coterie.simulation.simulation import Simulation

METHODS = ("fedavg", "fedacs", "flame")
REACH = 0.15
SHARES = ("evaluation", "records", "checkpoints", "closing", "other")


@dataclass(frozen=True)
class Case:
    """What is run: on so many drawn images a client, a seventh of them to test on, or else on the embedded digits."""

    clients: int
    model: str
    rounds: int
    images: int = 0
    scarcity: int | None = None

    def settings(self, folder: Path) -> dict[str, Any]:
        """Give the configuration's fields; images are written to ``folder`` first."""
        common = {"clients": self.clients, "model": self.model, "rounds": self.rounds, "scarcity": self.scarcity}
        if not self.images:
            return common
        path = folder / f"images-{self.clients}.npz"
        if not path.exists():
            _write_images(path, self.clients * self.images)
        return common | {"data": f"npz:{path}", "partition": "iid", "test_fraction": 1 / 7}


CASES = {
    "digits-20": Case(20, "mlp", 50),
    "digits-100": Case(100, "mlp", 50),
    "images-20": Case(20, "cnn_pfllib", 50, images=35),
    "images-100": Case(100, "cnn_pfllib", 20, images=35),  # a round is what it is after 20 as after 50
}


def _write_images(path: Path, count: int) -> None:
    """Draw images like Fashion-MNIST's: 28x28 grey levels of ten classes."""
    draw = randomness.stream(1, "benchmark images")
    prototypes = draw.integers(256, size=(10, 28, 28))
    labels = np.arange(count) % 10
    noise = draw.integers(256, size=(count, 28, 28))
    np.savez(path, x=((prototypes[labels] + noise) // 2).astype(np.uint8), y=labels)


@dataclass(frozen=True)
class Spent:
    """Seconds by the wall's clock, and of processor time, which nobody else's work makes longer."""

    wall: float
    processor: float

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.wall + other.wall, self.processor + other.processor)

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.wall - other.wall, self.processor - other.processor)


def now() -> Spent:
    """Read both clocks."""
    return Spent(time.perf_counter(), time.process_time())


class Clocks:
    """Notes the seconds of every call of some methods, without those calls within it that have a clock as well."""

    PLACES = (
        (Simulation, "play_round", "rounds"),
        (Scorer, "scores", "evaluation"),
        (RunFolder, "flush", "records"),
        (RunFolder, "checkpoint", "checkpoints"),
        (RunFolder, "finish", "closing"),
        (launch, "begin", "set-up"),
    )

    def __init__(self) -> None:
        self.calls: dict[str, list[Spent]] = {label: [] for _, _, label in self.PLACES}
        self._open: list[Spent] = []

    def _clocked(self, original: Any, label: str) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            began = now()
            self._open.append(Spent(0.0, 0.0))
            try:
                return original(*args, **kwargs)
            finally:
                took = now() - began
                self.calls[label].append(took - self._open.pop())
                if self._open:
                    self._open[-1] = self._open[-1] + took

        return wrapper

    @contextlib.contextmanager
    def running(self) -> Iterator[Clocks]:
        """Put the clocks on, and take them off again."""
        with contextlib.ExitStack() as off:
            for owner, name, label in self.PLACES:
                original = getattr(owner, name)
                setattr(owner, name, self._clocked(original, label))
                off.callback(setattr, owner, name, original)
            yield self


def rounds_alone(config: ExperimentConfig) -> list[Spent]:
    """Play all rounds and nothing else, and give what each took; the set-up is not timed."""
    parts = assemble(config)
    trainers = parts.population.roles.trainers
    taken = []
    with launch.threads(config.threads):
        for number in range(1, config.rounds + 1):
            began = now()
            parts.simulation.play_round(draw_cohort(config.seed, number, trainers, config.participation), number)
            taken.append(now() - began)
    return taken


def whole_run(settings: dict[str, Any], folder: Path) -> dict[str, list[Spent]]:
    """Run it as a user does, and say where the time went; ``total`` is without the set-up."""
    clocks = Clocks()
    began = now()
    with clocks.running():
        run_config(from_mapping(settings), out=folder, progress=False)
    total = now() - began - _sum(clocks.calls["set-up"])
    # What lies between the clocks: drawing the cohort, handing scores to the log, the summary at the end.
    inside = _sum(spent for label, calls in clocks.calls.items() if label != "set-up" for spent in calls)
    return clocks.calls | {"other": [total - inside], "total": [total]}


def _sum(spent: Iterable[Spent]) -> Spent:
    return functools.reduce(operator.add, spent, Spent(0.0, 0.0))


def samples_of(config: ExperimentConfig) -> dict[str, int]:
    """Count the samples that are trained on and looked at in a round."""
    parts = assemble(config)
    sizes = {name: int(parts.engine.sizes[name].sum()) for name in ("train", "validation", "test")}
    algorithm = parts.simulation.algorithm
    models = int(algorithm.has_personal) + int(algorithm.has_global)
    epochs = algorithm.settings().get("local_epochs", 1)
    return {"trained": sizes["train"] * epochs, "evaluated": models * (sizes["validation"] + sizes["test"])}


def measure(name: str, case: Case, method: str, repeats: int, threads: int, folder: Path) -> dict[str, Any]:
    """Play one case both ways, in turn."""
    settings = {"algorithm": method, "threads": threads, **case.settings(folder)}
    config = from_mapping(settings)
    rounds_alone(config.model_copy(update={"rounds": min(2, config.rounds)}))  # imports, first allocations
    alone: list[Spent] = []
    calls: dict[str, list[Spent]] = {}
    walls: list[float] = []
    others = measuring.Others()
    for repeat in range(repeats):
        with others:
            lone = rounds_alone(config)
        found = whole_run(settings, folder / f"{name}-{method}-{repeat}")
        walls.append(found["total"][0].wall / _sum(lone).wall - 1)
        alone += lone
        for label, spent in found.items():
            calls.setdefault(label, []).extend(spent)
    shares = {
        clock: {label: _whole(calls[label], clock) / _whole(alone, clock) for label in SHARES}
        for clock in measuring.CLOCKS
    }
    return {
        "case": name,
        "method": method,
        "clients": case.clients,
        "model": case.model,
        "rounds": case.rounds,
        "round_alone_seconds": measuring.spread(spent.wall for spent in alone),
        "round_in_run_seconds": measuring.spread(spent.wall for spent in calls["rounds"]),
        "set_up_seconds": measuring.spread(spent.wall for spent in calls["set-up"])["median"],
        "run_seconds": measuring.spread(spent.wall for spent in calls["total"]),
        "shares": shares["wall"],
        "overhead": sum(shares["wall"].values()),
        "overhead_by_wall_clock": measuring.spread(walls),
        "round_alone_processor_seconds": measuring.spread(spent.processor for spent in alone),
        "processor_shares": shares["processor"],
        "processor_overhead": sum(shares["processor"].values()),
        "samples_a_round": samples_of(config),
        "others_share_of_cores": others.share,
    }


def _whole(calls: list[Spent], clock: str) -> float:
    """Give what all calls took, had each taken what the median one did."""
    return measuring.spread(getattr(spent, clock) for spent in calls)["median"] * len(calls)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the cases that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=None, help="play so many instead of the case's own")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--smallest", action="store_true", help="two rounds of three clients, once: a trial")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--clock", choices=list(measuring.CLOCKS), default="wall", help="which times the page shows")
    parser.add_argument("--add", action="store_true", help="keep the file's rows that are not measured again")
    args = parser.parse_args(argv)
    if args.smallest:
        args.repeats, args.threads = 1, 1
    keep_freed_memory()  # as the command line does
    torch.set_num_threads(args.threads)
    rows = measuring.kept(args.json, "case", args.cases) if args.add else []
    result = {"command": "benchmarks/overhead.py", **measuring.facts(), "reach": REACH, "clock": args.clock}
    result["rows"] = rows
    head = ("case", "method", "round ms", "overhead", *SHARES, "processor", "by clock")
    print(("{:<12}{:<8}" + "{:>11}" * (len(head) - 2)).format(*head))
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.cases:
            case = CASES[name]
            if args.smallest:
                case = Case(3, case.model, 2, images=7 if case.images else 0, scarcity=5)
            if args.rounds:
                case = dataclasses.replace(case, rounds=args.rounds)
            for method in args.methods:
                row = measure(name, case, method, args.repeats, args.threads, Path(temporary))
                rows.append(row)
                rows.sort(key=lambda known: list(CASES).index(known["case"]))
                parts = (row["overhead"], *row["shares"].values(), row["processor_overhead"])
                parts = (*parts, row["overhead_by_wall_clock"]["median"])
                line = f"{name:<12}{method:<8}{row['round_alone_seconds']['median'] * 1e3:>11.1f}"
                print(line + "".join(f"{part:>11.1%}" for part in parts), flush=True)
                measuring.write(args.json, result)


if __name__ == "__main__":
    main()
