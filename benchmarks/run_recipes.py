"""Many recipes, and other commands, on one machine: so many processes at a time, a deadline, results gathered.

    python benchmarks/run_recipes.py JOBS.yaml --work WORK --out RESULTS --processes 14 --deadline 1100

A round of small models on a GPU is mostly work of the host, so that several processes with one thread each share the
GPU with gain. ``JOBS.yaml`` lists what is to be run::

    defaults: {device: cuda, precision: tf32}   # what every recipe's entry has, unless it says otherwise
    jobs:
      - recipe: flame-table3-label      # one job for each part,
        parts: [mnist, fmnist]          # of these, or of all that the recipe has,
        split: seeds                    # and for each seed, since it is long; or for each method, or [seeds, methods]
        methods: [FLAME, Ditto]         # of these methods only
        priority: 2                     # smaller is earlier; 5 by default
        needs: data/there               # it waits until this file is there
        together: images                # all of this name are one process, whose runs play together across recipes
      - recipe: flame-figure9
        over: {eval_every: 10}          # values over the plan's own, as of rounds, seeds or device
        quick: true                     # the recipe's quick version
      - name: board                     # any command; {work} and {python} stand for the folder and the interpreter
        command: ["{python}", -m, coterie, compare, plan.yaml, --out, "{work}/board"]
        files: ["{work}/board/table.md"]  # copied to RESULTS/board when it has ended, whatever way; patterns with *
        seconds: 120                    # how long it takes, about; of recipes it is taken from their rounds
        slots: 2                        # how many processes it is, 1 by default

``benchmarks/jobs/`` has lists for long verdicts. Within a priority the longest come first. A job that is finished is
not run again by the same command, and one that was stopped goes on; one that failed is tried once more when all others
have begun. Whenever a job has ended, the runs that its recipe has by then are put together and read:
``RESULTS/NAME.json`` and ``.md``, of the methods and seeds whose runs are all finished, and likewise of every recipe
that is read off the same runs. Where some methods have more seeds than others, these methods alone are read. At the
deadline what is running is stopped, and what is finished is read once more. ``WORK/log.txt``, copied to ``RESULTS``,
says what became of each job; ``WORK/jobs/NAME.txt`` is what it printed.

A process takes 10 to 30 seconds until its first round. With ``--early`` the next one begins when jobs that are played
together are in the last tenth of their rounds, so that the GPU does not wait.

Each process is told its share of the GPU's memory (``COTERIE_GPU_SHARE``). Where CUDA's multi-process service is
installed and works, the processes share the GPU through it (``--no-mps``: not). More processes than about six on one
GPU were slower than six.

A checkpoint is only written at the end of a run (unless ``over`` says otherwise) and removed at once when the run is
finished: those of thousands of runs would fill the disk, and what is read off a run does not need them.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from coterie.errors import ConfigError, CoterieError, Interrupted, UnknownName
from coterie.memory import GPU_SHARE, gpu_share, keep_freed_memory
from coterie.results import Result
from coterie.runs.storage.atomic_files import read_json, write_json, write_text
from coterie.studies import recipes
from coterie.studies.comparison.plan import PlannedRun
from coterie.studies.comparison.plan_folder import DIVERGED, locked, sentences
from coterie.studies.comparison.runner import is_finished, play_run
from coterie.studies.comparison.together import joined, run_together
from coterie.studies.recipes.registry import BOOK
from coterie.studies.recipes.run_numbers import numbers_of_runs
from coterie.studies.recipes.runner import chosen_parts

HOST = 0.01  # seconds of a process's time that a run's round takes, about
STARTING = 10.0  # and a process until its first round
ENTRY = {"recipe", "parts", "methods", "split", "over", "quick", "priority", "seconds", "needs", "together"}
ENTRY |= {"device", "precision"}
COMMAND = {"name", "command", "files", "priority", "seconds", "slots", "needs"}
LENT = 0.9  # of a GPU's memory, to all processes together: the rest is for what each takes merely to be there
LAST = 0.9  # of the rounds, from where a process is ending
READERS = 4  # processes that gather at a time; they are not counted, for they compute nothing on the GPU
MPS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Job:
    """One process: a part of a recipe with some of its seeds, or a command."""

    name: str
    priority: int = 5
    seconds: float = 60.0
    slots: int = 1
    needs: str = ""
    together: str = ""
    recipe: str = ""
    part: str = ""
    quick: bool = False
    over: Mapping[str, Any] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    command: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        """What is gathered together: a recipe's name, with its quick version apart."""
        return f"{self.recipe}-quick" if self.quick else self.recipe


