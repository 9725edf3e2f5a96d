"""The idx file format of MNIST: a header of big-endian numbers, then one byte a pixel or label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from coterie.data.archives import ArchiveReader
from coterie.errors import DataError

SIDE = 28
FLAME = (0.1307, 0.3081)  # mean and deviation
UNIT = (0.0, 1.0)


def open_idx(reader: ArchiveReader, count: int, *shape: int) -> ArchiveReader:
    """Read the header and refuse what is not the file expected."""
    wanted = (count, *shape)
    magic = reader.read(4).tolist()
    if magic != [0, 0, 8, len(wanted)]:
        raise DataError(f"the file {reader.path} is not an idx file of bytes with {len(wanted)} dimension(s)")
    found = tuple(int(size) for size in reader.read(4 * len(wanted)).view(">u4"))
    if found != wanted:
        raise DataError(
            f"the file {reader.path} says it holds {' x '.join(map(str, found))} bytes, not "
            f"{' x '.join(map(str, wanted))}: download it again"
        )
    return reader


def read_idx(
    parts: Sequence[tuple[Path, Path, int]], checksums: Mapping[str, str], *, transpose: bool = False
) -> tuple[Tensor, Tensor]:
    """Read pairs of image and label files, one after the other, into one pair of tensors."""
    total = sum(count for _, _, count in parts)
    x = np.empty((total, 1, SIDE, SIDE), dtype=np.uint8)
    y = np.empty(total, dtype=np.int64)
    first = 0
    for image_file, label_file, count in parts:
        with ExitStack() as stack:
            images, labels = (
                stack.enter_context(ArchiveReader(path, checksums.get(path.name.removesuffix(".gz"))))
                for path in (image_file, label_file)
            )
            into = x[first : first + count, 0]
            for part, content in open_idx(images, count, SIDE, SIDE).records(count, SIDE * SIDE):
                square = content.reshape(-1, SIDE, SIDE)
                into[part] = square.swapaxes(1, 2) if transpose else square
            y[first : first + count] = open_idx(labels, count).read(count)
            images.finish()
            labels.finish()
        first += count
    return torch.from_numpy(x), torch.from_numpy(y)
