"""What crosses the wire: named tensors under a header, in one block of bytes that is checked on both sides.

The block is a safetensors file: a JSON header, then each tensor's numbers as they lie in a row. Nothing in it is ever
executed. The header's metadata carries our own header (schema version, run, round, exchange and so on) as JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

SCHEMA = 1
"""Version of what headers and names mean; both sides must have the same."""

_METADATA = "coterie"
_DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)


class Rejected(Exception):
    """A message is not what it must be; says why in one sentence."""


@dataclass(frozen=True)
class Envelope:
    """A message or a reply, unpacked.

    Parameters
    ----------
    header
        What it says of itself, of plain JSON types.
    tensors
        Named tensors, in the order in which they were packed.
    """

    header: dict[str, Any]
    tensors: dict[str, Tensor]

    def under(self, prefix: str) -> dict[str, Tensor]:
        """Give the tensors whose names begin with a prefix and a slash.

        Parameters
        ----------
        prefix
            The first part of the names.

        Returns
        -------
        dict of str to Tensor
            The tensors, by the rest of their names.
        """
        start = f"{prefix}/"
        return {name.removeprefix(start): value for name, value in self.tensors.items() if name.startswith(start)}


@dataclass(frozen=True)
class Shape:
    """What a tensor must be.

    Parameters
    ----------
    shape
        Its shape, without a client axis.
    dtype
        Its type.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, value: Tensor) -> Shape:
        """Describe a tensor.

        Parameters
        ----------
        value
            The tensor.

        Returns
        -------
        Shape
            What it is.
        """
        return cls(tuple(value.shape), value.dtype)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def pack(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """Put a header and tensors into one block of bytes.

    Parameters
    ----------
    header
        Plain JSON types.
    tensors
        Named tensors of any layout, on any device.

    Returns
    -------
    bytes
        The block; a number that is not finite, or a type that does not travel, is :class:`Rejected`.
    """
    _check_numbers(tensors)
    plain: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    places: dict[object, str] = {}
    for name, value in tensors.items():
        # One piece of memory under two names, such as a model to train from and to evaluate, travels once.
        place = (value.data_ptr(), value.dtype, value.shape, value.stride(), str(value.device))
        twin = places.setdefault(place, name) if value.numel() else name
        if twin != name:
            same[name] = twin
        else:
            # Cloned: a safetensors file wants each tensor contiguous and alone in its memory.
            plain[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    text = json.dumps({**header, "schema": SCHEMA, "order": list(tensors), "same": same}, allow_nan=False)
    return save(plain, metadata={_METADATA: text})


def unpack(block: bytes, limit: int) -> Envelope:
    """Take a block of bytes apart, trusting nothing in it.

    Parameters
    ----------
    block
        What arrived.
    limit
        Bytes that it may have at most.

    Returns
    -------
    Envelope
        Header and tensors; every number is finite.

    Raises
    ------
    Rejected
        If it is too large, damaged, of another schema version, or holds a number that is not finite.
    """
    if len(block) > limit:
        raise Rejected(f"it has {len(block)} bytes, but may have {limit} at most")
    try:
        length = int.from_bytes(block[:8], "little")
        outer = json.loads(block[8 : 8 + length])
        header = json.loads(outer["__metadata__"][_METADATA])
        loaded = load(block)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Rejected(f"it cannot be read as a block of named tensors ({type(error).__name__})") from error
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        found = header.get("schema") if isinstance(header, dict) else None
        raise Rejected(f"its schema version is {found!r}, but must be {SCHEMA}: use the same version of Coterie")
    sources = _sources(header.pop("order", None), header.pop("same", {}), loaded)
    if sum(loaded[source].nbytes for source in sources.values()) > limit:
        raise Rejected(f"its tensors have more than {limit} bytes together")
    _check_numbers(loaded)
    # Cloned out of the block, whose alignment is not that of memory that PyTorch allocates: it can decide last bits.
    return Envelope(header, {name: loaded[source].clone() for name, source in sources.items()})


def _sources(order: object, same: object, loaded: Mapping[str, Tensor]) -> dict[str, str]:
    """Say which tensor of a block each name stands for, in the order of the names."""
    if (
        isinstance(order, list)
        and isinstance(same, dict)
        and all(isinstance(word, str) for word in (*order, *same.values()))
    ):
        held = {**{name: name for name in loaded}, **same}
        if sorted(order) == sorted(held) and not same.keys() & loaded.keys() and set(same.values()) <= loaded.keys():
            return {name: held[name] for name in order}
    raise Rejected("its header does not name its tensors")


def check(tensors: Mapping[str, Tensor], expected: Mapping[str, Shape]) -> None:
    """See that tensors have exactly the expected names, shapes and types.

    Parameters
    ----------
    tensors
        What came.
    expected
        What must come.

    Raises
    ------
    Rejected
        If they differ.
    """
    if tensors.keys() != expected.keys():
        raise Rejected(f"it holds {sorted(tensors)}, but must hold {sorted(expected)}")
    for name, shape in expected.items():
        found = Shape.of(tensors[name])
        if found != shape:
            raise Rejected(f"{name!r} is {found}, but must be {shape}")


def check_header(header: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """See that a header says what it must.

    Parameters
    ----------
    header
        What came.
    expected
        Fields with the values that they must have.

    Raises
    ------
    Rejected
        If a field differs.
    """
    for field, value in expected.items():
        if header.get(field) != value:
            raise Rejected(f"its {field} is {header.get(field)!r}, but must be {value!r}")


def payload(tensors: Mapping[str, Tensor]) -> int:
    """Count the bytes of the numbers alone.

    Parameters
    ----------
    tensors
        The tensors.

    Returns
    -------
    int
        Bytes.
    """
    return sum(math.prod(value.shape) * value.element_size() for value in tensors.values())


def _check_numbers(tensors: Mapping[str, Tensor]) -> None:
    for name, value in tensors.items():
        if value.dtype not in _DTYPES:
            raise Rejected(f"{name!r} is of type {value.dtype}, which does not travel")
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise Rejected(f"{name!r} holds a number that is not finite")
