"""How a table is laid out in a terminal: no number is broken, and one that is too wide is cut into several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from coterie.tables import ABSENT, Cell, Column, Table, cells_of

_STYLES = {"": "", "best": "bold", "second": "underline"}


def laid_out(table: Table, width: int) -> Iterator[RenderableType]:
    """Give what ``rich`` prints: the title, one table or several, the notes."""
    if table.title:
        yield Text(table.title, style="italic")
    for block in _blocks(table, width):
        yield _block(table, block, width)
    for note in table.notes:
        yield Text(note, style="dim")


def _blocks(table: Table, width: int) -> list[list[int]]:
    """Share the columns out to tables that are no wider than the terminal, so that no number is broken."""
    left = min(width // 2, _width_of_labels(table))
    blocks: list[list[int]] = [[]]
    used = left
    for place in range(table.labels, len(table.columns)):
        wide = _width(table, place)
        if blocks[-1] and used + wide > width:
            blocks.append([])
            used = left
        blocks[-1].append(place)
        used += wide
    return blocks


def _width(table: Table, place: int) -> int:
    # With the two spaces between columns. A heading may be broken between words, a cell may not.
    texts = [cell.text + cell.mark for row in table.rows for cell in [cells_of(row)[place]]]
    return 2 + max(map(len, (*table.columns[place].heading.split(), *texts)), default=0)


def _width_of_labels(table: Table) -> int:
    return sum(_width(table, place) for place in range(table.labels))


def _widths(table: Table, places: Sequence[int], width: int) -> dict[int, int]:
    """Give the widths of columns whose cells must not be broken, in a table no wider than that.

    Headings give way: rich would take from the widest columns, and break their cells.
    """
    labels_fit = _width_of_labels(table) <= width // 2
    kept = [place for place in places if (place < table.labels and labels_fit) or table.columns[place].align != "left"]
    least = {place: _width(table, place) for place in places}
    wide = {place: max(least[place], 2 + len(table.columns[place].heading)) for place in places}
    for _ in range(sum(wide.values()) - width):
        slack, place = max(((wide[place] - least[place], place) for place in kept), default=(0, 0))
        if not slack:
            break
        wide[place] -= 1
    return {place: wide[place] - 2 for place in kept}


def _block(table: Table, block: Sequence[int], width: int) -> RichTable:
    out = RichTable(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    places = (*range(table.labels), *block)
    widths = _widths(table, places, width)
    for place in places:
        column = table.columns[place]
        out.add_column(Text(column.heading), justify=column.align, overflow="fold", width=widths.get(place))
    for row in table.rows:
        cells = cells_of(row)
        if row.muted and all(cells[place].text == ABSENT for place in block):
            continue
        found = [_cell(cells[place], table.columns[place]) for place in places]
        out.add_row(*found, style="dim" if row.muted else "", end_section=row.ends_section)
    return out


def _cell(cell: Cell, column: Column) -> Text:
    return Text.assemble((cell.text, _STYLES[cell.emphasis]), cell.mark, no_wrap=column.align == "right")
