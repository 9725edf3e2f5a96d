"""How a table is laid out in a terminal.

No number is broken, sentences are broken between words, and a table that is too wide is cut into several.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from coterie.tables import ABSENT, Cell, Column, Table, cells_of

_STYLES = {"": "", "best": "bold", "second": "underline"}
_SENTENCE = 16  # characters that a column of sentences has in each line before it moves to a table of its own


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
        wide = 2 + (_longest_cell(table, place) if _is_number(table, place) else _readable(table, place))
        if blocks[-1] and used + wide > width:
            blocks.append([])
            used = left
        blocks[-1].append(place)
        used += wide
    return blocks


def _is_number(table: Table, place: int) -> bool:
    return table.columns[place].align == "right"


def _texts(table: Table, place: int) -> list[str]:
    return [cell.text + cell.mark for row in table.rows for cell in [cells_of(row)[place]]]


def _longest_cell(table: Table, place: int) -> int:
    """Give the width in which no cell is broken, and the heading between words only."""
    return max(map(cell_len, (*table.columns[place].heading.split(), *_texts(table, place))), default=0)


def _longest_word(table: Table, place: int) -> int:
    texts = (table.columns[place].heading, *_texts(table, place))
    return max((cell_len(word) for text in texts for word in text.split()), default=0)


def _readable(table: Table, place: int) -> int:
    """Give the width from which on sentences can be read: no word is broken, and several stand in a line."""
    return max(_longest_word(table, place), min(_SENTENCE, _longest_cell(table, place)))


def _width_of_labels(table: Table) -> int:
    return sum(2 + _longest_cell(table, place) for place in range(table.labels))


def _widths(table: Table, places: Sequence[int], width: int) -> dict[int, int]:
    """Give each column its width, so that the table is no wider than that.

    First the headings of numbers give way, then sentences are broken between words; numbers never are, nor labels that
    take no more than half of the width.
    """
    labels_fit = _width_of_labels(table) <= width // 2
    firm = {place for place in places if _is_number(table, place) or (place < table.labels and labels_fit)}
    least = {place: (_longest_cell if place in firm else _longest_word)(table, place) for place in places}
    whole = {place: max(_longest_cell(table, place), cell_len(table.columns[place].heading)) for place in places}
    room = width - 2 * len(places)
    sentences = [place for place in places if place not in firm]
    found = _shared(sentences, least, whole, room - sum(least[place] for place in firm))
    return found | _shared(sorted(firm), least, whole, room - sum(found.values()))


def _shared(places: Sequence[int], least: dict[int, int], whole: dict[int, int], room: int) -> dict[int, int]:
    """Share room out: to each column what it needs at least, and of what is left the more, the more it could use."""
    wide = {place: least[place] for place in places}
    while sum(wide.values()) > room and (widest := max(places, key=wide.__getitem__, default=None)) is not None:
        if wide[widest] == 1:
            break
        wide[widest] -= 1  # words that have no room are broken, the longest first
    spare, wanted = room - sum(wide.values()), sum(whole[place] - wide[place] for place in places)
    for place in places:
        more = whole[place] - wide[place]
        given = min(more, spare * more // wanted) if wanted and spare > 0 else 0
        wide[place], spare, wanted = wide[place] + given, spare - given, wanted - more
    return wide


def _block(table: Table, block: Sequence[int], width: int) -> RichTable:
    out = RichTable(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    places = (*range(table.labels), *block)
    widths = _widths(table, places, width)
    for place in places:
        column = table.columns[place]
        out.add_column(Text(column.heading), justify=column.align, overflow="fold", width=widths[place])
    for row in table.rows:
        cells = cells_of(row)
        if row.muted and all(cells[place].text == ABSENT for place in block):
            continue
        found = [_cell(cells[place], table.columns[place], widths[place]) for place in places]
        out.add_row(*found, style="dim" if row.muted else "", end_section=row.ends_section)
    return out


def _cell(cell: Cell, column: Column, width: int) -> Text:
    is_number = column.align == "right"
    text = cell.text if is_number else _broken(cell.text, width)
    return Text.assemble((text, _STYLES[cell.emphasis]), cell.mark, no_wrap=is_number)


def _broken(text: str, width: int) -> str:
    """Break a word that is longer than a line where a reader would: behind a hyphen, a slash or the like."""

    def parts_of(word: re.Match[str]) -> str:
        lines = [""]
        for part in re.findall(r"[^-/_=:.,]*[-/_=:.,]+|[^-/_=:.,]+", word.group()):
            if cell_len(lines[-1] + part) > width and lines[-1]:
                lines.append("")
            lines[-1] += part
        return "\n".join(lines)

    return re.sub(r"\S+", lambda word: parts_of(word) if cell_len(word.group()) > width else word.group(), text)
