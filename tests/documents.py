"""The documents, read for the tests: their blocks of code, their sections and their tables.

A line above a fenced block says what becomes of it: ``<!-- run -->`` (in order, in one folder for each document),
``<!-- file: NAME -->`` (written there), ``<!-- row -->`` (a row of the conformance table), ``<!-- test -->`` (a module
of tests), or ``<!-- not run: WHY -->``. Where ``<!-- generated: NAME -->`` stands alone, the site has what is made from
the code; ``tests/project/test_site.py`` looks at that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README, PRINCIPLES, GUIDE = "README.md", "docs/principles.md", "docs/add_an_algorithm.md"
REPRODUCTION, FEDERATION = "docs/reproduction.md", "docs/federation.md"
CHOICE, EXPERIMENT = "docs/choose_a_method.md", "docs/run_an_experiment.md"
HOSPITALS = "docs/hospitals.md"
PAGES = tuple(sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")))
GUIDES = (README, "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", *PAGES)  # what says how things are now
DOCUMENTS = (*GUIDES, "CHANGELOG.md")
TEXT = {name: (ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS}


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    document: str
    line: int
    language: str
    mark: str
    text: str

    @property
    def file(self) -> str | None:
        return self.mark.removeprefix("file: ") if self.mark.startswith("file: ") else None


def blocks(document: str) -> Iterator[Block]:
    pattern = re.compile(r"^(?:<!-- (?P<mark>[^\n]+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
    for match in pattern.finditer(TEXT[document]):
        line = TEXT[document].count("\n", 0, match.start()) + 1
        yield Block(document, line, match["language"], match["mark"] or "", match["text"])


BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]


def only(mark: str, document: str = GUIDE) -> str:
    (text,) = [block.text for block in BLOCKS if (block.document, block.mark) == (document, mark)]
    return text


def section(document: str, title: str) -> str:
    match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", TEXT[document], re.M | re.S)
    assert match, f"{document} has no section {title!r}"
    return match[1]


def first_cells(text: str) -> list[str]:
    """The first cell of each row of the Markdown tables in a text, without headers and code marks."""
    cells = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    return [cell.strip("`") for cell, below in zip(cells, [*cells[1:], ""], strict=True) if "---" not in (cell, below)]
