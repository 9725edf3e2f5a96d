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
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table as RichTable
    from rich.text import Text

ABSENT = "–"
"""What a cell shows where there is nothing to show."""

_STYLES = {"": "", "best": "bold", "second": "underline"}

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
        lines += [[_markdown_cell(cell) for cell in _cells(row)] for row in self.rows]
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
            lines.append(_latex_line([_latex_cell(cell) for cell in _cells(row)]))
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
        writer.writerows([cell.text for cell in _cells(row)] for row in self.rows)
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
        for place, (cell, column) in enumerate(zip(_cells(row), self.columns, strict=True)):
            tip = f' title="{html.escape(cell.tooltip)}"' if cell.tooltip else ""
            text = html.escape(cell.text)
            text = {"": text, "best": f"<b>{text}</b>", "second": f"<u>{text}</u>"}[cell.emphasis]
            text += f"<sup>{html.escape(cell.mark)}</sup>" if cell.mark else ""
            first = f'<th scope="row"{_number_class(column)}{tip}>{text}</th>'
            found.append(f"<td{_number_class(column)}{tip}>{text}</td>" if place else first)
        return ('<tr class="muted">' if row.muted else "<tr>") + "".join(found) + "</tr>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        if self.title:
            yield Text(self.title, style="italic")
        for block in self._blocks(options.max_width):
            yield self._rich_table(block, options.max_width)
        for note in self.notes:
            yield Text(note, style="dim")

    def _blocks(self, width: int) -> list[list[int]]:
        """Share the columns out to tables that are no wider than the terminal, so that no number is broken."""
        left = min(width // 2, self._width_of_labels())
        blocks: list[list[int]] = [[]]
        used = left
        for place in range(self.labels, len(self.columns)):
            wide = self._width(place)
            if blocks[-1] and used + wide > width:
                blocks.append([])
                used = left
            blocks[-1].append(place)
            used += wide
        return blocks

    def _texts(self, place: int) -> list[str]:
        return [cell.text + cell.mark for row in self.rows for cell in [_cells(row)[place]]]

    def _width(self, place: int) -> int:
        # With the two spaces between columns. A heading may be broken between words, a cell may not.
        return 2 + max(map(len, (*self.columns[place].heading.split(), *self._texts(place))), default=0)

    def _width_of_labels(self) -> int:
        return sum(self._width(place) for place in range(self.labels))

    def _widths(self, places: Sequence[int], width: int) -> dict[int, int]:
        """Give the widths of columns whose cells must not be broken, in a table no wider than that.

        Headings give way: rich would take from the widest columns, and break their cells.
        """
        labels_fit = self._width_of_labels() <= width // 2
        kept = [
            place for place in places if (place < self.labels and labels_fit) or self.columns[place].align != "left"
        ]
        least = {place: self._width(place) for place in places}
        wide = {place: max(least[place], 2 + len(self.columns[place].heading)) for place in places}
        for _ in range(sum(wide.values()) - width):
            slack, place = max(((wide[place] - least[place], place) for place in kept), default=(0, 0))
            if not slack:
                break
            wide[place] -= 1
        return {place: wide[place] - 2 for place in kept}

    def _rich_table(self, block: Sequence[int], width: int) -> RichTable:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        out = RichTable(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        places = (*range(self.labels), *block)
        widths = self._widths(places, width)
        for place in places:
            column = self.columns[place]
            out.add_column(Text(column.heading), justify=column.align, overflow="fold", width=widths.get(place))
        for row in self.rows:
            cells = _cells(row)
            if row.muted and all(cells[place].text == ABSENT for place in block):
                continue
            found: list[RenderableType] = [_rich_cell(cells[place], self.columns[place]) for place in places]
            out.add_row(*found, style="dim" if row.muted else "", end_section=row.ends_section)
        return out


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


def _cells(row: Row) -> list[Cell]:
    return [cell if isinstance(cell, Cell) else Cell(cell) for cell in row.cells]


def _rich_cell(cell: Cell, column: Column) -> Text:
    from rich.text import Text

    return Text.assemble((cell.text, _STYLES[cell.emphasis]), cell.mark, no_wrap=column.align == "right")


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
