"""Inner products in two halves: exact splitting, and nearly float32's accuracy from TF32's products."""

from __future__ import annotations

import numpy as np
import torch

from coterie import matrix_units
from coterie.randomness import stream


def test_split_is_exact_and_each_half_fits_tf32() -> None:
    values = torch.from_numpy(stream(1, "split").normal(size=100_000).astype("float32") * 100)
    high, low = matrix_units.split(values)
    assert torch.equal(high + low, values)
    assert not (high.view(torch.int32) & 0x1FFF).any()  # the last 13 bits of 23 are empty
    assert float((low / values).abs().max()) <= 2.0**-11  # half a unit of the 11th bit


def test_two_products_of_halves_give_the_gram_matrix() -> None:
    # What TF32 does to an input, done by hand: round it to 11 significant bits. The halves survive that but for the
    # low one's own rounding, 2^-11 of 2^-11, and the product of the two low ones is left out, 2^-22.
    draw = stream(2, "gram")
    rows = torch.from_numpy((draw.normal(size=(6, 40_000)) + 3).astype("float32"))
    high, low = matrix_units.split(rows - rows.mean(0))
    low, _ = matrix_units.split(low)
    cross = high.double() @ low.double().T
    approximate = high.double() @ high.double().T + cross + cross.T
    centred = (rows - rows.mean(0)).double()
    exact = centred @ centred.T
    assert float((approximate - exact).abs().max()) <= 3 * 2.0**-22 * float(exact.diagonal().max())


def test_centring_is_undone() -> None:
    draw = stream(3, "centring")
    rows = torch.from_numpy((draw.normal(size=(5, 3 * matrix_units.BLOCK + 7)) + 10).astype("float32"))
    products, with_mean, of_mean = matrix_units.centred_gram(rows)
    whole = products + with_mean.unsqueeze(1) + with_mean.unsqueeze(0) + of_mean
    exact = rows.double() @ rows.double().T
    np.testing.assert_allclose(whole, exact, rtol=1e-6)
    assert torch.equal(products, products.T)


def test_the_switch_is_put_back() -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    with matrix_units.tf32(not before[0]):
        assert torch.backends.cuda.matmul.allow_tf32 is not before[0]
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before


def test_only_large_matrices_on_a_gpu_are_split() -> None:
    assert not matrix_units.pays(torch.zeros(2, 3))