def read_jobs(*paths: Path) -> list[Job]:
    """Read lists of jobs."""
    found: list[Job] = []
    for path in paths:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict) or not isinstance(values.get("jobs"), list):
            raise ConfigError(f"{path} must have a list of jobs under `jobs`")
        common = values.get("defaults", {})
        for entry in values["jobs"]:
            found += list(_of_recipe({**common, **entry}) if "recipe" in entry else [_command(entry)])
    names = [job.name for job in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"the jobs {', '.join(twice)} are there twice: give each once")
    return found


def _command(entry: Mapping[str, Any]) -> Job:
    unknown = sorted(set(entry) - COMMAND)
    if unknown or "name" not in entry or "command" not in entry:
        raise ConfigError(f"a job has {', '.join(unknown or entry)}, but must have recipe, or name and command")
    own = {name: tuple(map(str, entry.get(name, ()))) for name in ("command", "files")}
    return Job(**{**entry, **own})


def _of_recipe(entry: Mapping[str, Any]) -> Iterator[Job]:
    unknown = sorted(set(entry) - ENTRY)
    if unknown:
        raise ConfigError(f"the job of {entry['recipe']} has {', '.join(unknown)}, but may have {', '.join(ENTRY)}")
    recipe, quick = recipes.load(entry["recipe"]), bool(entry.get("quick"))
    over = {name: entry[name] for name in ("device", "precision") if name in entry} | dict(entry.get("over", {}))
    for part in chosen_parts(recipe, entry.get("parts", ()), quick):
        plan = recipes.planned(part, quick=quick, over=over)
        rounds = plan.runs[0].config.rounds
        methods = tuple(entry.get("methods", plan.methods))
        for method in methods:
            if method not in plan.methods:
                raise UnknownName(f"method of {recipe.name} called", method, plan.methods)
        split = entry.get("split", ())
        split = {split} if isinstance(split, str) else set(split)
        if not split <= {"seeds", "methods"}:
            raise ConfigError(f"split of {recipe.name} is {', '.join(split)}, but may be seeds, methods or both")
        for seeds in [(seed,) for seed in plan.seeds] if "seeds" in split else [tuple(plan.seeds)]:
            for some in [(method,) for method in methods] if "methods" in split else [methods]:
                runs = [run for run in plan.runs if run.method in some and run.config.seed in seeds]
                yield Job(
                    _job_name(recipe.name, quick, part.name, some if some != plan.methods else (), seeds, plan.seeds),
                    int(entry.get("priority", 5)),
                    float(entry.get("seconds", STARTING + HOST * len(runs) * rounds)),
                    needs=str(entry.get("needs", "")),
                    together=str(entry.get("together", "")),
                    recipe=recipe.name,
                    part=part.name,
                    quick=quick,
                    over={"checkpoint_every": rounds, **over},
                    methods=some,
                    seeds=seeds,
                )


def _job_name(
    recipe: str, quick: bool, part: str, methods: Sequence[str], seeds: Sequence[int], all_seeds: Sequence[int]
) -> str:
    words = [recipe, *(["quick"] if quick else []), part, *methods]
    return re.sub(r"[^\w.-]+", "_", "-".join([*words, *(map(str, seeds) if len(seeds) < len(all_seeds) else ())]))


# ------------------------------------------------------------------------------------------------------ in a process


