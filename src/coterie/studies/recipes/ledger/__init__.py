"""The ledger: every claim of the papers, and whether it holds by what was run."""

from __future__ import annotations

from pathlib import Path

from coterie.studies.recipes.ledger.claims import claims_of, papers
from coterie.studies.recipes.ledger.judgement import judge_paper
from coterie.studies.recipes.ledger.page import Ledger, markdown, plain
from coterie.studies.recipes.ledger.records import read_records

__all__ = ["Ledger", "markdown", "open_ledger", "papers", "plain"]


def open_ledger(*results: Path, paper: str | None = None) -> Ledger:
    """Judge the claims of one paper or of all by the results in folders."""
    records = read_records(*results)
    found = [claims_of(name) for name in ([paper] if paper else papers())]
    return [(each, judge_paper(each, records)) for each in found]
