"""Runs in turn, or side by side in processes that live on from one to the next, each with its share of the cores.

What is handed out is a *group*: runs that one call plays to their end, one of them or several together.
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType

import torch

from coterie import signals
from coterie.data.registry import file_bytes
from coterie.errors import ConfigError, CoterieError, CoterieWarning, Diverged, Interrupted
from coterie.memory import GPU_SHARE, free_memory, gpu_share, keep_freed_memory
from coterie.runs.experiment import Watcher
from coterie.studies.comparison.plan import PlannedRun

RoundCallback = Callable[[PlannedRun, int, float | None], None]
"""Told after each round of each run: the run, the round, and the mean of the primary metric when it was evaluated."""

EndedRun = tuple[PlannedRun, str | CoterieError | None]
"""A run that ended, and the sentence that says how it diverged, or the error with which it failed, if it did."""

RunFunction = Callable[[PlannedRun, Watcher], None]
"""Plays one run to its end, telling the watcher after each round."""

Group = Sequence[PlannedRun]
"""Runs that are played by one call."""

GroupFunction = Callable[[Group, RoundCallback], Iterator[EndedRun]]
"""Plays a group to its end, and gives each run when it ends; must be picklable.

Of each run it tells a round 0 when the run begins, and then every round.
"""

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""What libraries read when they are imported: the pools that they then make cannot be made smaller."""

_STOPS = {signal.SIGINT, signal.SIGTERM}

# Clients' parts of rounds: with small models, of which more run a second than of any, eight seconds of a core, where
# another process costs four. Thirty runs on two cores took 7.1 s with two in place of 6.3 s where there were 9,000, 9.2
# in place of 10.3 where there were 20,100, and 21.6 in place of 32.3 where there were 90,000.
_WORTH_A_START = 15_000
_ROOM = 2 * 2**30  # bytes: a process with its libraries, a data set of the library's, and the models of some runs
_OF_A_FILE = 15  # times its bytes a table may take in each process that reads it: one in CSV took 5, in Parquet 12


@dataclass
class _Worker:
    process: SpawnProcess
    hand: Connection
    hear: Connection
    group: Group = ()

    def give(self, group: Group) -> None:
        self.group = group
        with contextlib.suppress(BrokenPipeError):  # it has died, which is found out where it is listened to
            self.hand.send(group)

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGTERM)


def run_in_turn(
    runs: Sequence[PlannedRun], play: RunFunction, round_ended: RoundCallback
) -> Generator[EndedRun, None, None]:
    """Play runs one after the other, in this process."""
    for run in runs:
        round_ended(run, 0, None)
        try:
            play(run, functools.partial(round_ended, run))
        except Interrupted:
            raise
        except Diverged as error:
            yield run, str(error)
        except CoterieError as error:
            yield run, error
        else:
            yield run, None


def play_groups(
    groups: Sequence[Group], play: GroupFunction, jobs: int, round_ended: RoundCallback
) -> Generator[EndedRun, None, None]:
    """Play groups one after the other in this process, or, with several jobs, so many at a time in others."""
    if jobs > 1:
        yield from _side_by_side(groups, play, jobs, round_ended)
        return
    for group in groups:
        yield from play(group, round_ended)


