"""What a report's page is made of: sections of tables, plots and texts."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from coterie.results.figures import Chart


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


class Cell(NamedTuple):
    """An entry of a table.

    Parameters
    ----------
    text
        What it says, as plain text.
    best
        Whether it is the best of its kind.
    """

    text: str
    best: bool = False


def table(head: Sequence[str], rows: Sequence[Sequence[Cell | str]], words: int = 1, caption: str = "") -> Markup:
    """Write a table.

    Parameters
    ----------
    head
        The headings.
    rows
        The rows, of plain text.
    words
        How many columns, from the left, are words and not numbers.
    caption
        What stands above it.

    Returns
    -------
    Markup
        The table; everything in it is escaped.
    """

    def cell(place: int, entry: Cell | str) -> str:
        shown = entry if isinstance(entry, Cell) else Cell(entry)
        text = html.escape(shown.text)
        text = f"<b>{text}</b>" if shown.best else text
        if place == 0:
            return f'<th scope="row">{text}</th>'
        return f"<td>{text}</td>" if place < words else f'<td class="number">{text}</td>'

    above = "".join(
        f'<th scope="col"{"" if place < words else " class=number"}>{html.escape(name)}</th>'
        for place, name in enumerate(head)
    )
    body = "\n".join(f"<tr>{''.join(cell(*each) for each in enumerate(row))}</tr>" for row in rows)
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return Markup(
        f'<div class="wide"><table>{title}<thead><tr>{above}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'
    )


def paragraph(text: str) -> Markup:
    """Write a paragraph.

    Parameters
    ----------
    text
        Plain text.

    Returns
    -------
    Markup
        The paragraph, escaped.
    """
    return Markup(f"<p>{html.escape(text)}</p>")


def bullets(lines: Sequence[str]) -> Markup:
    """Write a list.

    Parameters
    ----------
    lines
        Plain text.

    Returns
    -------
    Markup
        The list, escaped.
    """
    return Markup("<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>")
