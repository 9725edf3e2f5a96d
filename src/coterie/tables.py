"""A table as a value, written as text, Markdown, LaTeX, HTML or CSV.

Whoever has numbers to show makes one :class:`Table`; how a winner is emphasised, what is escaped and how columns are
aligned is decided here, once for each format.
"""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

ABSENT = "–"
"""What a cell shows where there is nothing to show."""

_TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_TEX |= {sign: f"\\{sign}" for sign in "&%$#_{}"}
# Without a T1 font encoding these three are printed as other characters.
_TEX |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
_TEX |= {"–": "--", "—": "---", "…": r"\ldots{}", "“": "``", "”": "''", "’": "'"}
_SYMBOLS = {"±": r"\pm", "†": r"\dagger", "∞": r"\infty", "ε": r"\varepsilon", "δ": r"\delta", "×": r"\times"}
_SYMBOLS |= {"−": "-", "·": r"\cdot", "→": r"\rightarrow", "≤": r"\leq", "≥": r"\geq"}
_TEX |= {sign: f"${command}$" for sign, command in _SYMBOLS.items()}


@dataclass(frozen=True)
class Cell:
    """One entry of a table.

    Parameters
    ----------
    text
        What it says, as plain text.
    emphasis
        ``"best"`` for a winner (bold), ``"second"`` for the next one (underlined; slanted in Markdown, which cannot
        underline).
    mark
        What follows the text, raised where the format can: stars or daggers that a note of the table explains.
    tooltip
        What HTML shows when the pointer rests on it.
    """

    text: str
    emphasis: Literal["", "best", "second"] = ""
    mark: str = ""
    tooltip: str = ""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Parameters
    ----------
    header
        What stands above it.
    align
        ``"left"`` for words, ``"right"`` for numbers.
    unit
        The unit of its numbers, shown behind the header.
    """

    header: str
    align: Literal["left", "right"] = "left"
    unit: str = ""

    @property
    def heading(self) -> str:
        """The header with its unit."""
        return f"{self.header} ({self.unit})" if self.unit else self.header


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Parameters
    ----------
    cells
        One for each column; plain text stands for a cell without emphasis.
    ends_section
        Whether a rule separates it from the next row.
    muted
        Whether it only accompanies the row above it, and is shown in a fainter colour in the terminal and on a page.
    """

    cells: tuple[Cell | str, ...]
    ends_section: bool = False
    muted: bool = False


def words(*headers: str) -> tuple[Column, ...]:
    """Make columns of words, aligned at the left.

    Parameters
    ----------
    *headers
        What stands above each.

    Returns
    -------
    tuple of Column
        The columns.
    """
    return tuple(Column(header) for header in headers)


def numbers(*headers: str) -> tuple[Column, ...]:
    """Make columns of numbers, aligned at the right.

    Parameters
    ----------
    *headers
        What stands above each.

    Returns
    -------
    tuple of Column
        The columns.
    """
    return tuple(Column(header, "right") for header in headers)


