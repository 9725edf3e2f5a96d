"""What a method must give back, looked at where it is given: a mistake in one is a sentence that says where to look."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from coterie import user_code
from coterie.algorithms.batch import Net
from coterie.errors import AlgorithmError, CoterieError
from coterie.rows import ClientMatrix, Rows

_MAPPINGS = (dict, Mapping)  # most are a dict, which is seen at once


class calling:  # used as a function; a generator would take three times as long, in every round
    """Say with every failure of a method's own code whose it is, as in ``"FedAvg, round"``, and in which line.

    ``tensors`` are names that the code may ask for: ``message=...``, which it is told of where it asked for another.
    """

    __slots__ = ("_tensors", "_whose")

    def __init__(self, whose: str, **tensors: Collection[str]) -> None:
        self._whose, self._tensors = whose, tensors

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception):
            return
        if isinstance(error, AlgorithmError):
            if getattr(error, "named", False):
                return
            raise _named(f"{self._whose}: {error}") from error
        if isinstance(error, CoterieError | MemoryError | torch.OutOfMemoryError):
            return
        if "can't allocate memory" in str(error):
            return
        has = "; ".join(f"the {what} has {_names(names)}" for what, names in self._tensors.items())
        there = f" ({has})" if has and isinstance(error, KeyError) else ""
        explained = f"{user_code.explain(error)}{user_code.place(error)}{there}"
        raise _named(f"{self._whose} failed: {explained}") from error


def _named(sentence: str) -> AlgorithmError:
    error = AlgorithmError(sentence)
    error.named = True  # type: ignore[attr-defined]  # what stands around adds nothing
    return error


def check_tensors(what: str, value: Any, kinds: tuple[type, ...] = (Tensor,)) -> None:
    """Refuse what is not a mapping of names to tensors, or to one of some kinds; ``what`` names it."""
    if not isinstance(value, _MAPPINGS):
        raise AlgorithmError(f"{what} must be a dict of tensors by name, but is a {type(value).__name__}")
    for name, tensor in value.items():
        if not isinstance(tensor, kinds):
            raise AlgorithmError(f"{what} must hold tensors, but {name!r} is a {type(tensor).__name__}")


def check_rows(what: str, rows: Any, count: int) -> None:
    """Refuse what is not named tensors with a row for each of so many clients."""
    check_tensors(what, rows)
    for name, value in rows.items():
        shape = tuple(value.shape)  # asked once: of a client matrix it takes a while
        if not shape or shape[0] != count:
            raise AlgorithmError(
                f"{what}: {name!r} must have a row for each of {count} client(s), shape ({count}, ...), but has {shape}"
            )


def check_same(what: str, rows: Any, before: Rows) -> None:
    """Refuse named tensors whose names, shapes or types are not those from before."""
    check_tensors(what, rows)
    if rows.keys() != before.keys():
        raise AlgorithmError(f"{what} must have the names {_names(before)}, but has {_names(rows)}")
    for name, value in rows.items():
        old = before[name]
        if value is old or (
            isinstance(value, ClientMatrix) and isinstance(old, ClientMatrix) and value.backend is old.backend
        ):
            continue
        if value.shape != old.shape or value.dtype != old.dtype:
            raise AlgorithmError(
                f"{what}: {name!r} must have the shape {tuple(old.shape)} of {old.dtype}, but has {tuple(value.shape)} "
                f"of {value.dtype}"
            )


def check_pair(what: str, value: Any, parts: str) -> None:
    """Refuse what is not a pair; ``parts`` says of what."""
    if not isinstance(value, tuple) or len(value) != 2:
        raise AlgorithmError(f"{what} must give a pair, {parts}, but gives a {type(value).__name__}")


def checked_step(step: Callable[..., Rows]) -> Callable[..., Rows]:
    """Give a fold's step that refuses what a next step, or another row, could not go on with."""

    def checked(work: Rows, *batches: Any) -> Rows:
        new = step(work, *batches)
        check_same("what step gives", new, work)
        return new

    return checked


def checked_predict(predict: Callable[[Net, Rows, Tensor], Tensor]) -> Callable[[Net, Rows, Tensor], Tensor]:
    """Give a method's ``predict`` that refuses outputs which are not one for each sample of each row."""

    def checked(net: Net, rows: Rows, x: Tensor) -> Tensor:
        found: Any = predict(net, rows, x)
        if not isinstance(found, Tensor):
            raise AlgorithmError(f"it must give a tensor of outputs, but gives a {type(found).__name__}")
        if found.shape[:2] != x.shape[:2]:
            wanted = ", ".join(map(str, x.shape[:2]))
            raise AlgorithmError(f"it must give outputs of shape ({wanted}, ...), but gives {tuple(found.shape)}")
        return found

    return checked


def _names(rows: Collection[str]) -> str:
    return ", ".join(map(repr, rows)) or "none"