def _side_by_side(
    groups: Sequence[Group], play: GroupFunction, jobs: int, round_ended: RoundCallback
) -> Generator[EndedRun, None, None]:
    """Play groups, so many at a time, each of them in one process from its beginning to its end.

    Whatever stops it, the processes are asked to stop, keep what they have done, and are waited for.
    """
    waiting, workers = list(groups), dict[Connection, _Worker]()
    try:
        for _ in range(min(jobs, len(waiting))):
            worker = _begin(play, max(1, min(usable_cores() // jobs, torch.get_num_threads())), gpu_share() / jobs)
            workers[worker.hear] = worker
        for worker in workers.values():
            _next(worker, waiting)
        while any(worker.group for worker in workers.values()):
            for ready in wait(list(workers)):
                assert isinstance(ready, Connection)
                worker = workers[ready]
                try:
                    kind, *rest = ready.recv()
                except EOFError:
                    del workers[ready]
                    worker.process.join()
                    if worker.group:
                        raise ConfigError(_died(worker)) from None
                    continue
                if kind == "round":
                    place, number, mean = rest
                    round_ended(worker.group[place], number, mean)
                elif kind == "ended":
                    place, sentence, failed = rest
                    yield worker.group[place], ConfigError(sentence) if failed else sentence
                elif kind == "done":
                    _next(worker, waiting)
                elif kind == "interrupted":
                    raise KeyboardInterrupt
                else:
                    raise ConfigError(rest[0])
    finally:
        _end(workers.values())


def workers_that_gain(jobs: int, runs: int, devices: Collection[str]) -> int:
    """Say how many processes are of use: no more than there are runs, nor, on the CPU, than there are cores.

    Parameters
    ----------
    jobs
        How many were asked for.
    runs
        How many runs are to be played.
    devices
        The devices that the runs ask for, with ``"auto"`` for whichever there is.

    Returns
    -------
    int
        At least 1.
    """
    on_gpu = _on_gpu(devices)
    if jobs > 1 and on_gpu and not _served_by_mps():
        warnings.warn(
            f"jobs is {jobs}, but the runs share a GPU, on which one process that plays runs of one shape together is "
            "faster, unless NVIDIA's multi-process service is started: leave --jobs out",
            CoterieWarning,
            stacklevel=2,
        )
    return max(1, min(jobs, runs) if on_gpu else min(jobs, runs, usable_cores()))


def workers_that_pay(runs: Sequence[PlannedRun]) -> int:
    """Say how many processes to start where nothing was asked for.

    Each must have work enough to pay for its beginning, memory, and the threads that its runs are to have. What a
    client's part of a round takes is reckoned as for a small model: larger ones use several cores by themselves.

    Parameters
    ----------
    runs
        The runs that are to be played.

    Returns
    -------
    int
        At least 1; 1 where a GPU computes.
    """
    configs = [run.config for run in runs]
    if _on_gpu({config.device for config in configs}):
        return 1
    work = sum(config.rounds * max(1, round(config.participation * config.clients)) for config in configs)
    threads = max((config.threads or 1 for config in configs), default=1)
    room = _ROOM + _OF_A_FILE * max((file_bytes(name) for name in {config.data for config in configs}), default=0)
    return max(1, min(len(runs), usable_cores() // threads, work // _WORTH_A_START, free_memory() // room))


def _on_gpu(devices: Collection[str]) -> bool:
    if any(torch.device(name).type == "cuda" for name in devices if name != "auto"):
        return True
    return "auto" in devices and torch.cuda.is_available()


def _served_by_mps() -> bool:
    """Say whether NVIDIA's multi-process service lets several processes compute on a GPU at the same time."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps") / "control").exists()


def divided(groups: Sequence[Group], count: int) -> list[Group]:
    """Halve the largest groups until there are as many as there are processes, or runs.

    Runs of one seed stay together as far as may be: they have their clients in common, and some of what they compute.
    """
    found = list(groups)
    while len(found) < count:
        place = max(range(len(found)), key=lambda k: len(found[k]), default=None)
        if place is None or len(found[place]) < 2:
            break
        group = _by_seed(found[place])
        half = (len(group) + 1) // 2
        found[place : place + 1] = [group[:half], group[half:]]
    return found


def _by_seed(group: Group) -> Group:
    seeds = list(dict.fromkeys(run.config.seed for run in group))
    return sorted(group, key=lambda run: seeds.index(run.config.seed))


def usable_cores() -> int:
    """Say how many cores this process may use, which in a container may be far fewer than the machine has."""
    found = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    limit = Path("/sys/fs/cgroup/cpu.max")
    if limit.exists():
        quota, _, period = limit.read_text(encoding="utf-8").strip().partition(" ")
        if quota.isdigit() and period.isdigit():
            found = min(found, int(quota) / int(period))
    return max(1, math.floor(found))


# ------------------------------------------------------------------------------------------------ in the first process


def refuse_unguarded_program() -> None:
    """Refuse to start processes in one that was itself started so and, lacking a guard, reads the program again."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "processes for several jobs read the program again from its first line, and it asks for jobs there: put "
            'the call below if __name__ == "__main__", or leave jobs out'
        )


def _begin(play: GroupFunction, threads: int, share: float) -> _Worker:
    # Not forked: a fork copies PyTorch's thread pool without its threads, and a CUDA context not at all.
    context = multiprocessing.get_context("spawn")
    hear, tell = context.Pipe(duplex=False)
    take, hand = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(play, threads, take, tell), daemon=True)
    values = {**dict.fromkeys(_THREADS, str(threads)), "OMP_WAIT_POLICY": "PASSIVE", GPU_SHARE: repr(share)}
    with _environment(values), _held_back(_STOPS):
        process.start()
    tell.close()
    take.close()
    return _Worker(process, hand, hear)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Have what is started now find these variables."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _held_back(numbers: Collection[signal.Signals]) -> Iterator[None]:
    """Start a process whole, and no signal stops it until it is ready for it: Ctrl-C reaches all on a terminal."""
    came: list[int] = []
    with signals.handled(lambda number, _: came.append(number), *numbers):  # they may reach any thread of this process
        resource_tracker.ensure_running()  # now, because it lets through what is blocked while it starts
        before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for number in came[:1]:
        signal.raise_signal(number)


def _next(worker: _Worker, waiting: list[Group]) -> None:
    if not waiting:
        worker.group = ()
        worker.hand.close()  # it ends by itself, and gives its memory back while others still work
        return
    worker.give(waiting.pop(0))


def _died(worker: _Worker) -> str:
    code, names = worker.process.exitcode, ", ".join(run.name for run in worker.group)
    if code is not None and code < 0:
        why = " (for lack of memory?)" if -code == signal.SIGKILL else ""
        return f"the process that played {names} was ended by signal {-code}{why}: go on with the same command"
    return f"the process that played {names} ended with code {code}"


def _end(workers: Collection[_Worker]) -> None:
    """Ask all that still work to stop, and wait until they have; who asks again is heard, and waits."""
    working = [worker for worker in workers if worker.group]
    for worker in working:
        worker.stop()
    for worker in workers:
        while True:
            try:
                worker.hand.close()
                # What it still tells is heard: in a full pipe it would wait for ever.
                with contextlib.suppress(EOFError, OSError):
                    while True:
                        worker.hear.recv()
                worker.process.join()
                break
            except KeyboardInterrupt:
                for each in working:
                    each.stop()


# ---------------------------------------------------------------------------------------------- in the other processes


def _work(play: GroupFunction, threads: int, take: Connection, tell: Connection) -> None:
    # Where the parent was killed, what is done is kept, and nobody is left to tell.
    with contextlib.suppress(BrokenPipeError, EOFError):
        try:
            _be_stopped_by_the_parent_alone()
            keep_freed_memory()
            torch.set_num_threads(threads)  # a run whose configuration says another number sets it itself
            while True:
                _play(take.recv(), play, tell)
                tell.send(("done",))
        except (Interrupted, KeyboardInterrupt):
            tell.send(("interrupted",))


def _play(group: Group, play: GroupFunction, tell: Connection) -> None:
    places = {run.name: place for place, run in enumerate(group)}

    def watch(run: PlannedRun, round_number: int, mean: float | None) -> None:
        tell.send(("round", places[run.name], round_number, mean))

    try:
        for run, found in play(group, watch):
            sentence = None if found is None else str(found)
            tell.send(("ended", places[run.name], sentence, isinstance(found, CoterieError)))
    except Interrupted:
        raise
    except CoterieError as error:
        tell.send(("failed", f"{', '.join(places)}: {error}"))


def _be_stopped_by_the_parent_alone() -> None:
    # A group of its own: Ctrl-C reaches the parent alone, which asks its children once.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    threading.Thread(target=_stop_with_parent, daemon=True).start()


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _stop_with_parent() -> None:
    # Of a parent that was killed nothing comes, and a round may take long: whoever goes on finds the run still locked.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
