"""How models lie in a ``[clients, parameters]`` matrix.

A :class:`Layout` says where each named parameter of an ``nn.Module`` lies in a row. Its views are strided windows into
the matrix: nothing is copied between "all models as one matrix", which is how the papers write their servers, and "a
stacked weight for each layer", which is how a batched forward pass wants them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from coterie.errors import ModelError

Rows = dict[str, Tensor]
"""Named tensors whose first axis is the client: what states, messages and replies are made of."""


@dataclass(frozen=True)
class Layout:
    """Where each named parameter lies in a row.

    Parameters
    ----------
    names
        Parameter names, in row order.
    shapes
        Their shapes.
    offsets
        Where each begins; one longer than ``names``, so the last entry is the row's length.
    parts
        Names of parts of the model (``"head"``, ``"body"``), each with the parameters it is made of.

    Examples
    --------
    >>> layout = Layout.of(nn.Linear(3, 2))
    >>> layout.size, layout.names
    (8, ('weight', 'bias'))
    >>> layout.views(torch.zeros(5, 8))["weight"].shape
    torch.Size([5, 2, 3])
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module, parts: Mapping[str, Iterable[str]] | None = None) -> Layout:
        """Read the layout off a module's trainable parameters.

        Parameters
        ----------
        module
            The module; parameters with ``requires_grad=False`` are left out of rows and shared by all clients.
        parts
            For each part, prefixes of the names of the parameters that belong to it.

        Returns
        -------
        Layout
            The layout, trainable parameters in the order of ``module.named_parameters()``.

        Raises
        ------
        ModelError
            If the module has nothing to train.
        """
        named = [(name, value) for name, value in module.named_parameters() if value.requires_grad]
        if not named:
            raise ModelError(f"{type(module).__name__} has no trainable parameter: there is nothing to learn")
        names = tuple(name for name, _ in named)
        offsets = [0]
        for _, value in named:
            offsets.append(offsets[-1] + value.numel())
        found = {
            part: tuple(n for n in names if any(n == p or n.startswith(f"{p}.") for p in prefixes))
            for part, prefixes in (parts or {}).items()
        }
        return cls(names, tuple(tuple(value.shape) for _, value in named), tuple(offsets), found)

    @property
    def size(self) -> int:
        """Parameters in a row."""
        return self.offsets[-1]

    def views(self, rows: Tensor) -> Rows:
        """Give each parameter of every row as one stacked tensor, without a copy.

        Parameters
        ----------
        rows
            A matrix ``[clients, size]``, or one row ``[size]``.

        Returns
        -------
        Rows
            For each name a view of shape ``[clients, *shape]`` (or ``shape`` for one row).
        """
        # One split rather than a slice each: its backward pass joins all gradients at once, instead of padding each.
        pieces = rows.split([end - begin for begin, end in pairwise(self.offsets)], dim=-1)
        return {
            name: piece.view(rows.shape[:-1] + shape)
            for name, shape, piece in zip(self.names, self.shapes, pieces, strict=True)
        }

    def row_of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Join named tensors into one row.

        Parameters
        ----------
        tensors
            At least the parameters of this layout, for instance a ``state_dict``.

        Returns
        -------
        Tensor
            A new vector ``[size]``.
        """
        return torch.cat([tensors[name].detach().reshape(-1) for name in self.names])

    def state_dict(self, row: Tensor) -> dict[str, Tensor]:
        """Give one row as a ``state_dict``.

        Parameters
        ----------
        row
            A vector ``[size]``.

        Returns
        -------
        dict of str to Tensor
            Copies, so that the caller may keep them.
        """
        return {name: view.clone() for name, view in self.views(row).items()}

    def columns(self, part: str) -> Columns:
        """Give the columns of a part of the model.

        Parameters
        ----------
        part
            The part's name.

        Returns
        -------
        Columns
            Its columns.

        Raises
        ------
        ModelError
            If the model declares no such part.
        """
        if part not in self.parts or not self.parts[part]:
            declared = ", ".join(sorted(self.parts)) or "none"
            raise ModelError(f"the model declares no part {part!r} (declared: {declared}); this method needs one")
        return self.columns_of(self.parts[part])

    def columns_of(self, names: Iterable[str]) -> Columns:
        """Give the columns of some parameters.

        Parameters
        ----------
        names
            Their names, in any order.

        Returns
        -------
        Columns
            Their columns, in row order.
        """
        wanted = set(names)
        spans: list[tuple[int, int]] = []
        for name, (begin, end) in zip(self.names, pairwise(self.offsets), strict=True):
            if name not in wanted:
                continue
            if spans and spans[-1][1] == begin:
                spans[-1] = (spans[-1][0], end)
            else:
                spans.append((begin, end))
        return Columns(tuple(spans))

    def only(self, names: Iterable[str]) -> Layout:
        """Give the layout of rows that hold some of the parameters and nothing else.

        Parameters
        ----------
        names
            Their names, in any order.

        Returns
        -------
        Layout
            Their layout, in row order; parts keep those of their parameters that are left.
        """
        wanted = set(names)
        kept = [(name, shape) for name, shape in zip(self.names, self.shapes, strict=True) if name in wanted]
        offsets = (0, *accumulate(math.prod(shape) for _, shape in kept))
        parts = {part: tuple(name for name in mine if name in wanted) for part, mine in self.parts.items()}
        return Layout(tuple(name for name, _ in kept), tuple(shape for _, shape in kept), offsets, parts)


@dataclass(frozen=True)
class Columns:
    """Some columns of a row matrix, as a few contiguous spans.

    Parameters
    ----------
    spans
        Pairs of first and one-past-last column, in order.
    """

    spans: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """How many columns."""
        return sum(end - begin for begin, end in self.spans)

    def take(self, rows: Tensor) -> Tensor:
        """Give these columns of every row: a view if they are contiguous, else a copy.

        Parameters
        ----------
        rows
            A matrix whose last axis is the row.

        Returns
        -------
        Tensor
            Its columns, in order.
        """
        pieces = [rows[..., begin:end] for begin, end in self.spans]
        if not pieces:
            return rows[..., :0]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)

    def put(self, rows: Tensor, values: Tensor) -> Tensor:
        """Give ``rows`` with these columns replaced; ``rows`` itself is left as it is.

        Parameters
        ----------
        rows
            A matrix whose last axis is the row.
        values
            What to put in, as :meth:`take` would give it.

        Returns
        -------
        Tensor
            A new matrix.
        """
        pieces, at, used = [], 0, 0
        values = values.expand(*rows.shape[:-1], values.shape[-1])
        for begin, end in self.spans:
            pieces += [rows[..., at:begin], values[..., used : used + end - begin]]
            at, used = end, used + end - begin
        return torch.cat([*pieces, rows[..., at:]], -1)

    def within(self, outer: Columns) -> Columns:
        """Give these columns of a row that is itself some columns of a longer one, as columns of the longer one.

        Parameters
        ----------
        outer
            Which columns of the longer row they are counted in.

        Returns
        -------
        Columns
            Columns of the longer row.
        """
        spans, before = [], 0
        for begin, end in outer.spans:
            length = end - begin
            for first, last in self.spans:
                low, high = max(first - before, 0), min(last - before, length)
                if low < high:
                    spans.append((begin + low, begin + high))
            before += length
        return Columns(tuple(spans))

    def mask(self, size: int, like: Tensor) -> Tensor:
        """Give 1 in these columns and 0 elsewhere.

        Parameters
        ----------
        size
            Length of a row.
        like
            A tensor of the wanted type and device.

        Returns
        -------
        Tensor
            A vector ``[size]``.
        """
        out = torch.zeros(size, dtype=like.dtype, device=like.device)
        for begin, end in self.spans:
            out[begin:end] = 1
        return out


def nbytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes that these tensors take on a wire.

    Parameters
    ----------
    tensors
        Named tensors.

    Returns
    -------
    int
        The sum over all of them.
    """
    return sum(math.prod(value.shape) * value.element_size() for value in tensors.values())
