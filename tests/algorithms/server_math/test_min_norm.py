"""The min-norm point against its optimality conditions, exact rational arithmetic, and a maintained QP solver."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from coterie.algorithms.server_math import min_norm
from coterie.algorithms.server_math.min_norm import min_norm_point, min_norm_point_in_box
from coterie.errors import AlgorithmError, ConfigError
from coterie.randomness import stream

Array = NDArray[np.float64]
seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=60, deadline=None)
TOLERANCE = 1e-9  # of the largest squared column


def kkt_gap(gram: Array, point: Array, lower: Array, upper: Array) -> float:
    """How far a feasible point is from optimal: what moving mass from one column to another could still gain."""
    assert point.sum() == pytest.approx(1.0, abs=1e-12)
    assert (point >= lower).all()
    assert (point <= upper).all()
    slope = gram @ point / max(np.diag(gram).max(), 1e-300)
    may_rise, may_fall = slope[point < upper], slope[point > lower]
    return max(0.0, float(may_fall.max() - may_rise.min())) if len(may_rise) and len(may_fall) else 0.0


def solve(columns: Array) -> tuple[Array, Array]:
    """Gram matrix and simplex solution of vectors given as rows."""
    gram = columns @ columns.T
    gram = (gram + gram.T) / 2
    return gram, min_norm_point(torch.from_numpy(gram)).numpy()


def check_simplex(columns: Array) -> Array:
    gram, point = solve(columns)
    assert kkt_gap(gram, point, np.zeros(len(gram)), np.full(len(gram), np.inf)) <= TOLERANCE
    return point


# ------------------------------------------------------------------------------------------------------------ oracles


def rational_solve(matrix: list[list[Fraction]], right: list[Fraction]) -> list[Fraction] | None:
    """Gauss and Jordan; ``None`` for a singular matrix."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for at in range(size):
        pivot = next((r for r in range(at, size) if rows[r][at] != 0), None)
        if pivot is None:
            return None
        rows[at], rows[pivot] = rows[pivot], rows[at]
        rows[at] = [value / rows[at][at] for value in rows[at]]
        for r in range(size):
            if r != at and rows[r][at] != 0:
                rows[r] = [x - rows[r][at] * y for x, y in zip(rows[r], rows[at], strict=True)]
    return [row[-1] for row in rows]


def rational_minimum(gram: list[list[Fraction]], lower: list[Fraction], upper: list[Fraction]) -> Fraction:
    """The least value of x'Gx on a simplex cut by a box, by trying every face.

    Some minimiser lies on a face on which the equations are regular: along a null direction one may walk on to a
    smaller face without changing the value.
    """
    size, best = len(gram), None
    for state in itertools.product((0, 1, 2), repeat=size):
        free = [i for i in range(size) if state[i] == 2]
        point = [upper[i] if state[i] == 1 else lower[i] for i in range(size)]
        if free:
            fixed = [i for i in range(size) if state[i] != 2]
            matrix = [[gram[i][j] for j in free] + [Fraction(-1)] for i in free] + [
                [Fraction(1)] * len(free) + [Fraction(0)]
            ]
            right = [-sum((gram[i][j] * point[j] for j in fixed), Fraction(0)) for i in free]
            found = rational_solve(matrix, [*right, 1 - sum((point[j] for j in fixed), Fraction(0))])
            if found is None:
                continue
            for i, value in zip(free, found, strict=False):
                point[i] = value
        if sum(point) != 1 or any(not lower[i] <= point[i] <= upper[i] for i in range(size)):
            continue
        value = sum(point[i] * gram[i][j] * point[j] for i in range(size) for j in range(size))
        best = value if best is None else min(best, value)
    assert best is not None
    return best


integer_columns = st.integers(2, 5).flatmap(
    lambda k: st.integers(1, 4).flatmap(
        lambda n: st.lists(st.lists(st.integers(-3, 3), min_size=n, max_size=n), min_size=k, max_size=k)
    )
)


@given(columns=integer_columns)
@quick
def test_simplex_matches_exact_rational_arithmetic(columns: list[list[int]]) -> None:
    size = len(columns)
    gram = [[Fraction(sum(x * y for x, y in zip(a, b, strict=True))) for b in columns] for a in columns]
    exact = rational_minimum(gram, [Fraction(0)] * size, [Fraction(1)] * size)
    matrix = np.array(columns, dtype=float)
    point = check_simplex(matrix)
    assert float(np.square(point @ matrix).sum()) == pytest.approx(
        float(exact), abs=1e-13 * max(1, np.square(matrix).sum(1).max())
    )