def play(job: Job, work: Path) -> int:
    """Run one job of a recipe in this process."""
    keep_freed_memory()
    recipe = recipes.load(job.recipe)
    outcome = recipes.run_recipe(
        recipe,
        work / "jobs" / job.name,
        quick=job.quick,
        parts=[job.part],
        over=recipes.narrowed(recipe.part(job.part), job.methods, job.seeds, quick=job.quick, over=job.over),
        progress=False,
        tell=print,
    )
    print("\n".join(outcome.failures))
    return 1 if outcome.failures else 0


def play_together(jobs: Sequence[Job], work: Path) -> int:
    """Play the runs of several jobs of recipes as those of one comparison, each in its own job's folder."""
    keep_freed_memory()
    homes: dict[int, Path] = {}
    left: list[PlannedRun] = []
    with contextlib.ExitStack() as held:
        for job in jobs:
            part = recipes.load(job.recipe).part(job.part)
            over = recipes.narrowed(part, job.methods, job.seeds, quick=job.quick, over=job.over)
            plan, folder = recipes.planned(part, quick=job.quick, over=over), work / "jobs" / job.name / job.part
            held.enter_context(locked(plan.plain(), folder, may_grow=True))
            diverged = sentences(folder / DIVERGED)
            mine = [run for run in plan.runs if run.name not in diverged and not is_finished(folder, run)]
            left += mine
            homes |= {id(run): folder for run in mine}
        began, told, groups = time.monotonic(), 0, joined(left)

        def play_one(run: PlannedRun, watch: Any, processes: Any = None) -> None:
            play_run(homes[id(run)], None, (), run, watch, processes)

        def round_ended(run: PlannedRun, number: int, mean: float | None) -> None:
            nonlocal told
            if number > told:
                told = number
                print(f"{time.monotonic() - began:7.1f} s  round {number}", flush=True)
                if group is groups[-1] and number >= LAST * run.config.rounds:
                    _ending(work, _leader(jobs[0])).touch()

        for group in groups:
            told = 0
            print(f"{time.monotonic() - began:7.1f} s  {len(group)} runs together", flush=True)
            # The GPU has most to do: two parties would double its steps of few rows, which take as long as others.
            try:
                for run, found in run_together(group, play_one, round_ended, parties=1):
                    if isinstance(found, str):
                        place = homes[id(run)] / DIVERGED
                        write_json(place, {**sentences(place), run.name: found})
                    elif found is not None:
                        print(f"{run.name} failed: {found}", flush=True)
            except (Interrupted, KeyboardInterrupt):
                print("stopped; all that is done is kept: the same command goes on", flush=True)
                return 130
    return max(_concluded(job, work) for job in jobs)


def _concluded(job: Job, work: Path) -> int:
    """Read what a job's runs have found, and play those that failed once more."""
    try:
        return play(job, work)
    except CoterieError as error:
        print(f"{job.name}: {error}", flush=True)
        return 1


def gather(jobs: Sequence[Job], work: Path, out: Path) -> int:
    """Put the runs of a recipe's jobs together, and write what is read off those seeds that are complete."""
    folder = work / "gathered" / jobs[0].group
    ended_runs = {part: _ended([job for job in jobs if job.part == part], work) for part in _parts(jobs)}
    over = {part: _complete(jobs[0], part, runs, folder / part) for part, runs in ended_runs.items()}
    for name in [jobs[0].recipe, *_read_off(jobs[0].recipe)]:
        recipe = recipes.load(name)
        like = {part.name: _likes(name, part) for part in recipe.parts}
        ended: list[recipes.PartOutcome] = []
        for part in recipe.parts:
            source = like[part.name].rpartition("/")[2]
            if like[part.name].startswith(f"{jobs[0].recipe}/") and over.get(source):
                where = _beside(folder, source, part.name)
                found = recipes.run_recipe(
                    recipe, where, quick=jobs[0].quick, parts=[part.name], over=over[source], progress=False
                )
                plan = recipes.planned(part, quick=jobs[0].quick, over=jobs[0].over)
                results = {
                    run: Result(place) if isinstance(place, Path) else None for run, place in ended_runs[source].items()
                }
                ended += [replace(each, runs=numbers_of_runs(part, plan, results)) for each in found.parts]
                print("\n".join(found.failures))
        if not ended:
            print(f"no seed of {name} is complete")
            continue
        verdicts = recipes.judge(recipe, ended, jobs[0].quick)
        outcome = recipes.RecipeOutcome(recipe, jobs[0].quick, tuple(ended), tuple(verdicts))
        stem = f"{name}-quick" if jobs[0].quick else name
        write_json(out / f"{stem}.json", recipes.plain(outcome))
        write_text(out / f"{stem}.md", recipes.markdown(outcome))
        print(f"{stem}: {', '.join(f'{part.part.name} {len(part.plan.seeds)} seeds' for part in ended)}")
    return 0


