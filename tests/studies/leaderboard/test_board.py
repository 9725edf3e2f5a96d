"""Ranks, intervals, who is beaten and whom a method harms: against numbers that were worked out by hand."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.evaluation import over_seeds
from coterie.studies.leaderboard.advice import advised
from coterie.studies.leaderboard.board import boards, harm_of, make_board, unbeaten_in
from coterie.studies.leaderboard.entries import Harm, LeaderboardEntry


def entry(method: str, answers: list[list[str]], **other: Any) -> LeaderboardEntry:
    """An entry from one text a seed and client: 1 for a right answer, 0 for a wrong one."""
    values: dict[str, Any] = {
        "setting": "here",
        "method": method,
        "title": method.title(),
        "model": "personal",
        "seeds": range(1, len(answers) + 1),
        "rounds": 3,
        "chosen": {"lr": 0.1},
        "tried": [({"lr": 0.1}, 0.5)],
        "edges": [],
        "diverged": 0,
        "runs": 2,
        "tests": [[len(client) for client in seed] for seed in answers],
        "right": [[client.count("1") for client in seed] for seed in answers],
        "answers": [packed("".join(seed)) for seed in answers],
        "sent": {},
        "seconds": 1.0,
    }
    return LeaderboardEntry(**{**values, **other})


def packed(bits: str) -> str:
    return base64.b64encode(np.packbits(np.array(list(bits)) == "1").tobytes()).decode()


ALONE = entry("local", [["1" * 10 + "0" * 10, "0" * 12, "1100"], ["1" * 11, "0" * 9, "1"]])


def test_answers_come_back_as_they_were_packed() -> None:
    assert ALONE.bits(0).tolist() == [True] * 10 + [False] * 22 + [True, True, False, False]
    assert ALONE.means() == [pytest.approx((0.5 + 0 + 0.5) / 3), pytest.approx((1 + 0 + 1) / 3)]
    assert ALONE.worst_tenths() == [0.0, 0.0]


def test_clients_are_helped_and_harmed_beyond_chance() -> None:
    # Clients of both seeds in order: loses 10 of 20 (McNemar: 2 * 2^-10), gains 12 of 12 (2 * 2^-12), one against
    # one (1), loses 11 of 11 (2 * 2^-11), gains 1 of 9 (1), the same (1).
    other = entry("other", [["0" * 20, "1" * 12, "1010"], ["0" * 11, "1" + "0" * 8, "1"]])
    found = harm_of(other, ALONE)
    assert found is not None
    # Benjamini and Hochberg over six: the three small ones become 6/2048, 6 * 2^-10 / 2 and 6 * 2^-9 / 3, all < 0.05.
    assert (found.helped, found.harmed) == ((1, 0), (1, 1))
    assert found.worst == -1.0
    # One of five gained alone has p = 1: chance.
    same = entry("same", [["1" * 11 + "0" * 9, "0" * 12, "1100"], ["1" * 11, "0" * 9, "1"]])
    again = harm_of(same, ALONE)
    assert again is not None and (again.helped, again.harmed, again.worst) == ((0, 0), (0, 0), 0.0)


def test_what_is_kept_stands_where_single_answers_are_not() -> None:
    other = entry("other", [["0" * 20, "1" * 12, "1010"], ["0" * 11, "1" + "0" * 8, "1"]])
    kept = other.model_copy(update={"answers": (), "harm": harm_of(other, ALONE)})
    assert harm_of(kept, ALONE) == harm_of(other, ALONE) is not None
    assert harm_of(ALONE, ALONE) is None and harm_of(other, None) is None


def test_intervals_are_students() -> None:
    found = over_seeds([1.0, 2.0, 3.0])
    # The quantile of two degrees of freedom has a closed form: t = (2p - 1) sqrt(2 / (4p (1 - p))) at p = 0.975.
    quantile = 0.95 * math.sqrt(2 / (4 * 0.975 * 0.025))
    assert (found.mean, found.reach) == (2.0, pytest.approx(quantile / math.sqrt(3)))
    assert math.isnan(over_seeds([1.0]).reach)


def of_counts(method: str, right: list[int]) -> LeaderboardEntry:
    return entry(method, [["1" * each + "0" * (20 - each) for each in right]])


def test_a_method_is_beaten_where_clients_agree_and_not_where_they_do_not() -> None:
    # Ten clients, all better by other amounts: Wilcoxon gives 2 / 2^10. One better client of ten gives 1.
    low = of_counts("low", [1, 1, 1, 1, 1, 1, 1, 1, 1, 1])
    high = of_counts("high", [2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
    near = of_counts("near", [3, 3, 4, 5, 6, 7, 8, 9, 10, 11])
    board = make_board("here", [low, high, near], "local")
    assert [placing.entry.method for placing in board.placings] == ["near", "high", "low"]
    assert [placing.rank for placing in board.placings] == [1, 2, 3]
    assert board.unbeaten == ["near", "high"]
    assert set(board.placings[2].beaten_by) == {"near", "high"}
    assert board.placings[0].harm is None  # training alone is not there
    found = boards([low, high, near], "local")
    assert (unbeaten_in(found, "near"), unbeaten_in(found, "low")) == (1, 0)


def test_those_that_harm_fewest_are_advised_first() -> None:
    harm = Harm(helped=(0,), harmed=(2,), worst=-0.1)
    high = of_counts("high", [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]).model_copy(update={"answers": (), "harm": harm})
    near = of_counts("near", [2, 3, 4, 5, 6, 7, 8, 9, 10, 10])
    alone = of_counts("local", [1, 1, 1, 1, 1, 1, 1, 1, 1, 1])
    board = make_board("here", [alone, high, near], "local")
    assert [placing.entry.method for placing in board.placings] == ["high", "near", "local"]
    assert [placing.entry.method for placing in advised(board)] == ["near", "high"]


def test_equals_share_their_ranks_and_those_that_diverged_have_none() -> None:
    one, two = of_counts("one", [5, 6]), of_counts("two", [6, 5])
    lost = one.model_copy(update={"method": "lost", "chosen": None, "tests": (), "right": (), "answers": ()})
    board = make_board("here", [one, two, lost], "local")
    assert [placing.rank for placing in board.placings] == [1.5, 1.5]
    assert [each.method for each in board.diverged] == ["lost"] and board.of("lost") is None


def test_other_clients_are_refused() -> None:
    with pytest.raises(ConfigError, match="two and one met other clients in here"):
        make_board("here", [of_counts("one", [5, 6]), of_counts("two", [5, 6, 7])], "local")
    with pytest.raises(ValueError, match="an entry for each seed"):
        entry("odd", [["10"]], right=[[1, 1]])
