r"""Successive halving: many candidates for few rounds, then fewer for more. Pure functions of counts and rounds.

With K stages the candidates of stage k (from 0) play on to round :math:`\lceil R / \eta^{K-1-k} \rceil`, and one in
:math:`\eta` stays, so that every stage costs about as much as every other, where a grid would cost all candidates
times R. Three things are particular to a choice of methods:

- after the first stage every method keeps its best settings, however it stands: so early a learning rate can be told to
  be wrong, but a method that begins slowly cannot be told from a bad one;
- the last stage is between different methods, where there are any: two learning rates of one say nothing about how sure
  a method is;
- training alone is the reference, so its candidates compete among themselves and one is there to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

FEWEST_ROUNDS = 2
"""Rounds of the first stage at least."""

FINALISTS = 2
"""Candidates, besides training alone, with which the last stage is played at least."""


class Count(NamedTuple):
    """How many candidates play a stage.

    Parameters
    ----------
    federated
        Those that federate.
    alone
        Those that train alone.
    """

    federated: int
    alone: int


@dataclass(frozen=True)
class Ladder:
    """Stages with their candidates, and how far each is played.

    Parameters
    ----------
    counts
        How many candidates play each stage.
    eta
        One in so many stays.
    """

    counts: tuple[Count, ...]
    eta: int

    def next_rung(self, stage: int, played: int, last: int) -> int | None:
        """Say to which round a stage is played.

        Parameters
        ----------
        stage
            The stage's number, from 0.
        played
            Rounds that its candidates have played.
        last
            The round at which the last stage ends.

        Returns
        -------
        int or None
            The round; ``None`` if there is no such stage, or no round left for it.
        """
        left = len(self.counts) - 1 - stage
        if left < 0 or played >= last:
            return None
        fewest = min(FEWEST_ROUNDS, last) if stage == 0 else played + 1
        parts = int(self.eta**left)
        return max(fewest, ceil(last / parts))

    def cost(self, stage: int, played: int, last: int) -> int:
        """Give the rounds of all candidates together that are still to be played, from a stage on."""
        total = 0
        while (rung := self.next_rung(stage, played, last)) is not None:
            total += sum(self.counts[stage]) * (rung - played)
            stage, played = stage + 1, rung
        return total

    def affordable(self, stage: int, played: int, most: int, rounds: float) -> int:
        """Give the latest last round for which no more than some rounds, of all candidates together, are to be played.

        Parameters
        ----------
        stage
            The next stage.
        played
            Rounds that its candidates have played.
        most
            The latest that there may be.
        rounds
            What may be played.

        Returns
        -------
        int
            The round, ``played`` if not even one more can be afforded.
        """
        low, high = played, most  # the cost rises with the last round
        while low < high:
            middle = (low + high + 1) // 2
            if self.cost(stage, played, middle) <= rounds:
                low = middle
            else:
                high = middle - 1
        return low


def make_ladder(federated: int, methods: int, alone: int, eta: int) -> Ladder:
    """Say how many candidates play each stage.

    Parameters
    ----------
    federated
        Candidates that federate.
    methods
        The methods that they are of, of which each keeps one after the first stage if some have more than one.
    alone
        Candidates that train alone.
    eta
        One in so many stays.

    Returns
    -------
    Ladder
        The stages, the last with few candidates.
    """
    counts = [Count(federated, alone)]
    least = methods if methods < federated else FINALISTS
    while counts[-1].federated > FINALISTS or counts[-1].alone > 1:
        before = counts[-1]
        following = max(min(least, before.federated), ceil(before.federated / eta))
        counts.append(Count(following, ceil(before.alone / eta)))
        least = FINALISTS
    return Ladder(tuple(counts), eta)


class Entry(NamedTuple):
    """A candidate as a cut sees it.

    Parameters
    ----------
    run
        Its run.
    method
        Its method.
    """

    run: str
    method: str


def cut(ranking: Sequence[Entry], count: int, methods_first: bool) -> list[str]:
    """Say who stays.

    Parameters
    ----------
    ranking
        The candidates, the best first.
    count
        How many stay.
    methods_first
        Whether the best of every method goes before the second of any.

    Returns
    -------
    list of str
        The runs that stay, the best first.
    """
    best = {each.method: each.run for each in reversed(ranking)} if methods_first else {}
    order = sorted(ranking, key=lambda each: each.run not in best.values())  # stable: otherwise as they stand
    staying = {each.run for each in order[:count]}
    return [each.run for each in ranking if each.run in staying]
