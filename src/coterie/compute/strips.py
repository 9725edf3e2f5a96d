"""Rows of very different lengths, cut into strips of similar ones: padded to the longest of all most is padding."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

_LITTLE = 2**22  # numbers of inputs that are padding, which take less time than another call
_ALIKE = 0.8  # of the longest, from where a row may stay with it whatever its padding


def strips(lengths: Numbers, numbers: int, most: int | None = None) -> list[Numbers]:
    """Give the rows of each strip, the longest rows first; all rows in their order where one strip will do.

    ``numbers`` is how many a place of a row has, so that the padding of small inputs is not taken for work. A strip has
    at most ``most`` rows.
    """
    most = most or max(1, len(lengths))
    if len(lengths) <= most and (lengths.max(initial=0) - lengths).sum() * numbers <= _LITTLE:
        return [np.arange(len(lengths))]
    order = np.argsort(-lengths, kind="stable")
    cuts, longest, padding = [], int(lengths[order[0]]), 0
    for place, length in enumerate(lengths[order].tolist()):
        padding += (longest - length) * numbers
        if padding > _LITTLE and length < _ALIKE * longest:
            cuts.append(place)
            longest, padding = length, 0
    if not cuts and len(lengths) <= most:
        return [np.arange(len(lengths))]
    return [piece[begin : begin + most] for piece in np.split(order, cuts) for begin in range(0, len(piece), most)]
