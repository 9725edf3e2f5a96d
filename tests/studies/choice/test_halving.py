"""Successive halving as arithmetic: who plays how far, what that costs, what can be afforded, who stays."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.studies.choice.halving import ETA, FINALISTS, Count, Ladder, Placed, cut, make_ladder


def rungs(ladder: Ladder, last: int) -> list[int]:
    found: list[int] = []
    while (rung := ladder.next_rung(len(found), found[-1] if found else 0, last)) is not None:
        found.append(rung)
    return found


def test_seven_methods_and_training_alone_with_four_learning_rates() -> None:
    """28 that federate: 7 methods keep two each, more than ⌈28/3⌉; ⌈14/3⌉ = 5; then the two of the end."""
    ladder = make_ladder(28, 7, 4, 3)
    assert ladder.counts == (Count(28, 4), Count(14, 2), Count(5, 2), Count(2, 2)) and ladder.of_each == 2
    assert rungs(ladder, 54) == [2, 6, 18, 54]
    assert ladder.cost(0, 0, 54) == 32 * 2 + 16 * 4 + 7 * 12 + 4 * 36
    assert ladder.cost(2, 6, 54) == 7 * 12 + 4 * 36
    assert ladder.cost(0, 0, 54) < 32 * 54 / 4  # a quarter of the grid


def test_one_in_four_stays_by_default() -> None:
    """⌈28/4⌉ = 7 would leave every method one setting, and each keeps two; then ⌈14/4⌉ = 4."""
    ladder = make_ladder(28, 7, 4, ETA)
    assert ladder.counts == (Count(28, 4), Count(14, 2), Count(4, 2), Count(2, 2))
    assert rungs(ladder, 50) == [2, 4, 13, 50]
    assert ladder.cost(0, 0, 50) == 32 * 2 + 16 * 2 + 6 * 9 + 4 * 37


def test_few_rounds_make_few_stages() -> None:
    ladder = make_ladder(28, 7, 4, 3)
    assert rungs(ladder, 3) == [2, 3] and rungs(ladder, 2) == [2] and rungs(ladder, 1) == [1]
    assert rungs(ladder, 20) == [2, 3, 7, 20]


def test_more_methods_than_a_third_all_stay_after_the_first_stage() -> None:
    ladder = make_ladder(12, 6, 3, 3)
    assert ladder.counts == (Count(12, 3), Count(6, 2), Count(2, 2)) and ladder.of_each == 1


def test_methods_with_one_candidate_each_are_cut_from_the_first_stage_on() -> None:
    assert make_ladder(9, 9, 1, 3).counts == (Count(9, 1), Count(3, 1), Count(2, 1))


def test_few_candidates_play_one_stage() -> None:
    assert make_ladder(2, 2, 1, 3).counts == (Count(2, 1),)
    assert rungs(make_ladder(2, 2, 1, 3), 50) == [50]


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 9), st.integers(2, 5), st.integers(1, 400))
def test_stages_narrow_to_the_last_round(federated: int, methods: int, alone: int, eta: int, last: int) -> None:
    ladder = make_ladder(federated, min(methods, federated), alone, eta)
    assert ladder.counts[0] == Count(federated, alone)
    assert ladder.counts[-1] == Count(min(FINALISTS, federated), min(FINALISTS, alone))
    assert all(sum(one) > sum(two) for one, two in zip(ladder.counts, ladder.counts[1:], strict=False))
    found = rungs(ladder, last)
    assert found[-1] == last and found == sorted(set(found))


@given(st.integers(3, 40), st.integers(2, 4), st.integers(0, 3000))
def test_what_can_be_afforded_is_the_most_that_can(federated: int, eta: int, rounds: int) -> None:
    ladder, most = make_ladder(federated, 3, 2, eta), 60
    found = ladder.affordable(1, 2, most, rounds)
    fitting = [last for last in range(2, most + 1) if ladder.cost(1, 2, last) <= rounds]
    assert found == max(fitting)


RANKING = [Placed(f"{method}{number}", method) for number, method in enumerate("aabacb")]


@pytest.mark.parametrize(
    ("count", "of_each", "staying"),
    [
        (3, 0, ["a0", "a1", "b2"]),
        (3, 1, ["a0", "b2", "c4"]),
        (4, 1, ["a0", "a1", "b2", "c4"]),
        (2, 1, ["a0", "b2"]),
        (5, 2, ["a0", "a1", "b2", "c4", "b5"]),
        (9, 1, ["a0", "a1", "b2", "a3", "c4", "b5"]),
    ],
)
def test_who_stays(count: int, of_each: int, staying: list[str]) -> None:
    assert cut(RANKING, count, of_each) == staying


def test_the_command_has_the_same_default() -> None:
    """Written there once more: the command line imports nothing of this before it has read its words."""
    from coterie.cli.choose import choose

    assert inspect.signature(inspect.unwrap(choose)).parameters["eta"].default == ETA
