"""What the papers claim: one file a paper, an entry for each claim.

A file, in short (``claims/flame.yaml`` is a whole one)::

    paper: flame
    setting: …                    # the paper's, in words
    protocol:                     # without all of which nothing is decided
      seeds: 5                    # as many as the paper has; left out where it names none, and then three are needed
      rounds: 100                 # left out where it names none, and then the recipe's are needed
      tuned: {methods: [Ditto], values: 5}   # rivals that it tunes, over at least so many values; * for all that
                                             # the claim compares
    claims:
      - id: flame-hybrid-best     # begins with the paper's name
        where: Table III
        claim: …                  # in our own words, one sentence
        setting: …                # what differs from the paper's setting, if anything does
        rests_on:                 # criteria of recipes: all must hold
          - {recipe: flame-table3-hybrid, criterion: hybrid-best, parts: [mnist]}   # by default the criterion's parts
        protocol: {rounds: 50}    # in place of the paper's, as far as given
        most: true                # where the paper says in most cases: more than half of them must hold
        nothing: …                # where no recipe can decide it, why
        differs: …                # why our numbers say something else, where they do and it is known
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from coterie.errors import ConfigError, UnknownName
from coterie.studies.recipes.registry import load
from coterie.studies.recipes.schema import Criterion, Recipe
from coterie.yaml_file import read_yaml

CLAIMS = Path(__file__).parent / "claims"
"""The folder of the claims' files."""

FEWEST_SEEDS = 3
"""How many seeds are needed where a paper names no number."""


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TuningNeeded(_Entry):
    """Which methods the paper tunes, and over how many values at least."""

    methods: tuple[str, ...] = Field(min_length=1, description="methods as recipes call them; * for all compared")
    values: int = Field(2, ge=2, description="how many values the paper tries, or how many are asked for here")


class Protocol(_Entry):
    """What a run must have for a claim to be decided by it."""

    seeds: int | None = Field(None, ge=1, description="how many seeds the paper has")
    rounds: int | None = Field(None, ge=1, description="how many rounds the paper has")
    tuned: TuningNeeded | None = Field(None, description="which methods it tunes")

    def but(self, other: Protocol) -> Protocol:
        """Give the same with what another says in its place."""
        return Protocol(**{**dict(self), **{name: getattr(other, name) for name in other.model_fields_set}})


class Basis(_Entry):
    """A recipe's criterion on which a claim rests."""

    recipe: str
    criterion: str
    parts: tuple[str, ...] = ()


class Claim(_Entry):
    """One claim of a paper."""

    id: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)+$")
    where: str = Field(min_length=1)
    claim: str = Field(min_length=1)
    setting: str = ""
    rests_on: tuple[Basis, ...] = ()
    protocol: Protocol = Protocol()
    most: bool = False
    nothing: str = ""
    differs: str = ""

    @model_validator(mode="after")
    def _can_be_decided_or_says_why_not(self) -> Self:
        if bool(self.rests_on) == bool(self.nothing):
            raise ValueError(f"the claim {self.id!r} must have exactly one of rests_on and nothing")
        return self


class PaperClaims(_Entry):
    """All claims of one paper."""

    paper: Literal["fedacs", "fedamp", "fedpg", "flame"]
    title: str = Field(min_length=1)
    setting: str = Field(min_length=1)
    protocol: Protocol
    claims: tuple[Claim, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names(self) -> Self:
        names = [claim.id for claim in self.claims]
        for place, name in enumerate(names):
            if name in names[:place] or not name.startswith(f"{self.paper}-"):
                raise ValueError(f"the claim {name!r} must begin with {self.paper}- and be there once")
        return self


def papers() -> list[str]:
    """Name the papers whose claims there are."""
    return sorted(path.stem for path in CLAIMS.glob("*.yaml"))


def claims_of(paper: str) -> PaperClaims:
    """Load a paper's claims, and refuse any that rests on a criterion that is not there."""
    if paper not in papers():
        raise UnknownName("paper with claims called", paper, papers())
    return checked(read_yaml(CLAIMS / f"{paper}.yaml"), paper)


def checked(values: dict[str, Any], where: str) -> PaperClaims:
    """Make claims of their file's values."""
    try:
        found = PaperClaims(**values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"the claims {where!r}: {place}: {first['msg']}") from None
    for claim in found.claims:
        for basis in claim.rests_on:
            recipe, criterion = criterion_of(basis)
            if recipe.paper != found.paper:
                raise ConfigError(f"the claim {claim.id!r} rests on {recipe.name}, a recipe of {recipe.paper}")
            spoken = criterion.parts or [part.name for part in recipe.parts]
            for name in basis.parts:
                if name not in spoken:
                    raise UnknownName(f"part of {criterion.name} in {recipe.name} called", name, spoken)
    return found


def criterion_of(basis: Basis) -> tuple[Recipe, Criterion]:
    """Give the recipe and the criterion on which a claim rests."""
    recipe = _recipe(basis.recipe)
    found = next((each for each in recipe.criteria if each.name == basis.criterion), None)
    if found is None:
        names = [each.name for each in recipe.criteria]
        raise UnknownName(f"criterion of {recipe.name} called", basis.criterion, names)
    return recipe, found


@cache
def _recipe(name: str) -> Recipe:
    return load(name)