def _parts(jobs: Sequence[Job]) -> list[str]:
    return list(dict.fromkeys(job.part for job in jobs))


def _likes(name: str, part: recipes.RecipePart) -> str:
    """Say whose runs a part is read off, its own if no other's."""
    return part.like or f"{name}/{part.name}"


def _read_off(name: str) -> list[str]:
    """Name the recipes that are read off another's runs."""
    return sorted(path.stem for path in BOOK.glob("*.yaml") if f"like: {name}/" in path.read_text(encoding="utf-8"))


def _beside(folder: Path, source: str, part: str) -> Path:
    """Give the folder in which a part finds its runs under its own name."""
    if source == part:
        return folder
    other = folder / f".{part}"
    other.mkdir(parents=True, exist_ok=True)
    if not (other / part).exists():
        (other / part).symlink_to(folder / source)
    return other


def _ended(jobs: Sequence[Job], work: Path) -> dict[str, Path | str]:
    """Give the folders of the runs of a part that have ended, by name, or what is said of one that diverged."""
    ended: dict[str, Path | str] = {}
    for job in jobs:
        place = work / "jobs" / job.name / job.part
        ended |= read_json(place / "diverged.json") if (place / "diverged.json").exists() else {}
        ended |= {path.parent.name: path.parent for path in place.glob("runs/*/summary.json")}
    return ended


def _complete(job: Job, name: str, ended: Mapping[str, Path | str], folder: Path) -> dict[str, Any]:
    """Lay out the finished runs of a part as one comparison; give what stands over its plan, nothing if none is."""
    part = recipes.load(job.recipe).part(name)
    methods, seeds = recipes.largest_block(recipes.planned(part, quick=job.quick, over=job.over), ended)
    if not methods:
        return {}
    over = recipes.narrowed(part, methods, seeds, quick=job.quick, over=job.over)
    plan = recipes.planned(part, quick=job.quick, over=over)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "runs").mkdir(parents=True)
    found = {run.name: ended[run.name] for run in plan.runs}
    for run, place in found.items():
        if isinstance(place, Path):
            (folder / "runs" / run).symlink_to(place.resolve())
    write_json(folder / "diverged.json", {run: why for run, why in found.items() if isinstance(why, str)})
    write_text(folder / "plan.yaml", yaml.safe_dump(plan.plain(), sort_keys=False, allow_unicode=True))
    return over


# ------------------------------------------------------------------------------------------------------- side by side


