"""Samples that come in pieces, one for each client or one for all, and how they become a data set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coterie.data._user_data import encode_labels, encode_owner, with_statistics
from coterie.data.dataset import Dataset, Preparation
from coterie.data.sequences import padded
from coterie.errors import DataError
from coterie.tasks import TaskName


@dataclass(frozen=True)
class SamplePiece:
    """Some samples: inputs (a tensor, or sequences of any length), labels, and whose they are where that is known."""

    x: Tensor | Sequence[Any]
    y: npt.NDArray[Any]
    owner: str | npt.NDArray[Any] | None = None

    def __post_init__(self) -> None:
        whose = f" of client {self.owner!r}" if isinstance(self.owner, str) else ""
        if self.y.ndim != 1 or len(self.x) != len(self.y):
            raise DataError(
                f"there are {len(self.x)} inputs{whose}, but labels of shape {self.y.shape}: give one for each sample"
            )
        if isinstance(self.owner, np.ndarray) and len(self.owner) != len(self.y):
            raise DataError(f"there are {len(self.y)} samples, but {len(self.owner)} owners: give one for each sample")

    @property
    def owners(self) -> list[Any]:
        """Whose each sample is."""
        return [self.owner] * len(self.y) if isinstance(self.owner, str) else list(np.asarray(self.owner).tolist())


def put_together(
    name: str,
    pieces: Sequence[SamplePiece],
    test: Sequence[SamplePiece],
    *,
    task: TaskName,
    scaled: bool,
    length: int | None = None,
    padding: int = 0,
    classes: tuple[str, ...] = (),
) -> Dataset:
    """Make a data set of pieces; the samples of ``test`` stand apart where all samples have owners.

    ``classes`` are the classes' names where labels are numbers of classes already.
    """
    every = [*pieces, *test]
    x = _joined(every, length, padding, name)
    labels = np.concatenate([piece.y for piece in every])
    if classes and task != "regression":
        y, names = torch.from_numpy(labels.astype(np.int64)), classes
    else:
        y, names = encode_labels(labels, task, f"the labels of {name!r}")
    known: dict[str, Any] = {}
    owned = [piece.owner is not None for piece in every]
    if any(owned) and not all(owned):
        raise DataError(
            f"some samples of {name!r} have owners and some have none: say whose all are, those to test on too"
        )
    if all(owned):
        owner, owner_names = _in_order([one for piece in every for one in piece.owners], pieces, name)
        known = {"owner": owner, "owner_names": owner_names, "test_apart": bool(test)}
    if scaled and x.dtype == torch.int64:
        raise DataError("norm=own does not fit integer inputs: numbers of words are not normalised")
    known["preparation"] = Preparation((True,) * x.shape[1]) if scaled else None
    train = sum(len(piece.y) for piece in pieces)
    return with_statistics(Dataset(name, x, y, train, task, names, (0.0,), (1.0,), **known))


def _in_order(owners: list[Any], pieces: Sequence[SamplePiece], name: str) -> tuple[Tensor, tuple[str, ...]]:
    """Count clients in the order in which they were given, where they were given one by one."""
    if not all(isinstance(piece.owner, str) for piece in pieces):
        return encode_owner(np.array(owners), f"{name!r}")
    names = list(dict.fromkeys(str(piece.owner) for piece in pieces))
    place = {each: number for number, each in enumerate(names)}
    strangers = [each for each in owners if each not in place]
    if strangers:
        raise DataError(f"client {strangers[0]!r} has samples to test on, but none to train on")
    return torch.tensor([place[each] for each in owners]), tuple(names)


def _joined(pieces: Sequence[SamplePiece], length: int | None, padding: int, name: str) -> Tensor:
    if not all(isinstance(piece.x, Tensor) for piece in pieces):
        return padded([row for piece in pieces for row in piece.x], length, padding, f"the inputs of {name!r}")
    tensors = [piece.x for piece in pieces if isinstance(piece.x, Tensor)]
    shapes = {tuple(each.shape[1:]) for each in tensors}
    kinds = {each.dtype for each in tensors}
    if len(shapes) > 1 or len(kinds) > 1:
        told = " and ".join(sorted(str(list(shape)) for shape in shapes)) if len(shapes) > 1 else kinds
        raise DataError(f"samples of {name!r} are of different kinds, {told}: all must have one shape and type")
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def as_inputs(values: Any, where: str) -> Tensor | list[Any]:
    """Take inputs as they are handed over: an array or tensor, or a list of sequences of whole numbers.

    ``uint8`` stays ``uint8`` (images as ``[N, channels, height, width]`` or ``[N, height, width]``), other integers
    become ``int64`` and stay integers, all else becomes ``float32``.
    """
    if isinstance(values, list | tuple):
        try:
            values = np.asarray(values)
        except ValueError:  # of different lengths
            return list(values)
    if isinstance(values, np.ndarray) and values.dtype == object:
        return list(values)
    try:
        x = values if isinstance(values, Tensor) else torch.from_numpy(_writable(np.asarray(values)))
    except TypeError:
        raise DataError(f"the inputs of {where} are {np.asarray(values).dtype}, not numbers") from None
    x = x.detach().cpu()
    if x.is_complex():
        raise DataError(f"the inputs of {where} are {x.dtype}, not real numbers")
    if x.dim() < 2:
        raise DataError(f"the inputs of {where} have shape {tuple(x.shape)}, but need a row for each sample")
    if x.dtype == torch.uint8:
        return x.unsqueeze(1) if x.dim() == 3 else x
    return x.to(torch.float32) if x.is_floating_point() or x.dtype == torch.bool else x.to(torch.int64)


def _writable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    # PyTorch warns of memory that it may not write to, and cannot read another byte order or negative strides.
    return array if array.flags.writeable and array.flags.c_contiguous else np.array(array, order="C")


def as_labels(values: Any) -> npt.NDArray[Any]:
    """Take labels as they are handed over."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    # [N, 1] is how many write the targets of a regression.
    return array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array


