"""Files of tensors in blocks: what the safetensors library reads, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from coterie.runs.storage import tensor_file
from coterie.runs.storage.tensor_file import NotATensorFile, TensorToWrite, opened, write

TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def read(path: Path) -> tuple[dict[str, Tensor], str]:
    with opened(path) as reader:
        tensors = {part.name: part.whole() for part in reader}
        return tensors, reader.sha256


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(
        one[name].dtype == two[name].dtype and torch.equal(one[name], two[name]) for name in one
    )


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_read_by_us_and_by_the_library(
    data: st.DataObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "BLOCK", data.draw(st.sampled_from([8, 24, 2**20])))
    tensors = {}
    for name in data.draw(st.lists(st.text(min_size=1, max_size=4), unique=True, max_size=5)):
        shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
        drawn = torch.arange(torch.Size(shape).numel()).view(shape) % 7
        tensors[name] = drawn.to(data.draw(st.sampled_from(TYPES)))
    tensors.pop("__metadata__", None)
    path = tmp_path / "file"
    size, digest = write(path, {name: TensorToWrite.of(value.T) for name, value in tensors.items() if value.dim() == 2})
    size, digest = write(path, {name: TensorToWrite.of(value) for name, value in tensors.items()})
    assert path.stat().st_size == size and hashlib.sha256(path.read_bytes()).hexdigest() == digest
    assert same(load_file(path), tensors)
    assert read(path)[1] == digest and same(read(path)[0], tensors)
    save_file(tensors, path)
    assert same(read(path)[0], tensors)


def test_numbers_that_do_not_lie_in_order(tmp_path: Path) -> None:
    wide = torch.arange(12.0).view(3, 4)
    write(tmp_path / "file", {"turned": TensorToWrite.of(wide.T), "repeated": TensorToWrite.of(wide[:1].expand(5, 4))})
    found = load_file(tmp_path / "file")
    assert torch.equal(found["turned"], wide.T) and torch.equal(found["repeated"], wide[:1].expand(5, 4))


def test_rows_are_read_in_blocks_of_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "BLOCK", 40)
    rows = torch.arange(35.0).view(7, 5)
    write(tmp_path / "file", {"rows": TensorToWrite.of(rows)})
    with opened(tmp_path / "file") as reader:
        blocks = [block for part in reader for block in part.rows()]
    assert [len(block) for block in blocks] == [2, 2, 2, 1] and torch.equal(torch.cat(blocks), rows)


def test_a_type_that_a_file_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="'phase' is of type"):
        write(tmp_path / "file", {"phase": TensorToWrite.of(torch.zeros(2, dtype=torch.complex64))})


def blob(header: Any, data: bytes = b"\0" * 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(begin: int, end: int, shape: Any, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        struct.pack("<Q", 2**60),
        blob(b"{"),
        blob([]),
        blob({"a": 3}),
        blob({"a": entry(0, 8, [3])}),
        blob({"a": entry(0, 8, [2], "F7")}),
        blob({"a": entry(0, 2**40, [2**38])}),
        blob({"a": entry(4, 8, [1])}),
        blob({"a": entry(0, 8, [-2])}),
        blob({"a": entry(0, 8, [2])}, b"\0" * 9),
        blob({"a": entry(0, 8, [2])}, b"\0" * 7),
    ],
)
def test_what_is_not_such_a_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(NotATensorFile):
        read(tmp_path / "file")
