r"""Successive halving: many candidates for few rounds, then fewer for more. Pure functions of counts and rounds.

With K stages the candidates of stage k (from 0) play on to round :math:`\lceil R / \eta^{K-1-k} \rceil`, and one in
:math:`\eta` stays, so that every stage costs about as much as every other, where a grid would cost all candidates
times R. Three things are particular to a choice of methods:

- after the first stage every method keeps its two best settings, however it stands: so early a learning rate can be
  told to be far off, but a method that begins slowly cannot be told from a bad one;
- the last stage is between different methods, where there are any: two learning rates of one say nothing about how sure
  a method is;
- training alone is the reference, so its candidates compete among themselves and two are there to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

ETA = 4
"""One in so many stays, unless somebody says otherwise. On fourteen hospital tables 3 took a third longer, and what it
chose was no better."""

FEWEST_ROUNDS = 2
"""Rounds of the first stage at least."""

FINALISTS = 2
"""Candidates that federate, and candidates that train alone, with which the last stage is played."""

OF_EACH = 2
"""Candidates that every method keeps after the first stage, if they have more; otherwise one."""


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
    of_each
        How many candidates every method keeps after the first stage.
    """

    counts: tuple[Count, ...]
    eta: int
    of_each: int = 0

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
        The methods that they are of, of which each keeps some after the first stage if it can.
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
    of_each = next((each for each in range(OF_EACH, 0, -1) if each * methods < federated), 0)
    least = max(FINALISTS, of_each * methods)
    while counts[-1].federated > FINALISTS or counts[-1].alone > FINALISTS:
        before = counts[-1]
        following = max(min(least, before.federated), ceil(before.federated / eta))
        counts.append(Count(following, max(min(FINALISTS, before.alone), ceil(before.alone / eta))))
        least = FINALISTS
    return Ladder(tuple(counts), eta, of_each)


class Placed(NamedTuple):
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


def cut(ranking: Sequence[Placed], count: int, of_each: int = 0) -> list[str]:
    """Say who stays.

    Parameters
    ----------
    ranking
        The candidates, the best first.
    count
        How many stay.
    of_each
        How many of every method go before all others.

    Returns
    -------
    list of str
        The runs that stay, the best first.
    """
    places: dict[str, int] = {}
    late: dict[str, bool] = {}
    for each in ranking:
        places[each.method] = places.get(each.method, 0) + 1
        late[each.run] = places[each.method] > of_each
    order = sorted(ranking, key=lambda each: late[each.run])  # stable: otherwise as they stand
    staying = {each.run for each in order[:count]}
    return [each.run for each in ranking if each.run in staying]
