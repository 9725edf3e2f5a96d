"""Runs in turn, or side by side, each in a process of its own."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from coterie.errors import ConfigError, CoterieError, Diverged, Interrupted
from coterie.memory import keep_freed_memory
from coterie.runs.experiment import Watcher
from coterie.studies.comparison.plan import PlannedRun

RunFunction = Callable[[PlannedRun, Watcher], None]
"""Plays one run to its end, telling the watcher after each round; must be picklable."""

RoundCallback = Callable[[PlannedRun, int, float | None], None]
"""Told after each round of each run: the run, the round, and the mean of the primary metric when it was evaluated."""


EndedRun = tuple[PlannedRun, str | None]
"""A run that ended, and the sentence that says how it diverged, ``None`` if it did not."""


@dataclass
class _Working:
    run: PlannedRun
    process: SpawnProcess
    ending: tuple[str, str] | None = None


def run_in_turn(
    runs: Sequence[PlannedRun], play: RunFunction, round_ended: RoundCallback
) -> Generator[EndedRun, None, None]:
    """Play runs one after the other, in this process."""
    for run in runs:
        round_ended(run, 0, None)
        try:
            play(run, functools.partial(round_ended, run))
        except Diverged as error:
            yield run, str(error)
        else:
            yield run, None


def run_side_by_side(
    runs: Sequence[PlannedRun], play: RunFunction, jobs: int, round_ended: RoundCallback
) -> Generator[EndedRun, None, None]:
    """Play runs, so many at a time.

    Whatever stops it, the processes are asked to stop, keep what they have done, and are waited for.
    """
    waiting, working = list(runs), dict[Connection, _Working]()
    threads = max(1, (os.cpu_count() or 1) // jobs)
    try:
        while waiting or working:
            while waiting and len(working) < jobs:
                run = waiting.pop(0)
                working.update([_begin(run, play, threads)])
                round_ended(run, 0, None)
            for ready in wait(list(working)):
                assert isinstance(ready, Connection)
                found = working[ready]
                try:
                    kind, *rest = ready.recv()
                except EOFError:
                    del working[ready]
                    ready.close()
                    found.process.join()
                    yield found.run, _ended(found)
                    continue
                if kind == "round":
                    round_ended(found.run, *rest)
                else:
                    found.ending = (kind, rest[0])
    finally:
        for found in working.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(found.process.pid or 0, signal.SIGTERM)
        for found in working.values():
            found.process.join()


def _begin(run: PlannedRun, play: RunFunction, threads: int) -> tuple[Connection, _Working]:
    # Not forked: a fork copies PyTorch's thread pool without its threads, and a CUDA context not at all.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(run, play, threads, theirs), daemon=True)
    process.start()
    theirs.close()
    return ours, _Working(run, process)


def _ended(found: _Working) -> str | None:
    """Give the sentence of a run that diverged; raise what else stopped it."""
    kind, sentence = found.ending or ("", f"the process of {found.run.name} ended with code {found.process.exitcode}")
    if kind == "finished":
        return None
    if kind == "diverged":
        return sentence
    if kind == "interrupted":
        raise KeyboardInterrupt
    raise ConfigError(sentence)


def _stop_with_parent() -> None:
    # Of a parent that was killed nothing comes, and a round may take long: whoever goes on finds the run still locked.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _work(run: PlannedRun, play: RunFunction, threads: int, tell: Any) -> None:
    # A group of its own: Ctrl-C reaches the parent alone, which asks its children once.
    os.setpgid(0, 0)
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    keep_freed_memory()
    if run.config.threads is None:
        torch.set_num_threads(threads)

    def watch(round_number: int, mean: float | None) -> None:
        tell.send(("round", round_number, mean))

    # Where the parent was killed, what is done is kept, and nobody is left to tell.
    with contextlib.suppress(BrokenPipeError):
        try:
            play(run, watch)
            tell.send(("finished", ""))
        except Diverged as error:
            tell.send(("diverged", str(error)))
        except (Interrupted, KeyboardInterrupt):
            tell.send(("interrupted", ""))
        except CoterieError as error:
            tell.send(("failed", f"{run.name}: {error}"))
