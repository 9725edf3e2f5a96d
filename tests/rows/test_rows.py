"""Rows: layouts without copies, and row algebra against float64 NumPy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from coterie.errors import ModelError
from coterie.models import build
from coterie.randomness import stream, torch_stream
from coterie.rows import (
    Columns,
    Layout,
    column_blocks,
    cosines,
    gram,
    mix,
    nbytes,
    norms,
    put_rows,
    squared_distances,
)

PARTS = {"body": ("body",), "head": ("head",)}


def model() -> nn.Module:
    with torch_stream(5, "rows model"):
        return build("cnn_small", (1, 8, 8), 3).double()


def matrix(clients: int, size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.from_numpy(stream(seed, "rows").normal(size=(clients, size))).to(dtype)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 256 columns, so that a small matrix takes several."""
    for name in ("_BLOCK_ELEMENTS", "_CACHED_ELEMENTS"):
        monkeypatch.setattr(f"coterie.rows.algebra.{name}", 1)


# Layouts


def test_a_layout_lists_trainable_parameters_in_the_modules_order() -> None:
    module = model()
    layout = Layout.of(module, PARTS)
    assert layout.names == tuple(name for name, _ in module.named_parameters())
    assert layout.shapes == tuple(tuple(value.shape) for value in module.parameters())
    assert layout.offsets[0] == 0
    assert [end - begin for begin, end in pairwise(layout.offsets)] == [value.numel() for value in module.parameters()]
    assert layout.size == sum(value.numel() for value in module.parameters())


def test_frozen_parameters_are_left_out() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    module[0].requires_grad_(False)
    assert Layout.of(module).names == ("1.weight", "1.bias")
    module.requires_grad_(False)
    with pytest.raises(ModelError, match="nothing to learn"):
        Layout.of(module)


def test_a_part_is_a_prefix_of_whole_names() -> None:
    module = nn.ModuleDict({"head": nn.Linear(1, 1), "header": nn.Linear(1, 1)})
    layout = Layout.of(module, {"head": ("head",), "one": ("header.bias",), "none": ("hea",)})
    assert layout.parts["head"] == ("head.weight", "head.bias")
    assert layout.parts["one"] == ("header.bias",)
    assert layout.parts["none"] == ()
    for part in ("none", "tail"):
        with pytest.raises(ModelError, match=part):
            layout.columns(part)


@pytest.mark.parametrize("clients", [None, 1, 4])
def test_views_are_windows_into_the_matrix(clients: int | None) -> None:
    layout = Layout.of(model())
    rows = torch.zeros(layout.size) if clients is None else torch.zeros(clients, layout.size)
    leading = rows.shape[:-1]
    for name, view in layout.views(rows).items():
        begin = layout.offsets[layout.names.index(name)]
        assert view.shape == (*leading, *layout.shapes[layout.names.index(name)])
        assert view.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
        assert view.data_ptr() == rows.data_ptr() + begin * rows.element_size()
        view.fill_(begin + 1)
    for begin, end in pairwise(layout.offsets):
        assert bool((rows[..., begin:end] == begin + 1).all())


def test_the_gradient_through_views_is_the_gradient_of_each_parameter() -> None:
    module, x = model(), matrix(6, 64, 3).view(3, 2, 1, 8, 8)
    layout = Layout.of(module)
    row = layout.row_of(module.state_dict())
    rows = (row + 0.1 * matrix(3, layout.size)).requires_grad_()
    views = layout.views(rows)
    total = torch.zeros((), dtype=torch.float64)
    for client in range(3):
        own = {name: value[client] for name, value in views.items()}
        total = total + torch.func.functional_call(module, own, (x[client],)).square().sum()
    (got,) = torch.autograd.grad(total, rows)
    for client in range(3):
        module.load_state_dict(layout.state_dict(rows.detach()[client]))
        module.zero_grad()
        module(x[client]).square().sum().backward()
        wanted = torch.cat([value.grad.reshape(-1) for value in module.parameters() if value.grad is not None])
        torch.testing.assert_close(got[client], wanted, rtol=1e-12, atol=1e-12)


def test_a_row_and_a_state_dict_are_the_same_thing() -> None:
    module = model()
    layout = Layout.of(module)
    row = layout.row_of(module.state_dict())
    assert not row.requires_grad and row.shape == (layout.size,)
    state = layout.state_dict(row)
    assert list(state) == list(layout.names)
    for name, value in module.named_parameters():
        assert torch.equal(state[name], value)
    state[layout.names[0]].zero_()
    assert torch.equal(row, layout.row_of(module.state_dict()))


# Columns


