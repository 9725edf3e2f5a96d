"""A table as a group of hospitals might have it, drawn: for guides, tests and first steps.

Twelve hospitals of very different sizes record the same columns of every stay, with gaps, and want to know who is
readmitted within thirty days. Much of what speaks for it is the same everywhere, some differs between city, country and
heart hospitals, and one hospital is like no other. So most have something to learn from some, and not from all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from coterie import randomness

ROWS = 12000
"""How many stays are drawn by default."""
LEAST = 20
"""Stays that every hospital has at least."""


@dataclass(frozen=True)
class HospitalKind:
    """What hospitals of one kind have in common.

    Parameters
    ----------
    effects
        How much a fact about a stay, brought to deviation 1, or the product of two of them, speaks for readmission.
    base
        What speaks for it without any, as a logit.
    age
        Mean age.
    wards
        Shares of medicine, surgery, cardiology and emergency.
    """

    effects: dict[str, float]
    base: float
    age: float
    wards: tuple[float, float, float, float]


_COMMON = {"age": 0.5, "stays": 0.8, "days": 0.5, "creatinine": 0.7, "haemoglobin": -0.7, "ambulance": 0.4}
_COMMON |= {"smoker": 0.4, "age × stays": 0.5, "days × creatinine": 0.5, "systolic × haemoglobin": 0.6}
_LIKE_NO_OTHER = {"days": -1.3, "haemoglobin": 0.9, "stays": -0.7, "age": 0.5}
_STEEPNESS = 3.0  # how much of the outcome the facts decide

KINDS = {
    "city": HospitalKind(_COMMON | {"ambulance": 0.8, "systolic": 0.4}, -0.9, 58, (0.4, 0.25, 0.05, 0.3)),
    "country": HospitalKind(_COMMON | {"days": 0.9, "stays": 0.3}, -0.7, 67, (0.5, 0.3, 0.05, 0.15)),
    "heart": HospitalKind(_COMMON | {"systolic": -1.2, "smoker": 0.8}, -0.6, 70, (0.1, 0.2, 0.65, 0.05)),
    "rehabilitation": HospitalKind(_LIKE_NO_OTHER, -0.4, 74, (0.8, 0.2, 0.0, 0.0)),
}
HOSPITALS: dict[str, tuple[str, float]] = {
    "Ashford": ("country", 0.7),
    "Brookside": ("country", 0.4),
    "Castle Street": ("city", 6.0),
    "Dunmore": ("country", 1.0),
    "Eastgate": ("city", 2.5),
    "Fairview Heart": ("heart", 1.2),
    "Glenwood": ("country", 0.5),
    "Harbour": ("city", 1.0),
    "Ivy Lane": ("city", 0.5),
    "Kingsmead Heart": ("heart", 0.7),
    "Lakeside Rehab": ("rehabilitation", 3.0),
    "Marsh Road": ("country", 2.5),
}
"""Each hospital's kind, and its size beside the others'."""

_SPREAD = {"age": (64, 14), "stays": (1.4, 1.2), "days": (5.7, 3.9), "systolic": (135, 19)}
_SPREAD |= {"creatinine": (1.12, 0.4), "haemoglobin": (12.8, 1.7), "ambulance": (0.35, 0.5), "smoker": (0.28, 0.5)}
_GAPS = {"arrival": 0.06, "smoker": 0.12, "systolic": 0.05, "creatinine": 0.2, "haemoglobin": 0.1}
_SMALL, _MORE_GAPS = 200, 1.5  # hospitals with fewer stays leave out more


def draw_hospitals(rows: int = ROWS, seed: int = 1) -> pd.DataFrame:
    """Draw the table.

    Parameters
    ----------
    rows
        About how many stays.
    seed
        The seed of everything that is drawn.

    Returns
    -------
    pandas.DataFrame
        A row for each stay, in no order: ``hospital``, eleven columns to predict from, and ``readmitted``, yes or no.
    """
    whole = sum(size for _, size in HOSPITALS.values())
    parts = [
        _stays(name, KINDS[kind], max(LEAST, round(rows * size / whole)), seed, number)
        for number, (name, (kind, size)) in enumerate(HOSPITALS.items())
    ]
    table = pd.concat(parts, ignore_index=True)
    order = randomness.stream(seed, "hospitals: order").permutation(len(table))
    return table.iloc[order].reset_index(drop=True)


def _stays(name: str, kind: HospitalKind, count: int, seed: int, number: int) -> pd.DataFrame:
    draw = randomness.stream(seed, "hospitals: stays", client=number)
    age = np.clip(draw.normal(kind.age, 13, count), 18, 99).round()
    arrival = draw.choice(["ambulance", "referral", "walk-in"], count, p=[0.35, 0.4, 0.25])
    smoker = draw.random(count) < 0.28
    facts = {
        "age": age,
        "stays": draw.poisson(1.4, count),
        "days": np.ceil(draw.gamma(2.2, 2.6, count)),
        "systolic": draw.normal(135, 19, count).round(),
        "creatinine": draw.lognormal(0.05, 0.35, count).round(2),
        "haemoglobin": draw.normal(12.8, 1.7, count).round(1),
        "ambulance": arrival == "ambulance",
        "smoker": smoker,
    }
    scaled = {fact: (facts[fact].astype(np.float64) - mean) / spread for fact, (mean, spread) in _SPREAD.items()}
    logit = np.full(count, kind.base)
    for fact, effect in kind.effects.items():
        logit += effect * np.prod([scaled[one] for one in fact.split(" × ")], axis=0)
    again = draw.random(count) < 1 / (1 + np.exp(-_STEEPNESS * logit))
    admitted = pd.Timestamp("2023-01-01") + pd.to_timedelta(draw.integers(0, 730, count), unit="D")
    table = pd.DataFrame(
        {
            "hospital": name,
            "admitted": admitted.strftime("%Y-%m-%d"),
            "age": age.astype(np.int64),
            "sex": draw.choice(["f", "m"], count),
            "ward": draw.choice(["medicine", "surgery", "cardiology", "emergency"], count, p=kind.wards),
            "arrival": arrival,
            "smoker": np.where(smoker, "true", "false"),
            "stays": facts["stays"],
            "days": facts["days"].astype(np.int64),
            "systolic": facts["systolic"],
            "creatinine": facts["creatinine"],
            "haemoglobin": facts["haemoglobin"],
            "readmitted": np.where(again, "yes", "no"),
        }
    )
    for column, share in _GAPS.items():
        gap = draw.random(count) < share * (_MORE_GAPS if count < _SMALL else 1.0)
        table[column] = table[column].where(~gap)
    return table