class Driver:
    """Starts jobs, so many at a time, and gathers what they leave."""

    def __init__(
        self, jobs: Sequence[Job], work: Path, out: Path, processes: int, deadline: float, grace: float, early: bool
    ):
        self.jobs, self.work, self.out = list(jobs), work, out
        self.slots, self.grace, self.early = processes, grace, early
        self.began = time.monotonic()
        self.deadline = self.began + deadline
        self.running: dict[str, tuple[subprocess.Popen[bytes], int, float]] = {}
        self.stopping = False
        self._pruned: set[Path] = set()
        self._unread: set[str] = set()  # recipes with runs that have not been gathered
        self._wanted: set[str] = set()  # and those to be gathered now
        self._told = self._looked = self.began
        for folder in (work / "jobs", out):
            folder.mkdir(parents=True, exist_ok=True)
        write_json(work / "jobs.json", {"jobs": [asdict(job) for job in jobs]})

    def log(self, sentence: str) -> None:
        """Write a line of the log."""
        line = f"{time.strftime('%H:%M:%S')} {time.monotonic() - self.began:7.1f} s  {sentence}"
        print(line, flush=True)
        with (self.work / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        shutil.copyfile(self.work / "log.txt", self.out / "log.txt")

    def done(self, job: Job) -> Path:
        """Give the file that says that a job is finished."""
        return self.work / "jobs" / f"{job.name}.done"

    def run(self) -> int:
        """Run all that is left; give how many jobs failed or were stopped."""
        processes = _processes(self.jobs)
        waiting = [job for job in processes if not self.done(job).exists()]
        known = {job.name: job for job in processes}
        self._unread = {job.group for job in self.jobs if job.recipe and self._has_runs(job)}
        lost: dict[str, str] = {}
        again: set[str] = set()
        self.log(f"{len(processes)} jobs, {len(processes) - len(waiting)} of them finished, {self.slots} at a time")
        while (waiting or self.running or self._wanted) and not self.stopping and time.monotonic() < self.deadline:
            while (job := self._next(waiting)) is not None:
                waiting.remove(job)
                self._start(job)
            time.sleep(0.2)
            self._prune()
            self._tell(len(waiting))
            for name in self._ended():
                code = self._close(name)
                job = known.get(name)
                if job is None:
                    continue
                if code:
                    self.log(f"{name} failed with {code}: {self._tail(name)}")
                    if name not in again:
                        again.add(name)
                        waiting.append(job)
                        continue
                    lost[name] = f"failed with {code}"
                else:
                    self.done(job).touch()
                self._copy(job)
                self._unread |= {each.group for each in self._played_by(job)}
                self._wanted |= {each.group for each in self._played_by(job)}
            self._gather(self._wanted)
        stopped = [name for name in self.running if name in known]
        self._stop(stopped)
        for name in stopped:
            lost[name] = "was stopped"
            self._copy(known[name])
        lost |= {job.name: "failed" if job.name in again else "was not begun" for job in waiting}
        played = [job for name in stopped for job in self._played_by(known[name])]
        self._unread |= {job.group for job in played if self._has_runs(job)}
        while self._unread or self.running:
            self._gather(self._unread)
            time.sleep(0.2)
            for name in self._ended():
                self._close(name)
        for name, why in lost.items():
            self.log(f"{name} {why}")
        self.log(f"{len(processes) - len(lost)} of {len(processes)} jobs are finished")
        return len(lost)

    def _next(self, waiting: Sequence[Job]) -> Job | None:
        """Give the first job that has what it needs, if there is room for it."""
        job = next((job for job in waiting if all(Path(name).exists() for name in self._needs(job))), None)
        room = job is not None and (self._taken() == 0 or self._taken() + job.slots <= self.slots)
        return job if room else None

    def _needs(self, job: Job) -> set[str]:
        return {each.needs for each in (job, *self._played_by(job)) if each.needs}

    def _played_by(self, job: Job) -> list[Job]:
        """Give the jobs of recipes that a process plays."""
        return [job] if job.recipe else [each for each in self.jobs if each.together and _leader(each) == job.name]

    def _taken(self) -> int:
        ending = {name for name in self.running if self.early and _ending(self.work, name).exists()}
        return sum(slots for name, (_, slots, _) in self.running.items() if name not in ending)

    def _start(self, job: Job) -> None:
        if job.recipe:
            command = [sys.executable, __file__, "--play", job.name, "--work", str(self.work)]
        else:
            command = [self._filled(word) for word in job.command]
        self._begin(job.name, command, job.slots)
        self.log(f"{job.name} begins, about {job.seconds:.0f} s")

    def _filled(self, word: str) -> str:
        return word.replace("{work}", str(self.work)).replace("{python}", sys.executable)

    def _gather(self, groups: set[str]) -> None:
        """Begin to gather recipes, each of them once at a time."""
        for group in sorted(groups):
            reading = sum(name.startswith("gather-") for name in self.running)
            if f"gather-{group}" not in self.running and reading < READERS:
                self._unread.discard(group)
                self._wanted.discard(group)
                command = [sys.executable, __file__, "--gather", group, "--work", str(self.work)]
                self._begin(f"gather-{group}", [*command, "--out", str(self.out)], 0)

    def _begin(self, name: str, command: Sequence[str], slots: int) -> None:
        _ending(self.work, name).unlink(missing_ok=True)
        own = dict.fromkeys(THREADS, "1")
        own[GPU_SHARE] = repr(LENT * gpu_share() * min(1.0, max(1, slots) / self.slots))
        with (self.work / "jobs" / f"{name}.txt").open("ab") as printed:
            process = subprocess.Popen(
                command, stdout=printed, stderr=subprocess.STDOUT, env={**os.environ, **own}, start_new_session=True
            )
        self.running[name] = (process, slots, time.monotonic())

    def _ended(self) -> list[str]:
        return [name for name, (process, _, _) in self.running.items() if process.poll() is not None]

    def _close(self, name: str) -> int:
        process, _, began = self.running.pop(name)
        code = process.wait()
        what = self._tail(name) if name.startswith("gather-") else "ended"
        self.log(f"{name}: {what}, {time.monotonic() - began:.1f} s")
        return code

    def _tail(self, name: str) -> str:
        path = self.work / "jobs" / f"{name}.txt"
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
        return " / ".join([line for line in lines if line.strip()][-3:])[-600:]

    def _copy(self, job: Job) -> None:
        for pattern in job.files:
            for found in glob.glob(self._filled(pattern)):
                (self.out / job.name).mkdir(parents=True, exist_ok=True)
                shutil.copy2(found, self.out / job.name)

    def _prune(self) -> None:
        """Remove the checkpoints of runs that are finished, now and then."""
        if time.monotonic() - self._looked < 2:
            return
        self._looked = time.monotonic()
        for summary in glob.iglob(f"{self.work}/jobs/*/*/runs/*/summary.json"):
            path = Path(summary).parent
            if path not in self._pruned:
                self._pruned.add(path)
                shutil.rmtree(path / "checkpoint", ignore_errors=True)

    def _tell(self, waiting: int) -> None:
        if time.monotonic() - self._told >= 30:
            self._told = time.monotonic()
            free = shutil.disk_usage(self.work).free / 2**30
            self.log(f"{len(self.running)} running, {waiting} waiting, {len(self._pruned)} runs, {free:.0f} GiB free")

    def _stop(self, names: Sequence[str]) -> None:
        if not names:
            return
        self.log(f"the time is up: {len(names)} jobs are stopped")
        for way, seconds in ((signal.SIGTERM, self.grace), (signal.SIGKILL, 5.0)):
            for name in names:
                process = self.running[name][0]
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, way)
            until = time.monotonic() + seconds
            while time.monotonic() < until and any(self.running[name][0].poll() is None for name in names):
                self._prune()
                time.sleep(0.2)
        for name in names:
            self.running.pop(name)

    def _has_runs(self, job: Job) -> bool:
        return any((self.work / "jobs" / job.name).glob("*/runs/*/summary.json"))

    def stop(self, number: int, frame: object) -> None:
        """Stop as at the deadline."""
        self.stopping = True


