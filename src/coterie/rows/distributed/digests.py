"""Numbers that stand for what a rank has, by which ranks see that they have the same."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def number_of(value: object) -> int:
    """Give 63 bits that stand for a value whose ``repr`` says all of it, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little") >> 1


def checksum(value: Tensor) -> int:
    """Sum the bits of a tensor, read as whole numbers, modulo 2⁶⁴: tensors that differ in one place differ in this."""
    flat = value.detach().contiguous().view(-1).view(torch.uint8)
    words = len(flat) // 8 * 8
    # Summed as they lie, in one pass: this is done after every round.
    total = int(flat[:words].view(torch.int64).sum()) + int(flat[words:].sum(dtype=torch.int64))
    return (total + 2**63) % 2**64 - 2**63