@dataclass(frozen=True)
class Table:
    """Rows and columns with a title and notes. ``rich`` prints it, a notebook shows it.

    Parameters
    ----------
    columns
        The columns.
    rows
        The rows, each with a cell for every column.
    title
        What stands above, empty for none.
    notes
        Sentences below: what marks mean, and whatever else a reader has to know.
    labels
        How many columns, from the left, say what a row is about. The terminal repeats them where a table is too wide
        and is cut into several.

    Examples
    --------
    >>> table = Table((*words("method"), *numbers("mean")), (Row(("FedAvg", Cell("0.94", "best"))),))
    >>> print(table.markdown())
    | method | mean |
    | --- | ---: |
    | FedAvg | **0.94** |
    <BLANKLINE>
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    title: str = ""
    notes: tuple[str, ...] = ()
    labels: int = 1

    def text(self, width: int = 100) -> str:
        """Write the table as plain text.

        Parameters
        ----------
        width
            Characters of a line at most.

        Returns
        -------
        str
            What a terminal of that width shows, without emphasis.
        """
        from rich.console import Console

        console = Console(file=io.StringIO(), width=width, color_system=None)
        with console.capture() as printed:
            console.print(self)
        return printed.get()

    def markdown(self) -> str:
        """Write the table as Markdown.

        Returns
        -------
        str
            The title, the table and the notes, as paragraphs; everything is escaped.
        """
        rules = ("---:" if column.align == "right" else "---" for column in self.columns)
        lines = [[escape_markdown(column.heading) for column in self.columns], list(rules)]
        lines += [[_markdown_cell(cell) for cell in cells_of(row)] for row in self.rows]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        parts = [escape_markdown(self.title), body, *map(escape_markdown, self.notes)]
        return "\n\n".join(part for part in parts if part) + "\n"

    def latex(self) -> str:
        r"""Write the table as LaTeX, for a document that uses the package ``booktabs``.

        Returns
        -------
        str
            A ``tabular`` environment to be input where it is wanted. The title and the notes are comments above it.
        """
        comments = [self.title, *self.notes, r"needs \usepackage{booktabs}"]
        spec = "".join("r" if column.align == "right" else "l" for column in self.columns)
        lines = [f"% {' '.join(comment.split())}" for comment in comments if comment]
        lines += [f"\\begin{{tabular}}{{{spec}}}", r"\toprule"]
        lines += [_latex_line([escape_latex(column.heading) for column in self.columns]), r"\midrule"]
        for place, row in enumerate(self.rows, 1):
            lines.append(_latex_line([_latex_cell(cell) for cell in cells_of(row)]))
            if row.ends_section and place < len(self.rows):
                lines.append(r"\midrule")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])

    def html(self) -> str:
        """Write the table as HTML.

        Returns
        -------
        str
            A ``table`` element, and a paragraph of the class ``note`` for each note; everything is escaped. Columns of
            numbers have the class ``number``, muted rows the class ``muted``.
        """
        caption = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        head = "".join(
            f'<th scope="col"{_number_class(column)}>{html.escape(column.heading)}</th>' for column in self.columns
        )
        bodies = "\n".join(
            "<tbody>\n" + "\n".join(self._html_row(row) for row in section) + "\n</tbody>"
            for section in self._sections()
        )
        notes = "".join(f'\n<p class="note">{html.escape(note)}</p>' for note in self.notes)
        return f"<table>{caption}<thead><tr>{head}</tr></thead>\n{bodies}</table>{notes}"

    def csv(self) -> str:
        """Write the table as CSV.

        Returns
        -------
        str
            The headers and the cells' texts, without marks, title and notes.
        """
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([column.heading for column in self.columns])
        writer.writerows([cell.text for cell in cells_of(row)] for row in self.rows)
        return out.getvalue()

    def _repr_html_(self) -> str:
        return self.html()

    def _sections(self) -> Iterator[list[Row]]:
        section: list[Row] = []
        for row in self.rows:
            section.append(row)
            if row.ends_section:
                yield section
                section = []
        if section:
            yield section

    def _html_row(self, row: Row) -> str:
        found = []
        for place, (cell, column) in enumerate(zip(cells_of(row), self.columns, strict=True)):
            tip = f' title="{html.escape(cell.tooltip)}"' if cell.tooltip else ""
            text = html.escape(cell.text)
            text = {"": text, "best": f"<b>{text}</b>", "second": f"<u>{text}</u>"}[cell.emphasis]
            text += f"<sup>{html.escape(cell.mark)}</sup>" if cell.mark else ""
            first = f'<th scope="row"{_number_class(column)}{tip}>{text}</th>'
            found.append(f"<td{_number_class(column)}{tip}>{text}</td>" if place else first)
        return ('<tr class="muted">' if row.muted else "<tr>") + "".join(found) + "</tr>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from coterie.terminal_tables import laid_out

        return laid_out(self, options.max_width)


def escape_markdown(text: str) -> str:
    """Write plain text so that Markdown shows it as it is, within a table too.

    Parameters
    ----------
    text
        The text.

    Returns
    -------
    str
        One line.
    """
    escaped = re.sub(r"[\\`*_|<#\[]", r"\\\g<0>", " ".join(text.splitlines()))
    return re.sub(r"&(?=#?\w+;)", "&amp;", escaped)


def escape_latex(text: str) -> str:
    """Write plain text so that LaTeX prints it as it is.

    Parameters
    ----------
    text
        The text.

    Returns
    -------
    str
        One line.
    """
    return "".join(_TEX.get(sign, sign) for sign in " ".join(text.splitlines()))


def cells_of(row: Row) -> list[Cell]:
    """Give a row's cells, plain words made into ones.

    Parameters
    ----------
    row
        The row.

    Returns
    -------
    list of Cell
        One for each column.
    """
    return [cell if isinstance(cell, Cell) else Cell(cell) for cell in row.cells]


def _markdown_cell(cell: Cell) -> str:
    text = escape_markdown(cell.text)
    return {"": text, "best": f"**{text}**", "second": f"*{text}*"}[cell.emphasis] + escape_markdown(cell.mark)


def _latex_cell(cell: Cell) -> str:
    text = escape_latex(cell.text)
    text = {"": text, "best": f"\\textbf{{{text}}}", "second": f"\\underline{{{text}}}"}[cell.emphasis]
    if not cell.mark:
        return text
    raised = "".join(_SYMBOLS[sign] + " " if sign in _SYMBOLS else escape_latex(sign) for sign in cell.mark)
    return f"{text}$^{{{raised.strip()}}}$"


def _latex_line(cells: Sequence[str]) -> str:
    line = " & ".join(cells) + r" \\"
    # After a rule or a line's end, LaTeX takes these for an option of that command.
    return "{}" + line if line.startswith(("[", "*")) else line


def _number_class(column: Column) -> str:
    return ' class="number"' if column.align == "right" else ""
