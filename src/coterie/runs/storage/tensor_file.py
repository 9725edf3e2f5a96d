"""Files of tensors that are written and read block by block: never is more than a block held beside the tensors.

The format is that of safetensors: eight bytes with the length of a JSON header, the header with each tensor's type,
shape and place, then their bytes. What is written here, that library reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

BLOCK = 2**22
"""Bytes that are written or read at a time."""

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TYPES = {code: dtype for dtype, code in _CODES.items()}
_LENGTH = struct.Struct("<Q")
_SMALL = 2**24  # bytes that are written before a thread would be of use
_LONGEST = 2**27  # bytes of a header: more is not one


class NotATensorFile(Exception):
    """A file is not what :func:`write` writes; says why."""


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor to be written.

    Parameters
    ----------
    shape
        Its shape.
    dtype
        Its type.
    blocks
        Gives its numbers in order, as tensors on the host.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: Callable[[], Iterable[Tensor]]

    @classmethod
    def of(cls, value: Tensor) -> TensorToWrite:
        """Describe a plain tensor, of any strides, on any device."""

        def blocks() -> Iterator[Tensor]:
            flat = value.detach().contiguous().view(-1)
            for piece in flat.split(max(1, BLOCK // value.element_size())):
                yield piece.cpu()

        return cls(tuple(value.shape), value.dtype, blocks)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write(path: Path, entries: Mapping[str, TensorToWrite], notes: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Write tensors by name, and give the file's size and SHA-256; types that the format lacks are a ``TypeError``."""
    # The widest numbers first, so that all of them lie where their type may.
    names = sorted(entries, key=lambda name: -entries[name].dtype.itemsize)
    header: dict[str, Any] = {} if notes is None else {"__metadata__": dict(notes)}
    at = 0
    for name in names:
        entry = entries[name]
        if entry.dtype not in _CODES:
            raise TypeError(f"{name!r} is of type {entry.dtype}, which a file cannot hold")
        header[name] = {
            "dtype": _CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.nbytes],
        }
        at += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    pieces = (_bytes(block.contiguous()) for name in names for block in entries[name].blocks())
    whole = itertools.chain([memoryview(_LENGTH.pack(len(text)) + text)], pieces)
    return _LENGTH.size + len(text) + at, (_written if at <= _SMALL else _written_beside)(path, whole)


def _written(path: Path, pieces: Iterable[memoryview]) -> str:
    """Write a file piece by piece, and give its checksum."""
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        for piece in pieces:
            digest.update(piece)
            _write_all(file, piece)
    return digest.hexdigest()


def _written_beside(path: Path, pieces: Iterable[memoryview]) -> str:
    """Do the same, with the checksum taken of a piece while the one before it is written, in a thread."""
    digest, last = hashlib.sha256(), Future[None]()
    last.set_result(None)
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1, "coterie-write") as writer:
        for piece in pieces:
            digest.update(piece)
            last.result()
            last = writer.submit(_write_all, file, piece)
        last.result()
    return digest.hexdigest()


def save_named(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None) -> None:
    """Write tensors by name, with notes, as safetensors itself does; of a disk that is full it makes an ``OSError``."""
    try:
        save_file(dict(tensors), path, metadata=None if notes is None else dict(notes))
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


def _write_all(file: IO[bytes], piece: memoryview) -> None:
    while piece:
        piece = piece[file.write(piece) :]


def _bytes(value: Tensor) -> memoryview:
    flat: Any = value.view(-1).view(torch.uint8).numpy()
    return memoryview(flat)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file that is being read; its numbers must be taken before the next one's.

    Parameters
    ----------
    name
        Its name.
    shape
        Its shape.
    dtype
        Its type.
    fill
        Reads on from where the file is.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: Callable[[memoryview], None]

    def whole(self) -> Tensor:
        """Read it as a whole, on the host."""
        out = torch.empty(self.shape, dtype=self.dtype)
        memory = _bytes(out)
        for begin in range(0, len(memory), BLOCK):
            self.fill(memory[begin : begin + BLOCK])
        return out

    def rows(self) -> Iterator[Tensor]:
        """Read it in blocks of consecutive whole rows, on the host."""
        count = max(1, BLOCK // max(1, math.prod(self.shape[1:]) * self.dtype.itemsize))
        for begin in range(0, self.shape[0], count):
            block = torch.empty((min(count, self.shape[0] - begin), *self.shape[1:]), dtype=self.dtype)
            self.fill(_bytes(block))
            yield block


class TensorFileReader:
    """Reads a file from its beginning to its end.

    Parameters
    ----------
    file
        The file, at its beginning.
    size
        Its size.
    """

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._size = file, size
        self._digest = hashlib.sha256()

    def __iter__(self) -> Iterator[StoredTensor]:
        """Give the tensors in the order of their bytes; what is not such a file is a :class:`NotATensorFile`."""
        begin, header = self._header()
        for name, dtype, shape in _layout(header, self._size - begin):
            yield StoredTensor(name, shape, dtype, self._fill)
        if self._file.read(1):
            raise NotATensorFile("it goes on after its tensors")

    @property
    def sha256(self) -> str:
        """The checksum of what has been read."""
        return self._digest.hexdigest()

    def _fill(self, memory: memoryview) -> None:
        window = memory
        while window:
            got = self._file.readinto(window)  # type: ignore[attr-defined]
            if not got:
                raise NotATensorFile("it ends too early")
            window = window[got:]
        self._digest.update(memory)

    def _header(self) -> tuple[int, Any]:
        length = bytearray(_LENGTH.size)
        self._fill(memoryview(length))
        (size,) = _LENGTH.unpack(length)
        if size > min(_LONGEST, self._size):
            raise NotATensorFile("its header is too long")
        text = bytearray(size)
        self._fill(memoryview(text))
        try:
            return _LENGTH.size + size, json.loads(text)
        except ValueError as error:
            raise NotATensorFile("its header is not JSON") from error


@contextlib.contextmanager
def opened(path: Path) -> Iterator[TensorFileReader]:
    with path.open("rb", buffering=0) as file:
        yield TensorFileReader(file, path.stat().st_size)


def _layout(header: Any, size: int) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Give names, types and shapes in the order of their bytes; refuses gaps and overlaps."""
    try:
        found = [(*entry["data_offsets"], name, entry) for name, entry in header.items() if name != "__metadata__"]
        at = 0
        for begin, end, name, entry in sorted(found, key=lambda each: each[:3]):
            dtype, shape = _TYPES[entry["dtype"]], tuple(int(side) for side in entry["shape"])
            fits = end - begin == math.prod(shape) * dtype.itemsize and end <= size
            if begin != at or not fits or min(shape, default=0) < 0:
                raise NotATensorFile(f"{name!r} lies where it cannot")
            yield name, dtype, shape
            at = end
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NotATensorFile("its header does not describe tensors") from error
