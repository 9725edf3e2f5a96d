"""Changes to messages and configurations, by a seeded draw: of bytes, of what headers say, of what files say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

STRANGE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63 - 1, -(2**63), 1e308, -1e-308, 0.5, "", "x", "..", "../../etc", "auto",
    "none", "nan", "1e400", "é\N{SNOWMAN}", "\x00", "a" * 5000, "import:os:system", "fedavg", "flame", [], [1], [[]],
    ["a", None], {}, {"": ""}, {"a": {"b": []}}, [0] * 100, "-1-round-0", "0123456789abcdef", "train", "2026-01-01",
    "8:8", "clip=1,noise=0",
)  # fmt: skip
"""Values that may stand where another was meant."""


def raw(header: Any, body: bytes) -> bytes:
    """Put a block together as it is, right or wrong."""
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + body


def parts(block: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(block[:8], "little")
    found: dict[str, Any] = json.loads(block[8 : 8 + length])
    return found, block[8 + length :]


def mutated(blocks: Sequence[bytes], draw: np.random.Generator) -> bytes:
    """Change a message that was right; one in some is changed in several ways."""
    block = blocks[int(draw.integers(len(blocks)))]
    for _ in range(1 + int(draw.random() < 0.3)):
        block = (_bytes, _spliced, _outer, _inner, _inner, _inner)[int(draw.integers(6))](block, blocks, draw)
    return block


def _bytes(block: bytes, others: Sequence[bytes], draw: np.random.Generator) -> bytes:
    if not block:
        return draw.bytes(16)
    kind, at = int(draw.integers(5)), int(draw.integers(len(block)))
    at = int(draw.integers(min(len(block), 64))) if draw.random() < 0.3 else at
    if kind == 0:
        return block[:at]
    if kind == 1:
        return block[:at] + draw.bytes(int(draw.integers(1, 9))) + block[at:]
    if kind == 2:
        return block[:at] + block[at + int(draw.integers(1, 9)) :]
    if kind == 3:
        return block[:at] + bytes([block[at] ^ (1 << int(draw.integers(8)))]) + block[at + 1 :]
    return block[:at] + draw.bytes(min(8, len(block) - at)) + block[at + 8 :]


def _spliced(block: bytes, others: Sequence[bytes], draw: np.random.Generator) -> bytes:
    other = others[int(draw.integers(len(others)))]
    if not block or not other:
        return block + other
    return block[: int(draw.integers(len(block)))] + other[int(draw.integers(len(other))) :]


def _outer(block: bytes, others: Sequence[bytes], draw: np.random.Generator) -> bytes:
    """Change what the block says of its tensors."""
    try:
        header, body = parts(block)
        return raw(changed(header, draw), body)
    except (ValueError, RecursionError, AttributeError):
        return _bytes(block, others, draw)


def _inner(block: bytes, others: Sequence[bytes], draw: np.random.Generator) -> bytes:
    """Change what Coterie's own header says."""
    try:
        header, body = parts(block)
        own = json.loads(header["__metadata__"]["coterie"])
        header["__metadata__"]["coterie"] = json.dumps(changed(own, draw))
        return raw(header, body)
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError):
        return _bytes(block, others, draw)


def changed(value: Any, draw: np.random.Generator, depth: int = 0) -> Any:
    """Change one thing somewhere inside of a value."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = list(value)[int(draw.integers(len(value)))]
        kind, out = int(draw.integers(8)), dict(value)
        if kind == 0:
            del out[name]
        elif kind == 1:
            out[str(STRANGE[int(draw.integers(len(STRANGE)))])] = out[name]
        else:
            out[name] = changed(out[name], draw, depth + 1)
        return out
    if isinstance(value, list) and value and draw.random() < 0.7:
        at = int(draw.integers(len(value)))
        return [*value[:at], changed(value[at], draw, depth + 1), *value[at + int(draw.random() < 0.8) :]]
    return STRANGE[int(draw.integers(len(STRANGE)))]
