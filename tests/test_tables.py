"""One table in every format: what is emphasised, what is escaped, and what a narrow terminal does to it."""

from __future__ import annotations

import csv
import html
import io
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from rich.console import Console

from coterie.tables import ABSENT, Cell, Column, Row, Table, escape_latex, escape_markdown, numbers, words

SIGNS = r"a_b|c & d* 100% #1 {x} ~^\ <b>x</b> `q` $y$ [z](w) &lt; ± – † \textbf{"
TABLE = Table(
    (*words("method"), *numbers("mean"), Column("time", "right", "s")),
    (
        Row(("FedAvg-FT", Cell("0.94 ± 0.01", "best"), "1.5"), ends_section=True),
        Row(("[Local]", Cell("0.90", "second", "**", "p = 0.004"), ABSENT)),
        Row(("*", Cell("0.80", mark="††"), ABSENT), muted=True),
    ),
    title="test accuracy, 50% of [clients]",
    notes=("** p < 0.01", "a second\nnote"),
)


def test_markdown() -> None:
    title, body, *notes = TABLE.markdown().rstrip("\n").split("\n\n")
    assert title == r"test accuracy, 50% of \[clients]" and notes == [r"\*\* p \< 0.01", "a second note"]
    assert body.splitlines() == [
        "| method | mean | time (s) |",
        "| --- | ---: | ---: |",
        "| FedAvg-FT | **0.94 ± 0.01** | 1.5 |",
        r"| \[Local] | *0.90*\*\* | – |",
        r"| \* | 0.80†† | – |",
    ]


