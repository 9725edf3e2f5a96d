"""A whole study by the command line, from its start to its table: runs in turn, side by side, and together.

    python benchmarks/study.py --json benchmarks/results/study_cpu.json
    python benchmarks/study.py --device cuda --repeats 1 --brief --json benchmarks/results/study_h200.json
    python benchmarks/study.py --device cuda --repeats 1 --brief --states warm --parts study --ways together "in turn"

The study: FedAvg and FedACS, three learning rates, five seeds, so 30 runs in the shape of FedPG's Table 1: 10 of 100
clients, batches of 50, five local epochs. On a GPU its MLP of 199,210 parameters on Fashion-MNIST, 300 rounds; on the
CPU digits with an MLP of 15,010. Where Fashion-MNIST is not there (``--data-dir``), images of the same number and size
are drawn, which take as long.

Each way is one command in a process of its own, timed from start to exit. Cold: with empty folders for what is
compiled. Warm: again, with what the first has left. Ways are taken in turn, and ratios within a repeat. Processor time
of the command and all that it started is given beside it: on a machine that others use too it is the one to compare.
Two ways take ``--jobs`` processes, two on a CPU and three on a GPU.

With ``--states warm`` alone, on a GPU a study of two rounds leaves what is compiled beforehand.

Installing a library compiles its Python modules as a rule. Where they have not been, and Python may not keep what it
compiles, they are compiled once beforehand into a folder of this program: else every command would compile them again.

``--before FOLDER`` takes the same by an older version of the library as well, whose ``src`` the folder is: one from
before runs played together, which took them one after another.

Runs in turn take minutes. With ``--brief`` all of them are played cold alone; warm the runs of one seed are, and the
time of all is reckoned from them: the command's own time, which is that of the same command again when there is nothing
left to do, and so many times the rest. The result says so.

At the end runs of 60 rounds by themselves: which part of their time, warm, is not rounds. One is a run of the study; in
the other all clients take part, on a GPU with a CNN of 582,026 parameters. ``--parts`` leaves out one or the other;
with ``--add`` the file keeps what it has of the part that was left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

sys.path.insert(0, str(Path(__file__).parent))
import measuring

from coterie import data, randomness
from coterie.errors import CoterieError
from coterie.results import Result

BEFORE = "in turn, before"
WAYS = {
    BEFORE: [],
    "in turn": ["--apart", "--jobs", "1"],
    "side by side": ["--apart", "--jobs", "JOBS"],
    "together": ["--jobs", "1"],
    "together, side by side": ["--jobs", "JOBS"],
}
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
IMAGES = 70_000


@dataclass(frozen=True)
class Study:
    """What is compared."""

    model: str
    partition: str
    rounds: int
    seeds: int = 5
    rates: tuple[float, ...] = (0.01, 0.05, 0.1)
    clients: int = 100
    participation: float = 0.1
    run_rounds: int = 60
    larger: str = "mlp"  # the model of the run with all clients

    @property
    def runs(self) -> int:
        """How many runs it has."""
        return 2 * len(self.rates) * self.seeds

    def plan(self, source: str, device: str) -> dict[str, Any]:
        """Give what ``coterie compare`` takes."""
        return {
            "methods": ["fedavg", "fedacs"],
            "seeds": list(range(1, self.seeds + 1)),
            "grid": {"lr": list(self.rates)},
            **self._shared(source, device),
            "rounds": self.rounds,
        }

    def run(self, source: str, device: str, everyone: bool) -> dict[str, Any]:
        """Give what ``coterie run`` takes, of one run with fewer rounds."""
        shared = self._shared(source, device)
        settings = shared.pop("settings") | {"lr": self.rates[-1]}
        larger = {"participation": 1.0, "model": self.larger} if everyone else {}
        return {"algorithm": "fedavg", **shared, "settings": settings, "rounds": self.run_rounds, **larger}

    def _shared(self, source: str, device: str) -> dict[str, Any]:
        return {
            "data": source,
            "partition": self.partition,
            "clients": self.clients,
            "participation": self.participation,
            "model": self.model,
            "eval_every": 10,
            "device": device,
            "settings": {"local_epochs": 5, "batch_size": 50},
        }


CPU = Study("mlp", "dirichlet:0.5", 100)
GPU = Study("mlp_fedpg", "dirichlet:0.1,balanced=true,min_samples=50", 300, larger="cnn_pfllib")


@dataclass(frozen=True)
class Spent:
    """Seconds by the wall's clock, and of processor time of a command and all that it started."""

    wall: float
    processor: float

    @property
    def both(self) -> tuple[float, float]:
        """The one and the other."""
        return self.wall, self.processor


