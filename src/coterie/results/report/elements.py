"""What a report's page is made of: sections of tables, plots and texts."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from coterie.results.figures import Chart
from coterie.tables import Table


@dataclass(frozen=True)
class Markup:
    """Something that is HTML already.

    Parameters
    ----------
    text
        HTML in which whatever users wrote is escaped.
    """

    text: str


class Variant(NamedTuple):
    """One of several charts that share a place on the page.

    Parameters
    ----------
    label
        What tells it from the others, as the user reads it.
    chart
        The chart.
    """

    label: str
    chart: Chart


@dataclass(frozen=True)
class Plot:
    """A chart, or several of which the reader chooses one.

    Parameters
    ----------
    key
        Names it on the page and in file names.
    title
        What it shows, as a heading.
    caption
        What the reader has to know.
    variants
        The charts.
    choice
        What the reader chooses by, where there are several.
    """

    key: str
    title: str
    caption: str
    variants: tuple[Variant, ...]
    choice: str = "Run"


@dataclass(frozen=True)
class Section:
    """A section of the page.

    Parameters
    ----------
    key
        Its anchor.
    title
        Its heading.
    parts
        What it holds.
    """

    key: str
    title: str
    parts: tuple[Markup | Plot, ...]


def table(of: Table) -> Markup:
    return Markup(f'<div class="wide">{of.html()}</div>')


def paragraph(text: str) -> Markup:
    return Markup(f"<p>{html.escape(text)}</p>")


def bullets(lines: Sequence[str]) -> Markup:
    return Markup("<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>")
