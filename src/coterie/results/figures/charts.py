"""What a figure shows, apart from how it is drawn: plain numbers, for a page and for paper alike.

Three kinds are enough: panels of lines or points, panels of boxes, and a heat map that may change with the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from coterie.results.figures.line_styles import Style

Array = NDArray[np.floating[Any]] | NDArray[np.integer[Any]]
Detail = dict[str, Sequence[str] | Array]


@dataclass(frozen=True)
class Axis:
    """An axis.

    Parameters
    ----------
    title
        What it says.
    ticks
        Places and what stands there, instead of numbers.
    borders
        Places between groups, at which a line is drawn.
    range
        Where it begins and ends, if the data do not decide.
    whole
        Whether only whole numbers make sense.
    labels
        For a heat map, what each row or column is, in words for the tooltip.
    """

    title: str = ""
    ticks: tuple[tuple[float, str], ...] | None = None
    borders: tuple[float, ...] = ()
    range: tuple[float, float] | None = None
    whole: bool = False
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Series:
    """A line, or points.

    Parameters
    ----------
    name
        What the legend calls it; series of one name share an entry.
    style
        How it is drawn.
    x
        Where its points lie.
    y
        Their values.
    spread
        The standard deviation of each, NaN where there is none; drawn as a band.
    detail
        More to say of each point in its tooltip, by name.
    points
        Whether it is points rather than a line.
    size
        The area of each point relative to the largest there may be, from 0 to 1.
    faint
        Whether it stands behind others.
    """

    name: str
    style: Style
    x: Array
    y: Array
    spread: Array | None = None
    detail: Detail = field(default_factory=dict)
    points: bool = False
    size: Array | None = None
    faint: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Parameters
    ----------
    series
        What is drawn.
    x
        The axis below.
    y
        The axis at the left.
    title
        What stands above.
    """

    series: tuple[Series, ...]
    x: Axis = Axis()
    y: Axis = Axis()
    title: str = ""


@dataclass(frozen=True)
class Panels:
    """Lines or points, in one panel or several.

    Parameters
    ----------
    panels
        The panels.
    share_y
        Whether the panels of a row have one scale.
    hover
        Whether the tooltip is about the nearest point, or about all series at one place.
    height
        The height of a panel relative to the usual one.
    """

    panels: tuple[Panel, ...]
    share_y: bool = True
    hover: Literal["closest", "x unified"] = "closest"
    height: float = 1.0


@dataclass(frozen=True)
class Box:
    """The distribution of one number over clients.

    Parameters
    ----------
    name
        What stands below.
    style
        How it is drawn.
    values
        The numbers.
    detail
        More to say of each in its tooltip, by name.
    """

    name: str
    style: Style
    values: Array
    detail: Detail = field(default_factory=dict)


@dataclass(frozen=True)
class Boxes:
    """Boxes side by side, in one panel or several.

    Parameters
    ----------
    panels
        For each panel, what stands above and its boxes.
    y
        The axis at the left.
    """

    panels: tuple[tuple[str, tuple[Box, ...]], ...]
    y: Axis


@dataclass(frozen=True)
class HeatMap:
    """A matrix as colours, for one round or for several.

    Parameters
    ----------
    frames
        The rounds and their matrices, all of one shape; NaN is left blank.
    rows
        The axis at the left.
    columns
        The axis below.
    what
        What the numbers are, beside the colour scale.
    range
        The numbers at the ends of the colour scale.
    note
        What the reader has to know about the numbers, empty if nothing.
    square
        Whether cells are as high as they are wide.
    """

    frames: tuple[tuple[int, NDArray[np.float32]], ...]
    rows: Axis
    columns: Axis
    what: str
    range: tuple[float, float]
    note: str = ""
    square: bool = True


Chart = Panels | Boxes | HeatMap
"""What a figure shows."""
