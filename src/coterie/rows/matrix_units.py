"""Products of large float32 matrices on a GPU's matrix units, to nearly float32's accuracy.

The units multiply numbers of 11 significant bits in half precision, more than ten times as fast as float32 is
multiplied otherwise. A float32 number is the sum of two such numbers to 23 bits, ``a = a_h + a_l``; so ``a b ≈ a_h b_h
+ a_h b_l + a_l b_h`` to about 2⁻²². Where a matrix is multiplied by its own transpose, the last two are each other's
transpose: two fast products in place of a slow one. Half precision has a narrow range, so every row is scaled by a
power of two, which costs no bits. Sums over many columns are carried from block to block in float64.

Rows are centred first. What clients have in common is then not multiplied, nor rounded with the sums. The centre is in
each column the middle of a few rows' numbers and not their mean: of rows that are close to each other it is close to
all, and a few that are far away (a faulty or hostile client's) do not move it, as they would the mean, so that small
differences between the others are not lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from coterie import kernels

_LARGE_ELEMENTS = 2**27
"""Elements from which on the splitting pays; below, plain products are quick enough."""

BLOCK = 2**12
"""Columns over which sums are carried in the matrix units, which cut off what they cannot hold instead of rounding."""

_SPLIT_COLUMNS = 32 * BLOCK
"""Columns that are split at a time."""

_CENTRE_COLUMNS = 2**21
"""Columns of which the centre is found at a time: of few rows, so more of them."""

_SAMPLED = 27
"""Rows whose middle is the centre: a power of three."""

_TOP_EXPONENT = 15
"""Scaled numbers lie below 2 to this; half precision reaches to almost 2¹⁶."""


def pays(rows: Tensor) -> bool:
    """Say whether splitting pays: for a large float32 matrix on a GPU that has matrix units."""
    if not (rows.is_cuda and rows.dtype == torch.float32 and rows.numel() >= _LARGE_ELEMENTS):
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(rows.device) >= (7, 0)


@contextlib.contextmanager
def tf32(on: bool = True) -> Iterator[None]:
    """Let the matrix units round to TF32 (or not), and put PyTorch's process-wide switch back afterwards."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32, cudnn.allow_tf32 = on, on
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


Switches = tuple[bool, bool, bool]
"""How products are rounded just now, in this process: TF32 in PyTorch's, in cuDNN's, bfloat16 in ours."""


def switches() -> Switches:
    """Give the switches as they are."""
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, kernels.is_coarse()


def switch(now: Switches, wanted: Switches) -> None:
    """Set those switches that are not as wanted, as for another thread's turn: they are the process's."""
    if now[0] != wanted[0]:
        torch.backends.cuda.matmul.allow_tf32 = wanted[0]
    if now[1] != wanted[1]:
        torch.backends.cudnn.allow_tf32 = wanted[1]
    if now[2] != wanted[2]:
        kernels.set_coarse(wanted[2])


Precision = Literal["float32", "tf32", "bf16"]
"""How a GPU rounds what it multiplies: not at all, to 11 significant bits, or to 8 where a kernel of ours does it and
to 11 elsewhere. Sums are float32 in any case."""


class rounded:  # used as a function; it is opened several times a round
    """Let products be rounded to this precision while the context is open."""

    __slots__ = ("_before", "_wanted")

    def __init__(self, precision: Precision) -> None:
        coarsely = precision != "float32"
        self._wanted: Switches = (coarsely, coarsely, precision == "bf16")

    def __enter__(self) -> None:
        self._before = switches()
        switch(self._before, self._wanted)

    def __exit__(self, *failed: object) -> None:
        switch(switches(), self._before)


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Cut float32 numbers below 2¹⁶ into two of half precision, the larger part rounded to nearest.

    Their sum is the number to 23 significant bits, or to 2⁻²⁵ where that is more.
    """
    high = values.half()
    return high, (values - high.float()).half()


def middle(values: Tensor) -> Tensor:
    """Find in each column a number in the middle: the median of three medians of three, and so on.

    There must be :data:`_SAMPLED` rows, or another power of three. About as many numbers are above it as below it, and
    fewer than a quarter of the rows cannot move it far but by chance.
    """
    while len(values) > 1:
        one, two, three = values.unflatten(0, (3, -1))
        values = torch.maximum(torch.minimum(one, two), torch.minimum(torch.maximum(one, two), three))
    return values[0]


def _power(most: Tensor) -> Tensor:
    """Give the powers of two by which numbers up to so much are divided to lie below :data:`_TOP_EXPONENT`'s."""
    _, exponent = torch.frexp(most)
    return torch.ldexp(torch.ones_like(most), exponent.clamp(-100, 128) - _TOP_EXPONENT)