def _leader(job: Job) -> str:
    return f"together-{job.together}"


def _ending(work: Path, name: str) -> Path:
    """Give the file that says that a process is in its last rounds."""
    return work / "jobs" / f"{name}.ending"


def _processes(jobs: Sequence[Job]) -> list[Job]:
    """Give what is a process of its own, in the order in which they begin."""
    found = [*(job for job in jobs if not job.together), *_leaders(jobs)]
    return sorted(found, key=lambda job: (job.priority, -job.seconds))


def _leaders(jobs: Sequence[Job]) -> list[Job]:
    """Give a command for each group of jobs that are played together."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        if job.together:
            groups.setdefault(job.together, []).append(job)
    return [
        Job(
            _leader(some[0]),
            min(job.priority for job in some),
            sum(job.seconds for job in some),
            command=("{python}", __file__, "--play-together", name, "--work", "{work}"),
        )
        for name, some in groups.items()
    ]


@contextlib.contextmanager
def shared_gpu(work: Path, wanted: bool) -> Iterator[str]:
    """Let processes share the GPU through CUDA's multi-process service where it works; say whether they do."""
    control = shutil.which("nvidia-cuda-mps-control") if wanted else None
    if control is None:
        yield "without CUDA's multi-process service"
        return
    places = {name: str(work / f"mps{name[9:12].lower()}") for name in MPS}
    for place in places.values():
        Path(place).mkdir(parents=True, exist_ok=True)
    before = {name: os.environ.get(name) for name in places}
    os.environ.update(places)
    try:
        trial = "import torch; a = torch.ones(256, 256, device='cuda'); assert float((a @ a).sum()) == 256.0**3"
        begun = _works([control, "-d"], 20) and _works([sys.executable, "-c", trial], 60)
        if not begun:
            _restore(before)
        yield "with CUDA's multi-process service" if begun else "CUDA's multi-process service does not work here"
    finally:
        os.environ.update(places)
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run([control], input=b"quit\n", capture_output=True, timeout=20)
        _restore(before)


