"""The client matrix: a tensor with a row per client that lies wherever there is room for it.

To its reader a :class:`ClientMatrix` is a tensor. Behind it is a :class:`Backend`, which holds the rows on the
device, in the host's memory or on disk. Replacing rows (``put_rows``) gives another matrix on the same backend with a
patch over it, and costs no more than those rows: the old one is still what it was. :meth:`ClientMatrix.commit` writes
the patch to the backend. An older matrix on that backend that is still referenced then gets the old rows as a patch of
its own: no matrix ever changes under its reader. Where there is none, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.errors import AlgorithmError
from coterie.rows._overlay import Overlay, Patch
from coterie.rows.backends import Backend, InitialBackend, RowIndex
from coterie.rows.host_copies import to_device

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
    overlay
        That backend with the patch that stands over it; by default none does.
    """

    _overlay: Overlay

    @staticmethod
    def __new__(cls, backend: Backend, overlay: Overlay | None = None) -> ClientMatrix:
        """Make the tensor, which has a shape, a type and a device, but no memory of its own."""
        made: ClientMatrix = Tensor._make_wrapper_subclass(
            cls, backend.shape, dtype=backend.dtype, device=backend.device
        )
        made._overlay = overlay or Overlay(backend)
        return made

    def __init__(self, backend: Backend, overlay: Overlay | None = None) -> None:
        super().__init__()

    @property
    def backend(self) -> Backend:
        """Where the rows lie."""
        return self._overlay.backend

    @property
    def patch(self) -> Tensor | None:
        """The rows that were replaced and not committed yet."""
        return None if self._overlay.patch is None else self._overlay.patch.rows

    def gather_rows(self, index: RowIndex) -> Tensor:
        """Give some rows.

        Parameters
        ----------
        index
            Which.

        Returns
        -------
        Tensor
            A copy.
        """
        return self._overlay.gather(index)

    def gather_local_rows(self, index: RowIndex) -> Tensor:
        """Give some of the rows that lie with this process.

        Parameters
        ----------
        index
            Which.

        Returns
        -------
        Tensor
            A copy.
        """
        return self._overlay.gather(index, local=True)

    def patched(self, index: RowIndex, values: Tensor) -> ClientMatrix:
        """Give the matrix with some rows replaced.

        Parameters
        ----------
        index
            Which, each once.
        values
            What to put there; copied, so that whoever made them may change them.

        Returns
        -------
        ClientMatrix
            Another matrix on the same backend; this one is left as it is.
        """
        old, backend = self._overlay.patch, self.backend
        rows = torch.empty((len(index), *backend.shape[1:]), dtype=backend.dtype, device=backend.device).copy_(values)
        numbers = index.on_host.numpy()  # whose operations on so few numbers take a third of the time
        if (numbers[1:] <= numbers[:-1]).any():
            order = index.on_host.argsort()
            on_device = to_device(order, backend.device)
            index, rows = RowIndex(index.on_device[on_device], index.on_host[order]), rows[on_device]
        patch = Patch(index, rows)
        return ClientMatrix(backend, Overlay(backend, patch if old is None else patch.over(old)))

    def commit(self) -> None:
        """Write to the backend what stands over it; may be stopped and called again."""
        self._overlay.commit()

    def move_to(self, backend: Backend) -> None:
        """Lie on another backend from now on.

        Parameters
        ----------
        backend
            A backend with the same rows.
        """
        self._overlay = Overlay(backend, self._overlay.patch)

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
        for block in self._overlay.blocks(rows or self._block_rows, first):
            yield first, block
            first += len(block)

    @property
    def _block_rows(self) -> int:
        # A multiple of 16, so that a block that is copied lies in memory as one that is not: alignment can decide a
        # last bit.
        return max(16, BLOCK_BYTES // max(1, self.backend.row_bytes) // 16 * 16)

    def local_blocks(self) -> Iterator[tuple[RowIndex, Tensor]]:
        """Give the rows that lie with this process, block after block; all of them, unless other processes have some.

        Yields
        ------
        tuple
            Which rows, and the rows on the device that computes, which must not be changed.
        """
        yield from self._overlay.local_blocks(self._block_rows)

    def dense(self) -> Tensor:
        """Give all rows at once.

        Returns
        -------
        Tensor
            A plain matrix on the device that computes, which must not be changed: it may be the backend's own.
        """
        matrix = self.backend.device_tensor()
        if matrix is not None and self._overlay.patch is None:
            return matrix
        out = torch.empty(self.backend.shape, dtype=self.backend.dtype, device=self.backend.device)
        for begin, block in self.blocks():
            out[begin : begin + len(block)] = block
        return out

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what is asked of the matrix as a tensor."""
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if func is Tensor.__getitem__ and isinstance(first, ClientMatrix):
            index = _row_index(first, args[1])
            if index is not None:
                rows = first.gather_rows(index)
                return rows[0] if isinstance(args[1], int) else rows.view(*_shape_of(args[1], index), *rows.shape[1:])
        name = getattr(func, "__name__", "")
        if isinstance(first, ClientMatrix) and name.startswith("new_"):
            return func(first.backend.initial_row, *args[1:], **kwargs)
        if isinstance(kwargs.get("out"), ClientMatrix) or name in ("__set__", "__delete__"):
            raise AlgorithmError(f"a client matrix cannot be changed by {name!r}: use put_rows")
        if isinstance(first, ClientMatrix) and _is_in_place(name):
            # A matrix may be changed in place as any tensor may; it costs a patch as large as the whole of it.
            rows = first.dense().clone()
            func(rows, *_plain(args[1:], []), **_plain(kwargs, []))
            first._overlay = Overlay(first.backend, Patch(first.backend.index_range(0, len(first)), rows))
            return None if name == "__setitem__" else first
        bases: list[Tensor] = []
        result = func(*_plain(args, bases), **_plain(kwargs, bases))
        return _copied(result, {base.untyped_storage().data_ptr() for base in bases})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Answer what reaches PyTorch's core in another way."""
        return func(*_plain(args, []), **_plain(kwargs or {}, []))


# What a tensor says about itself without looking at its numbers.
_METADATA = {
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
_IN_PLACE = {"__setitem__", *(f"__i{operator}__" for operator in _OPERATORS)}


def _is_in_place(name: str) -> bool:
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _row_index(rows: ClientMatrix, index: Any) -> RowIndex | None:
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
    return RowIndex.from_host(host, rows.device)


def _shape_of(index: Any, rows: RowIndex) -> tuple[int, ...]:
    if isinstance(index, Tensor) and index.dtype != torch.bool:
        return tuple(index.shape)
    return (len(rows),)


def _plain(value: Any, bases: list[Tensor]) -> Any:
    """Replace client matrices by plain tensors, which may be a backend's own and are collected in ``bases``."""
    if isinstance(value, ClientMatrix):
        dense = value.dense()
        bases.append(dense)
        return dense
    if type(value) in (list, tuple):
        return type(value)(_plain(item, bases) for item in value)
    if isinstance(value, dict):
        return {key: _plain(item, bases) for key, item in value.items()}
    return value


def _copied(value: Any, bases: set[int]) -> Any:
    """Copy what would be a view of a backend's matrix: backends change in place."""
    if isinstance(value, Tensor):
        return value.clone() if value.untyped_storage().data_ptr() in bases and value.numel() else value
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (list, tuple):
        return type(value)(_copied(item, bases) for item in value)
    return value


def repeat_row(row: Tensor, count: int) -> ClientMatrix:
    """Make a matrix whose rows are all alike; it takes room only once it is known where.

    Parameters
    ----------
    row
        The row.
    count
        How many.

    Returns
    -------
    ClientMatrix
        A matrix ``[count, ...]``.
    """
    return ClientMatrix(InitialBackend(count, row))
