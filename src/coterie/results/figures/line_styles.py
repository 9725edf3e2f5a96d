"""How figures look: colours that people with any colour vision can tell apart, on light and on dark ground."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

# The palette of Okabe and Ito, without black and yellow: one is lost on dark ground, the other on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
"""Colours of lines."""

# As light as these, so that they too are legible on both grounds; such a line is dashed besides.
_MORE = ("#7A67EE", "#B5524A", "#5B8C2A", "#AA4499", "#8F7326", "#2F9AA8", "#A3846B")

DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
"""Kinds of lines, as Plotly calls them."""

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "star")
"""Markers, as Plotly calls them."""

SCALE = "Cividis"
"""The colour scale of heat maps: even in lightness, the same to every colour vision, legible on both grounds."""

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

_GROUNDS = {
    False: {"ink": "#1f2328", "soft": "#57606a", "grid": "#e2e5e9", "axis": "#8c959f", "box": "#ffffff"},
    True: {"ink": "#e6e8eb", "soft": "#a6afb9", "grid": "#343b43", "axis": "#6e7781", "box": "#22272e"},
}


class Line(NamedTuple):
    """What one line of a figure stands for: runs that differ by their seed alone.

    Parameters
    ----------
    method
        The method, with those of its parameters that tell it from others; has a colour.
    setting
        What else tells the runs from others, empty if nothing does; has a kind of line.
    """

    method: str
    setting: str = ""

    @property
    def name(self) -> str:
        """What the legend calls it."""
        return f"{self.method}, {self.setting}" if self.setting else self.method


@dataclass(frozen=True)
class Style:
    """How one line is drawn.

    Parameters
    ----------
    colour
        Its colour, as ``#rrggbb``.
    dash
        One of :data:`DASHES`.
    symbol
        One of :data:`SYMBOLS`.
    """

    colour: str = PALETTE[0]
    dash: str = DASHES[0]
    symbol: str = SYMBOLS[0]

    def pale(self, opacity: float) -> str:
        """Give the colour as one that shows what is behind it.

        Parameters
        ----------
        opacity
            From 0 to 1.

        Returns
        -------
        str
            A colour as CSS writes it.
        """
        red, green, blue = (int(self.colour[place : place + 2], 16) for place in (1, 3, 5))
        return f"rgba({red},{green},{blue},{opacity:g})"


def styles(lines: Iterable[Line]) -> dict[str, Style]:
    """Give every line its style: a colour and a marker for each method, a kind of line for each setting.

    Parameters
    ----------
    lines
        The lines, in their order.

    Returns
    -------
    dict of str to Style
            The styles by the lines' names. Beyond as many methods as there are colours in the palette, lines have other
        colours, and kinds of lines tell them apart too.
    """
    lines = list(dict.fromkeys(lines))
    methods = list(dict.fromkeys(line.method for line in lines))
    settings = list(dict.fromkeys(line.setting for line in lines))
    colours, turns = (*PALETTE, *_MORE), -(-len(methods) // len(PALETTE))
    found = {}
    for line in lines:
        method, setting = methods.index(line.method), settings.index(line.setting)
        turn = method // len(PALETTE)
        found[line.name] = Style(
            colours[method % len(colours)],
            DASHES[(setting * turns + turn) % len(DASHES)],
            SYMBOLS[(method + 2 * turn + setting) % len(SYMBOLS)],
        )
    return found


def theme(dark: bool) -> dict[str, Any]:
    """Give Plotly's template for light or for dark ground.

    Parameters
    ----------
    dark
        Whether the ground is dark.

    Returns
    -------
    dict
        What Plotly takes as ``layout.template``.
    """
    ground = _GROUNDS[dark]
    axis = {
        "gridcolor": ground["grid"],
        "linecolor": ground["axis"],
        "zerolinecolor": ground["grid"],
        "tickcolor": ground["axis"],
        "ticks": "outside",
        "ticklen": 4,
        "showline": True,
        "zeroline": False,
        "automargin": True,
        "title": {"standoff": 8},
        "exponentformat": "power",
    }
    clear = "rgba(0,0,0,0)"
    return {
        "layout": {
            "font": {"family": FONT, "size": 13, "color": ground["ink"]},
            "paper_bgcolor": clear,
            "plot_bgcolor": clear,
            "colorway": list(PALETTE),
            "xaxis": axis,
            "yaxis": axis,
            "hoverlabel": {
                "bgcolor": ground["box"],
                "bordercolor": ground["axis"],
                "font": {"family": FONT, "color": ground["ink"]},
                "namelength": -1,
            },
            "legend": {"bgcolor": clear},
            "modebar": {"bgcolor": clear, "color": ground["soft"], "activecolor": ground["ink"]},
            "sliderdefaults": {
                "bgcolor": ground["grid"],
                "bordercolor": ground["axis"],
                "activebgcolor": PALETTE[0],
                "tickcolor": ground["axis"],
                "font": {"color": ground["soft"]},
                "currentvalue": {"font": {"color": ground["ink"]}},
            },
            "shapedefaults": {"line": {"color": ground["axis"]}},
            "annotationdefaults": {"font": {"color": ground["ink"]}},
        }
    }


def literal(text: str) -> str:
    """Write a user's text so that Plotly shows it as it is: Plotly reads some HTML in labels.

    Parameters
    ----------
    text
        The text.

    Returns
    -------
    str
        The text with HTML's signs escaped.
    """
    return html.escape(text, quote=False)