def test_latex_is_booktabs() -> None:
    assert TABLE.latex().splitlines() == [
        "% test accuracy, 50% of [clients]",
        "% ** p < 0.01",
        "% a second note",
        r"% needs \usepackage{booktabs}",
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"method & mean & time (s) \\",
        r"\midrule",
        r"FedAvg-FT & \textbf{0.94 $\pm$ 0.01} & 1.5 \\",
        r"\midrule",
        # A bracket or a star after a rule or a line's end would be an option of theirs.
        r"{}[Local] & \underline{0.90}$^{**}$ & -- \\",
        r"{}* & 0.80$^{\dagger \dagger}$ & -- \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_latex_has_no_rule_before_its_last() -> None:
    text = Table(words("a"), (Row(("x",), ends_section=True),)).latex()
    assert text.count(r"\midrule") == 1 and "\\midrule\n\\bottomrule" not in text


def test_html() -> None:
    text = TABLE.html()
    assert text.startswith("<table><caption>test accuracy, 50% of [clients]</caption><thead><tr>")
    assert '<th scope="col">method</th><th scope="col" class="number">mean</th>' in text
    assert '<tr><th scope="row">FedAvg-FT</th><td class="number"><b>0.94 ± 0.01</b></td>' in text
    assert '<td class="number" title="p = 0.004"><u>0.90</u><sup>**</sup></td>' in text
    assert text.count("<tbody>") == 2 and '<tr class="muted">' in text
    assert text.endswith('<p class="note">** p &lt; 0.01</p>\n<p class="note">a second\nnote</p>')
    assert TABLE._repr_html_() == text


def test_csv() -> None:
    rows = list(csv.reader(io.StringIO(TABLE.csv())))
    assert rows[0] == ["method", "mean", "time (s)"] and rows[2] == ["[Local]", "0.90", ABSENT] and len(rows) == 4


class Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_nothing_that_people_write_breaks_out_of_a_format() -> None:
    everywhere = Table(
        words(SIGNS), (Row((Cell(SIGNS, "best", "*", SIGNS + '"'),)),), SIGNS + "\nx", (SIGNS + "\n\\y",)
    )
    read = Text()
    read.feed(everywhere.html())
    assert read.tags == ["table", "caption", "thead", "tr", "th", "tbody", "tr", "th", "b", "sup", "p"]
    assert read.words.count(SIGNS) == 2 and html.escape(SIGNS + '"') in everywhere.html()
    lines = [line for line in everywhere.markdown().splitlines() if line.startswith("|")]
    assert len(lines) == 3 and {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {2}
    tex = everywhere.latex().splitlines()
    assert [line.startswith("%") for line in tex] == [True] * 3 + [False] * 7
    assert list(csv.reader(io.StringIO(everywhere.csv()))) == [[SIGNS], [SIGNS]]


def test_latex_escapes_are_balanced_and_leave_no_bare_sign() -> None:
    text = escape_latex(SIGNS)
    assert text.count("{") - text.count(r"\{") == text.count("}") - text.count(r"\}")
    bare = re.sub(r"\\[&%$#_{}]|\\[a-z]+(?:\{\})?|\$\\[a-z]+\$", "", text)
    assert not set(r"\&%$#_{}~^<>|") & set(bare)
    assert escape_latex("x\ny") == "x y"


@pytest.mark.parametrize(
    ("text", "written"),
    [("a_b", r"a\_b"), ("a|b", r"a\|b"), ("R&D", "R&D"), ("&amp;", "&amp;amp;"), ("a\nb", "a b"), ("\\", r"\\")],
)
def test_markdown_escapes(text: str, written: str) -> None:
    assert escape_markdown(text) == written


def printed(table: Table, width: int, **more: object) -> str:
    console = Console(file=io.StringIO(), width=width, **more)  # type: ignore[arg-type]
    console.print(table)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_the_terminal_emphasises_and_takes_no_text_for_a_command() -> None:
    text = printed(TABLE, 80, force_terminal=True, color_system="standard")
    assert "\x1b[1m0.94 ± 0.01\x1b[0m" in text and "\x1b[4m0.90\x1b[0m**" in text
    assert "[Local]" in text and "[clients]" in text  # rich would take these for its markup
    assert TABLE.text(80).splitlines()[0].strip() == "test accuracy, 50% of [clients]"


NAMES = ("Local", "FedAvg-FT", "Per-FedAvg")
VERSUS = ("helped vs Local", "harmed vs Local", "worst vs Local", "helped vs FedAvg-FT", "harmed vs FedAvg-FT")


@pytest.mark.parametrize(("cell", "count"), [("0.8222*", 7), ("0.5606 ± 0.0052***", 4), ("0.5606 ± 0.0052***", 7)])
@pytest.mark.parametrize("width", [60, 80, 100])
def test_headings_are_broken_before_labels_and_cells(cell: str, count: int, width: int) -> None:
    headings = ("personal", "global", *VERSUS)[:count]
    rows = tuple(Row((Cell(name), *(Cell(cell if k < 2 else "0") for k in range(count)))) for name in NAMES)
    text = printed(Table((*words("method"), *numbers(*headings)), rows), width)
    assert all(len(line) <= width for line in text.splitlines()) and text.count(cell) == 2 * len(NAMES)
    tables = text.count("─ \n")
    assert [line.split()[0] for line in text.splitlines() if line.strip().startswith(NAMES)] == list(NAMES) * tables
    for word in " ".join(headings).split():
        assert word in text


def test_a_label_that_has_no_room_is_broken() -> None:
    text = printed(Table((*words("method"), *numbers("personal")), (Row((Cell("x" * 60), Cell("0.5"))),)), 40)
    assert all(len(line) <= 40 for line in text.splitlines()) and text.count("x") == 60


@pytest.mark.parametrize(("width", "tables"), [(40, 4), (80, 2), (160, 1)])
def test_a_wide_table_is_cut_between_columns_and_never_within_a_number(width: int, tables: int) -> None:
    headers = [f"number {k}" for k in range(7)]
    rows = (
        Row(("ours", *(f"{90 + k}.00 ± 0.25" for k in range(7)))),
        Row(("paper", "81.00", *[ABSENT] * 6), muted=True),
    )
    text = printed(Table((*words("method"), *numbers(*headers)), rows), width)
    assert all(len(line) <= width for line in text.splitlines()) and "…" not in text
    assert all(f"{90 + k}.00 ± 0.25" in text for k in range(7))
    assert text.count("method") == tables
    assert text.count("paper") == 1  # a muted row that has nothing in a block is left out of it


def test_long_labels_leave_room_for_numbers() -> None:
    text = printed(Table((*words("method"), *numbers("mean")), (Row(("x" * 200, "0.1234 ± 0.0001")),)), 60)
    assert "0.1234 ± 0.0001" in text and max(map(len, text.splitlines())) <= 60


def test_tables_import_nothing_heavy() -> None:
    code = "import sys, coterie.tables; print({'torch', 'pandas', 'numpy', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


SENTENCES = Table(
    words("name", "of", "what it shows"),
    (
        Row(("fedamp-table3", "Table 3", "FedAMP and eight others where clients come in groups (practical data)")),
        Row(("flame-appendix-quality", "Figures 13 to 20 and 36 to 43, quality skew", "How fast and how fair it is")),
    ),
)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_sentences_share_the_width_and_are_broken_between_words(width: int) -> None:
    text = printed(SENTENCES, width)
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    found = text.split()
    for row in SENTENCES.rows:
        assert all(word in found for cell in row.cells for word in str(cell).split())
    head = next(line for line in text.splitlines() if "what it shows" in line)
    assert width - head.index("what it shows") > head.index("what it shows") - head.index(" of ")  # long text has room
    assert text.count("name") == 1  # one table: sentences move to one of their own only where they cannot be read


def test_a_word_that_has_no_room_is_broken_behind_a_hyphen() -> None:
    claims = Table(
        words("claim", "why"),
        (Row(("fedacs-above-local-when-scarce", "word " * 40)), Row(("x" * 30, "no hyphen"))),
        labels=2,
    )
    lines = [line.split()[0] for line in printed(claims, 28).splitlines() if line.startswith(" fedacs-")]
    assert lines and lines[0].endswith("-")
    text = printed(claims, 28)
    assert max(map(len, text.splitlines())) <= 28 and text.count("x") == 30


def test_letters_that_are_two_columns_wide_are_counted_so() -> None:
    hospitals = Table((*words("client"), *numbers("rows")), (Row(("東京大学病院", "1,200")), Row(("Köln", "7"))))
    lines = printed(hospitals, 24).splitlines()
    assert any("東京大学病院" in line and "1,200" in line for line in lines)
