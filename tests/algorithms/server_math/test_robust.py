"""Aggregators that survive clients who send anything."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coterie.algorithms.server_math import robust
from coterie.algorithms.server_math.robust import (
    aggregate,
    coordinate_median,
    krum,
    krum_scores,
    mean,
    multi_krum,
    tolerated,
    trimmed_mean,
)
from coterie.errors import ConfigError, UnknownName
from coterie.randomness import stream

seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=40, deadline=None)


def honest(seed: int, clients: int, parameters: int = 6) -> Tensor:
    return torch.from_numpy(stream(seed, "rows").normal(size=(clients, parameters)))


def test_mean_weighs_and_normalises() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    torch.testing.assert_close(mean(rows), torch.tensor([2.0, 4.0]))
    torch.testing.assert_close(mean(rows, torch.tensor([3.0, 1.0])), torch.tensor([1.5, 3.0]))
    torch.testing.assert_close(mean(rows, torch.tensor([30, 10])), torch.tensor([1.5, 3.0]))


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [1.0], [1.0, float("nan")]])
def test_mean_refuses_weights_that_are_none(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="weights"):
        mean(torch.ones(2, 3), torch.tensor(weights))


def test_krum_scores_by_hand() -> None:
    # Five points on a line, f = 1: the 5 - 1 - 2 = 2 nearest others count.
    rows = torch.tensor([[0.0], [1.0], [3.0], [4.0], [10.0]], dtype=torch.float64)
    expected = [1 + 9, 1 + 4, 1 + 4, 1 + 9, 36 + 49]
    torch.testing.assert_close(krum_scores(rows, 1), torch.tensor(expected, dtype=torch.float64))
    assert krum(rows, 1).tolist() == [1.0]  # of two equal scores, the first client's
    assert multi_krum(rows, 1).tolist() == [2.0]  # all but the last
    assert multi_krum(rows, 1, select=2).tolist() == [2.0]


@given(seed=seeds, clients=st.integers(5, 12), distance=st.sampled_from([1e2, 1e8, 1e30]), at=st.integers(0, 11))
@quick
def test_multi_krum_never_selects_the_far_outlier(seed: int, clients: int, distance: float, at: int) -> None:
    rows = honest(seed, clients)
    rows[at % clients] += distance
    others = torch.arange(clients) != at % clients
    torch.testing.assert_close(multi_krum(rows, 1), rows[others].mean(0), rtol=1e-12, atol=1e-12)
    assert krum(rows, 1).tolist() in rows[others].tolist()
    assert multi_krum(rows.float(), 1).abs().max() < 10


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e200])
def test_rows_that_are_not_numbers_are_never_selected(value: float) -> None:
    rows = honest(3, 7)
    clean = rows[2:].clone()
    rows[0, 2] = value
    rows[1] = value
    assert torch.equal(krum_scores(rows, 2).isinf(), torch.tensor([True, True] + [False] * 5))
    torch.testing.assert_close(multi_krum(rows, 2), clean.mean(0))
    assert krum(rows, 2).tolist() in clean.tolist()


def test_honest_scores_do_not_depend_on_how_far_the_outlier_is() -> None:
    # Two outliers that lie together, and rows of float32: the honest ranking must survive their size.
    rows = honest(4, 9).float()
    scores = []
    for distance in (1e3, 1e30):
        attacked = rows.clone()
        attacked[:2] = distance
        scores.append(krum_scores(attacked, 3)[2:])
    torch.testing.assert_close(scores[1], scores[0], rtol=1e-10, atol=0)


@given(seed=seeds, clients=st.integers(1, 9))
@quick
def test_multi_krum_and_trimmed_mean_without_attackers_are_the_mean(seed: int, clients: int) -> None:
    rows = honest(seed, clients)
    torch.testing.assert_close(multi_krum(rows, 0), rows.mean(0), rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(trimmed_mean(rows, 0), rows.mean(0), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("clients", range(1, 12))
def test_what_is_tolerated_is_the_most_that_is_not_refused(clients: int) -> None:
    def accepted(name: str, f: int) -> bool:
        try:
            aggregate(name, honest(0, clients), f=f)
        except ConfigError:
            return False
        return True

    for name in ("krum", "multi_krum", "trimmed_mean"):
        most = max((f for f in range(clients) if accepted(name, f)), default=0)
        assert tolerated(name, clients) == most
    assert tolerated("mean", clients) == 0
    with pytest.raises(UnknownName, match="multi_krum"):
        tolerated("multikrum", clients)


@pytest.mark.parametrize("clients", [5, 6])
def test_krum_outside_its_guarantee_is_refused(clients: int) -> None:
    message = f"f must satisfy 2 f \\+ 2 < {clients}, the number of rows, but f = 2"
    for call in (krum, multi_krum):
        with pytest.raises(ConfigError, match=message):
            call(honest(0, clients), 2)
    assert multi_krum(honest(0, 7), 2).shape == (6,)
    assert multi_krum(honest(0, clients), 2, strict=False).shape == (6,)


def test_values_that_are_no_count_are_refused() -> None:
    rows = honest(0, 7)
    with pytest.raises(ConfigError, match="f must be"):
        multi_krum(rows, -1)
    with pytest.raises(ConfigError, match="f must leave at least one neighbour"):
        krum(rows, 5, strict=False)
    with pytest.raises(ConfigError, match="select must be between 1 and 7, but is 8"):
        multi_krum(rows, 1, select=8)
    with pytest.raises(ConfigError, match="f must satisfy 2 f < 7"):
        trimmed_mean(rows, 4)
    with pytest.raises(ConfigError, match="no rows"):
        coordinate_median(rows[:0])


@given(seed=seeds, clients=st.integers(4, 10))
@quick
def test_permuting_rows_changes_nothing(seed: int, clients: int) -> None:
    rows = honest(seed, clients)
    order = torch.from_numpy(stream(seed, "order").permutation(clients))
    for name, options in (("krum", {"f": 0}), ("multi_krum", {"f": 0}), ("median", {}), ("trimmed_mean", {"f": 1})):
        torch.testing.assert_close(
            aggregate(name, rows[order], None, **options),
            aggregate(name, rows, None, **options),
            rtol=1e-12,
            atol=1e-14,
        )
    torch.testing.assert_close(krum_scores(rows[order], 0), krum_scores(rows, 0)[order], rtol=1e-10, atol=1e-12)


@given(seed=seeds, clients=st.integers(1, 9))
@quick
def test_median_is_numpys(seed: int, clients: int) -> None:
    rows = honest(seed, clients)
    np.testing.assert_allclose(coordinate_median(rows).numpy(), np.median(rows.numpy(), axis=0), rtol=1e-15)


@given(seed=seeds, clients=st.integers(3, 9), data=st.data())
@quick
def test_trimmed_mean_is_the_mean_of_the_middle(seed: int, clients: int, data: st.DataObject) -> None:
    trim = data.draw(st.integers(0, (clients - 1) // 2))
    rows = honest(seed, clients)
    expected = np.sort(rows.numpy(), axis=0)[trim : clients - trim].mean(0)
    np.testing.assert_allclose(trimmed_mean(rows, trim).numpy(), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("value", [1e30, -1e30, float("nan"), float("inf")])
def test_median_and_trimmed_mean_stay_among_the_honest(value: float) -> None:
    rows = honest(5, 9).float()
    rows[3] = value
    rows[7] = value
    clean = rows[torch.tensor([i not in (3, 7) for i in range(9)])]
    for found in (coordinate_median(rows), trimmed_mean(rows, 2)):
        assert ((found >= clean.min(0).values) & (found <= clean.max(0).values)).all()


def test_blocks_of_columns_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = honest(6, 7, 1000)
    whole = [coordinate_median(rows), trimmed_mean(rows, 2), krum_scores(rows, 1)]
    for name in ("_BLOCK_ELEMENTS", "_CACHED_ELEMENTS"):
        monkeypatch.setattr(f"coterie.rows.algebra.{name}", 1)  # blocks of 256 columns
    assert len(list(robust.column_blocks(rows))) == 4
    for found, expected in zip(
        [coordinate_median(rows), trimmed_mean(rows, 2), krum_scores(rows, 1)], whole, strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


def test_registry_knows_its_names_and_options() -> None:
    rows, weights = honest(7, 7), torch.arange(1.0, 8.0)
    torch.testing.assert_close(aggregate("mean", rows, weights), mean(rows, weights))
    assert torch.equal(aggregate("krum", rows, weights, f=1), krum(rows, 1))
    assert torch.equal(aggregate("multi_krum", rows, weights, f=1, select=3), multi_krum(rows, 1, select=3))
    assert torch.equal(aggregate("median", rows, weights), coordinate_median(rows))
    assert torch.equal(aggregate("trimmed_mean", rows, weights, f=2), trimmed_mean(rows, 2))
    assert set(robust.AGGREGATORS) == {"mean", "krum", "multi_krum", "median", "trimmed_mean"}
    with pytest.raises(UnknownName, match="multi_krum"):
        aggregate("multikrum", rows, weights)
    with pytest.raises(ConfigError, match="aggregator 'median' takes no option 'f'"):
        aggregate("median", rows, weights, f=1)
    with pytest.raises(ConfigError, match="aggregator 'krum' needs the option 'f'"):
        aggregate("krum", rows, weights)


def test_answers_keep_the_rows_type_and_inputs_are_left_as_they_are() -> None:
    rows = honest(8, 7).float()
    before = rows.clone()
    for name, options in (
        ("mean", {}),
        ("krum", {"f": 1}),
        ("multi_krum", {"f": 1}),
        ("median", {}),
        ("trimmed_mean", {"f": 1}),
    ):
        found = aggregate(name, rows, None, **options)
        assert found.dtype == torch.float32
        assert found.shape == (6,)
        found += 1.0
        assert torch.equal(rows, before)