def test_columns_of_neighbours_are_one_span_and_a_view() -> None:
    layout = Layout.of(model(), PARTS)
    rows = matrix(3, layout.size)
    head = layout.columns("head")
    assert head.spans == ((layout.size - 3 * 65, layout.size),) and head.size == 3 * 65  # 64 features and a bias
    taken = head.take(rows)
    assert taken.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
    assert layout.columns("body").spans == ((0, layout.size - 3 * 65),)
    scattered = layout.columns_of([layout.names[3], layout.names[0]])
    assert len(scattered.spans) == 2 and scattered.spans[0][0] == 0
    assert layout.columns_of([]) == Columns(())


@given(seed=st.integers(0, 2**31), size=st.integers(1, 40), clients=st.integers(1, 4), pieces=st.integers(0, 5))
@settings(max_examples=80, deadline=None)
def test_take_and_put_undo_each_other(seed: int, size: int, clients: int, pieces: int) -> None:
    draw = stream(seed, "columns")
    cuts = sorted(draw.choice(size + 1, size=min(2 * pieces, 2 * ((size + 1) // 2)), replace=False).tolist())
    columns = Columns(tuple(zip(cuts[::2], cuts[1::2], strict=True)))
    chosen = np.concatenate([np.arange(size)[:0], *(np.arange(begin, end) for begin, end in columns.spans)])
    rows = matrix(clients, size, seed)
    before = rows.clone()
    assert columns.size == len(chosen)
    assert torch.equal(columns.take(rows), rows[:, chosen])
    values = matrix(clients, columns.size, seed + 1)
    new = columns.put(rows, values)
    assert torch.equal(rows, before) and torch.equal(columns.take(new), values)
    rest = np.setdiff1d(np.arange(size), chosen)
    assert torch.equal(new[:, rest], rows[:, rest])
    assert torch.equal(columns.put(rows, columns.take(rows)), rows)
    one = columns.put(rows, values[0])  # one row for all
    assert torch.equal(columns.take(one), values[:1].expand(clients, -1))
    assert torch.equal(columns.take(rows[0]), rows[0, chosen])
    mask = columns.mask(size, rows)
    assert mask.dtype == rows.dtype and mask.nonzero().flatten().tolist() == chosen.tolist() and bool((mask <= 1).all())


def test_gradients_flow_through_take_and_put() -> None:
    columns = Columns(((1, 3), (4, 5)))
    rows, values = matrix(2, 6).requires_grad_(), matrix(2, 3, 1).requires_grad_()
    to_rows, to_values = torch.autograd.grad(columns.put(rows, values).square().sum(), (rows, values))
    kept = 1 - columns.mask(6, rows)
    torch.testing.assert_close(to_rows, 2 * rows.detach() * kept)
    torch.testing.assert_close(to_values, 2 * values.detach())
    (to_rows,) = torch.autograd.grad(columns.take(rows).square().sum(), rows)
    torch.testing.assert_close(to_rows, 2 * rows.detach() * (1 - kept))


# Algebra


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 300, 1000])
@pytest.mark.usefixtures("small_blocks")
def test_products_norms_cosines_and_distances_are_those_of_numpy(size: int, dtype: torch.dtype) -> None:
    rows, other = matrix(6, size, 1, dtype), matrix(4, size, 2, dtype)
    a, b = rows.numpy().astype(np.float64), other.numpy().astype(np.float64)
    length = np.linalg.norm(a, axis=1)
    # Sums of `size` products, each of relative error eps; pairwise cosines and distances of a few of those.
    tolerance = 4 * size * np.finfo(np.float64).eps
    np.testing.assert_allclose(gram(rows).numpy(), a @ a.T, rtol=0, atol=tolerance * length.max() ** 2)
    scale = length.max() * np.linalg.norm(b, axis=1).max()
    np.testing.assert_allclose(gram(rows, other).numpy(), a @ b.T, rtol=0, atol=tolerance * scale)
    np.testing.assert_allclose(norms(rows).numpy(), length, rtol=tolerance)
    np.testing.assert_allclose(cosines(rows).numpy(), a @ a.T / np.outer(length, length), rtol=0, atol=4 * tolerance)
    direct = ((a[:, None] - a[None]) ** 2).sum(-1)
    np.testing.assert_allclose(squared_distances(rows).numpy(), direct, rtol=0, atol=8 * tolerance * length.max() ** 2)
    for made in (gram(rows), gram(rows, other), norms(rows), cosines(rows), squared_distances(rows)):
        assert made.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distances_survive_a_large_common_offset(dtype: torch.dtype) -> None:
    # Multiples of 2⁻⁶ below 2 about an offset of 2¹⁶: both are exact in float32, so the distances are the same numbers.
    # Products of uncentred rows would be near 2³² · 500 and lose the differences, near 1, to their last places.
    small = torch.from_numpy(stream(3, "offset").integers(-128, 128, size=(5, 500))).to(dtype) / 64
    shifted = small + 2.0**16
    assert torch.equal(shifted - 2.0**16, small)
    wanted = ((small.double().unsqueeze(1) - small.double().unsqueeze(0)) ** 2).sum(-1)
    # Centring at 2¹⁶ rounds by 2⁻³⁷ in float64; times |difference| <= 4, twice, 500 times.
    torch.testing.assert_close(squared_distances(shifted), wanted, rtol=0, atol=500 * 8 * 2.0**-36)
    torch.testing.assert_close(squared_distances(small), wanted, rtol=1e-13, atol=0)


def test_nearly_equal_rows_are_a_small_distance_apart() -> None:
    row = matrix(1, 2000, 4)
    rows = torch.cat([row, row + 1e-7 * matrix(1, 2000, 5), row + 1e-7 * matrix(1, 2000, 6)])
    wanted = ((rows.unsqueeze(1) - rows.unsqueeze(0)) ** 2).sum(-1)
    torch.testing.assert_close(squared_distances(rows), wanted, rtol=1e-6, atol=0)


@given(seed=st.integers(0, 2**31), clients=st.integers(1, 7), size=st.integers(1, 60), single=st.booleans())
@settings(max_examples=60, deadline=None)
def test_symmetry_bounds_and_permutation(seed: int, clients: int, size: int, single: bool) -> None:
    rows = matrix(clients, size, seed, torch.float32 if single else torch.float64)
    order = torch.from_numpy(stream(seed, "order").permutation(clients))
    for function in (gram, cosines, squared_distances):
        made = function(rows)
        assert torch.equal(made, made.T), function.__name__
        moved = function(rows[order])
        torch.testing.assert_close(moved, made[order][:, order], rtol=1e-13, atol=1e-13)
    near = cosines(rows)
    assert bool((near.abs() <= 1).all()) and bool((near.diagonal() == 1).all())
    away = squared_distances(rows)
    assert bool((away >= 0).all()) and bool((away.diagonal() == 0).all())


@given(seed=st.integers(0, 2**31), factor=st.floats(1e-3, 1e3))
@settings(max_examples=30, deadline=None)
def test_cosines_do_not_see_the_length_of_a_row(seed: int, factor: float) -> None:
    rows = matrix(4, 30, seed)
    scaled = rows.clone()
    scaled[2] *= factor
    torch.testing.assert_close(cosines(scaled), cosines(rows), rtol=0, atol=1e-13)


def test_a_zero_row_has_cosine_0_with_the_others_and_1_with_itself() -> None:
    rows = matrix(3, 10)
    rows[1] = 0
    made = cosines(rows)
    assert made[1].tolist() == [0.0, 1.0, 0.0]
    assert bool(made.isfinite().all())


@pytest.mark.usefixtures("small_blocks")
def test_blocks_cover_all_columns_without_a_copy() -> None:
    rows = matrix(3, 700)
    pieces = list(column_blocks(rows))
    assert len(pieces) == 3
    assert torch.equal(torch.cat(pieces, 1), rows)
    assert all(piece.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr() for piece in pieces)


def test_two_matrices_can_be_cut_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_BLOCK_ELEMENTS", "_CACHED_ELEMENTS"):
        monkeypatch.setattr(f"coterie.rows.algebra.{name}", 3 * 300)
    assert [piece.shape[1] for piece in column_blocks(matrix(3, 700))] == [300, 300, 100]
    assert [piece.shape[1] for piece in column_blocks(matrix(1, 700), 3)] == [300, 300, 100]
    assert [piece.shape[1] for piece in column_blocks(matrix(1, 700))] == [700]


def test_mixtures_are_in_the_rows_own_type() -> None:
    rows = matrix(4, 9, dtype=torch.float32)
    weights = matrix(3, 4, 1)
    assert mix(weights, rows).dtype == torch.float32
    wanted = weights.float().numpy() @ rows.numpy()
    np.testing.assert_allclose(mix(weights, rows).numpy(), wanted, rtol=0, atol=1e-5)
    assert mix(weights[0], rows).shape == (9,)
    wide = matrix(4, 9)
    np.testing.assert_allclose(mix(weights, wide).numpy(), weights.numpy() @ wide.numpy(), rtol=0, atol=1e-13)


def test_put_rows_makes_a_new_matrix() -> None:
    rows = matrix(4, 3, dtype=torch.float32)
    before, values = rows.clone(), matrix(2, 3, 1)
    new = put_rows(rows, torch.tensor([3, 1]), values)
    assert torch.equal(rows, before) and new.dtype == torch.float32
    assert torch.equal(new[[3, 1]], values.float()) and torch.equal(new[[0, 2]], rows[[0, 2]])


def test_bytes_are_counted_by_type() -> None:
    tensors = {"a": torch.zeros(3, 2), "b": torch.zeros(5, dtype=torch.float64), "c": torch.zeros((), dtype=torch.int8)}
    assert nbytes(tensors) == 3 * 2 * 4 + 5 * 8 + 1
    # What is repeated without a copy crosses the wire for each row.
    assert nbytes({"a": torch.zeros(1, 2).expand(10, 2)}) == 80
