"""Products in two halves: what splitting leaves out, and nearly float32's accuracy from products of half precision."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from coterie.randomness import stream
from coterie.rows import matrix_units
from tests.support import DEVICE

UNIT = 2.0**-24  # half a unit of float32's last bit, of a number
CUT = 1 if DEVICE.type == "cpu" else 10  # matrix units cut off what sums cannot hold, others round it


@pytest.fixture(autouse=True)
def there() -> Iterator[None]:
    with DEVICE:
        yield


def normal(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(stream(seed, "matrix units").normal(size=shape).astype("float32")).to(DEVICE)


def test_two_halves_hold_23_bits() -> None:
    # The larger one is rounded to 11 bits: off by 2^-12 of the number at most. So is the rest, of itself.
    values = normal(1, 100_000) * 1000
    high, low = matrix_units.split(values)
    assert high.dtype == low.dtype == torch.float16
    assert float((low.double() / values).abs().max()) <= 2.0**-11 * (1 + 2.0**-10)
    left = (high.double() + low.double() - values.double()).abs()
    assert bool((left <= (2.0**-23 * values.double().abs()).clamp_min(2.0**-25)).all())
    assert float(left.max()) > 0


def test_the_middle_of_three_threes() -> None:
    # Medians of (0, 3, 6), (1, 4, 7), (2, 5, 8) are 3, 4, 5; theirs is 4, whatever their order.
    values = torch.arange(9.0).unsqueeze(1)
    for seed in range(20):
        order = torch.from_numpy(stream(seed, "orders").permutation(3)).to(DEVICE)
        assert float(matrix_units.middle(values.view(3, 3, 1)[order][:, order].reshape(9, 1))) == 4.0


def test_the_middle_is_a_number_of_the_column_and_in_its_middle_half() -> None:
    # By each step of three, at least 2 of 3 groups have at least 2 of 3 numbers not above the middle: 8 of 27.
    values = normal(2, 27, 500)
    middle = matrix_units.middle(values)
    below, above = (values <= middle).sum(0), (values >= middle).sum(0)
    assert bool((values == middle).any(0).all())
    assert int(below.min()) >= 8 and int(above.min()) >= 8


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_products_are_nearly_as_exact_as_float32(scale: float) -> None:
    # Left out: 2^-22 of |z||z'| for the product of the rests, 2^-23 for the rounding of each; sums are float32's here.
    rows = (normal(3, 6, 40_000) + 3) * scale
    products, with_centre, of_centre = matrix_units.centred_gram(rows)
    asked = rows[torch.arange(27) * 6 // 27]
    centre = matrix_units.middle(asked).double()
    z = rows.double() - centre
    size = z.norm(dim=1)
    assert float(((products - z @ z.T).abs() / (size.unsqueeze(1) * size)).max()) < 100 * CUT * UNIT
    assert float(((with_centre - z @ centre).abs() / (size * centre.norm())).max()) < 100 * CUT * UNIT
    assert float((of_centre / (centre @ centre) - 1).abs()) < 100 * CUT * UNIT
    assert torch.equal(products, products.T)


def test_centring_is_undone() -> None:
    rows = normal(4, 5, 3 * matrix_units.BLOCK + 7) + 10
    products, with_centre, of_centre = matrix_units.centred_gram(rows)
    whole = products + with_centre.unsqueeze(1) + with_centre.unsqueeze(0) + of_centre
    torch.testing.assert_close(whole, rows.double() @ rows.double().T, rtol=3e-6 * CUT, atol=0)


def test_sums_are_as_exact_as_float32() -> None:
    # Left out is 2^-22 of |w||z| for the product of the rests and 2^-23 for their rounding, and |z| <= |x| + |c|; sums
    # of 120 numbers and the centre add a few roundings of float32.
    width = 2 * matrix_units.BLOCK + 5
    rows, weights = normal(5, 40, width) * 0.1 + normal(6, width), normal(7, 9, 40)
    weights[3] = 0
    wanted = weights.double() @ rows.double()
    found = matrix_units.mixed(weights, rows)
    assert found.dtype == torch.float32
    centre = matrix_units.middle(rows[torch.arange(27) * 40 // 27])
    terms = weights.double().abs() @ (rows.double().abs() + centre.double().abs())
    assert float(((found - wanted).abs() / terms.clamp_min(1e-30)).max()) < 8 * CUT * UNIT
    plain = weights @ rows
    assert float((found - wanted).norm()) < 2 * float((plain - wanted).norm())
    assert not bool(found[3].any())


@pytest.mark.parametrize("size", [1e3, 1e8])
def test_a_client_that_is_far_away_does_not_cost_the_others_their_accuracy(size: float) -> None:
    # Five of forty send numbers of another size. Sums of the others, and distances between them, stay exact to their
    # own size: with a mean as the centre all would be rounded to a number of the order of the hostile ones.
    rows = normal(8, 40, 20_000) * 0.01 + normal(9, 20_000)
    hostile = torch.tensor([3, 4, 17, 30, 39])
    rows[hostile] = normal(10, 5, 20_000) * size
    honest = torch.tensor([i for i in range(40) if i not in hostile.tolist()])
    weights = torch.zeros(2, 40)
    weights[0, honest], weights[1, 0] = 1 / len(honest), 1
    wanted = weights.double() @ rows.double()
    assert float((matrix_units.mixed(weights, rows) - wanted).norm() / wanted.norm()) < 2 * CUT * UNIT
    products = matrix_units.centred_gram(rows)[0][honest][:, honest]
    square = products.diagonal()
    apart = square.unsqueeze(1) + square - 2 * products
    exact = torch.cdist(rows[honest].double(), rows[honest].double()).square()
    off = ~torch.eye(len(honest), dtype=torch.bool)
    assert float((apart[off] / exact[off] - 1).abs().max()) < 1000 * CUT * UNIT


def test_with_tf32_allowed_one_product_of_the_larger_parts_is_taken() -> None:
    rows, weights = normal(11, 9, 5000), normal(12, 4, 9)
    z = rows.double() - matrix_units.middle(rows[torch.arange(27) * 9 // 27]).double()
    exact = z @ z.T
    with matrix_units.tf32():
        products = matrix_units.centred_gram(rows)[0]
        sums = matrix_units.mixed(weights, rows)
    size = exact.diagonal().sqrt()
    error = float(((products - exact).abs() / (size.unsqueeze(1) * size)).max())
    assert 2.0**-22 < error < 2.0**-11
    wanted = weights.double() @ rows.double()
    assert 2.0**-20 < float((sums - wanted).norm() / wanted.norm()) < 2.0**-10


def test_the_switch_is_put_back() -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    with matrix_units.tf32(not before[0]):
        assert torch.backends.cuda.matmul.allow_tf32 is not before[0]
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before


def test_only_large_matrices_on_a_gpu_are_split() -> None:
    assert not matrix_units.pays(torch.zeros(2, 3))
