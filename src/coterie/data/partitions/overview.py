"""Who has what, as a table for the terminal and as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from coterie.data.partitions.shares import Shares
from coterie.errors import ConfigError
from coterie.tables import Column, Row, Table, numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BUBBLES = 40  # up to so many clients and classes bubbles are legible; beyond, a heat map
_COLUMNS = 20  # up to so many classes the table has one column each
_BLUE, _ORANGE, _GREY = "#2f6db3", "#e08a1e", "#9aa0a6"
_PALE, _DARK = "#cfe0f3", "#0b2545"


def table(shares: Shares, labels: Tensor, classes: Sequence[str] = (), limit: int = 40) -> Table:
    """Show who got what, as a table for the terminal.

    Parameters
    ----------
    shares
        Who holds which samples.
    labels
        The class of each sample of the data set, or its target.
    classes
        The classes' names; numbers unless given.
    limit
        Clients to show at most; the last line sums up all of them.

    Returns
    -------
    Table
        A line a client.
    """
    names = _names(labels, classes)
    counts = shares.counts(labels, len(names)) if names else None
    groups, noise = shares.groups, shares.noise
    whose = (*(["name"] if shares.names else []), *(["group"] if groups is not None else []))
    wide = 0 < len(names) <= _COLUMNS
    headings = ("train", "val", "test", *(["noise"] if noise is not None else []))
    headings += tuple(names) if wide else ("classes", "largest class") if names else ()
    sizes = torch.stack([shares.train.sizes, shares.validation.sizes, shares.test.sizes], 1)
    rows = []
    for client in range(min(limit, len(shares))):
        row = [str(client), *shares.names[client : client + 1]]
        row += [str(int(groups[client]))] if groups is not None else []
        row += [str(int(size)) for size in sizes[client]]
        row += [f"{float(noise[client]):.3g}"] if noise is not None else []
        row += _cells(counts[client], names, wide) if counts is not None else []
        rows.append(row)
    if len(shares) > limit:
        rows.append(["…", *[""] * (len(whose) + len(headings))])
    total = ["all", *[""] * len(whose), *(str(int(size)) for size in sizes.sum(0))]
    total += [""] if noise is not None else []
    total += _cells(counts.sum(0), names, wide) if counts is not None else []
    who = [Column(heading, "left" if heading == "name" else "right") for heading in ("client", *whose)]
    shown = [Row(tuple(row), ends_section=place == len(rows)) for place, row in enumerate(rows, 1)]
    title = f"{len(shares)} clients, {shares.scheme}"
    return Table((*who, *numbers(*headings)), (*shown, Row(tuple(total))), title, labels=len(who))


def _names(labels: Tensor, classes: Sequence[str]) -> list[str]:
    if labels.is_floating_point():
        return []
    return list(classes) or [str(number) for number in range(int(labels.max()) + 1)]


def _cells(counts: Tensor, names: Sequence[str], wide: bool) -> list[str]:
    if wide:
        return [str(int(count)) if count else "·" for count in counts]
    return [str(int((counts > 0).sum())), f"{names[int(counts.argmax())]} ({int(counts.max())})"]


def plot(shares: Shares, labels: Tensor, classes: Sequence[str] = ()) -> Figure:
    """Draw who has what: bubbles for few clients and classes, a heat map for many, and everybody's sizes above.

    Parameters
    ----------
    shares
        Who holds which samples.
    labels
        The class of each sample of the data set, or its target.
    classes
        The classes' names; numbers unless given.

    Returns
    -------
    Figure
        A figure to save or show; it belongs to no window.

    Raises
    ------
    ConfigError
        If matplotlib is not installed.
    """
    try:
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib, which is not installed: install coterie[plots]") from error
    names = _names(labels, classes)
    width = min(16.0, max(7.0, 0.16 * len(shares) + 2.5))
    height = min(14.0, max(2.2, 0.28 * min(len(names), _BUBBLES) + 0.8)) if names else 0.0
    figure = Figure(figsize=(width, 1.9 + height), layout="constrained")
    figure.suptitle(f"{len(shares)} clients, {shares.scheme}", x=0.01, ha="left", fontsize=11)
    if not names:
        axes = figure.subplots()
        _sizes(axes, shares)
        axes.set_xlabel("client")
        return figure
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.5, height])
    _sizes(above, shares)
    counts = shares.counts(labels, len(names)).numpy()
    if max(len(shares), len(names)) <= _BUBBLES:
        _bubbles(below, counts, height)
    else:
        image = below.imshow(
            np.where(counts > 0, counts, np.nan).T,
            aspect="auto",
            interpolation="nearest",
            cmap=LinearSegmentedColormap.from_list("held", [_PALE, _BLUE, _DARK]),
            vmin=0,
        )
        figure.colorbar(image, ax=below, label="training samples", pad=0.01)
    step = -(-len(names) // _BUBBLES)
    below.set_yticks(range(0, len(names), step), names[::step], fontsize=8)
    below.set_ylim(len(names) - 0.4, -0.6)
    below.set_xlabel("client")
    below.set_ylabel("class")
    below.xaxis.get_major_locator().set_params(integer=True)
    if shares.groups is not None:
        for edge in np.flatnonzero(np.diff(shares.groups.numpy())) + 0.5:
            for axes in (above, below):
                axes.axvline(edge, color=_GREY, linewidth=0.8, linestyle="--")
    return figure


def _sizes(axes: Axes, shares: Shares) -> None:
    bottom = np.zeros(len(shares))
    for part, name, colour in (
        (shares.train, "training", _BLUE),
        (shares.validation, "validation", _ORANGE),
        (shares.test, "test", _GREY),
    ):
        size = part.sizes.numpy()
        if size.any():
            axes.bar(np.arange(len(shares)), size, 0.8, bottom=bottom, color=colour, label=name)
        bottom += size
    axes.set_xlim(-0.7, len(shares) - 0.3)
    axes.set_ylabel("samples")
    axes.margins(y=0.05)
    axes.legend(fontsize=8, frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1.0, 0.98), borderaxespad=0.2)
    axes.spines[["top", "right"]].set_visible(False)


def _bubbles(axes: Axes, counts: np.ndarray, height: float) -> None:
    client, label = np.nonzero(counts)
    # The largest bubble just fills the line of its class: 72 points an inch, areas in square points.
    largest = min(0.85 * 72 * (height - 0.8) / counts.shape[1], 26.0) ** 2
    axes.scatter(client, label, s=largest * counts[client, label] / counts.max(), color=_BLUE, linewidths=0)
    axes.set_axisbelow(True)
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
