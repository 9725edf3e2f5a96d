"""Charts as matplotlib figures, for papers: one column wide, text as text, no window."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.errors import ConfigError
from coterie.results.figures.charts import Axis, Boxes, Chart, HeatMap, Panels, Series
from coterie.results.figures.line_styles import SCALE, Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN = 3.35
"""Width of a column of a paper, in inches (85 mm)."""

WIDE = 6.9
"""Width of two columns with the gap between them, in inches (175 mm)."""

_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (8, 3))}
_SYMBOLS = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^"}
_SYMBOLS |= {"cross": "P", "x": "X", "triangle-down": "v", "star": "*"}
_GREY = "#8c959f"
_LOOK: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "grid.linewidth": 0.4,
    "grid.color": "#e2e5e9",
    "lines.linewidth": 1.2,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",  # text stays text: it can be searched, and takes the paper's font
    "svg.hashsalt": "coterie",  # the same figure is the same file
    "savefig.dpi": 300,
    "text.usetex": False,
    "text.parse_math": False,  # a dollar sign in somebody's name is a dollar sign
}


def matplotlib_figure(chart: Chart) -> Figure:
    """Draw a chart with matplotlib.

    Parameters
    ----------
    chart
        The chart.

    Returns
    -------
    matplotlib.figure.Figure
        One column wide, two for several panels; of a heat map of several rounds, the last.
    """
    with _looking():
        if isinstance(chart, HeatMap):
            return _heat_map(chart)
        return _boxes(chart) if isinstance(chart, Boxes) else _panels(chart)


def save(chart: Chart, stem: Path) -> list[Path]:
    """Write a chart as SVG and as PNG.

    Parameters
    ----------
    chart
        The chart.
    stem
        The files' path without a suffix; its folder is there.

    Returns
    -------
    list of Path
        The files.
    """
    figure = matplotlib_figure(chart)
    paths = []
    with _looking():
        for suffix, metadata in ((".svg", {"Date": None}), (".png", {})):
            path = stem.with_name(stem.name + suffix)
            figure.savefig(path, metadata=metadata)
            paths.append(path)
    return paths


@contextmanager
def _looking() -> Iterator[None]:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("static figures need matplotlib, which is not installed: install coterie[plots]") from error
    with matplotlib.rc_context(_LOOK):
        yield


def _grid(count: int, height: float, share_y: bool) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    columns = min(2, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(COLUMN if count == 1 else WIDE, 0.5 + 2.0 * height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharey="row" if share_y else False, squeeze=False)
    for spare in axes.flat[count:]:
        spare.set_visible(False)
    return figure, list(axes.flat[:count])


def _set(axes: Axes, x: Axis, y: Axis, title: str = "", y_title: bool = True) -> None:
    axes.set_xlabel(x.title)
    axes.set_ylabel(y.title if y_title else "")
    axes.set_title(title)
    for side, axis in (("x", x), ("y", y)):
        if axis.ticks is not None:
            long = side == "x" and sum(len(text) for _, text in axis.ticks) > 45
            turned: dict[str, Any] = {"rotation": 90} if long else {}
            getattr(axes, f"set_{side}ticks")([at for at, _ in axis.ticks], [text for _, text in axis.ticks], **turned)
        if axis.range is not None:
            getattr(axes, f"set_{side}lim")(*axis.range)
        if axis.whole:
            getattr(axes, f"{side}axis").get_major_locator().set_params(integer=True)
    for edge in x.borders:
        axes.axvline(edge, color=_GREY, linewidth=0.6, linestyle=":")
    for edge in y.borders:
        axes.axhline(edge, color=_GREY, linewidth=0.6, linestyle=":")


def _panels(chart: Panels) -> Figure:
    figure, places = _grid(len(chart.panels), chart.height, chart.share_y)
    legend: dict[str, Any] = {}
    for number, (panel, axes) in enumerate(zip(chart.panels, places, strict=True)):
        axes.set_axisbelow(True)
        axes.grid()
        for series in panel.series:
            drawn = _series(axes, series)
            if not series.faint or series.name not in legend:  # the legend shows a series as it stands in front
                legend[series.name] = drawn
        _set(axes, panel.x, panel.y, panel.title, not (chart.share_y and number % 2))
    if len(legend) > 1:
        # A letter is about a twentieth of an inch wide, and a line's sample takes as much as nine of them.
        width = COLUMN if len(places) == 1 else WIDE
        columns = max(1, min(4, int(20 * width / (9 + max(map(len, legend))))))
        figure.set_figheight(figure.get_figheight() + 0.15 * (-(-len(legend) // columns) - 1))
        figure.legend(
            list(legend.values()),
            list(legend),
            loc="outside lower center",
            ncols=columns,
            frameon=False,
            handlelength=2.4,
        )
    return figure


def _series(axes: Axes, series: Series) -> Any:
    style = series.style
    if series.points:
        area: Any = 40.0 if not series.faint else 14.0
        area = area if series.size is None else 90.0 * series.size
        alpha = 0.5 if series.faint else 0.9
        return axes.scatter(
            series.x, series.y, s=area, c=style.colour, marker=_SYMBOLS[style.symbol], alpha=alpha, linewidths=0
        )
    if series.spread is not None:
        low, high = series.y - series.spread, series.y + series.spread
        axes.fill_between(series.x, low, high, color=style.colour, alpha=0.18, linewidth=0)
    every = -(-len(series.x) // 12)  # on paper too, markers tell many lines apart
    (line,) = axes.plot(
        series.x,
        series.y,
        color=style.colour,
        linestyle=_DASHES[style.dash],
        marker="" if series.faint else _SYMBOLS[style.symbol],
        markevery=every or 1,
        markersize=3,
    )
    return line


def _boxes(chart: Boxes) -> Figure:
    figure, places = _grid(len(chart.panels), 1.1, True)
    most = max(len(boxes) for _, boxes in chart.panels)
    for number, ((title, boxes), axes) in enumerate(zip(chart.panels, places, strict=True)):
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        for place, box in enumerate(boxes):
            _box(axes, place, box.values, box.style)
        ticks = tuple((float(place), box.name) for place, box in enumerate(boxes))
        spare = (most - len(boxes)) / 2  # boxes are as wide in all panels
        _set(axes, Axis("", ticks, range=(-0.5 - spare, len(boxes) - 0.5 + spare)), chart.y, title, not number % 2)
    return figure


def _box(axes: Axes, place: int, values: Any, style: Style) -> None:
    plain = {"color": style.colour, "linewidth": 0.9}
    axes.boxplot(
        [np.asarray(values)],
        positions=[place],
        widths=0.6,
        showmeans=True,
        meanline=True,
        boxprops=plain,
        whiskerprops=plain,
        capprops=plain,
        medianprops=plain | {"linewidth": 1.6},
        meanprops=plain | {"linestyle": ":"},
        flierprops={"marker": ".", "markersize": 3, "markeredgecolor": style.colour, "alpha": 0.6},
    )


def _heat_map(chart: HeatMap) -> Figure:
    from matplotlib.figure import Figure

    (_, values) = chart.frames[-1]
    figure = Figure(figsize=(COLUMN, 3.0 if chart.square else 2.6), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(
        values,
        cmap=SCALE.lower(),
        vmin=chart.range[0],
        vmax=chart.range[1],
        interpolation="nearest",
        aspect="equal" if chart.square else "auto",
    )
    axes.spines[:].set_visible(False)
    # What the scale leaves out is said in a line of its own: the bar is too short for both in one.
    what = chart.what.replace(" (", "\n(", 1)
    figure.colorbar(image, ax=axes, label=what, shrink=0.8, pad=0.02).outline.set_visible(False)
    _set(axes, chart.columns, chart.rows)
    return figure
