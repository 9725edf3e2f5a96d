"""Where the time of runs that play together goes on a GPU: a list of jobs, on drawn images, so that no data are needed.

    python benchmarks/profile_jobs.py benchmarks/jobs/flame_images.yaml together-mmnist [--rounds 4] [--top 40]

The runs of a process of the list (``run_recipes.py --list`` names them) are played for a few rounds, with their own
models, partitions and settings; images and labels are drawn, as many and as large as the data set's. It prints when
each round ended (every second one evaluates), and of the last but one, which does not, the kernels by their time.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))
import run_recipes

from coterie.data import cifar, medical_mnist, mnist
from coterie.data.dataset import Dataset
from coterie.errors import Interrupted
from coterie.randomness import torch_stream
from coterie.studies import recipes
from coterie.studies.comparison.plan import PlannedRun
from coterie.studies.comparison.runner import play_run
from coterie.studies.comparison.together import joined, run_together

DRAWN: dict[Any, tuple[int, int, tuple[int, ...], int]] = {
    mnist.Mnist: (70_000, 60_000, (1, 28, 28), 10),
    mnist.FashionMnist: (70_000, 60_000, (1, 28, 28), 10),
    cifar.Cifar10: (60_000, 50_000, (3, 32, 32), 10),
    cifar.Cifar100: (60_000, 50_000, (3, 32, 32), 100),
    medical_mnist.MedicalMnist: (58_954, 58_954, (1, 64, 64), 6),
}
"""Images, how many of them train, their shape in memory, and classes."""


def drawn(source: Any) -> Any:
    """Give a way to load a data set that draws it."""
    count, train, shape, classes = DRAWN[source]

    def load(self: Any, folder: Path, seed: int) -> Dataset:
        with torch_stream(1, "drawn images"):
            x = torch.randint(0, 256, (count, *shape), dtype=torch.uint8)
        grey = source is medical_mnist.MedicalMnist  # shown to models as three channels
        return Dataset(
            name=self.text(),
            x=x.expand(-1, 3, -1, -1) if grey else x,
            y=torch.arange(count) % classes,
            train_count=train,
            task="multiclass",
            classes=tuple(map(str, range(classes))),
            mean=(0.5,),
            std=(0.5,),
        )

    return load


def runs_of(jobs: Sequence[Any], rounds: int) -> list[PlannedRun]:
    """Give all runs of some jobs, made short."""
    found: list[PlannedRun] = []
    for job in jobs:
        over = {**job.over, "rounds": rounds, "eval_every": 2, "checkpoint_every": rounds}
        part = recipes.load(job.recipe).part(job.part)
        over = recipes.narrowed(part, job.methods, job.seeds, quick=job.quick, over=over)
        found += recipes.planned(part, quick=job.quick, over=over).runs
    return found


def told(found: profile, top: int) -> None:
    """Print kernels by their time, and how long the device worked at all."""
    events = [event for event in found.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA]
    spent: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for event in events:
        spent[event.name][0] += event.time_range.elapsed_us()
        spent[event.name][1] += 1
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    busy, end = 0.0, spans[0][0] if spans else 0.0
    for begin, until in spans:
        busy, end = busy + max(0.0, until - max(begin, end)), max(end, until)
    whole = end - spans[0][0] if spans else 0.0
    print(f"{len(events):,} launches, busy {busy / 1e6:.2f} of {whole / 1e6:.2f} s")
    for name, (us, count) in sorted(spent.items(), key=lambda each: -each[1][0])[:top]:
        print(f"{us / 1e3:9.1f} ms {count:7.0f}x {us / count:9.1f} us  {name[:100]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Play and profile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path, help="a list of jobs, as run_recipes.py takes it")
    parser.add_argument("process", help="which of its processes")
    parser.add_argument("--rounds", type=int, default=4, help="rounds to play, four or more")
    parser.add_argument("--top", type=int, default=40, help="kernels to print")
    args = parser.parse_args(arguments)
    jobs = [job for job in run_recipes.read_jobs(args.jobs) if job.recipe]
    mine = [job for job in jobs if args.process in (job.name, f"together-{job.together}")]
    if not mine or args.rounds < 4:
        names = ", ".join(sorted({f"together-{job.together}" if job.together else job.name for job in jobs}))
        parser.error(f"--rounds must be 4 or more, and the process one of {names}")
    for source in DRAWN:
        source.load = drawn(source)
    began, last, recording = time.monotonic(), 0, profile(activities=[ProfilerActivity.CUDA])
    with tempfile.TemporaryDirectory() as folder:

        def play_one(run: PlannedRun, watch: Any, processes: Any = None) -> None:
            play_run(Path(folder), None, (), run, watch, processes)

        def round_ended(run: PlannedRun, number: int, mean: float | None) -> None:
            nonlocal last
            if number <= last:
                return
            last = number
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            print(f"{time.monotonic() - began:7.1f} s  round {number}", flush=True)
            odd = args.rounds - 1 - args.rounds % 2  # the last one that does not evaluate
            if number == odd - 1 and torch.cuda.is_available():
                recording.start()
            elif number == odd and torch.cuda.is_available():
                recording.stop()

        (runs,) = joined(runs_of(mine, args.rounds))
        try:
            for run, found in run_together(runs, play_one, round_ended, parties=1):
                if found is not None:
                    print(f"{run.name}: {found}")
        except (Interrupted, KeyboardInterrupt):
            print("stopped: nothing is kept of a profile", file=sys.stderr)
            return 130
    if torch.cuda.is_available():
        told(recording, args.top)
        print(f"at most {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
