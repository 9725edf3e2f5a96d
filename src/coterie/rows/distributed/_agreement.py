"""How ranks agree: where one of them fails, all raise what it raised."""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from coterie.errors import CoterieError, Diverged, RankError
from coterie.rows._collectives import dividing

Result = TypeVar("Result")

_AGREED = "coterie ranks agreed"  # in what all ranks raise

LEFT: list[int] = []
"""This process's rank, once it has left a group: then it does not wait for the others when it ends."""


class ProcessAgreement:
    """Processes that agree before they go on, seen from one of them.

    Parameters
    ----------
    rank
        The number of this one, counted from 0.
    count
        How many there are.

    Attributes
    ----------
    apart
        Whether this rank computes something of its own just now, which may be stopped at any time.
    gone
        Whether it has left the others.
    asked_to_stop
        Says whether this rank was asked (by a signal) to stop what it does; looked at in :meth:`together`.
    """

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank, self.count = rank, count
        self.apart = self.gone = False
        self.asked_to_stop: Callable[[], bool] = lambda: False

    @property
    def leads(self) -> bool:
        """Whether this is the rank that writes and prints."""
        return self.rank == 0

    def together(self, work: Callable[[], Result], stoppable: bool = False) -> Result:
        """Do something that is this rank's own, and see that all ranks did theirs.

        ``work`` may not wait for other ranks. If it raises on one of them, all raise what it raised. If it is
        ``stoppable``, the user may interrupt it.
        """
        if self.count == 1:
            return work()
        done: list[Result] = []
        failure: BaseException | None = None
        try:
            with dividing(None):  # what a rank computes of its own, the others do not
                try:
                    self.apart = stoppable
                    if stoppable and self.asked_to_stop():
                        failure = KeyboardInterrupt()
                    else:
                        done.append(work())
                finally:
                    self.apart = False
        except BaseException as error:
            failure = error
        if self._worst(int(failure is not None)):
            self._raise(self._common(failure))
        return done[0]

    def _raise(self, error: BaseException) -> NoReturn:
        vars(error)[_AGREED] = True  # not kept here: with it would live all that it was raised from
        raise error

    def told(self, work: Callable[[], Result]) -> Result:
        """Let the first rank do something, and tell the others its result, which must be picklable."""
        mine = self.together(lambda: work() if self.leads else None)
        if self.count == 1:
            return mine  # type: ignore[return-value]
        result: Result = self.announce(mine)
        return result

    def announce(self, what: Any) -> Any:
        """Broadcast what the first rank gives, which must be picklable; what others give is not looked at."""
        found = [what]
        with self.reachable():
            dist.broadcast_object_list(found, 0)
        return found[0]

    def any(self, flag: bool) -> bool:
        """Say, alike on all ranks, whether a flag is set on any of them."""
        return bool(self._worst(int(flag)))

    def least(self, number: int) -> int:
        """Give, alike on all ranks, the least of their numbers."""
        return -self._worst(-number)

    def agree(self, complaint: str, numbers: Sequence[int]) -> None:
        """See that all ranks have the same numbers, of 64 bits each; if not, all raise a ``RankError``."""
        if self.count == 1 or not numbers:
            return
        mine = torch.tensor(list(numbers), dtype=torch.int64)
        both = torch.stack([mine, ~mine])  # the complement's largest is the least
        with self.reachable():
            dist.all_reduce(both, dist.ReduceOp.MAX)
        if not torch.equal(both[0], ~both[1]):
            self._raise(RankError(complaint))

    def agreed(self, error: BaseException) -> bool:
        """Say whether all ranks raise this: what was agreed on, or is raised on purpose by what all compute alike."""
        if self.gone:
            return False
        return _AGREED in vars(error) or (isinstance(error, CoterieError) and not isinstance(error, RankError))

    def leave(self) -> None:
        """Wait for no other rank from now on."""
        self.gone = True
        LEFT.append(self.rank)

    def _worst(self, number: int) -> int:
        if self.count == 1:
            return number
        found = torch.tensor([number])
        with self.reachable():
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def _common(self, failure: BaseException | None) -> BaseException:
        """Give what all ranks raise: a stop, models that diverged on any of them, or else the first one's failure."""
        found: list[Any] = [None] * self.count
        with self.reachable():
            dist.all_gather_object(found, _packed(failure))
        failures = {rank: _unpacked(each) for rank, each in enumerate(found) if each is not None}
        if any(isinstance(each, KeyboardInterrupt) for each in failures.values()):
            return KeyboardInterrupt()
        diverged = [each for each in failures.values() if isinstance(each, Diverged)]
        if len(diverged) == len(failures):
            return Diverged(diverged[0].round_number, [client for each in diverged for client in each.clients])
        rank = min(rank for rank, each in failures.items() if not isinstance(each, Diverged))
        if rank == self.rank and failure is not None:
            return failure
        return failures[rank]

    @contextlib.contextmanager
    def reachable(self) -> Iterator[None]:
        """Turn what PyTorch says of a connection that broke into a :class:`~coterie.errors.RankError`."""
        if self.gone:
            raise RankError("this rank of the sharded run has left the others")
        try:
            yield
        except RuntimeError as error:
            self.leave()
            # Without where in PyTorch it was found, and its advice.
            reason = re.sub(r"^(\[[^]]*\] *)+", "", " ".join(str(error).split())).split(". ")[0]
            raise RankError(
                f"rank {self.rank} of {self.count} cannot reach the others ({reason}): look at what the first that "
                "failed says, then `coterie resume` the run"
            ) from error


def _packed(failure: BaseException | None) -> bytes | None:
    if failure is None:
        return None
    try:
        packed = pickle.dumps((type(failure), failure.args, vars(failure)))
        pickle.loads(packed)
    except Exception:
        text = " ".join(f"{type(failure).__name__}: {failure}".split())
        packed = pickle.dumps((RuntimeError, (text,), {}))
    return packed


def _unpacked(packed: bytes) -> BaseException:
    kind, args, attributes = pickle.loads(packed)  # from a rank of this very run, which runs the same code
    # Not by its own constructor, which may take other things than the sentence that it makes of them.
    made: BaseException = kind.__new__(kind, *args)
    made.args = args
    vars(made).update(attributes)
    return made
