"""Charts as Plotly figures, for a page and for a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.results.figures.charts import Axis, Boxes, Chart, HeatMap, Panel, Panels, Series
from coterie.results.figures.line_styles import SCALE, literal, theme

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_ROW = 350  # height of a row of panels, in pixels
_BETWEEN = 90  # pixels from one row of panels to the next
_NAMES = 5  # boxes side by side whose names lie
_TOP = 32  # room for the buttons above a plot
_POINTS = 400  # up to so many values of a box are shown one by one
_LARGEST = 26.0  # diameter of the largest bubble, in pixels
_MARKED = 30  # lines of up to so many points have a marker at each
_SPACED = 12  # markers of a longer line, by which many lines can be told apart
_UNNAMED_DETAILS = ("who", "whose", "why")  # details that need no name before them


def plotly_figure(chart: Chart) -> Figure:
    """Draw a chart with Plotly.

    Parameters
    ----------
    chart
        The chart.

    Returns
    -------
    plotly.graph_objects.Figure
        A figure on light ground, as wide as where it is shown.
    """
    if isinstance(chart, HeatMap):
        return _heat_map(chart)
    return _boxes(chart) if isinstance(chart, Boxes) else _panels(chart)


def _grid(
    titles: Sequence[str], share_y: bool, height: float, between: int = _BETWEEN
) -> tuple[Figure, list[tuple[int, int]]]:
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    columns = min(2, len(titles))
    rows = -(-len(titles) // columns)
    pixels = rows * _ROW * height + (rows - 1) * (between - _BETWEEN)
    # With its own template from the start: one that is set later is laid over Plotly's, number by number.
    figure = make_subplots(
        figure=go.Figure(layout={"template": theme(False)}),
        rows=rows,
        cols=columns,
        subplot_titles=[literal(title) for title in titles] if any(titles) else None,
        shared_yaxes=share_y,
        horizontal_spacing=0.06 if share_y else 0.14,
        vertical_spacing=min(0.25, between / pixels),
    )
    figure.update_annotations(font_size=14)
    figure.update_layout(
        height=int(pixels) + 60,
        margin={"l": 60, "r": 16, "t": _TOP + (24 if any(titles) else 0), "b": 48},
    )
    return figure, [(place // columns + 1, place % columns + 1) for place in range(len(titles))]


def _set_axis(axis: Axis, shared: bool = False) -> dict[str, Any]:
    out: dict[str, Any] = {} if shared else {"title_text": literal(axis.title)}
    if axis.ticks is not None:
        out |= {"tickvals": [at for at, _ in axis.ticks], "ticktext": [literal(text) for _, text in axis.ticks]}
    if axis.range is not None:
        out["range"] = list(axis.range)
    return out


def _whole(panel: Panel) -> dict[str, Any]:
    """Step by whole numbers below a panel that wants them; Plotly's own steps may be fractions, shown as wholes."""
    places = [float(place) for series in panel.series for place in (series.x.min(), series.x.max()) if len(series.x)]
    if not panel.x.whole or not places:
        return {}
    least = (max(places) - min(places)) / 10
    step = next(size * 10**power for power in range(12) for size in (1, 2, 5) if size * 10**power >= least)
    return {"dtick": step, "tick0": 0}


def _borders(figure: Figure, x: Axis, y: Axis, **place: Any) -> None:
    for edge in x.borders:
        figure.add_vline(x=edge, line_width=1, line_dash="dot", **place)
    for edge in y.borders:
        figure.add_hline(y=edge, line_width=1, line_dash="dot", **place)


