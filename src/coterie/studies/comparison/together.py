"""Which runs of a study play together, and playing them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Hashable, Sequence

from coterie.config import ExperimentConfig
from coterie.errors import CoterieError, Diverged, Interrupted
from coterie.memory import free_memory, gpu_memory
from coterie.runs.experiment import threads
from coterie.simulation.processes import OneProcess
from coterie.studies.comparison.plan import PlannedRun
from coterie.studies.comparison.workers import EndedRun, RoundCallback, run_in_turn
from coterie.studies.joint import PARTIES, Common, Meeting, Seat

WIDEST = 64
"""Runs that play together at most; on a GPU, to which more rows are hardly more work, four times as many."""

_SHARE = 0.6  # of the memory that is free, for the runs of a meeting
_COPIES = 3  # of the clients' states that a run may have at a time: its own, the server's, and those of a round
_ROWS = 16  # times its parameters that a row takes while it is trained, with gradients and activations

JointFunction = Callable[..., None]
"""Plays one run to its end: given the run, a watcher and, as ``processes``, what it plays in."""


def can_join(config: ExperimentConfig) -> Hashable:
    """Give what runs must have in common to play together; ``None`` for one that plays by itself."""
    if config.engine != "batched" or config.convolution == "measured" or config.class_weights is not None:
        return None
    return (
        (config.data, config.model, config.local, config.buffers, config.loss, tuple(config.metrics)),
        (config.device, config.dtype, config.precision, config.kernel, config.convolution, config.chunk),
        (config.compile, config.threads),
    )


def joined(runs: Sequence[PlannedRun]) -> list[list[PlannedRun]]:
    """Group runs that may play together, in the order of the first of each."""
    groups: dict[Hashable, list[PlannedRun]] = {}
    for run in runs:
        key = can_join(run.config)
        groups.setdefault(id(run) if key is None else key, []).append(run)
    return list(groups.values())


def play_group(
    play: JointFunction, common: Common | None, share: float, runs: Sequence[PlannedRun], round_ended: RoundCallback
) -> Generator[EndedRun, None, None]:
    """Play a group in this process: together, with what earlier groups have made, or a run by itself.

    ``share`` is the part of the free memory that it may count on, beside other processes.
    """
    if len(runs) == 1:
        return run_in_turn(runs, play, round_ended)
    return run_together(runs, play, round_ended, common, share)


def run_together(
    runs: Sequence[PlannedRun],
    play: JointFunction,
    round_ended: RoundCallback,
    common: Common | None = None,
    share: float = 1.0,
    parties: int = PARTIES,
) -> Generator[EndedRun, None, None]:
    """Play runs together, as many at a time as there is room for.

    A run that diverges or fails leaves the others alone: what it failed with is raised when they have ended.
    ``parties`` says how many take turns at a GPU: one is better where the GPU has more to do than the host.
    """
    waiting = list(runs)
    while waiting:
        yield from _one_meeting(waiting, play, round_ended, Meeting(common, parties), share)


def _one_meeting(
    waiting: list[PlannedRun], play: JointFunction, round_ended: RoundCallback, meeting: Meeting, share: float
) -> Generator[EndedRun, None, None]:
    seated = dict[Seat, PlannedRun]()
    failed: list[BaseException] = []
    with meeting.signals(), threads(waiting[0].config.threads), contextlib.closing(meeting):
        while waiting and meeting.stopped_by is None and _room(list(seated), share):
            run = waiting.pop(0)
            round_ended(run, 0, None)
            body = functools.partial(_body, play, run, functools.partial(round_ended, run))
            seated[meeting.seat(body)] = run
        for seat in meeting.play():
            error = seat.error
            if isinstance(error, Diverged):
                yield seated[seat], str(error)
            elif error is None or (isinstance(error, CoterieError) and not isinstance(error, Interrupted)):
                yield seated[seat], error
            else:
                failed.append(error)
    own = [error for error in failed if not isinstance(error, Interrupted | KeyboardInterrupt)]
    if own:
        raise own[0]
    if meeting.stopped_by is not None:
        raise Interrupted(None, 0, meeting.stopped_by)


def _body(
    play: JointFunction, run: PlannedRun, watch: Callable[[int, float | None], None], processes: OneProcess
) -> None:
    play(run, watch, processes=processes)


def _room(seats: Sequence[Seat], share: float) -> bool:
    """Say whether one more run has room, as large as the largest of those that are here."""
    if not seats:
        return True
    devices = [seat.engine.device for seat in seats if seat.engine is not None]
    on_gpu = bool(devices) and devices[0].type == "cuda"
    if len(seats) >= WIDEST * (4 if on_gpu else 1):
        return False
    largest = max(map(_bytes, seats))
    taken = sum(map(_bytes, seats)) - sum(seat.state_bytes for seat in seats)  # the states are there already
    free = int(share * free_memory())
    if on_gpu:
        free = min(free, gpu_memory(devices[0])[0])
    return taken + largest <= _SHARE * free


def _bytes(seat: Seat) -> int:
    """Estimate what a run takes while it plays."""
    if seat.engine is None or seat.ask is None:
        return 0
    start = seat.engine.problem.start
    return _COPIES * seat.state_bytes + _ROWS * len(seat.ask.clients) * start.numel() * start.element_size()
