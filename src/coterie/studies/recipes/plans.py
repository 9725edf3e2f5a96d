"""From a recipe's part to the plan of a comparison, and how much work that is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coterie.config import ExperimentConfig
from coterie.studies.comparison import ComparisonPlan, make_plan
from coterie.studies.recipes.schema import RecipePart

_OF_ONE_RUN = {"algorithm", "algorithm_sha256", "settings", "seed", "rounds"}
_OF_MACHINES = {
    *("engine", "device", "dtype", "precision", "kernel", "convolution", "compile", "threads"),
    *("chunk", "keep", "keep_samples", "scratch", "checkpoint_every"),
}
_OF_WHAT_IS_LOOKED_AT = {"eval_train", "matrix", "matrix_every", "s_acc", "metrics"}


def planned(part: RecipePart, *, quick: bool = False, over: Mapping[str, Any] | None = None) -> ComparisonPlan:
    """Make the plan of a part.

    Parameters
    ----------
    part
        The part, which must have a quick version if that is asked for.
    quick
        Whether to take the quick version.
    over
        Values that stand over the part's own.

    Returns
    -------
    ComparisonPlan
        The plan; every run's configuration has been checked.
    """
    values = {**part.plan, **(part.quick or {} if quick else {}), **(over or {})}
    return make_plan({name: value for name, value in values.items() if value is not None})


def narrowed(
    part: RecipePart,
    methods: Collection[str],
    seeds: Sequence[int],
    *,
    quick: bool = False,
    over: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Give what stands over a part's plan so that it is one of these methods and seeds alone.

    Parameters
    ----------
    part
        The part.
    methods
        Names of methods in its plan.
    seeds
        The seeds.
    quick
        Whether it is the quick version's plan.
    over
        Values that stand over the part's own besides.

    Returns
    -------
    dict
        For :func:`planned`.
    """
    over = dict(over or {})
    listed = {**part.plan, **(part.quick or {} if quick else {}), **over}["methods"]
    every = planned(part, quick=quick, over=over).methods
    chosen = [each for each, name in zip(listed, every, strict=True) if name in methods]
    return {**over, "methods": chosen, "seeds": list(seeds)}


def largest_block(plan: ComparisonPlan, ended: Collection[str]) -> tuple[list[str], list[int]]:
    """Find what of a plan can be read where only some of its runs have ended.

    Parameters
    ----------
    plan
        The plan.
    ended
        Names of the runs that have, those that diverged among them.

    Returns
    -------
    methods
        Those with the most seeds of which every run has ended; none if no method has one.
    seeds
        Those that all of them have.
    """
    left = {(run.method, run.config.seed) for run in plan.runs if run.name not in ended}
    seeds_of = {method: [seed for seed in plan.seeds if (method, seed) not in left] for method in plan.methods}
    most = max(map(len, seeds_of.values()))
    methods = [method for method, seeds in seeds_of.items() if 0 < len(seeds) == most]
    seeds = [seed for seed in plan.seeds if methods and all(seed in seeds_of[method] for method in methods)]
    return (methods if seeds else []), seeds


def settings_of(part: RecipePart, plan: ComparisonPlan) -> dict[str, dict[str, Any]]:
    """Name the points of a plan's grid as the part does.

    Parameters
    ----------
    part
        The part.
    plan
        Its plan.

    Returns
    -------
    dict
        The points by label; one without a label if there is no grid.
    """
    return {_label(part, setting): setting for setting in plan.settings}


def _label(part: RecipePart, setting: Mapping[str, Any]) -> str:
    named = {name: {str(value): label for value, label in labels.items()} for name, labels in part.labels.items()}
    return ", ".join(named.get(name, {}).get(str(value), f"{name}={value}") for name, value in setting.items())


def circumstances(part: RecipePart, plan: ComparisonPlan, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Give what a part's numbers depend on beside methods, seeds, rounds, grid and machine: data, clients, attacks.

    Parameters
    ----------
    part
        The part.
    plan
        Its plan.
    values
        Plain values to look them up in, where what is missing was as by default; the plan's if not given.

    Returns
    -------
    dict
        Fields of an experiment with their plain values.
    """
    ats = {part.at, *(reading.at or part.at for reading in part.readings.values())}
    passed_over = _OF_ONE_RUN | _OF_MACHINES | _OF_WHAT_IS_LOOKED_AT | plan.grid.keys()
    passed_over |= {"eval_every"} if ats == {"final"} else set()
    found = plan.runs[0].config.plain() if values is None else values
    fields = ExperimentConfig.model_fields.items()
    return {name: found.get(name, field.default) for name, field in fields if name not in passed_over}


@dataclass(frozen=True)
class Work:
    """How much there is to do.

    Parameters
    ----------
    runs
        How many runs.
    rounds
        How many rounds they have together.
    updates
        How often a client trains in them.
    """

    runs: int = 0
    rounds: int = 0
    updates: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.runs + other.runs, self.rounds + other.rounds, self.updates + other.updates)

    def sentence(self) -> str:
        """Say it in words.

        Returns
        -------
        str
            Half a sentence.
        """
        return f"{self.runs:,} runs, {self.rounds:,} rounds, {self.updates:,} times a client trains"


def work(plan: ComparisonPlan) -> Work:
    """Count what a plan's runs have to do.

    Parameters
    ----------
    plan
        The plan.

    Returns
    -------
    Work
        The counts.
    """
    total = Work()
    for run in plan.runs:
        config = run.config
        trainers = config.clients - round(config.hold_out * config.clients)
        total += Work(1, config.rounds, config.rounds * max(1, round(config.participation * trainers)))
    return total
