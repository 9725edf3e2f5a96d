"""What a server is asked to run; light, because the command line has an option for each of its fields."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from coterie.config import SHORTHANDS
from coterie.errors import ConfigError
from coterie.yaml_file import read_yaml

if TYPE_CHECKING:
    from coterie.config import ExperimentConfig
    from coterie.federation.agreement import Agreement


OF_AN_EXPERIMENT = ("algorithm", "rounds", "participation", "eval_every")
"""Fields of an experiment's file that a plan takes, besides settings: all else was agreed on."""


def of_experiment(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Read from an experiment's file what a plan takes of it; what is given stands over it."""
    found = read_yaml(path, "experiment file")
    settings = found.get("settings") or {}
    if not isinstance(settings, Mapping):
        raise ConfigError(f"settings is {settings!r}, but must map the method's parameters to values")
    if found.get("algorithm") is None:
        raise ConfigError(f"algorithm is missing in {str(path)!r}: name the method to run")
    own = {name: found[name] for name in SHORTHANDS if found.get(name) is not None}
    values = {name: found[name] for name in OF_AN_EXPERIMENT if found.get(name) is not None}
    return {**values, **given, "settings": {**settings, **own, **(given.get("settings") or {})}}


class Plan(BaseModel):
    """What a server is asked to run; the rest was agreed on in ``federation.yaml``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    algorithm: str = Field(description="the method's name")
    settings: dict[str, Any] = Field(default_factory=dict, description="the method's own parameters")
    rounds: int = Field(10, ge=1, description="how many rounds are played")
    participation: float = Field(1.0, gt=0, le=1, description="fraction of the members that take part in a round")
    eval_every: int = Field(1, ge=1, description="evaluate after every so many rounds (and after the last)")
    deadline: float = Field(600.0, gt=0, description="seconds that nodes have for an exchange")
    minimum: int = Field(1, ge=1, description="replies that an exchange needs; with fewer the round is void")
    wait: float = Field(120.0, ge=0, description="seconds to wait for members before the first round")
    max_update: float = Field(
        100.0, gt=1, description="how many times the members' median a reply may change what was sent"
    )
    max_samples: int = Field(10_000_000, ge=1, description="how many samples a member may say that it has")
    track: tuple[str, ...] = Field((), description="trackers that the server tells how it goes")

    def experiment(self, agreement: Agreement) -> ExperimentConfig:
        """Give the configuration of the run; more replies than there are members are a ``ConfigError``."""
        if self.minimum > len(agreement.members):
            raise ConfigError(f"minimum is {self.minimum}, but the federation has {len(agreement.members)} members")
        own = {"rounds": self.rounds, "participation": self.participation, "eval_every": self.eval_every}
        return agreement.experiment(self.algorithm, self.settings, **own)
