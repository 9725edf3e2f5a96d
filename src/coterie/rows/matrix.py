"""The client matrix: a tensor with a row per client that lies wherever there is room for it.

To its reader a :class:`ClientMatrix` is a tensor. Behind it is a :class:`Backend`, which holds the rows on the
device, in the host's memory or on disk. Replacing rows (``put_rows``) gives another matrix on the same backend with a
patch over it, and costs no more than those rows: the old one is still what it was. :meth:`ClientMatrix.settle` writes
the patch to the backend. Whoever still holds an older matrix of that backend then finds the old rows in a patch of
its own: no matrix ever changes under its reader. Where nobody does, nothing is kept of the old rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.errors import AlgorithmError
from coterie.rows.backends import Backend, InitialBackend, RowIndex
from coterie.rows.overlay import Overlay, joined

BLOCK_BYTES = 2**26
"""Bytes of the blocks of rows in which a matrix is read as a whole."""


class ClientMatrix(Tensor):
    """A matrix with a row per client, on a backend.

    Taking rows of it, and the functions of :mod:`coterie.rows`, touch what they need. Everything else that PyTorch can
    do with a tensor is done with a copy of the whole matrix on the device that computes. What is taken is always a copy
    and never a window into the matrix.

    Parameters
    ----------
    backend
        Where the rows lie.
    held
        The rows with what stands over them; by default the backend's as they are.
    """

    _held: Overlay

    @staticmethod
    def __new__(cls, backend: Backend, held: Overlay | None = None) -> ClientMatrix:
        """Make the tensor, which has a shape, a type and a device, but no memory of its own."""
        made: ClientMatrix = Tensor._make_wrapper_subclass(
            cls, backend.shape, dtype=backend.dtype, device=backend.device
        )
        made._held = held or Overlay(backend)
        return made

    def __init__(self, backend: Backend, held: Overlay | None = None) -> None:
        super().__init__()

    @property
    def backend(self) -> Backend:
        """Where the rows lie."""
        return self._held.backend

    @property
    def patch(self) -> Tensor | None:
        """The rows that stand over the backend's and are not settled yet."""
        return self._held.values

    def pick(self, chosen: RowIndex) -> Tensor:
        """Give some rows.

        Parameters
        ----------
        chosen
            Which.

        Returns
        -------
        Tensor
            A copy.
        """
        return self._held.take(chosen)

    def pick_own(self, chosen: RowIndex) -> Tensor:
        """Give some of the rows that lie with this process.

        Parameters
        ----------
        chosen
            Which.

        Returns
        -------
        Tensor
            A copy.
        """
        return self._held.take(chosen, own=True)

    def patched(self, chosen: RowIndex, values: Tensor) -> ClientMatrix:
        """Give the matrix with some rows replaced.

        Parameters
        ----------
        chosen
            Which, each once.
        values
            What to put there; copied, so that whoever made them may change them.

        Returns
        -------
        Kept
            Another matrix on the same backend; this one is left as it is.
        """
        held, backend = self._held, self.backend
        own = torch.empty((len(chosen), *backend.shape[1:]), dtype=backend.dtype, device=backend.device).copy_(values)
        if bool((chosen.host[1:] <= chosen.host[:-1]).any()):
            order = chosen.host.argsort()
            chosen, own = (
                RowIndex(chosen.here[order.to(backend.device)], chosen.host[order]),
                own[order.to(backend.device)],
            )
        patch = (chosen, own)
        if held.chosen is not None and held.values is not None:
            patch = joined((held.chosen, held.values), patch)
        return ClientMatrix(backend, Overlay(backend, *patch))

    def settle(self) -> None:
        """Write to the backend what stands over it; may be stopped and called again."""
        held, backend = self._held, self.backend
        if held.chosen is None or held.values is None:
            return
        others = [other for reader in backend.readers if (other := reader()) is not None and other is not held]
        if backend.anybody(bool(others)):  # how long a reader lives may differ by process, what it reads may not
            below = (held.chosen, backend.gather(held.chosen))
            for other in others:
                over = None if other.chosen is None or other.values is None else (other.chosen, other.values)
                # What another matrix has over these rows already is what it must go on to show.
                other.chosen, other.values = below if over is None else joined(below, over)
        backend.write(held.chosen, held.values)
        held.chosen = held.values = None

    def move(self, backend: Backend) -> None:
        """Lie on another backend from now on.

        Parameters
        ----------
        backend
            A backend with the same rows.
        """
        self._held = Overlay(backend, self._held.chosen, self._held.values)

    def blocks(self, rows: int | None = None, first: int = 0) -> Iterator[tuple[int, Tensor]]:
        """Give rows, block after block.

        Parameters
        ----------
        rows
            Rows in a block; by default as many as make up :data:`BLOCK_BYTES`, whatever the backend.
        first
            Where to begin.

        Yields
        ------
        tuple
            The first row's number, and consecutive rows on the device that computes, which must not be changed.
        """
        # Of 16 rows, so that a block that is copied lies in memory as one that is not: alignment can decide a last bit.
        rows = rows or max(16, BLOCK_BYTES // max(1, self.backend.row_bytes) // 16 * 16)
        for block in self._held.blocks(rows, first):
            yield first, block
            first += len(block)

    def own_blocks(self) -> Iterator[tuple[RowIndex, Tensor]]:
        """Give the rows that lie with this process, block after block; all of them, unless they are spread over ranks.

        Yields
        ------
        tuple
            Which rows, and the rows on the device that computes, which must not be changed.
        """
        yield from self._held.own_blocks(max(16, BLOCK_BYTES // max(1, self.backend.row_bytes) // 16 * 16))

    def dense(self) -> Tensor:
        """Give all rows at once.

        Returns
        -------
        Tensor
            A plain matrix on the device that computes, which must not be changed: it may be the backend's own.
        """
        whole = self.backend.whole()
        if whole is not None and self._held.chosen is None:
            return whole
        out = torch.empty(self.backend.shape, dtype=self.backend.dtype, device=self.backend.device)
        for begin, block in self.blocks():
            out[begin : begin + len(block)] = block
        return out

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what is asked of the matrix as a tensor."""
        kwargs = kwargs or {}
        if func in _OUTSIDE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if func is Tensor.__getitem__ and isinstance(first, ClientMatrix):
            chosen = _chosen(first, args[1])
            if chosen is not None:
                rows = first.pick(chosen)
                return rows[0] if isinstance(args[1], int) else rows.view(*_shape_of(args[1], chosen), *rows.shape[1:])
        name = getattr(func, "__name__", "")
        if isinstance(first, ClientMatrix) and name.startswith("new_"):
            return func(first.backend.opening, *args[1:], **kwargs)
        if isinstance(kwargs.get("out"), ClientMatrix) or name in ("__set__", "__delete__"):
            raise AlgorithmError(f"rows that are kept for all clients cannot be changed by {name!r}: use put_rows")
        if isinstance(first, ClientMatrix) and _changes(name):
            # Whoever has the matrix in hand may change it, as any tensor; it costs the whole of it.
            own = first.dense().clone()
            func(own, *_plain(args[1:], []), **_plain(kwargs, []))
            first._held = Overlay(first.backend, first.backend.span(0, len(first)), own)
            return None if name == "__setitem__" else first
        bases: list[Tensor] = []
        result = func(*_plain(args, bases), **_plain(kwargs, bases))
        return _apart(result, {base.untyped_storage().data_ptr() for base in bases})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Answer what reaches PyTorch's core in another way."""
        return func(*_plain(args, []), **_plain(kwargs or {}, []))


# What a tensor says about itself without looking at its numbers.
_OUTSIDE = {
    Tensor.__len__,
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "nbytes", "itemsize", "is_cuda", "requires_grad", "layout")
    ),
}


_OPERATORS = (
    "add",
    "sub",
    "mul",
    "matmul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
)
_CHANGING = {"__setitem__", *(f"__i{operator}__" for operator in _OPERATORS)}


def _changes(name: str) -> bool:
    return name in _CHANGING or (name.endswith("_") and not name.endswith("__"))


def _chosen(rows: ClientMatrix, index: Any) -> RowIndex | None:
    """Read an index of rows as tensors take it; ``None`` if it is another kind of index."""
    count = len(rows)
    if isinstance(index, bool):
        return None
    if isinstance(index, int):
        host = torch.tensor([index])
    elif isinstance(index, slice):
        host = torch.arange(count)[index]
    elif isinstance(index, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in index):
        host = torch.tensor(index, dtype=torch.int64)
    elif isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() == 1 and len(index) == count:
        host = index.cpu().nonzero().squeeze(1)
    elif isinstance(index, Tensor) and index.dtype in (torch.int32, torch.int64):
        host = index.reshape(-1).to("cpu", torch.int64)
    else:
        return None
    if bool(((host < -count) | (host >= count)).any()):
        raise IndexError(f"there are {count} rows, numbered from 0: {index} is out of range")
    host = torch.where(host < 0, host + count, host)
    return RowIndex(host.to(rows.device), host)


def _shape_of(index: Any, chosen: RowIndex) -> tuple[int, ...]:
    if isinstance(index, Tensor) and index.dtype != torch.bool:
        return tuple(index.shape)
    return (len(chosen),)


def chosen_of(rows: Tensor, index: Tensor) -> RowIndex:
    """Read the numbers of rows.

    Parameters
    ----------
    rows
        A matrix.
    index
        Row numbers of any shape, counted from 0.

    Returns
    -------
    Chosen
        The same, in one line.
    """
    return RowIndex(index.reshape(-1).to(rows.device, torch.int64))


def _plain(value: Any, bases: list[Tensor]) -> Any:
    """Replace kept matrices by plain ones; collects those that are a backend's own."""
    if isinstance(value, ClientMatrix):
        dense = value.dense()
        bases.append(dense)
        return dense
    if type(value) in (list, tuple):
        return type(value)(_plain(item, bases) for item in value)
    if isinstance(value, dict):
        return {key: _plain(item, bases) for key, item in value.items()}
    return value


def _apart(value: Any, bases: set[int]) -> Any:
    """Copy what would be a window into a backend: backends change in place."""
    if isinstance(value, Tensor):
        return value.clone() if value.untyped_storage().data_ptr() in bases and value.numel() else value
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (list, tuple):
        return type(value)(_apart(item, bases) for item in value)
    return value


def repeated(row: Tensor, count: int) -> ClientMatrix:
    """Make a matrix whose rows are all alike; it takes room once it is known where.

    Parameters
    ----------
    row
        The row.
    count
        How many.

    Returns
    -------
    Kept
        A matrix ``[count, ...]``.
    """
    return ClientMatrix(InitialBackend(count, row))
