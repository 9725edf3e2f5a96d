"""Numbers and lists as sentences have them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from coterie.evaluation import OverSeeds

_COUNTS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def count(number: int) -> str:
    """Write a small number as a word."""
    return _COUNTS[number] if number < len(_COUNTS) else str(number)


def listed(names: Sequence[str]) -> str:
    """Join names as a sentence does."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "none"


def some(names: Sequence[str], most: int, named: int) -> str:
    """Join names as a sentence does; of more than ``most``, so many are named and the others counted."""
    return listed(names) if len(names) <= most else f"{', '.join(names[:named])} and {len(names) - named} more"


def percent(value: float) -> str:
    """Write a fraction as a percentage with one decimal."""
    return f"{100 * value:.1f}"


def with_reach(found: OverSeeds) -> str:
    """Write a mean with what its interval reaches to either side."""
    reach = "" if math.isnan(found.reach) else f" ± {percent(found.reach)}"
    return f"{percent(found.mean)}{reach}"
