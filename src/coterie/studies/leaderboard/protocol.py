"""The leaderboard's protocol: what is the same for all methods, which settings there are, what is tried of a method.

``protocol.yaml`` beside this file is the one that the documentation's page shows; another file may stand in its place.
A setting is a data set, a partition and a presence (how many clients there are, and who takes part), and is called by
the three: ``fmnist-dir0.1-tenth``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from coterie.algorithms import registry
from coterie.errors import ConfigError, UnknownName
from coterie.yaml_file import read_yaml

if TYPE_CHECKING:
    from coterie.studies.comparison import ComparisonPlan

OURS = Path(__file__).parent / "protocol.yaml"
"""The file of the protocol."""

REFERENCE = "local"
"""The method against which others help or harm."""

Values = dict[str, Any]
Grid = dict[str, Annotated[list[Any], Field(min_length=1)]]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Ingredient(_Part):
    """A data set, a partition or a presence."""

    title: str = Field(min_length=1)
    words: str = Field("", description="whom it is like, for those who look for a method")
    fields: Values = Field(description="fields of an experiment's configuration")
    model: Literal["personal", "newcomer"] = Field("personal", description="whose models are measured")
    tuning_seeds: int | None = Field(
        None, ge=1, description="with how many of the seeds, the first, candidates are compared; with all by default"
    )


class Contestant(_Part):
    """What is fixed and what is tried of a method."""

    settings: Values = Field(default_factory=dict)
    tune: Grid = Field(default_factory=dict)
    why: str = Field("", description="why its settings or its grid are others than those of most")

    @property
    def candidates(self) -> int:
        """How many combinations are tried."""
        return math.prod(len(values) for values in self.tune.values())


class Setting(_Part):
    """Where methods are compared."""

    name: str
    data: str
    partition: str
    presence: str
    words: str
    fields: Values
    model: Literal["personal", "newcomer"]
    tuning_seeds: int | None = None

    @property
    def place(self) -> str:
        """What settings of one table have in common."""
        return f"{self.data}, {self.presence}"


class LeaderboardProtocol(_Part):
    """What the leaderboard compares, and how."""

    seeds: tuple[int, ...] = Field(min_length=2)
    candidates: int = Field(ge=1, description="how many combinations are tried of every method")
    same: Values = Field(description="fields of the configuration that all runs have")
    budget: Values = Field(description="parameters of local training, for methods that have them")
    data: dict[str, Ingredient] = Field(min_length=1)
    partitions: dict[str, Ingredient] = Field(min_length=1)
    presences: dict[str, Ingredient] = Field(min_length=1)
    rates: list[float] = Field(description="learning rates that are tried of a method without a grid of its own")
    methods: dict[str, Contestant]

    @model_validator(mode="after")
    def _as_many_for_all(self) -> Self:
        if REFERENCE not in self.methods:
            raise ValueError(f"methods must have {REFERENCE!r}, with which others are compared")
        for name in self.methods:
            self._refuse_another_number(name, self.contestant(name))
        return self

    def _refuse_another_number(self, name: str, found: Contestant) -> None:
        if found.candidates != self.candidates:
            raise ValueError(
                f"the method {name!r} would be tuned over {found.candidates} combinations, but every method has "
                f"{self.candidates}: give other lists to tune"
            )

    @property
    def settings(self) -> dict[str, Setting]:
        """All settings by name."""
        found = {}
        for data, one in self.data.items():
            for presence, two in self.presences.items():
                for partition, three in self.partitions.items():
                    name = f"{data}-{partition}-{presence}"
                    fields = {**one.fields, **three.fields, **two.fields}
                    found[name] = Setting(
                        name=name,
                        data=one.title,
                        partition=three.title,
                        presence=two.title,
                        words="; ".join(each.words or each.title for each in (three, two)),
                        fields=fields,
                        model=two.model,
                        tuning_seeds=one.tuning_seeds,
                    )
        return found

    def runs(self, setting: Setting) -> int:
        """Count the runs of a method in a setting, where none diverges."""
        tuning = min(setting.tuning_seeds or len(self.seeds), len(self.seeds))
        return self.candidates * tuning + len(self.seeds) - tuning

    def setting(self, name: str) -> Setting:
        """Give a setting by its name."""
        known = self.settings
        if name not in known:
            raise UnknownName("setting of the leaderboard called", name, known)
        return known[name]

    def contestant(self, method: str) -> Contestant:
        """Give what is fixed and tried of a method; one that the protocol does not name has its learning rate tuned."""
        found = self.methods.get(method, Contestant())
        return found if found.tune else found.model_copy(update={"tune": {"lr": list(self.rates)}})

    def with_method(
        self, method: str, tune: Mapping[str, list[Any]], settings: Mapping[str, Any]
    ) -> LeaderboardProtocol:
        """Give the protocol with another method, which has as many candidates as all."""
        grid = dict(tune) or {"lr": list(self.rates)}
        found = Contestant(settings=dict(settings), tune=grid, why="not of the library")
        try:
            self._refuse_another_number(method, found)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return self.model_copy(update={"methods": {**self.methods, method: found}})

    def plan(
        self,
        setting: Setting,
        method: str,
        over: Mapping[str, Any] | None = None,
        only: Mapping[str, Any] | None = None,
    ) -> ComparisonPlan:
        """Give all runs of a method in a setting, or those of one candidate ``only``.

        What is in ``over`` stands over the protocol's own values.
        """
        from coterie.studies.comparison import make_plan

        found = self.contestant(method)
        known = registry.get(method).model_fields
        budget = {name: value for name, value in self.budget.items() if name in known}
        entry = {"algorithm": method, "settings": {**budget, **found.settings}, "tune": _grid(found.tune, only)}
        own = {"eval_every": self.same["rounds"], "checkpoint_every": self.same["rounds"], "threads": 1}
        values = {**own, **self.same, **setting.fields, **(over or {})}
        return make_plan({"seeds": list(self.seeds), **values, "methods": [entry]})


def _grid(tune: Grid, only: Mapping[str, Any] | None) -> Grid:
    return tune if only is None else {name: [value] for name, value in only.items()}


@cache
def load(path: Path = OURS) -> LeaderboardProtocol:
    """Load a protocol from its file."""
    try:
        return LeaderboardProtocol(**read_yaml(path, "protocol"))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        text = str(first["msg"]).removeprefix("Value error, ")
        raise ConfigError(f"the protocol {path.name!r}: {f'{where}: ' if where else ''}{text}") from None
