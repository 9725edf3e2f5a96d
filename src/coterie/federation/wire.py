"""Messages on the wire: named tensors and a header, in one block of bytes that both sides check.

The block is a safetensors file: a JSON header, then the numbers of each tensor. Nothing in it is ever executed. The
metadata of that header carries Coterie's own (schema version, run, round, exchange and so on) as JSON.
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
    """A message is not what it must be; the text says why, in one sentence."""


@dataclass(frozen=True)
class Envelope:
    """A message or a reply, unpacked.

    Parameters
    ----------
    header
        Fields of plain JSON types.
    tensors
        Named tensors, in the order in which they were packed.
    """

    header: dict[str, Any]
    tensors: dict[str, Tensor]

    def under(self, prefix: str) -> dict[str, Tensor]:
        """Give the tensors whose names begin with a prefix and a slash, by the rest of their names."""
        start = f"{prefix}/"
        return {name.removeprefix(start): value for name, value in self.tensors.items() if name.startswith(start)}


@dataclass(frozen=True)
class TensorSpec:
    """The shape and type of a tensor.

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
    def of(cls, value: Tensor) -> TensorSpec:
        return cls(tuple(value.shape), value.dtype)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def pack(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """Put a header of plain JSON types and tensors into one block of bytes.

    A number that is not finite, or a type that cannot be sent, is :class:`Rejected`.
    """
    _check_numbers(tensors)
    plain: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    places: dict[object, str] = {}
    for name, value in tensors.items():
        # Memory that goes under two names, such as a model to train from and to evaluate, is sent once.
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
    """Take a block of bytes apart, trusting nothing in it; every number of the result is finite.

    A block that has more than ``limit`` bytes, is damaged or has another schema version is :class:`Rejected`.
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


def check(tensors: Mapping[str, Tensor], expected: Mapping[str, TensorSpec]) -> None:
    """Reject tensors that do not have exactly the expected names, shapes and types."""
    if tensors.keys() != expected.keys():
        raise Rejected(f"it holds {sorted(tensors)}, but must hold {sorted(expected)}")
    for name, shape in expected.items():
        found = TensorSpec.of(tensors[name])
        if found != shape:
            raise Rejected(f"{name!r} is {found}, but must be {shape}")


def check_header(header: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Reject a header whose fields do not have the expected values."""
    for field, value in expected.items():
        if header.get(field) != value:
            raise Rejected(f"its {field} is {header.get(field)!r}, but must be {value!r}")


def payload(tensors: Mapping[str, Tensor]) -> int:
    """Count the bytes of the numbers alone."""
    return sum(math.prod(value.shape) * value.element_size() for value in tensors.values())


def _check_numbers(tensors: Mapping[str, Tensor]) -> None:
    for name, value in tensors.items():
        if value.dtype not in _DTYPES:
            raise Rejected(f"{name!r} is of type {value.dtype}, which cannot be sent")
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise Rejected(f"{name!r} holds a number that is not finite")
