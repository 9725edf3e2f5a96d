"""Matrices of clients against clients, and what each client holds, with clients of one kind beside each other.

A thousand clients make a matrix of a million cells, more than a screen has room for: then clients are put together in
blocks, and a cell is the mean over its block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from coterie.results.figures.charts import Axis, Detail, HeatMap, Panel, Panels, Series
from coterie.results.figures.line_styles import PALETTE, Style

BLOCKS = 100
"""Rows and columns of a heat map at most."""

_BUBBLES = 40  # up to so many clients and classes bubbles are legible
_NAMED = 30  # up to so many clients have their number on the axis
_TAIL = 0.02  # of the cells, at either end, that may lie beyond the colour scale
_LISTED = 6  # clients of a block that its tooltip lists

Matrix = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True)
class ClientOrder:
    """In which order clients stand.

    Parameters
    ----------
    clients
        The clients' numbers.
    groups
        For each of them, in words, what it has in common with its neighbours; empty if nothing is known.
    by
        What the order is by, in words.
    names
        The clients' names, where they have any.
    """

    clients: NDArray[np.int64]
    groups: tuple[str, ...]
    by: str
    names: tuple[str, ...] = ()


def order_by_group(shares: pd.DataFrame | None, clients: Iterable[int] | None = None) -> ClientOrder:
    """Order clients by their group, or by the class that they have most of, then by number.

    Parameters
    ----------
    shares
        What each client holds, as a run records it; ``None`` if that is not known.
    clients
        The clients to order, by default all that hold something.

    Returns
    -------
    ClientOrder
        The order: by ``group`` where shares have it, else by main class where they count classes, else by number.
    """
    if shares is None:
        return ClientOrder(np.array(sorted(clients or ()), dtype=np.int64), (), "number")
    chosen = shares if clients is None else shares[shares["client"].isin(list(clients))]
    numbers, counts = chosen["client"].to_numpy(dtype=np.int64), class_counts(chosen)
    if "group" in chosen:
        keys = chosen["group"].to_numpy()
        words, by = [f"group {key}" for key in keys], "group"
    elif counts is not None:
        keys = counts.to_numpy().argmax(1)
        words, by = [f"mostly {counts.columns[key]}" for key in keys], "main class"
    else:
        keys, words, by = np.zeros(len(numbers)), [], "number"
    place = np.lexsort((numbers, keys))
    names = tuple(chosen["name"].iloc[place]) if "name" in chosen else ()
    return ClientOrder(numbers[place], tuple(words[each] for each in place) if words else (), by, names)


def class_counts(shares: pd.DataFrame) -> pd.DataFrame | None:
    """Give the training samples of each class that each client holds.

    Parameters
    ----------
    shares
        What each client holds.

    Returns
    -------
    pandas.DataFrame or None
        A row for each client and a column for each class, ``None`` if samples have no classes.
    """
    columns = [name for name in shares.columns if name.startswith("class ")]
    if not columns:
        return None
    return shares.set_index("client")[columns].rename(columns=lambda name: name.removeprefix("class "))


def blocks(matrix: Matrix, rows: Places, columns: Places) -> Matrix:
    """Take the mean over blocks of a matrix; NaN does not count.

    Parameters
    ----------
    matrix
        The matrix.
    rows
        Where blocks of rows begin, from 0.
    columns
        Where blocks of columns begin, from 0.

    Returns
    -------
    numpy.ndarray
        A mean for each block, NaN where nothing counts.
    """
    there = np.isfinite(matrix)

    def summed(values: Matrix) -> Matrix:
        return np.add.reduceat(np.add.reduceat(values, rows, axis=0), columns, axis=1)

    counts = summed(there.astype(np.float64))
    with np.errstate(invalid="ignore"):
        return summed(np.where(there, matrix, 0.0)) / counts


def heat_map(
    frames: Iterable[tuple[int, pd.DataFrame]],
    order: ClientOrder,
    *,
    what: str,
    axes: tuple[str, str],
    own: bool = True,
    range: tuple[float, float] | None = None,
    limit: int = BLOCKS,
) -> HeatMap:
    """Draw matrices of clients against clients, one for each round.

    Parameters
    ----------
    frames
        Rounds with their matrices, whose index and columns are client numbers; read one at a time.
    order
        The order of the clients; those that a matrix does not have are left blank.
    what
        What the numbers are.
    axes
        What rows and columns stand for.
    own
        Whether what a client has with itself counts: if not, it decides neither the colours nor a block's mean.
    range
        The numbers at the ends of the colour scale. By default they are quantiles, so that a few cells do not take
        all colours, and ``what`` says so: see :func:`robust_range`.
    limit
        Rows and columns at most.

    Returns
    -------
    HeatMap
        The matrices in order, in blocks where there are more clients than ``limit``.
    """
    starts = _starts(len(order.clients), limit)
    in_blocks = len(starts) < len(order.clients)
    found, counted_values = [], []
    for number, frame in frames:
        matrix = frame.reindex(index=order.clients, columns=order.clients).to_numpy(dtype=np.float64, copy=True)
        others = matrix.copy()
        if not own:
            np.fill_diagonal(others, np.nan)
        values = blocks(others, starts, starts) if in_blocks else matrix
        counted = values if in_blocks else others
        finite = counted[np.isfinite(counted)]
        counted_values.append(finite)
        found.append((int(number), values.astype(np.float32)))
    ends, cut = robust_range(np.concatenate([*counted_values, np.zeros(0)]), (0.0, None))
    low, high = range or ends
    note = _block_note(order, starts, own) if in_blocks else _own_note(own)
    rows, columns = (_axis(order, starts, title) for title in axes)
    shown = f"{what}{'' if range else cut}"
    return HeatMap(tuple(found), rows, columns, shown, (low, high if high > low else low + 1.0), note)


def robust_range(
    values: NDArray[np.floating[Any]], at_least: tuple[float | None, float | None] = (None, None)
) -> tuple[tuple[float, float], str]:
    """Choose the ends of a colour scale such that a few cells do not take all of its colours.

    Parameters
    ----------
    values
        The finite numbers that are shown.
    at_least
        Numbers that the scale shall reach at its lower and upper end, ``None`` for none.

    Returns
    -------
    ends
        The least and the greatest number; where these lie farther out than the range of the middle 96 % by more than
        half its width, the quantile of 2 or 98 % in its place.
    said
        What the scale has to say about it, empty if it holds all numbers.
    """
    if not len(values):
        return (at_least[0] or 0.0, at_least[1] or 1.0), ""
    least, greatest = float(values.min()), float(values.max())
    low, high = (float(each) for each in np.quantile(values, [_TAIL, 1 - _TAIL]))
    far = (high - low) / 2
    # Where nearly all cells are alike, as in a sparse matrix, the few others are all there is to see.
    cut_low, cut_high = (far > 0 and beyond > far for beyond in (low - least, greatest - high))
    low, high = low if cut_low else least, high if cut_high else greatest
    said = [f"from the {_TAIL:.0%} quantile"] if cut_low and (at_least[0] is None or low < at_least[0]) else []
    said += [f"to the {1 - _TAIL:.0%} quantile; up to {greatest:.3g}"] if cut_high else []
    low = low if at_least[0] is None else min(low, at_least[0])
    high = high if at_least[1] is None else max(high, at_least[1])
    return (low, high), f" (scale {', '.join(said)})" if said else ""


def samples_by_client(shares: pd.DataFrame, order: ClientOrder, limit: int = BLOCKS) -> Panels | HeatMap:
    """Draw the training samples of each class by client, or only how many where there are no classes.

    Parameters
    ----------
    shares
        What each client holds.
    order
        The order of the clients.
    limit
        Clients and classes at most, beyond which they are put together in blocks.

    Returns
    -------
    Panels or HeatMap
        Bubbles whose area is the number of samples, for few clients and classes; a heat map for many.
    """
    counts = class_counts(shares)
    here = _starts(len(order.clients), limit)
    if counts is None:
        return _sizes(shares, order, here)
    counts = counts.loc[order.clients]
    names = [str(name) for name in counts.columns]
    if max(counts.shape) <= _BUBBLES:
        return _bubbles(counts, order, names)
    classes = _starts(len(names), limit)
    values = blocks(counts.to_numpy(dtype=np.float64).T, classes, here)
    labels = tuple(f"class {names[each]}" for each in classes)
    note = ""
    if len(classes) < len(names):
        labels = tuple(f"{len(part)} classes from {part[0]}" for part in np.split(np.array(names), classes[1:]))
        note = f" {len(names)} classes are put together in {len(classes)} blocks."
    step = -(-len(classes) // _BUBBLES)
    ticks = tuple((float(place), names[classes[place]]) for place in np.arange(0, len(classes), step))
    blocked = len(here) < len(order.clients)
    return HeatMap(
        ((0, values.astype(np.float32)),),
        Axis("class", ticks, labels=labels),
        _axis(order, here, "client"),
        "training samples of a client",
        (0.0, max(1.0, float(values.max()))),
        (_block_note(order, here, True) if blocked else "") + note,
        square=False,
    )


def events(events: pd.DataFrame) -> Panels:
    """Draw the events of a federation, by round and client.

    Parameters
    ----------
    events
        Columns ``round``, ``client`` (missing for the federation itself), ``what`` and ``reason``.

    Returns
    -------
    Panels
        A point for each event.
    """
    clients = sorted({int(client) for client in events["client"].dropna()})
    place = {client: number + 1 for number, client in enumerate(clients)}
    series = []
    for number, (what, own) in enumerate(events.groupby("what", sort=False)):
        line = [0 if pd.isna(client) else place[int(client)] for client in own["client"]]
        style = Style(PALETTE[number % len(PALETTE)], symbol=_MARKS[number % len(_MARKS)])
        reasons = [str(reason) for reason in own["reason"]]
        whose = ["the federation" if pd.isna(client) else f"client {int(client)}" for client in own["client"]]
        detail: Detail = {"whose": whose, "why": reasons}
        x, y = own["round"].to_numpy(), np.array(line, dtype=np.float64)
        series.append(Series(str(what), style, x, y, detail=detail, points=True))
    step = -(-len(clients) // _NAMED) or 1
    ticks = ((0.0, "federation"), *((float(place[client]), f"client {client}") for client in clients[::step]))
    left = Axis("", ticks, range=(-0.7, len(clients) + 0.7))
    return Panels((Panel(tuple(series), Axis("round", whole=True), left),), height=0.6 + min(0.8, 0.03 * len(clients)))


_MARKS = ("circle", "x", "diamond", "square", "cross", "triangle-up", "star")


def _starts(count: int, limit: int) -> Places:
    """Say where blocks begin, of equal size but for the last."""
    return np.arange(0, count, max(1, -(-count // limit)), dtype=np.int64)


def _axis(order: ClientOrder, starts: Places, title: str) -> Axis:
    count = len(order.clients)
    parts = np.split(np.arange(count), starts[1:])
    labels = tuple(_label(order, part) for part in parts)
    width = len(parts[0])
    # Places are those of blocks: the k-th client in order stands at (k + 1/2) / width - 1/2.
    if order.groups and len(set(order.groups)) < count:
        edges = [0, *(np.flatnonzero(np.array(order.groups)[1:] != np.array(order.groups)[:-1]) + 1), count]
        borders = tuple(float(edge) / width - 0.5 for edge in edges[1:-1])
        centres = [(first + last) / 2 / width - 0.5 for first, last in itertools.pairwise(edges)]
        ticks = tuple((float(at), order.groups[edge]) for at, edge in zip(centres, edges, strict=False))
        if order.names and count <= min(_NAMED, len(parts)):
            ticks = tuple((float(place), name) for place, name in enumerate(order.names))
        if len(ticks) <= _NAMED:
            return Axis(f"{title}, by {order.by}", ticks, borders, labels=labels)
    step = -(-len(parts) // _NAMED)
    shown = order.names or tuple(map(str, order.clients))
    ticks = tuple((float(place), shown[starts[place]]) for place in np.arange(0, len(parts), step))
    return Axis(f"{title}, by {order.by}" if order.groups else title, ticks, labels=labels)


def _label(order: ClientOrder, part: Places) -> str:
    numbers = [order.names[place] if order.names else str(order.clients[place]) for place in part]
    groups = list(dict.fromkeys(order.groups[place] for place in part)) if order.groups else []
    where = f" ({', '.join(groups)})" if groups else ""
    if len(part) == 1:
        return f"{'' if order.names else 'client '}{numbers[0]}{where}"
    listed = ", ".join(numbers[:_LISTED]) + (", …" if len(part) > _LISTED else "")
    return f"{len(part)} clients: {listed}{where}"


def _block_note(order: ClientOrder, starts: Places, own: bool) -> str:
    note = (
        f"{len(order.clients)} clients are put together in {len(starts)} blocks of up to {int(starts[1])}, in this "
        "order; a cell is the mean over its block."
    )
    return note if own else f"{note} What a client has with itself is left out of these means."


def _own_note(own: bool) -> str:
    return "" if own else "What a client has with itself may lie beyond the end of the colour scale."


def _bubbles(counts: pd.DataFrame, order: ClientOrder, names: list[str]) -> Panels:
    values = counts.to_numpy(dtype=np.float64)
    client, label = np.nonzero(values)
    held = values[client, label]
    who = [_label(order, np.array([each])) for each in client]
    detail: Detail = {"who": who, "class": [names[each] for each in label], "training samples": held.astype(np.int64)}
    x, y = client.astype(np.float64), label.astype(np.float64)
    bubbles = Series("training samples", Style(), x, y, detail=detail, points=True, size=held / max(1.0, held.max()))
    below = _axis(order, np.arange(len(order.clients), dtype=np.int64), "client")
    ticks = tuple((float(place), name) for place, name in enumerate(names))
    left = Axis("class", ticks, range=(len(names) - 0.4, -0.6))
    return Panels((Panel((bubbles,), below, left),), height=0.4 + 0.05 * len(names))


def _sizes(shares: pd.DataFrame, order: ClientOrder, starts: Places) -> Panels:
    sizes = shares.set_index("client").loc[order.clients, "train"].to_numpy(dtype=np.float64)
    means = blocks(sizes[:, None], starts, np.zeros(1, dtype=np.int64))[:, 0]
    below = _axis(order, starts, "client")
    held = Series(
        "training samples",
        Style(),
        np.arange(len(means), dtype=np.float64),
        means,
        detail={"who": below.labels},
        points=True,
    )
    left = Axis("training samples", range=(0.0, 1.05 * max(1.0, float(means.max()))))
    return Panels((Panel((held,), below, left),), height=0.7)