def _panels(chart: Panels) -> Figure:
    figure, places = _grid([panel.title for panel in chart.panels], chart.share_y, chart.height)
    strong = {series.name for panel in chart.panels for series in panel.series if not series.faint}
    named: set[str] = set()
    for panel, (row, column) in zip(chart.panels, places, strict=True):
        for series in panel.series:
            # The legend shows a series as it stands in front, if it does anywhere.
            first = series.name not in named and not (series.faint and series.name in strong)
            named |= {series.name} if first else set()
            for trace in _traces(series, first, ", " if chart.hover == "x unified" else "<br>"):
                figure.add_trace(trace, row=row, col=column)
        shared = chart.share_y and column > 1
        figure.update_xaxes(row=row, col=column, **_set_axis(panel.x), **_whole(panel))
        figure.update_yaxes(row=row, col=column, **_set_axis(panel.y, shared))
        _borders(figure, panel.x, panel.y, row=row, col=column)
    # Below everything and as long as it must be: a legend at the side would take the lines' room.
    figure.update_layout(
        hovermode=chart.hover,
        showlegend=len(named) > 1,
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
    )
    return figure


def _traces(series: Series, in_legend: bool, between: str) -> list[Any]:
    import plotly.graph_objects as go

    style, name = series.style, literal(series.name)
    common: dict[str, Any] = {"name": name, "legendgroup": name, "showlegend": in_legend}
    common |= {"x": series.x, "y": series.y.astype(np.float32)}
    if series.points:
        data, phrases = _details(series.detail)
        marker: dict[str, Any] = {"color": style.colour, "symbol": style.symbol, "size": 7 if series.faint else 11}
        if series.size is not None:
            marker |= {"size": np.sqrt(series.size) * _LARGEST, "sizemin": 2}
        values = [] if series.size is not None else ["%{x:.4~g}, %{y:.4~g}"]
        return [
            go.Scatter(
                **common,
                mode="markers",
                marker=marker,
                opacity=0.5 if series.faint else 0.9,
                customdata=data,
                hovertemplate=_hover_template([*values, *phrases], between),
            )
        ]
    if series.spread is None:
        data, phrases = _details(series.detail)
        return [_line(series, common, data, _hover_template(["%{y:.4f}", *phrases], between))]
    data, phrases = _details({"±": series.spread, **series.detail})
    known = np.isfinite(series.spread) & np.isfinite(series.y)
    x, y, band = (values[known] for values in (series.x, series.y, series.spread))
    shade = go.Scatter(
        x=np.concatenate([x, x[::-1]]),
        y=np.concatenate([y + band, (y - band)[::-1]]).astype(np.float32),
        fill="toself",
        fillcolor=style.pale(0.18),
        line={"width": 0},
        mode="lines",
        hoverinfo="skip",
        legendgroup=name,
        showlegend=False,
    )
    return [shade, _line(series, common, data, _hover_template(["%{y:.4f} " + phrases[0], *phrases[1:]], between))]


def _line(series: Series, common: Mapping[str, Any], data: Any, template: str) -> Any:
    import plotly.graph_objects as go

    return go.Scatter(
        **common,
        mode="lines" if series.faint else "lines+markers",
        line={"color": series.style.colour, "dash": series.style.dash, "width": 2},
        marker={
            "symbol": series.style.symbol,
            "size": 6,
            "maxdisplayed": 0 if len(series.x) <= _MARKED else _SPACED,
        },
        customdata=data,
        hovertemplate=template,
    )


def _hover_template(parts: Sequence[str], between: str) -> str:
    return between.join(parts) + "<extra>%{fullData.name}</extra>"