def commanded(words: Sequence[str], environment: Mapping[str, str], folder: Path) -> Spent:
    """Run ``coterie`` in a process of its own; what goes wrong is raised with what it said."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "coterie", *words],
        env=os.environ | dict(environment),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"coterie {' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return Spent(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def compile_modules(device: str, folder: Path) -> None:
    """Leave compiled Python modules for all commands to come, where an installation has left none."""
    if all(Path(importlib.util.cache_from_source(str(module.__file__))).exists() for module in (torch, data)):
        return
    os.environ |= {"PYTHONPYCACHEPREFIX": str(folder / "modules"), "PYTHONDONTWRITEBYTECODE": ""}
    words = ["compare", "fedavg", "fedacs", "--clients", "4", "--rounds", "1", "--device", device, "--quiet"]
    commanded([*words, "--out", "compiles"], caches_in(folder, "compiles"), folder)


def drawn(path: Path, count: int) -> str:
    """Write images like Fashion-MNIST's, 28x28 grey levels of ten classes, and give their name as a data set."""
    draw = randomness.stream(1, "benchmark images")
    prototypes, labels = draw.integers(256, size=(10, 28, 28)), np.arange(count) % 10
    noise = draw.integers(256, size=(count, 28, 28))
    np.savez(path, x=((prototypes[labels] + noise) // 2).astype(np.uint8), y=labels)
    return f"npz:{path}"


def source_for(device: str, data_dir: Path | None, folder: Path, images: int) -> tuple[str, str]:
    """Give the data set, and how it is called in the result."""
    if device == "cpu":
        return "digits", "digits"
    with contextlib.suppress(CoterieError):
        if not data.absent("fashion_mnist", data_dir):
            return "fashion_mnist:norm=fedpg", "fashion_mnist"
    return drawn(folder / "images.npz", images), "drawn images of Fashion-MNIST's size"


class Commands:
    """The commands of a study, each in a process of its own.

    Parameters
    ----------
    study
        What is compared.
    jobs
        Processes of the ways that take several.
    source, device
        The data set, and where it is computed.
    folder
        Where all of it lies.
    before
        The ``src`` of an older version of the library, for the way that it takes.
    """

    def __init__(
        self, study: Study, jobs: int, source: str, device: str, folder: Path, before: Path | None = None
    ) -> None:
        self.study, self.device = study, device
        self._jobs, self._source, self._folder, self._before = jobs, source, folder, before

    def whole(self, way: str, caches: str, out: str) -> Spent:
        """Take a whole study."""
        return self._compare(self.study, way, caches, out)

    def reckoned(self, way: str, caches: str, out: str) -> Spent:
        """Reckon what a whole study takes from the runs of one seed."""
        part = replace(self.study, seeds=1)
        runs, idle = self._compare(part, way, caches, out), self._compare(part, way, caches, out)
        times = self.study.runs / part.runs
        return Spent(*(mine + times * (one - mine) for one, mine in zip(runs.both, idle.both, strict=True)))

    def warm_up(self, way: str, caches: str) -> None:
        """Leave what is compiled, by a study of one seed and two rounds."""
        self._compare(replace(self.study, seeds=1, rounds=2), way, caches, f"{caches}-warm-up")

    def _compare(self, study: Study, way: str, caches: str, out: str) -> Spent:
        plan = self._folder / f"plan-{study.seeds}-{study.rounds}.yaml"
        plan.write_text(yaml.safe_dump(study.plan(self._source, self.device)), encoding="utf-8")
        options = [str(self._jobs) if word == "JOBS" else word for word in WAYS[way]]
        words = ["compare", plan.name, *options, "--out", out, "--quiet"]
        environment = caches_in(self._folder, caches)
        if way == BEFORE:
            # In front of all that is on the path already, the version of this program's own library among it.
            paths = [str(self._before), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        return commanded(words, environment, self._folder)


def caches_in(folder: Path, name: str) -> dict[str, str]:
    """Give the folders for what is compiled, as the environment has them."""
    return {each: str(folder / f"{name}-{each}") for each in CACHES}


def studies(
    commands: Commands, ways: Sequence[str], states: Sequence[str], repeats: int, brief: bool, folder: Path
) -> dict[str, Any]:
    """Take each way cold and warm, in turn; make sure that all end with the same table but for rounding."""
    study = commands.study
    spent: dict[str, dict[str, list[Spent]]] = {way: {state: [] for state in states} for way in ways}
    scores: dict[str, dict[str, float]] = {}
    in_turn = {"in turn", BEFORE} & set(ways)
    reckoned = [state for state in states if state == "warm"] if brief and in_turn else []
    for repeat in range(repeats):
        for state in states:
            for way in ways:
                name = f"{way}-{repeat}".replace(", ", "-").replace(" ", "-")
                if "cold" not in states and commands.device != "cpu":
                    commands.warm_up(way, name)
                part = way in ("in turn", BEFORE) and state in reckoned
                found = (commands.reckoned if part else commands.whole)(way, name, f"{name}-{state}")
                spent[way][state].append(found)
                if not part:
                    scores[way] = _scores(folder / f"{name}-{state}")
                said = ", reckoned from the runs of one seed" if part else ""
                print(f"{way:<24}{state:<5}{found.wall:>8.1f} s, {found.processor:.1f} of processors{said}", flush=True)
    return {
        "runs": study.runs,
        "rounds": study.rounds,
        "clients": study.clients,
        "participation": study.participation,
        "model": study.model,
        "in_turn_reckoned": reckoned,
        "seconds": _spreads(spent, "wall"),
        "processor_seconds": _spreads(spent, "processor"),
        "times_as_fast": _ratios(spent, "wall"),
        "times_as_fast_as_before": _ratios(spent, "wall", BEFORE),
        "times_as_little_processor": _ratios(spent, "processor"),
        "scores_apart": _apart(scores),
    }


def _scores(out: Path) -> dict[str, float]:
    """Read what each run ended with."""
    found = {}
    for path in sorted((out / "runs").iterdir()):
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
        models = [summary[model] for model in ("personal", "global") if summary.get(model)]
        found[path.name] = float(models[0]["final"]["mean"])
    return found


def _apart(scores: dict[str, dict[str, float]]) -> float:
    """Say how far the same run's score lies apart between ways, at most."""
    first, *others = scores.values()
    return max((abs(first[run] - other[run]) for other in others for run in first), default=0.0)


def _spreads(spent: dict[str, dict[str, list[Spent]]], clock: str) -> dict[str, dict[str, dict[str, float]]]:
    return {
        way: {state: measuring.spread(getattr(each, clock) for each in taken) for state, taken in states.items()}
        for way, states in spent.items()
    }


def _ratios(
    spent: dict[str, dict[str, list[Spent]]], clock: str, reference: str = "in turn"
) -> dict[str, dict[str, dict[str, float]]]:
    """Say how many times as fast each way is as one of them, repeat by repeat."""
    base = spent.get(reference)
    if base is None:
        return {}
    return {
        way: {
            state: measuring.spread(
                getattr(slow, clock) / getattr(fast, clock) for slow, fast in zip(base[state], taken, strict=True)
            )
            for state, taken in states.items()
        }
        for way, states in spent.items()
        if way not in (reference, BEFORE)
    }


def one_run(
    study: Study, everyone: bool, cold: bool, repeats: int, source: str, device: str, folder: Path
) -> dict[str, Any]:
    """Run one experiment by the command line, warm after a cold one; say which part of its time is not rounds.

    On a CPU nothing is compiled, so that where only warm ones are asked for there is no cold one.
    """
    name, config = "all" if everyone else "run", study.run(source, device, everyone)
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    whole, rounds, first = [], [], []
    for repeat in range(0 if cold or device != "cpu" else 1, repeats + 1):
        words = ["run", f"{name}.yaml", "--out", f"{name}-{repeat}", "--quiet"]
        taken = commanded(words, caches_in(folder, name), folder)
        timings = Result(folder / f"{name}-{repeat}").timings
        if repeat:  # the first one is cold
            whole.append(taken.wall)
            # The first round compiles, or loads what was compiled: that is no round's own time.
            own = timings["training"].iloc[1:]
            rounds.append(float(own.sum() * len(timings) / len(own)))
            first.append(float(timings["training"].iloc[0]))
    shares = [1 - part / all_of_it for part, all_of_it in zip(rounds, whole, strict=True)]
    found = {
        "rounds": study.run_rounds,
        "model": config["model"],
        "participation": config["participation"],
        "seconds": measuring.spread(whole),
        "rounds_seconds": measuring.spread(rounds),
        "first_round_seconds": measuring.spread(first),
        "overhead_seconds": measuring.spread(a - b for a, b in zip(whole, rounds, strict=True)),
        "share": measuring.spread(shares),
    }
    share, all_of_it = found["share"]["median"], found["seconds"]["median"]
    who = "all clients" if everyone else "as in the study"
    print(f"one run of {study.run_rounds} rounds, {who}: {all_of_it:.2f} s, {share:.0%} of it not rounds", flush=True)
    return found


def table(result: dict[str, Any]) -> list[str]:
    """Give the rows of the page's table: seconds of each way, processor time, and how many times as fast it is."""
    (row,) = result["rows"]
    lines = []
    for state in next(iter(row.get("seconds", {}).values()), ()):
        cells = [f"{row['data']}, {state}"]
        for way in WAYS:
            if way == BEFORE:
                continue  # the page says in words what came before
            if way not in row["seconds"]:
                cells.append("")
                continue
            wall, processor = (row[clock][way][state]["median"] for clock in ("seconds", "processor_seconds"))
            about = "about " if way in ("in turn", BEFORE) and state in row.get("in_turn_reckoned", ()) else ""
            text = f"{about}{wall:,.1f} s ({processor:,.1f})"
            if way in row["times_as_fast"]:
                text += f", {row['times_as_fast'][way][state]['median']:.1f} times as fast"
                text += f" ({row['times_as_little_processor'][way][state]['median']:.1f})"
            cells.append(text)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    known = [way for way in WAYS if way != BEFORE]
    parser.add_argument("--ways", nargs="+", choices=known, default=known)
    parser.add_argument("--before", type=Path, default=None, help="src of an older version, to be taken as well")
    parser.add_argument("--states", nargs="+", choices=["cold", "warm"], default=["cold", "warm"])
    parser.add_argument("--parts", nargs="+", choices=["study", "runs"], default=["study", "runs"])
    parser.add_argument("--rounds", type=int, default=None, help="fewer or more than the study's own")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=None, help="processes of the ways that take several")
    parser.add_argument("--brief", action="store_true", help="runs in turn: all of them in the first state alone")
    parser.add_argument("--data-dir", type=Path, default=None, help="where Fashion-MNIST lies")
    parser.add_argument("--smallest", action="store_true", help="next to no work, once: a trial")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--add", action="store_true", help="keep what the file has of the part that is left out")
    args = parser.parse_args(argv)
    study, images = GPU if args.device == "cuda" else CPU, IMAGES
    if args.rounds is not None:
        study = replace(study, rounds=args.rounds)
    if args.smallest:
        study, images = replace(study, rounds=2, seeds=1, rates=(0.05,), clients=10, run_rounds=3), 600
        args.repeats = 1
    if args.data_dir is not None:
        os.environ["COTERIE_DATA"] = str(args.data_dir.absolute())
    facts = measuring.facts(args.device)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        compile_modules(args.device, folder)
        source, called = source_for(args.device, args.data_dir, folder, images)
        ways = [way for way in args.ways if args.device == "cpu" or way != "side by side"]
        before = args.before and args.before.absolute()
        commands = Commands(study, args.jobs or (2 if args.device == "cpu" else 3), source, args.device, folder, before)
        row: dict[str, Any] = {"data": called}
        if "study" in args.parts:
            ways += [BEFORE] if before else []
            row |= studies(commands, ways, args.states, args.repeats, args.brief, folder)
        if "runs" in args.parts:
            place_of = (args.repeats, source, args.device, folder)
            row["one_run"] = one_run(study, False, "cold" in args.states, *place_of)
            row["run_with_all_clients"] = one_run(study, True, "cold" in args.states, *place_of)
    for way, states in row.get("times_as_fast_as_before", {}).items():
        said = ", ".join(f"{states[state]['median']:.2f} times as fast {state}" for state in states)
        print(f"{way} against the older version in turn: {said}")
    for way, states in row.get("times_as_fast", {}).items():
        said = ", ".join(
            f"{states[state]['median']:.2f} times as fast {state}"
            f" ({row['times_as_little_processor'][way][state]['median']:.2f} by processor time)"
            for state in states
        )
        print(f"{way} against in turn: {said}")
    if args.add and args.json is not None and args.json.exists():
        (before,) = json.loads(args.json.read_text(encoding="utf-8"))["rows"]
        row = before | row
    measuring.write(args.json, {"command": "benchmarks/study.py", **facts, "rows": [row]})


if __name__ == "__main__":
    main()