def _works(command: Sequence[str], seconds: float) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=seconds).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _restore(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _again(work: Path) -> list[Job]:
    tuples = ("methods", "seeds", "command", "files")
    found = json.loads((work / "jobs.json").read_text(encoding="utf-8"))["jobs"]
    return [Job(**{**values, **{name: tuple(values[name]) for name in tuples}}) for values in found]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a list of jobs, or, in a process of its own, one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path, nargs="*", help="lists of jobs")
    parser.add_argument("--work", type=Path, required=True, help="folder for runs and logs; the same goes on")
    parser.add_argument("--out", type=Path, help="folder for results; WORK/results by default")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="how many at a time")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds after which all is stopped")
    parser.add_argument("--grace", type=float, default=20.0, help="seconds that a stopped job has to keep its state")
    parser.add_argument("--early", action="store_true", help="begin when the process before is in its last rounds")
    parser.add_argument("--no-mps", action="store_true", help="do without CUDA's multi-process service")
    parser.add_argument("--list", action="store_true", help="print the jobs in their order, with estimates, and stop")
    parser.add_argument("--play", metavar="JOB", help=argparse.SUPPRESS)
    parser.add_argument("--play-together", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--gather", metavar="RECIPE", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    work = args.work.resolve()
    out = (args.out or work / "results").resolve()
    try:
        if args.play:
            return play(next(job for job in _again(work) if job.name == args.play), work)
        if args.play_together:
            return play_together([job for job in _again(work) if job.together == args.play_together], work)
        if args.gather:
            return gather([job for job in _again(work) if job.recipe and job.group == args.gather], work, out)
        if not args.jobs:
            parser.error("a list of jobs is needed")
        jobs = read_jobs(*args.jobs)
    except CoterieError as error:
        parser.error(str(error))
    if args.list:
        for job in _processes(jobs):
            print(f"{job.priority:3d} {job.seconds:8.0f} s  {job.name}")
        print(f"{sum(job.seconds * job.slots for job in jobs):,.0f} s in {len(_processes(jobs))} jobs")
        return 0
    driver = Driver(jobs, work, out, args.processes, args.deadline, args.grace, args.early)
    before = {number: signal.signal(number, driver.stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with shared_gpu(work, not args.no_mps) as said:
            driver.log(said)
            return 1 if driver.run() else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