def _details(detail: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Give what a tooltip adds: the numbers or words of each point, and the phrases that show them."""
    if not detail:
        return None, []
    columns = list(detail.values())
    data: Any
    if all(isinstance(column, np.ndarray) for column in columns):
        whole = all(np.issubdtype(column.dtype, np.integer) for column in columns)
        data = np.stack([np.asarray(column, dtype=np.int32 if whole else np.float32) for column in columns], axis=1)
    else:
        rows = zip(*columns, strict=True)
        data = [[literal(part) if isinstance(part, str) else int(part) for part in row] for row in rows]
    phrases = []
    for place, (name, column) in enumerate(detail.items()):
        exact = isinstance(column, np.ndarray) and np.issubdtype(column.dtype, np.floating)
        words = "" if name in _UNNAMED_DETAILS else f"{name} "
        phrases.append(f"{words}%{{customdata[{place}]{':.4f' if exact else ''}}}")
    return data, phrases


def _boxes(chart: Boxes) -> Figure:
    import plotly.graph_objects as go

    most = max(len(boxes) for _, boxes in chart.panels)
    longest = max(len(box.name) for _, boxes in chart.panels for box in boxes)
    # The names of many boxes stand upright, and need room above the next row's titles.
    between = max(_BETWEEN, 50 + 9 * longest) if most > _NAMES else _BETWEEN
    figure, places = _grid([title for title, _ in chart.panels], True, 1.0, between)
    for (_, boxes), (row, column) in zip(chart.panels, places, strict=True):
        for box in boxes:
            data, phrases = _details(box.detail)
            figure.add_trace(
                go.Box(
                    y=box.values.astype(np.float32),
                    name=literal(box.name),
                    customdata=data,
                    boxpoints="all" if len(box.values) <= _POINTS else "outliers",
                    boxmean=True,
                    width=0.5,
                    jitter=0.5,
                    pointpos=0,
                    marker={"color": box.style.colour, "size": 4, "opacity": 0.6},
                    line={"width": 1.5},
                    hovertemplate=_hover_template(["%{y:.4f}", *phrases], "<br>"),
                    showlegend=False,
                ),
                row=row,
                col=column,
            )
        spare = (most - len(boxes)) / 2  # boxes are as wide in all panels
        figure.update_xaxes(row=row, col=column, range=[-0.5 - spare, len(boxes) - 0.5 + spare])
        figure.update_yaxes(row=row, col=column, **_set_axis(chart.y, column > 1))
    return figure


def _heat_map(chart: HeatMap) -> Figure:
    import plotly.graph_objects as go

    (_, values) = chart.frames[-1]
    several = len(chart.frames) > 1
    rows, columns = ([literal(label) for label in axis.labels] for axis in (chart.rows, chart.columns))
    first = chart.columns.title.partition(",")[0]
    second = chart.rows.title.partition(",")[0]
    figure = go.Figure(
        go.Heatmap(
            z=values,
            x=columns,
            y=rows,
            zmin=chart.range[0],
            zmax=chart.range[1],
            colorscale=SCALE,
            colorbar={"title": {"text": literal(chart.what), "side": "right"}, "thickness": 14, "outlinewidth": 0},
            hovertemplate=f"{literal(second)}: %{{y}}<br>{literal(first)}: %{{x}}<br>%{{z:.4~g}}<extra></extra>",
            hoverongaps=False,
        ),
        layout={"template": theme(False)},
    )
    figure.update_layout(
        height=(620 if chart.square else 420) + (70 if several else 0),
        margin={"l": 60, "r": 16, "t": _TOP, "b": 48},
    )
    sides = {"type": "category", "showgrid": False}
    figure.update_xaxes(**sides, **_set_axis(chart.columns), constrain="domain")
    figure.update_yaxes(**sides, **_set_axis(chart.rows), autorange="reversed", constrain="domain")
    if chart.square:
        figure.update_yaxes(scaleanchor="x")
    _borders(figure, chart.columns, chart.rows)
    if several:
        figure.frames = [
            go.Frame(name=str(number), data=[go.Heatmap(z=matrix)], traces=[0]) for number, matrix in chart.frames
        ]
        figure.update_layout(sliders=[_slider([number for number, _ in chart.frames])])
    return figure


def _slider(rounds: Sequence[int]) -> dict[str, Any]:
    at_once = {"mode": "immediate", "frame": {"duration": 0, "redraw": True}, "transition": {"duration": 0}}
    steps = [{"method": "animate", "args": [[str(number)], at_once], "label": str(number)} for number in rounds]
    return {
        "steps": steps,
        "active": len(rounds) - 1,
        "currentvalue": {"prefix": "round ", "xanchor": "left"},
        "pad": {"t": 56, "b": 0},
    }
