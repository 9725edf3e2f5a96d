"""Blocks of bytes: what goes in comes out, and nothing else comes out."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from coterie.federation.wire import SCHEMA, Rejected, TensorSpec, check, check_header, pack, payload, unpack

LIMIT = 2**24
DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)


@given(
    st.dictionaries(
        st.text("abcw/_ é", min_size=1, max_size=8),
        st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(DTYPES)),
        max_size=5,
    )
)
def test_what_goes_in_comes_out(shapes: dict[str, tuple[list[int], torch.dtype]]) -> None:
    tensors = {
        name: (torch.arange(torch.Size(shape).numel()) - 1).reshape(shape).to(dtype)
        for name, (shape, dtype) in shapes.items()
    }
    found = unpack(pack({"run": "a", "round": 3}, tensors), LIMIT)
    assert found.header == {"run": "a", "round": 3, "schema": SCHEMA}
    assert list(found.tensors) == list(tensors)
    for name, value in tensors.items():
        assert found.tensors[name].dtype == value.dtype
        assert torch.equal(found.tensors[name], value)


def test_views_travel_as_what_they_show() -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    found = unpack(pack({}, {"row": matrix[1], "column": matrix[:, 1], "same": matrix[1].expand(2, 4)}), LIMIT)
    assert found.tensors["row"].tolist() == [4, 5, 6, 7]
    assert found.tensors["column"].tolist() == [1, 5, 9]
    assert found.tensors["same"].tolist() == [[4, 5, 6, 7], [4, 5, 6, 7]]


def test_what_is_sent_under_two_names_travels_once_and_is_held_once() -> None:
    w = torch.arange(1000.0)
    once, twice = pack({}, {"message/w": w}), pack({}, {"message/w": w, "evaluate/w": w})
    assert len(twice) < len(once) + 200
    found = unpack(twice, LIMIT).tensors
    assert list(found) == ["message/w", "evaluate/w"]
    assert torch.equal(found["evaluate/w"], w)
    assert found["evaluate/w"].data_ptr() == found["message/w"].data_ptr()


@pytest.mark.parametrize(
    "header",
    [
        {"order": ["w", "v"], "same": {"v": "x"}},
        {"order": ["w"], "same": {"w": "w"}},
        {"order": ["w", "v"], "same": {}},
        {"order": ["w", "w"], "same": {"v": "w"}},
        {"order": [["w"]], "same": {}},
        {"order": ["w"], "same": {"v": ["w"]}},
        {"order": None},
    ],
)
def test_headers_that_do_not_fit_their_tensors_are_rejected(header: dict[str, object]) -> None:
    with pytest.raises(Rejected):
        unpack(save({"w": torch.zeros(1)}, metadata={"coterie": json.dumps({"schema": SCHEMA, **header})}), LIMIT)


def test_aliases_do_not_blow_a_block_up() -> None:
    header = {"schema": SCHEMA, "order": ["w", *map(str, range(100))], "same": {str(n): "w" for n in range(100)}}
    block = save({"w": torch.zeros(1000)}, metadata={"coterie": json.dumps(header)})
    with pytest.raises(Rejected, match="more than 100000 bytes together"):
        unpack(block, 100_000)


@given(st.binary(max_size=300))
def test_any_bytes_are_rejected_and_nothing_worse(block: bytes) -> None:
    with pytest.raises(Rejected):
        unpack(block, LIMIT)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_spoilt_block_is_rejected_or_read(place: int, value: int) -> None:
    block = bytearray(pack({"run": "a"}, {"w": torch.ones(8)}))
    block[place % len(block)] = value
    try:
        found = unpack(bytes(block), LIMIT)
    except Rejected:
        return
    assert all(bool(tensor.isfinite().all()) for tensor in found.tensors.values() if tensor.is_floating_point())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_neither_leave_nor_enter(bad: float) -> None:
    tensors = {"w": torch.tensor([1.0, bad])}
    with pytest.raises(Rejected, match="'w' holds a number that is not finite"):
        pack({}, tensors)
    smuggled = save(tensors, metadata={"coterie": json.dumps({"schema": SCHEMA, "order": ["w"]})})
    with pytest.raises(Rejected, match="not finite"):
        unpack(smuggled, LIMIT)


def test_what_is_too_large_is_not_even_read() -> None:
    block = pack({}, {"w": torch.zeros(1000)})
    assert unpack(block, len(block))
    with pytest.raises(Rejected, match="may have"):
        unpack(block, len(block) - 1)


@pytest.mark.parametrize(
    ("header", "says"),
    [({"schema": 2, "order": ["w"]}, "schema version is 2"), ({"order": ["w"]}, "None"), ([], "None")],
)
def test_another_schema_is_rejected(header: object, says: str) -> None:
    with pytest.raises(Rejected, match=says):
        unpack(save({"w": torch.zeros(1)}, metadata={"coterie": json.dumps(header)}), LIMIT)


def test_names_shapes_and_types_are_checked() -> None:
    expected = {"w": TensorSpec((2,), torch.float32)}
    check({"w": torch.zeros(2)}, expected)
    for wrong, says in (
        ({"w": torch.zeros(3)}, r"float32\[3\], but must be float32\[2\]"),
        ({"w": torch.zeros(2, dtype=torch.float64)}, "float64"),
        ({"v": torch.zeros(2)}, "'v'"),
        ({}, "must hold"),
        ({"w": torch.zeros(2), "more": torch.zeros(1)}, "more"),
    ):
        with pytest.raises(Rejected, match=says):
            check(wrong, expected)


def test_headers_are_checked() -> None:
    check_header({"run": "a", "more": 1}, {"run": "a"})
    with pytest.raises(Rejected, match="its run is 'b', but must be 'a'"):
        check_header({"run": "b"}, {"run": "a"})


@pytest.mark.parametrize("count", [2**18, 2**20])
def test_a_block_is_hardly_larger_than_its_numbers(count: int) -> None:
    tensors = {"w": torch.zeros(count), "gamma": torch.zeros(())}
    header = {"run": "0" * 16, "federation": "0" * 32, "algorithm": "fedavg", "settings": {"lr": 0.1}, "round": 7}
    numbers = payload(tensors)
    assert numbers == 4 * (count + 1) >= 2**20
    assert numbers <= len(pack(header, tensors)) < 1.05 * numbers
