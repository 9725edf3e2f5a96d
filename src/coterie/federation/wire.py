"""Messages on the wire: named tensors and a header, in one block of bytes that both sides check.

The block is a safetensors file: a JSON header, then the numbers of each tensor. Nothing in it is ever executed. The
metadata of that header carries Coterie's own (schema version, run, round, exchange and so on) as JSON.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SCHEMA = 1
"""Version of what headers and names mean; both sides must have the same."""

_METADATA = "coterie"
_DTYPES = {"F32": torch.float32, "F64": torch.float64, "I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGNED = 8  # bytes: of the length of the header, and what the header's own length is a multiple of
_HEADER_LIMIT = 2**20
_MOST_SIDES = 16
_MOST_LETTERS = 400
_PATH = re.compile(r"""(?<![\w.:/])/(?:[^\s/:'",;()]+/)*([^\s/:'",;()]+)""")


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
            plain[name] = value
    text = json.dumps({**header, "schema": SCHEMA, "order": list(tensors), "same": same}, allow_nan=False)
    # Written here rather than by safetensors, which holds each tensor three times on the way. As it does, the types
    # with the longest numbers come first, so that all of them are aligned.
    outer: dict[str, Any] = {"__metadata__": {_METADATA: text}}
    end = 0
    order = sorted(plain, key=lambda name: (-plain[name].element_size(), name))
    for name in order:
        value = plain[name]
        begin, end = end, end + value.numel() * value.element_size()
        outer[name] = {"dtype": _NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    head = json.dumps(outer, separators=(",", ":")).encode()
    head += b" " * (-len(head) % _ALIGNED)
    return b"".join([len(head).to_bytes(_ALIGNED, "little"), head, *(_bytes(plain[name]) for name in order)])


def _bytes(value: Tensor) -> memoryview:
    return value.detach().cpu().contiguous().reshape(-1).numpy().view(np.uint8).data


def unpack(block: bytes, limit: int) -> Envelope:
    """Take a block of bytes apart, trusting nothing in it; every number of the result is finite.

    A block that has more than ``limit`` bytes, is damaged or has another schema version is :class:`Rejected`.
    """
    if len(block) > limit:
        raise Rejected(f"it has {len(block)} bytes, but may have {limit} at most")
    length = int.from_bytes(block[:_ALIGNED], "little")
    if _HEADER_LIMIT < length < len(block):
        raise Rejected(f"its header has {length} bytes, but may have {_HEADER_LIMIT} at most")
    try:
        outer = _plain_json(block[_ALIGNED : _ALIGNED + length])
        header = _plain_json(outer.pop("__metadata__")[_METADATA])
        loaded = _views(outer, block, _ALIGNED + length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError) as error:
        raise Rejected(f"it cannot be read as a block of named tensors ({type(error).__name__})") from error
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        found = header.get("schema") if isinstance(header, dict) else None
        raise Rejected(f"its schema version is {found!r}, but must be {SCHEMA}: use the same version of Coterie")
    sources = _sources(header.pop("order", None), header.pop("same", {}), loaded)
    if sum(loaded[source].nbytes for source in sources.values()) > limit:
        raise Rejected(f"its tensors have more than {limit} bytes together")
    _check_numbers(loaded)
    # Cloned out of the block, whose alignment is not that of memory that PyTorch allocates: it can decide last bits.
    # What went under two names is one tensor here too: nobody writes into what was received.
    held = {source: loaded[source].clone() for source in dict.fromkeys(sources.values())}
    return Envelope(header, {name: held[source] for name, source in sources.items()})


def _plain_json(text: str | bytes) -> Any:
    """Read JSON of which every number can be computed with and every text written; all else is a ``ValueError``."""
    found = json.loads(text, parse_constant=_refused, parse_float=_finite, parse_int=_whole)
    json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair is an error here, and not in some log
    return found


def _refused(text: str) -> float:
    raise ValueError(text)


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refused("not finite")


def _whole(text: str) -> int:
    value = int(text)
    if not -(2**63) <= value < 2**63:
        raise ValueError("a whole number of more than 64 bits")
    return value


def _views(outer: Mapping[str, Any], block: bytes, start: int) -> dict[str, Tensor]:
    """Give the tensors of a block as views of it; they must cover it without a gap or an overlap."""
    entries = []
    for name, entry in outer.items():
        dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if len(shape) > _MOST_SIDES or not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
            raise ValueError(f"a tensor of {len(shape)} sides")
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError("a tensor of another size than its shape says")
        entries.append((begin, end, name, dtype, shape))
    entries.sort(key=lambda entry: entry[:2])
    reached, out = 0, {}
    for begin, end, name, dtype, shape in entries:
        if begin != reached:
            raise ValueError("tensors with a gap or an overlap")
        reached = end
        if end == begin:
            out[name] = torch.zeros(shape, dtype=dtype)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of memory that must not be written to: nobody does
                flat = torch.frombuffer(block, dtype=torch.uint8, count=end - begin, offset=start + begin)
            out[name] = _typed(flat, dtype).reshape(shape)
    if start + reached != len(block):
        raise ValueError("bytes that belong to no tensor")
    return out


def _typed(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes as numbers; those of a block that is not Coterie's may lie where that takes a copy."""
    if dtype == torch.bool:
        if bool((flat > 1).any()):
            raise ValueError("a truth value that is neither")
        return flat.view(torch.bool)
    return (flat if flat.data_ptr() % dtype.itemsize == 0 else flat.clone()).view(dtype)


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


def sentence(text: object) -> str:
    """Make what another party says fit to be shown: one line that ends, without codes that a terminal acts on."""
    words = " ".join(str(text)[: 4 * _MOST_LETTERS].split())
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in words)
    return shown if len(shown) <= _MOST_LETTERS else f"{shown[:_MOST_LETTERS]} …"


def without_folders(text: str, *folders: Path, known: str = "") -> str:
    """Take the names of folders out of what is to be told to another party; of a file its own name stays.

    What looks like a path and stands in ``known``, which that party said itself, stays as it is.
    """
    for folder in folders:  # whose names may hold what ends a path elsewhere
        text = text if not folder.name else text.replace(f"{folder}/", "").replace(str(folder), folder.name)
    return _PATH.sub(lambda found: found[0] if found[0] in known else found[1], text)


def payload(tensors: Mapping[str, Tensor]) -> int:
    """Count the bytes of the numbers alone."""
    return sum(math.prod(value.shape) * value.element_size() for value in tensors.values())


def _check_numbers(tensors: Mapping[str, Tensor]) -> None:
    for name, value in tensors.items():
        if value.dtype not in _NAMES:
            raise Rejected(f"{name!r} is of type {value.dtype}, which cannot be sent")
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise Rejected(f"{name!r} holds a number that is not finite")
