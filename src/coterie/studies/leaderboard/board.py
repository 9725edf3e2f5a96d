"""Who is where in a setting: means and intervals over seeds, who is beaten beyond chance, and who harms whom."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie import evaluation
from coterie.errors import ConfigError
from coterie.studies.leaderboard.entries import Harm, LeaderboardEntry

LEVEL = 0.05
"""The rate of false discoveries: among clients that are called helped or harmed, and among pairs of methods."""


@dataclass(frozen=True)
class Placing:
    """A method in a setting.

    Parameters
    ----------
    entry
        What was found.
    rank
        Its place by the mean, 1 for the best; equals share the mean of their places.
    mean
        The mean over clients.
    worst_tenth
        The mean over the worst tenth of the clients.
    harm
        Whom it helps and harms against training alone; ``None`` for that itself, and where that is not there.
    beaten_by
        The methods that are better beyond chance.
    """

    entry: LeaderboardEntry
    rank: float
    mean: evaluation.OverSeeds
    worst_tenth: evaluation.OverSeeds
    harm: Harm | None
    beaten_by: tuple[str, ...]


@dataclass(frozen=True)
class Board:
    """All methods in a setting, from the first to the last, and those every candidate of which diverged."""

    setting: str
    placings: tuple[Placing, ...]
    diverged: tuple[LeaderboardEntry, ...]

    @property
    def unbeaten(self) -> list[str]:
        """The methods that no other is better than beyond chance."""
        return [placing.entry.method for placing in self.placings if not placing.beaten_by]

    def of(self, method: str) -> Placing | None:
        """Give a method's place, ``None`` if it has none."""
        return next((placing for placing in self.placings if placing.entry.method == method), None)


def make_board(setting: str, entries: Sequence[LeaderboardEntry], reference: str) -> Board:
    """Rank the entries of a setting."""
    placed = [entry for entry in entries if entry.chosen is not None]
    for entry in placed[1:]:
        if (entry.seeds, entry.rounds, entry.tests) != (placed[0].seeds, placed[0].rounds, placed[0].tests):
            raise ConfigError(
                f"{entry.method} and {placed[0].method} met other clients in {setting}: rounds, seeds and test samples "
                "must be the same"
            )
    alone = next((entry for entry in placed if entry.method == reference), None)
    beaten, ranks = _beaten(placed), _ranks(placed)
    placings = [
        Placing(
            entry,
            ranks[entry.method],
            evaluation.over_seeds(entry.means()),
            evaluation.over_seeds(entry.worst_tenths()),
            harm_of(entry, alone),
            tuple(beaten[entry.method]),
        )
        for entry in placed
    ]
    placings.sort(key=lambda placing: (placing.rank, placing.entry.method))
    return Board(setting, tuple(placings), tuple(entry for entry in entries if entry.chosen is None))


def _ranks(entries: Sequence[LeaderboardEntry]) -> dict[str, float]:
    from scipy.stats import rankdata

    means = [-round(float(np.mean(entry.means())), 12) for entry in entries]
    return dict(zip((entry.method for entry in entries), rankdata(means).tolist(), strict=True)) if means else {}


def _beaten(entries: Sequence[LeaderboardEntry]) -> dict[str, list[str]]:
    """Say of each method who is better beyond chance: Wilcoxon over clients of all seeds, adjusted for all pairs."""
    scores = {entry.method: np.concatenate(entry.scores()) for entry in entries}
    pairs = list(itertools.combinations(scores, 2))
    pvalues = [evaluation.wilcoxon(scores[one], scores[other]).pvalue for one, other in pairs]
    found: dict[str, list[str]] = {method: [] for method in scores}
    for (one, other), adjusted in zip(pairs, evaluation.benjamini_hochberg(pvalues), strict=True):
        difference = float(np.mean(scores[one]) - np.mean(scores[other]))
        if adjusted < LEVEL and difference != 0:
            better, worse = (one, other) if difference > 0 else (other, one)
            found[worse].append(better)
    return found


def harm_of(entry: LeaderboardEntry, alone: LeaderboardEntry | None) -> Harm | None:
    """Say whom a method helps and harms against training alone; as it is kept, where single answers are not."""
    if alone is None or entry.method == alone.method or entry.chosen is None:
        return None
    if not entry.answers or not alone.answers:
        return entry.harm
    pvalues: list[NDArray[np.float64]] = []
    gains: list[NDArray[np.float64]] = []
    for seed, tests in enumerate(entry.tests):
        place = np.repeat(np.arange(len(tests)), tests)
        ours, theirs = entry.bits(seed), alone.bits(seed)
        gained, lost = (np.bincount(place[only], minlength=len(tests)) for only in (ours & ~theirs, theirs & ~ours))
        pvalues.append(evaluation.mcnemar(gained, lost))
        gains.append((gained - lost) / np.array(tests, dtype=np.float64))
    sure = evaluation.benjamini_hochberg(np.concatenate(pvalues)) < LEVEL
    ends = np.cumsum([len(each) for each in gains])[:-1]
    by_seed = list(zip(np.split(sure, ends), gains, strict=True))
    return Harm(
        helped=tuple(int((found & (gain > 0)).sum()) for found, gain in by_seed),
        harmed=tuple(int((found & (gain < 0)).sum()) for found, gain in by_seed),
        worst=round(float(min(gain.min() for gain in gains)), 6),
    )


def boards(entries: Sequence[LeaderboardEntry], reference: str) -> dict[str, Board]:
    """Rank all entries, setting by setting."""
    by_setting: dict[str, list[LeaderboardEntry]] = {}
    for entry in entries:
        by_setting.setdefault(entry.setting, []).append(entry)
    return {setting: make_board(setting, found, reference) for setting, found in by_setting.items()}


def unbeaten_in(found: Mapping[str, Board], method: str) -> int:
    """Count the settings in which no method is better than one beyond chance."""
    return sum(method in board.unbeaten for board in found.values())