@given(columns=integer_columns, seed=seeds)
@settings(max_examples=40, deadline=None)
def test_box_matches_exact_rational_arithmetic(columns: list[list[int]], seed: int) -> None:
    columns = columns[:4]
    size = len(columns)
    draw = stream(seed, "box")
    shares = draw.multinomial(8, np.full(size, 1 / size))
    lower = [Fraction(max(0, int(share - draw.integers(0, 4))), 8) for share in shares]
    upper = [Fraction(int(share + draw.integers(0, 4)), 8) for share in shares]
    gram = [[Fraction(sum(x * y for x, y in zip(a, b, strict=True))) for b in columns] for a in columns]
    exact = rational_minimum(gram, lower, upper)
    matrix = np.array(columns, dtype=float)
    low, high = (np.array([float(x) for x in side]) for side in (lower, upper))
    products = matrix @ matrix.T
    point = min_norm_point_in_box(*map(torch.from_numpy, (products, low, high))).numpy()
    assert kkt_gap(products, point, low, high) <= TOLERANCE
    assert float(np.square(point @ matrix).sum()) == pytest.approx(float(exact), abs=1e-12 * max(1, products.max()))


def quadprog_point(gram: Array, lower: Array, upper: Array) -> Array:
    """Solve with quadprog (the Goldfarb and Idnani dual method), which needs a positive definite matrix."""
    quadprog = pytest.importorskip("quadprog")
    size = len(gram)
    constraints = np.vstack([np.ones(size), np.eye(size), -np.eye(size)]).T
    found = quadprog.solve_qp(gram, np.zeros(size), constraints, np.concatenate([[1.0], lower, -upper]), 1)[0]
    return np.asarray(found, dtype=np.float64)


@pytest.mark.parametrize("size", [2, 5, 20, 70])
@pytest.mark.parametrize("common", [0.0, 0.5, 3.0])
def test_both_match_quadprog_where_the_gram_matrix_is_regular(size: int, common: float) -> None:
    draw = stream(size, "columns")
    columns = draw.normal(size=(size, 3 * size)) + common * draw.normal(size=3 * size)
    gram, point = solve(columns)
    np.testing.assert_allclose(point, quadprog_point(gram, np.zeros(size), np.ones(size)), atol=1e-11)
    centre = draw.dirichlet(np.ones(size))
    for eps in (0.5 / size, 0.1, 1.0):
        lower, upper = np.maximum(0, centre - eps), np.minimum(1, centre + eps)
        boxed = min_norm_point_in_box(*map(torch.from_numpy, (gram, lower, upper))).numpy()
        np.testing.assert_allclose(boxed, quadprog_point(gram, lower, upper), atol=1e-11)


# ---------------------------------------------------------------------------------------------------- hard columns


def _near(eps: float) -> Callable[[np.random.Generator, int], Array]:
    def columns(draw: np.random.Generator, size: int) -> Array:
        base = draw.normal(size=50)
        base /= np.linalg.norm(base)
        noise = draw.normal(size=(size, 50))
        return base + eps * (noise - np.outer(noise @ base, base))  # all differences are perpendicular to the solution

    return columns


def _near_duplicates(eps: float) -> Callable[[np.random.Generator, int], Array]:
    def columns(draw: np.random.Generator, size: int) -> Array:
        whole = draw.normal(size=(size, 300)) + 0.3 * draw.normal(size=300)
        return whole[draw.integers(0, size, size=size)] + eps * draw.normal(size=(size, 300))

    return columns


