"""Who competes: training alone, and methods with settings of their own, each a run on the user's data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from coterie.algorithms import registry
from coterie.config import ExperimentConfig
from coterie.errors import ConfigError
from coterie.studies.choice.halving import ETA, Ladder, make_ladder
from coterie.studies.comparison import ComparisonPlan, PlannedRun, make_plan
from coterie.studies.comparison.standings import Tuned, format_values

ALONE = "local"
"""The method that federates nothing, with which all others are compared."""

METHODS = (ALONE, "fedavg", "fedavg_ft", "ditto", "apfl", "fedacs", "fedamp", "flame")
"""The methods that compete unless others are named: one model for all, that model fine-tuned, and the plainest of each
other kind that won somewhere in the tables of the documentation."""

RATES = (0.01, 0.03, 0.1, 0.3)
"""The learning rates of each."""

VALIDATION = 0.25
"""The fraction of training samples to choose by: more than a run holds out, for everything is decided by them."""

NOT_GIVEN = ("hold_out", "adapt_rounds", "attack", "matrix", "matrix_every", "s_acc", "eval_every", "eval_train")
"""Fields of a configuration that a choice does not take."""

_AT_THE_END = 1_000_000  # evaluate where a stage ends, and nowhere else


@dataclass(frozen=True)
class Candidates:
    """The candidates of a choice.

    Parameters
    ----------
    plan
        A run for each, without its rounds.
    eta
        One in so many stays.
    """

    plan: ComparisonPlan
    eta: int

    @property
    def ladder(self) -> Ladder:
        """How many play each stage."""
        federated = [run for run in self.plan.runs if not is_alone(run)]
        methods = {run.method for run in federated}
        return make_ladder(len(federated), len(methods), len(self.plan.runs) - len(federated), self.eta)

    def stage(self, names: Sequence[str], rounds: int) -> ComparisonPlan:
        """Give the plan of a stage: some of the runs, played to a round."""
        chosen = [run for run in self.plan.runs if run.name in set(names)]
        runs = (replace(run, config=run.config.model_copy(update={"rounds": rounds})) for run in chosen)
        return replace(self.plan, runs=tuple(runs))

    def run(self, name: str) -> PlannedRun:
        return next(run for run in self.plan.runs if run.name == name)

    def title(self, name: str) -> str:
        """Say what people see a candidate called."""
        run = self.run(name)
        values = format_values(run.candidate)
        return f"{self.plan.titles[run.method]}, {values}" if values else self.plan.titles[run.method]

    def edges(self, name: str) -> tuple[str, ...]:
        """Say which values of a candidate are the least or the greatest that were tried, in sentences."""
        own = self.run(name)
        tried = [(run.candidate, 0.0) for run in self.plan.runs if run.method == own.method]
        title = self.plan.titles[own.method]
        found = Tuned({}, title, own.candidate, tried).edges
        return tuple(f"{title}: {each}, and a better one may lie beyond" for each in found)


def is_alone(run: PlannedRun) -> bool:
    return registry.get(run.config.algorithm).name == ALONE


def make_candidates(values: Mapping[str, Any], eta: int = ETA) -> Candidates:
    """Make the candidates of named values, as :func:`coterie.choose` takes them.

    What is missing is added: training alone as a method, and learning rates where nothing says what they are; where not
    all take part in every round, also the ways in which a method lets a client return, where it has several.
    """
    values = dict(values)
    if not isinstance(eta, int) or isinstance(eta, bool) or eta < 2:
        raise ConfigError(f"eta is {eta!r}, but must be a whole number of at least 2: one in so many stays")
    for name in NOT_GIVEN:
        if values.get(name) is not None:
            raise ConfigError(f"{name} is {values[name]!r}, but a choice decides that itself: leave it out")
    named = values.pop("methods", None)
    if isinstance(named, str):
        raise ConfigError(f"methods is {named!r}, but must be a list: write [{named!r}]")
    methods = list(named or METHODS)
    if not any(_algorithm(method) == ALONE for method in methods):
        methods.insert(0, ALONE)
    if len(methods) < 2:
        raise ConfigError("methods has 'local' alone, but a choice needs something to compare it with: name more")
    tune = dict(values.pop("tune", None) or {})
    settings = values.get("settings") or {}
    said = {*tune, *(settings if isinstance(settings, Mapping) else ())}
    said |= {name for name, value in values.items() if value is not None}
    if "lr" not in said:
        tune = {"lr": list(RATES), **tune}
    # A method that says its own learning rate is not given others.
    if "lr" in tune:
        rates = tune.pop("lr")
        methods = [_tuned(method, "lr", rates) for method in methods]
    if _some_are_away(values) and "returning" not in said:
        methods = [_tuned(method, "returning") for method in methods]
    held_out = values.get("validation")
    if held_out == 0:
        raise ConfigError("validation is 0, but methods are chosen on validation samples: hold some out")
    plan = make_plan(
        {
            **{name: value for name, value in values.items() if name not in ("seed", "validation")},
            "methods": methods,
            "tune": tune,
            "seeds": [1 if values.get("seed") is None else values["seed"]],
            "validation": VALIDATION if held_out is None else held_out,
            "eval_every": _AT_THE_END,
        }
    )
    return Candidates(replace(plan, runs=tuple(_always_there(run) for run in plan.runs)), eta)


def recommended(config: ExperimentConfig, rounds: int) -> ExperimentConfig:
    """Give the configuration of a candidate as somebody would run it: to its last round, and evaluated on the way."""
    usual = ExperimentConfig.model_fields["eval_every"].default
    return config.model_copy(update={"rounds": rounds, "eval_every": usual})


def _always_there(run: PlannedRun) -> PlannedRun:
    """Let who trains alone train in every round: nobody is away from itself."""
    return replace(run, config=run.config.model_copy(update={"participation": 1.0})) if is_alone(run) else run


def _algorithm(method: Any) -> Any:
    given = method.get("algorithm") if isinstance(method, Mapping) else method
    return getattr(given, "name", given)


def _some_are_away(values: Mapping[str, Any]) -> bool:
    present = values.get("participation")
    return isinstance(present, int | float) and present < 1


def _tuned(method: Any, name: str, tried: Any = None) -> Any:
    """Let values of a setting be tried, all that it may have by default, unless a method lacks it or says its own."""
    own = dict(method) if isinstance(method, Mapping) else {"algorithm": method}
    given, settings = own.get("algorithm"), own.get("settings")
    says = name in own or (isinstance(settings, Mapping) and name in settings) or not isinstance(given, str | type)
    fields = registry.get(given).model_fields if isinstance(given, str) else getattr(given, "model_fields", {})
    if says or name not in fields or name in (own.get("tune") or {}):
        return method
    tried = list(get_args(fields[name].annotation)) if tried is None else tried
    return {**own, "tune": {name: tried, **(own.get("tune") or {})}}
