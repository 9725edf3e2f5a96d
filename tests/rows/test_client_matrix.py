"""Client matrices: tensors to their readers, changed by a few rows at a time; and their algebra, in blocks of rows."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from coterie.errors import AlgorithmError
from coterie.randomness import stream
from coterie.rows import (
    ClientMatrix,
    cosines,
    distances_from,
    gram,
    look_at_rows,
    mix,
    norms,
    put_rows,
    repeat_row,
    row_blocks,
    squared_distances,
    take_rows,
    total,
)
from coterie.rows._overlay import Patch
from coterie.rows._transfers import Transfers
from coterie.rows.backends import Backend, DeviceBackend, DiskBackend, HostBackend, RowIndex
from coterie.rows.placement import Placement

PLACES = ["device", "host", "disk"]


def backend_of(place: str, count: int, initial_row: Tensor, folder: Path) -> Backend:
    if place == "device":
        return DeviceBackend(count, initial_row)
    transfers = Transfers(torch.device("cpu"))
    return (
        HostBackend(count, initial_row, transfers)
        if place == "host"
        else DiskBackend(count, initial_row, transfers, folder)
    )


def filled(place: str, values: Tensor, folder: Path) -> ClientMatrix:
    """A client matrix of which the rows that are zeros were never written."""
    rows = ClientMatrix(backend_of(place, len(values), torch.zeros_like(values[0]), folder))
    some = values.flatten(1).any(1).nonzero().squeeze(1)
    if len(some):
        rows = rows.patched(RowIndex(some), values[some])
        rows.commit()
    return rows


def matrix(clients: int, size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    rows = torch.from_numpy(stream(seed, "kept").normal(size=(clients, size))).to(dtype)
    rows[::4] = 0
    return rows


@given(data=st.data(), place=st.sampled_from(PLACES), count=st.integers(1, 7))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_version_is_what_a_copy_would_be(data: st.DataObject, place: str, count: int, tmp_path: Path) -> None:
    """Put rows, commit some versions and drop others, in any order: each one left reads as plain copies do."""
    versions: list[tuple[ClientMatrix, Tensor]] = [
        (
            ClientMatrix(backend_of(place, count, torch.tensor([0.5, -1.0]), tmp_path)),
            torch.tensor([0.5, -1.0]).repeat(count, 1),
        )
    ]
    for step in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(versions) - 1))
        rows, plain = versions[at]
        what = data.draw(st.sampled_from(["put", "put", "commit", "drop"]))
        if what == "put":
            index = torch.tensor(data.draw(st.lists(st.integers(0, count - 1), unique=True)), dtype=torch.int64)
            values = torch.full((len(index), 2), float(step)) + torch.arange(len(index)).unsqueeze(1)
            new = put_rows(rows, index, values)
            assert isinstance(new, ClientMatrix)
            versions.append((new, plain.index_copy(0, index, values)))
        elif what == "commit":
            rows.commit()
            assert rows.patch is None
        elif len(versions) > 1:
            del versions[at]
            del rows
        some = torch.tensor(data.draw(st.lists(st.integers(0, count - 1), max_size=4)), dtype=torch.int64)
        for version, wanted in versions:
            assert torch.equal(take_rows(version, some), wanted[some])
            for index in (some, torch.arange(count), torch.arange(count).flip(0)):
                assert torch.equal(look_at_rows(version, index), wanted[index])
            assert torch.equal(version.dense(), wanted)
            assert torch.equal(torch.cat([block for _, block in version.blocks(2)]), wanted)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_patch_over_another_is_both_with_the_newer_on_top(data: st.DataObject) -> None:
    plain, patches = {}, []
    for number in (1, 2):
        index = sorted(data.draw(st.sets(st.integers(0, 9))))
        plain |= dict.fromkeys(index, float(number))
        patches.append(
            Patch(RowIndex(torch.tensor(index, dtype=torch.int64)), torch.full((len(index), 2), float(number)))
        )
    both = patches[1].over(patches[0])
    assert both.index.on_host.tolist() == both.index.on_device.tolist() == sorted(plain)
    assert both.rows[:, 1].tolist() == [plain[row] for row in sorted(plain)]


def test_all_rows_in_order_are_looked_at_where_they_lie() -> None:
    rows = matrix(5, 3)
    zeros = ClientMatrix(DeviceBackend(5, torch.zeros(3)))
    assert look_at_rows(rows, torch.arange(5)).data_ptr() == rows.data_ptr()
    assert look_at_rows(zeros, torch.arange(5)).data_ptr() == zeros.backend.device_tensor().data_ptr()  # type: ignore[union-attr]
    for index in (torch.arange(4), torch.tensor([1, 0, 2, 3, 4]), torch.arange(5).unsqueeze(1)):
        assert look_at_rows(rows, index).data_ptr() != rows.data_ptr()
        assert torch.equal(look_at_rows(rows, index), rows[index])


def test_nothing_is_kept_of_rows_that_nobody_reads() -> None:
    rows = repeat_row(torch.zeros(4), 10)
    rows.move_to(DeviceBackend(10, torch.zeros(4)))
    read: list[int] = []
    gather = rows.backend.gather
    rows.backend.gather = lambda index: read.append(len(index)) or gather(index)  # type: ignore[func-returns-value, method-assign, misc]
    new = rows.patched(RowIndex(torch.tensor([2, 3])), torch.ones(2, 4))
    del rows
    gc.collect()
    new.commit()
    assert read == []
    old, new = new, new.patched(RowIndex(torch.tensor([3])), torch.ones(1, 4) * 2)
    new.commit()
    assert read == [1] and old[3].tolist() == [1] * 4 and new[3].tolist() == [2] * 4


@pytest.mark.parametrize("place", PLACES)
def test_a_client_matrix_is_a_tensor_to_its_reader(place: str, tmp_path: Path) -> None:
    plain = matrix(6, 3, dtype=torch.float64)
    rows = filled(place, plain, tmp_path)
    assert (rows.shape, rows.dtype, rows.device, len(rows), rows.dim()) == ((6, 3), plain.dtype, plain.device, 6, 2)
    assert rows.numel() == 18 and rows.nbytes == 18 * 8 and rows.is_floating_point()
    for index in (
        2,
        -1,
        slice(1, 4),
        slice(None),
        [0, 5],
        torch.tensor([[1, 2], [5, 1]]),
        torch.tensor(3),
        plain[:, 0] > 0,
    ):
        assert torch.equal(rows[index], plain[index]), index  # type: ignore[index]
    assert torch.equal(rows[:, :2], plain[:, :2]) and torch.equal(rows[1, 2], plain[1, 2])
    for index in (6, torch.tensor([-7])):
        with pytest.raises(IndexError):
            rows[index]  # type: ignore[index]
    assert torch.equal(rows * 2 + plain, plain * 2 + plain) and torch.equal(torch.stack([rows, plain])[0], plain)
    assert torch.equal(rows.T @ plain, plain.T @ plain) and np.array_equal(rows.numpy(), plain.numpy())
    assert rows.tolist() == plain.tolist() and str(rows) == str(plain)
    assert all(torch.equal(one, two) for one, two in zip(rows, plain, strict=True))
    for again in (copy.deepcopy(rows), pickle.loads(pickle.dumps(rows)), rows.clone(), rows.detach()):
        assert type(again) is Tensor and torch.equal(again, plain)
    assert rows.new_zeros(2).tolist() == [0, 0]
    rows[0].fill_(7.0)  # copies, all of them
    rows.numpy()[:] = 7.0
    rows.T.fill_(7.0)
    assert torch.equal(rows, plain)


@pytest.mark.parametrize("place", PLACES)
def test_who_has_the_matrix_in_hand_may_change_it(place: str, tmp_path: Path) -> None:
    plain = matrix(5, 3)
    rows = filled(place, plain, tmp_path)
    other = rows.patched(RowIndex(torch.tensor([1])), torch.ones(1, 3))
    before = plain.clone()
    for value in (rows, plain):
        value[2] = 3.0
        value += 1
        value.mul_(2.0)
    assert torch.equal(rows, plain)
    rows.commit()
    assert torch.equal(rows, plain)
    before[1] = 1.0
    assert torch.equal(other, before)
    with pytest.raises(AlgorithmError, match="use put_rows"):
        torch.add(plain, 1, out=rows)
    with pytest.raises(AlgorithmError, match="use put_rows"):
        rows.data = plain


@pytest.mark.parametrize("place", PLACES)
def test_what_was_put_may_be_changed_by_whoever_made_it(place: str, tmp_path: Path) -> None:
    rows = filled(place, torch.zeros(4, 2), tmp_path)
    values = torch.ones(2, 2)
    new = put_rows(rows, torch.tensor([1, 2]), values)
    values.fill_(7.0)  # an engine's buffer, used again
    assert torch.equal(new[:, 0], torch.tensor([0.0, 1, 1, 0]))
    assert isinstance(new, ClientMatrix)
    new.commit()
    assert torch.equal(new[:, 0], torch.tensor([0.0, 1, 1, 0]))


def test_rows_in_any_order_and_on_several_places_at_once(tmp_path: Path) -> None:
    for place in PLACES:
        rows = filled(place, torch.zeros(9, 2), tmp_path)
        new = put_rows(rows, torch.tensor([7, 0, 3]), torch.tensor([[7.0, 7], [0, 9], [3, 3]]))
        new = put_rows(new, torch.tensor([3, 8]), torch.tensor([[4.0, 4], [8, 8]]))
        wanted = torch.tensor([0.0, 0, 0, 4, 0, 0, 0, 7, 8])
        assert torch.equal(new[:, 0], wanted) and isinstance(new, ClientMatrix)
        new.commit()
        assert torch.equal(new[:, 0], wanted) and new.backend.changed().tolist() == [0, 3, 7, 8]
        wide = take_rows(new, torch.tensor([[8, 7], [8, 0]]))
        assert wide.shape == (2, 2, 2) and wide[..., 0].tolist() == [[8, 7], [8, 0]]


def test_rows_that_have_no_place_yet_cannot_be_committed() -> None:
    rows = repeat_row(torch.ones(2), 3)
    assert rows.sum() == 6
    with pytest.raises(AlgorithmError, match="before it was known where"):
        rows.patched(RowIndex(torch.tensor([1])), torch.zeros(1, 2)).commit()


def test_matrices_that_share_a_backend_are_put_apart(tmp_path: Path) -> None:
    one = repeat_row(torch.ones(2), 3)
    server, clients = Placement("device", torch.device("cpu")).place({"a": one}, {"a": one, "b": torch.arange(3.0)}, 3)
    (a, b, c) = (server["a"], clients["a"], clients["b"])
    assert all(isinstance(value, ClientMatrix) for value in (a, b, c)) and a.backend is not b.backend  # type: ignore[attr-defined]
    assert torch.equal(a, torch.ones(3, 2)) and torch.equal(b, a) and c.tolist() == [0, 1, 2]


# Algebra


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 rows, and no matrix small enough to be taken as a whole."""
    monkeypatch.setattr("coterie.rows.matrix.BLOCK_BYTES", 1)
    monkeypatch.setattr("coterie.rows.algebra._DENSE_BYTES", 0)
    monkeypatch.setattr("coterie.rows.algebra._PAIR_BYTES", 1)
    for name in ("_BLOCK_ELEMENTS", "_CACHED_ELEMENTS"):
        monkeypatch.setattr(f"coterie.rows.algebra.{name}", 1)