def _opposite(draw: np.random.Generator, size: int) -> Array:
    half = draw.normal(size=(size - size // 2, 300))
    return np.concatenate([half, -half])[:size]


def _some_zero(draw: np.random.Generator, size: int) -> Array:
    columns = draw.normal(size=(size, 300))
    columns[draw.integers(0, size)] = 0
    return columns


FAMILIES: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "generic": lambda draw, size: draw.normal(size=(size, 300)),
    "far from the origin": lambda draw, size: draw.normal(size=(size, 300)) + 3 * draw.normal(size=300),
    "unit norm": lambda draw, size: (lambda x: x / np.linalg.norm(x, axis=1, keepdims=True))(
        draw.normal(size=(size, 300))
    ),
    "more columns than dimensions": lambda draw, size: draw.normal(size=(size, max(1, size // 4))),
    "one side of a plane": lambda draw, size: draw.normal(size=(size, 2)) * [0.0, 1.0] + [1.0, 0.0],
    "duplicated": lambda draw, size: draw.normal(size=(size, 300))[draw.integers(0, size, size=size)],
    "all equal": lambda draw, size: np.tile(draw.normal(size=300), (size, 1)),
    "opposite": _opposite,
    "one zero": _some_zero,
    "all zero": lambda draw, size: np.zeros((size, 4)),
    "small integers": lambda draw, size: draw.integers(-2, 3, size=(size, 6)).astype(float),
    "unequal norms": lambda draw, size: draw.normal(size=(size, 300)) * 10.0 ** draw.uniform(-8, 8, size=(size, 1)),
    "tiny": lambda draw, size: 1e-150 * draw.normal(size=(size, 300)),
    "huge": lambda draw, size: 1e140 * draw.normal(size=(size, 300)),
    **{f"within {eps} of each other": _near(eps) for eps in (1e-3, 1e-5, 1e-7, 1e-8, 1e-9, 1e-12)},
    **{f"duplicated within {eps}": _near_duplicates(eps) for eps in (1e-4, 1e-6, 1e-8, 1e-10, 1e-12)},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [2, 3, 10, 70, 200])
def test_kkt_holds_for_hard_columns(family: str, size: int) -> None:
    columns = FAMILIES[family](stream(size, family), size)
    gram, point = solve(columns)
    assert kkt_gap(gram, point, np.zeros(size), np.full(size, np.inf)) <= TOLERANCE
    draw = stream(size, "centre")
    for eps in (0.5 / size, 0.1, 1.0) if size < 200 else (0.1,):
        centre = draw.dirichlet(np.ones(size))
        lower, upper = np.maximum(0, centre - eps), centre + eps
        boxed = min_norm_point_in_box(*map(torch.from_numpy, (gram, lower, upper))).numpy()
        assert kkt_gap(gram, boxed, lower, upper) <= TOLERANCE


@given(seed=seeds, size=st.integers(2, 12), family=st.sampled_from(sorted(FAMILIES)))
@quick
def test_kkt_holds_for_random_hard_columns(seed: int, size: int, family: str) -> None:
    columns = FAMILIES[family](stream(seed, family), size)
    gram, _ = solve(columns)
    check_simplex(columns)
    draw = stream(seed, "centre")
    centre, eps = draw.dirichlet(np.full(size, 0.3)), 10.0 ** draw.uniform(-5, 0)
    lower, upper = np.maximum(0, centre - eps), np.minimum(1, centre + eps)
    boxed = min_norm_point_in_box(*map(torch.from_numpy, (gram, lower, upper))).numpy()
    assert kkt_gap(gram, boxed, lower, upper) <= TOLERANCE


# ------------------------------------------------------------------------------------------------- closed-form cases


def test_orthogonal_pair_of_equal_norm_is_halved() -> None:
    np.testing.assert_allclose(check_simplex(np.array([[3.0, 0.0], [0.0, 3.0]])), [0.5, 0.5], atol=1e-15)


def test_orthogonal_columns_are_weighed_by_inverse_square_norms() -> None:
    squares = np.array([1.0, 4.0, 0.25])
    expected = (1 / squares) / (1 / squares).sum()
    np.testing.assert_allclose(check_simplex(np.diag(np.sqrt(squares))), expected, atol=1e-15)


def test_one_column_has_weight_one() -> None:
    for value in (0.0, 2.5):
        assert min_norm_point(torch.tensor([[value]], dtype=torch.float64)).tolist() == [1.0]


def test_the_shortest_column_wins_where_the_hull_lies_behind_it() -> None:
    columns = np.array([[1.0, 0.0], [2.0, 1.0], [2.0, -1.0]])
    np.testing.assert_allclose(check_simplex(columns), [1.0, 0.0, 0.0], atol=1e-15)


@pytest.mark.parametrize("size", [3, 12, 60])
def test_origin_inside_the_hull_gives_the_zero_vector(size: int) -> None:
    draw = stream(size, "hull")
    columns = draw.normal(size=(size, size - 2))  # size points in size - 2 dimensions, about the origin below
    columns -= draw.dirichlet(np.ones(size)) @ columns
    point = check_simplex(columns)
    assert np.linalg.norm(point @ columns) < 1e-8 * np.linalg.norm(columns, axis=1).max()


def test_duplicating_a_column_leaves_the_point_where_it_is() -> None:
    columns = stream(1, "columns").normal(size=(6, 20)) + 1.0
    doubled = np.concatenate([columns, columns[2:4], columns[2:3]])
    np.testing.assert_allclose(check_simplex(doubled) @ doubled, check_simplex(columns) @ columns, atol=1e-13)


def test_permuting_columns_permutes_the_weights() -> None:
    draw = stream(2, "columns")
    columns = draw.normal(size=(8, 20)) + 0.5
    order = draw.permutation(8)
    np.testing.assert_allclose(check_simplex(columns[order]), check_simplex(columns)[order], atol=1e-13)


def test_box_of_zero_width_is_its_centre_and_of_full_width_is_the_simplex() -> None:
    columns = stream(3, "columns").normal(size=(7, 30)) + 0.4
    gram, point = solve(columns)
    centre = stream(4, "centre").dirichlet(np.ones(7))
    fixed = min_norm_point_in_box(*map(torch.from_numpy, (gram, centre, centre)))
    assert torch.equal(fixed, torch.from_numpy(centre))
    whole = min_norm_point_in_box(*map(torch.from_numpy, (gram, np.zeros(7), np.ones(7)))).numpy()
    np.testing.assert_allclose(whole, point, atol=1e-12)


def test_box_exchanges_weight_where_every_column_has_met_a_bound() -> None:
    columns = np.array([[1.0, 3.0, 0.0], [2.0, 3.0, -3.0], [3.0, -2.0, 2.0], [3.0, -3.0, 0.0]])
    lower, upper = np.array([3, 2, 1, 0]) / 8, np.array([5, 3, 2, 2]) / 8
    products = columns @ columns.T
    point = min_norm_point_in_box(*map(torch.from_numpy, (products, lower, upper))).numpy()
    # With the first two at their lower bounds, x and 3/8 - x are left: (7/8 + 9/8, 15/8 - 9/8 + x, 2 x - 3/4) squared.
    np.testing.assert_allclose(point, [0.375, 0.25, 0.15, 0.225], atol=1e-12)


def test_simplex_falls_back_on_the_box_where_the_first_method_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(*_: object, **__: object) -> None:
        raise RuntimeError("Maximum number of iterations reached.")

    columns = stream(3, "columns").normal(size=(20, 30)) + 0.4
    _, expected = solve(columns)
    monkeypatch.setattr(min_norm, "nnls", give_up)
    np.testing.assert_allclose(check_simplex(columns), expected, atol=1e-11)


# -------------------------------------------------------------------------------------------------------------- input


def test_input_is_left_as_it_is_and_answer_is_float64_on_its_device() -> None:
    gram = torch.eye(3, dtype=torch.float64) * 2
    lower, upper = torch.zeros(3, dtype=torch.float64), torch.tensor([0.2, 1.0, 1.0], dtype=torch.float64)
    before = [x.clone() for x in (gram, lower, upper)]
    assert min_norm_point(gram).dtype == torch.float64
    point = min_norm_point_in_box(gram, lower, upper)
    torch.testing.assert_close(point, torch.tensor([0.2, 0.4, 0.4], dtype=torch.float64))
    assert all(torch.equal(x, y) for x, y in zip((gram, lower, upper), before, strict=True))


def test_impossible_boxes_are_refused() -> None:
    gram = torch.eye(3, dtype=torch.float64)
    with pytest.raises(ConfigError, match=re.escape("lower bounds sum to 1.2")):
        min_norm_point_in_box(gram, torch.full((3,), 0.4), torch.ones(3))
    with pytest.raises(ConfigError, match=re.escape("upper bounds sum to 0.6")):
        min_norm_point_in_box(gram, torch.zeros(3), torch.full((3,), 0.2))
    with pytest.raises(ConfigError, match=re.escape("lower bound 0.7 of column 1 is above its upper bound 0.5")):
        min_norm_point_in_box(gram, torch.tensor([0, 0.7, 0.0]), torch.tensor([1, 0.5, 1.0]))


def test_a_gram_matrix_that_is_not_finite_is_refused() -> None:
    gram = torch.tensor([[1.0, float("nan")], [float("nan"), 1.0]], dtype=torch.float64)
    with pytest.raises(AlgorithmError, match="not finite"):
        min_norm_point(gram)
    with pytest.raises(AlgorithmError, match="not finite"):
        min_norm_point_in_box(gram, torch.zeros(2), torch.ones(2))