class _Blocks:
    """Blocks of columns of a matrix, centred, scaled and split, in buffers that are used again.

    Below the rows lies their centre, so that products with it come with the others; then zeros up to a round number.
    """

    def __init__(self, rows: Tensor, parts: int) -> None:
        self.rows = rows
        self.width = min(_SPLIT_COLUMNS, -(-rows.shape[1] // BLOCK) * BLOCK)
        self.height = -(-(len(rows) + 1) // 16) * 16
        self.parts = torch.zeros(parts, self.height, self.width, dtype=torch.float16, device=rows.device)
        sampled = torch.arange(_SAMPLED, device=rows.device) * len(rows) // _SAMPLED
        self.centre = torch.cat([middle(block[sampled]) for block in rows.split(_CENTRE_COLUMNS, 1)])
        furthest = torch.linalg.vector_norm(rows, torch.inf, dim=1)
        common = torch.linalg.vector_norm(self.centre, torch.inf)
        self.scale = _power(torch.cat([furthest + common, common.unsqueeze(0)]))  # of rows, and last of their centre
        self.inverse = 1 / self.scale  # a power of two as well

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        """Give which columns, and their parts: the larger ones, the rests, the larger ones again, as many as asked."""
        count = len(self.rows)
        for begin in range(0, self.rows.shape[1], self.width):
            block = self.rows[:, begin : begin + self.width]
            here = block.shape[1]
            if here < self.width:
                self.parts.zero_()
            centre = self.centre[begin : begin + here]
            for part, found in zip(self.parts, split(centre * self.inverse[count]), strict=False):
                part[count, :here] = found
            if kernels.usable(block):
                from coterie.kernels.half_precision import split_centred

                split_centred(block, centre, self.inverse, self.parts[:, :count, :here])
            else:
                high, low = split((block - centre) * self.inverse[:count].unsqueeze(1))
                for part, found in zip(self.parts, (high, low, high), strict=False):
                    part[:count, :here] = found
            yield slice(begin, begin + here), self.parts


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices of half precision, the sums in float32."""
    if not left.is_cuda:
        return left.float() @ right.float()
    switches = torch.backends.cuda.matmul
    before = switches.allow_fp16_reduced_precision_reduction
    switches.allow_fp16_reduced_precision_reduction = False
    try:
        return (torch.bmm if left.dim() == 3 else torch.mm)(left, right, out_dtype=torch.float32)
    finally:
        switches.allow_fp16_reduced_precision_reduction = before


def centred_gram(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inner products of all pairs of rows less a centre, and what is needed to undo the centring, in float64.

    The products ``[clients, clients]`` are symmetric; then come each row's product with the centre ``[clients]``, and
    the centre's with itself.
    """
    count = len(rows)
    rough = torch.backends.cuda.matmul.allow_tf32
    blocks = _Blocks(rows, 1 if rough else 2)
    products = torch.zeros(blocks.height, blocks.height, dtype=torch.float64, device=rows.device)
    crosses = torch.zeros_like(products)
    for _, parts in blocks:
        # A few narrow blocks at a time: one product of so few rows would leave most of the device idle.
        high, *low = parts.unflatten(2, (-1, BLOCK)).transpose(1, 2)
        products += _product(high, high.transpose(1, 2)).sum(0, dtype=torch.float64)
        for rest in low:
            crosses += _product(high, rest.transpose(1, 2)).sum(0, dtype=torch.float64)
    products += crosses + crosses.T
    products = (products + products.T)[: count + 1, : count + 1] / 2
    scale = blocks.scale.double()
    products *= scale.unsqueeze(1) * scale
    return products[:count, :count], products[:count, count], products[count, count]


def mixed(weights: Tensor, rows: Tensor) -> Tensor:
    """Weighted sums of rows, ``[out, clients]`` by ``[clients, parameters]``."""
    count = len(rows)
    rough = torch.backends.cuda.matmul.allow_tf32
    blocks = _Blocks(rows, 1 if rough else 3)
    wide = torch.zeros(len(weights), blocks.height, dtype=torch.float32, device=rows.device)
    wide[:, :count] = weights.to(rows.dtype) * blocks.scale[:count]
    scale = _power(torch.linalg.vector_norm(wide, torch.inf, dim=1))
    high, low = split(wide / scale.unsqueeze(1))
    factors = high if rough else torch.cat([high, high, low], 1)  # beside the larger parts, the rests, the larger parts
    share = weights.double().sum(1).to(rows.dtype)
    out = rows.new_empty(len(weights), rows.shape[1])
    for columns, parts in blocks:
        here = columns.stop - columns.start
        sums = _product(factors, parts.flatten(0, 1)[:, :here])
        # Last, and rounded properly: the centre is much larger than the rows' distances from it.
        if kernels.usable(sums):
            from coterie.kernels.half_precision import add_centre

            add_centre(sums, scale, share, blocks.centre[columns], out[:, columns])
        else:
            out[:, columns] = (sums * scale.unsqueeze(1)).addr_(share, blocks.centre[columns])
    return out
