"""Does federating help us, and with which method? Candidates compete on the user's data, and one page answers."""

from __future__ import annotations

from coterie.studies.choice.candidates import METHODS, RATES, make_candidates
from coterie.studies.choice.chooser import Choice, choose, make_budget, play
from coterie.studies.choice.decision import Decision, MethodsBest
from coterie.studies.choice.stages import Budget

__all__ = [
    "METHODS",
    "RATES",
    "Budget",
    "Choice",
    "Decision",
    "MethodsBest",
    "choose",
    "make_budget",
    "make_candidates",
    "play",
]