def patched(place: str, values: Tensor, folder: Path) -> ClientMatrix:
    """A client matrix with something over it."""
    rows = filled(place, values.flip(0), folder)
    index = torch.arange(0, len(values))
    rest = index[(values != values.flip(0)).any(1)]
    return rows.patched(RowIndex(rest), values[rest])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", [filled, patched])
@pytest.mark.usefixtures("few_rows")
def test_the_algebra_of_blocks_is_that_of_the_whole(
    make: Callable[[str, Tensor, Path], ClientMatrix], dtype: torch.dtype, tmp_path: Path
) -> None:
    plain, other = matrix(41, 700, 1, dtype), matrix(5, 700, 2, dtype)
    wide = plain.double()
    weights = torch.from_numpy(stream(3, "kept weights").normal(size=(6, 41)))
    some = torch.tensor([0, 17, 40])
    lengths = wide.norm(dim=1).clamp_min(1e-300)
    apart = torch.cdist(wide, wide, compute_mode="donot_use_mm_for_euclid_dist").square()
    # Sums of 700 products of size one, in float64 but for mixtures, whose 41 terms are in the rows' own type.
    wanted: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, float]] = {
        "gram": (gram, wide @ wide.T, 1e-11),
        "gram of another": (lambda rows: gram(other, rows), other.double() @ wide.T, 1e-11),
        "gram with another": (lambda rows: gram(rows, other), wide @ other.double().T, 1e-11),
        "norms": (norms, wide.norm(dim=1), 1e-12),
        "distances": (squared_distances, apart, 1e-11),
        "distances from some": (lambda rows: distances_from(rows, some), apart[some], 1e-11),
        "total": (lambda rows: total(rows, torch.arange(41)), torch.arange(41.0).double() @ wide, 1e-4),
        "mix": (lambda rows: mix(weights, rows), weights @ wide, 1e-4 if dtype == torch.float32 else 1e-12),
        "mean": (lambda rows: mix(weights[0], rows), weights[0] @ wide, 1e-4 if dtype == torch.float32 else 1e-12),
    }
    matrices = [make(place, plain, tmp_path) for place in PLACES]
    assert len(list(row_blocks(matrices[0]))) == 3
    for name, (function, exact, tolerance) in wanted.items():
        found = [function(rows) for rows in matrices]
        torch.testing.assert_close(found[0].double(), exact, rtol=0, atol=tolerance, msg=name)
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]), name
    near = cosines(matrices[2])
    assert torch.equal(near, near.T)
    exact = (wide @ wide.T / lengths / lengths.unsqueeze(1)).fill_diagonal_(1.0)
    torch.testing.assert_close(near, exact, rtol=0, atol=1e-13)


def test_a_small_matrix_is_taken_as_a_whole(tmp_path: Path) -> None:
    plain = matrix(8, 30)
    for place in PLACES:
        rows = filled(place, plain, tmp_path)
        for function in (gram, cosines, squared_distances):
            assert torch.equal(function(rows), function(plain))
        assert torch.equal(mix(torch.ones(2, 8), rows), mix(torch.ones(2, 8), plain))