def as_image(value: Any) -> Any:
    """Turn a picture of Pillow's into an array ``[channels, height, width]``; anything else is given back."""
    if not (hasattr(value, "mode") and hasattr(value, "getbands")):
        return value
    grey = value.mode in ("1", "L", "LA")
    pixels = np.asarray(value.convert("L" if grey else "RGB"))
    return pixels[None] if grey else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def read_items(count: int, item: Callable[[int], tuple[Any, Any]], where: str) -> SamplePiece:
    """Read samples one after the other into one tensor; sequences of different lengths stay a list."""
    rows: Tensor | None = None
    lists: list[Any] = []
    labels = []
    for number in range(count):
        x, y = item(number)
        x = as_image(x)
        labels.append(np.asarray(y).reshape(-1)[0])
        if isinstance(x, list | tuple):
            lists.append(x)
            continue
        row = x if isinstance(x, Tensor) else torch.from_numpy(np.array(x))
        if rows is None:
            rows = torch.empty(count, *row.shape, dtype=row.dtype)
        if row.shape != rows.shape[1:]:
            if row.dim() == 1 and not row.is_floating_point():
                return _as_lists(count, item, where)
            raise DataError(
                f"sample {number} of {where} has shape {tuple(row.shape)}, but the first has {tuple(rows.shape[1:])}"
            )
        rows[number] = row
    if rows is None and not lists:
        raise DataError(f"there are no samples in {where}")
    inputs = as_inputs(lists if rows is None else _with_axis(rows), where)
    return SamplePiece(inputs, np.asarray(labels))


def _as_lists(count: int, item: Callable[[int], tuple[Any, Any]], where: str) -> SamplePiece:
    """Read sequences of different lengths."""
    found = [item(number) for number in range(count)]
    return SamplePiece([np.asarray(x) for x, _ in found], np.asarray([int(y) for _, y in found]))


def _with_axis(rows: Tensor) -> Tensor:
    return rows.unsqueeze(1) if rows.dim() == 1 else rows
