"""The ledger as the terminal shows it: all claims in short, or some with their cases and numbers."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.padding import Padding
from rich.text import Text

from coterie.cli.console import out
from coterie.studies.recipes.ledger.judgement import Answer, Judgement
from coterie.studies.recipes.ledger.page import Ledger, cases, cases_table, counted, in_short, reasons, sentence

_SIGNS: dict[Answer, str] = {"holds": "✓", "does not hold": "✗", "undecided": "·"}
_STYLES: dict[Answer, str] = {"holds": "green", "does not hold": "red", "undecided": ""}
_SHORT = 200  # characters of the reasons in the list: the rest are names of what was not run


def print_ledger(ledger: Ledger) -> None:
    for paper, judgements in ledger:
        out.print(Text(paper.title, style="bold"), Text(f"{counted(judgements)}."), "", sep="\n")
        for judgement in judgements:
            _heading(judgement)
            _indented(f"{judgement.claim.where}: {judgement.claim.claim}")
            _indented(textwrap.shorten("; ".join(reasons(judgement)), _SHORT, placeholder=" …"), "dim")
            out.print()
    if len(ledger) > 1:
        every = [judgement for _, judgements in ledger for judgement in judgements]
        out.print(Text("All papers", style="bold"), Text(f"{counted(every)}."), "", sep="\n")
    out.print(Text("A claim with its cases and their numbers: coterie recipe verdicts CLAIM", style="dim"))


def print_claims(ledger: Ledger, claims: Sequence[str]) -> None:
    """Show some claims with their cases, in the order in which they are named."""
    found = {judgement.claim.id: (paper, judgement) for paper, judgements in ledger for judgement in judgements}
    for name in claims:
        paper, judgement = found[name]
        _heading(judgement)
        _indented(f"{paper.title}, {judgement.claim.where}: {judgement.claim.claim}")
        _indented(judgement.claim.setting or paper.setting, "dim")
        _indented(sentence(judgement))
        table = cases_table(judgement)
        if table is not None:
            out.print(Padding(table, (0, 0, 0, 2)))
        out.print()


def _heading(judgement: Judgement) -> None:
    answer = judgement.answer
    text = Text(f"{_SIGNS[answer]} ", style=_STYLES[answer]).append(judgement.claim.id, "bold")
    out.print(text.append(f"  {in_short(judgement)} ({cases(judgement)})", _STYLES[answer]))


def _indented(text: str, style: str = "") -> None:
    out.print(Padding(Text(text, style=style), (0, 0, 0, 2)))
