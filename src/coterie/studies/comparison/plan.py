"""The plan of a comparison: which runs there are, each with its whole configuration."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.algorithms import registry
from coterie.config import SHORTHANDS, ExperimentConfig, from_mapping
from coterie.errors import ConfigError, UnknownName
from coterie.user_code import OBJECT, HeldObject

_OWN = ("methods", "seeds", "grid", "tune")
_NOT_SHARED = {"algorithm": "methods", "algorithm_sha256": "methods", "seed": "seeds"}
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_OF_METHODS = ("algorithm", "name", "settings", "tune", *SHORTHANDS)

Values = dict[str, Any]


@dataclass(frozen=True)
class PlannedRun:
    """One run of a comparison.

    Parameters
    ----------
    name
        Its folder's name.
    method
        The method's name in the plan: its registered one, unless the plan gives another.
    setting
        The values of the grid that it has.
    candidate
        The values of the tuned parameters that it has.
    config
        Its configuration.
    """

    name: str
    method: str
    setting: Values
    candidate: Values
    config: ExperimentConfig


@dataclass(frozen=True)
class ComparisonPlan:
    """All runs of a comparison, in the order in which they are run.

    Parameters
    ----------
    runs
        The runs.
    methods
        The methods' names in the plan, in the order of the table: their registered ones, unless the plan gives others.
    titles
        What people see each method called: the name that the plan gives it, or else its title.
    seeds
        The seeds.
    grid
        Names that vary, each with its values.
    tune
        Parameters that are chosen on validation data for all methods, each with its values.
    objects
        What was handed over as an object, and is found by its digest while the plan holds it.
    """

    runs: tuple[PlannedRun, ...]
    methods: tuple[str, ...]
    titles: dict[str, str]
    seeds: tuple[int, ...]
    grid: dict[str, list[Any]]
    tune: dict[str, list[Any]]
    objects: tuple[HeldObject, ...] = ()

    @property
    def settings(self) -> list[Values]:
        """The points of the grid; one without values if there is no grid."""
        return list(_points(self.grid))

    def of(self, setting: Values, method: str) -> dict[tuple[tuple[str, Any], ...], list[PlannedRun]]:
        """Give the runs of one method at one point of the grid.

        Parameters
        ----------
        setting
            The point.
        method
            The method's name in the plan.

        Returns
        -------
        dict
            For each candidate, as pairs of name and value, its runs in the order of seeds.
        """
        found: dict[tuple[tuple[str, Any], ...], list[PlannedRun]] = {}
        for run in self.runs:
            if run.method == method and run.setting == setting:
                found.setdefault(tuple(run.candidate.items()), []).append(run)
        return found

    @property
    def has_objects(self) -> bool:
        """Whether some of it is an object, or a class, of this process alone."""
        texts = [text for run in self.runs for text in (run.config.data, run.config.model, run.config.loss or "")]
        handed_over = any(registry.handed_over(run.config.algorithm) for run in self.runs)
        return handed_over or any(text.startswith(OBJECT) for text in texts)

    @property
    def tunes(self) -> bool:
        """Whether something is tuned, for all methods or for one."""
        return any(run.candidate for run in self.runs)

    def plain(self) -> Values:
        """Give the plan as plain YAML types.

        Returns
        -------
        dict
            What decides the comparison, complete with defaults.
        """
        return {
            "methods": list(self.methods),
            "seeds": list(self.seeds),
            "grid": self.grid,
            "tune": self.tune,
            "called": {run.name: run.method for run in self.runs},
            "runs": {run.name: run.config.plain() for run in self.runs},
        }


def make_plan(values: Mapping[str, Any]) -> ComparisonPlan:
    """Make a plan of named values, as a YAML file or the command line give them.

    ``methods`` lists names, or mappings with ``algorithm``, parameters (under ``settings``, or ``lr``, ``local_epochs``
    and ``batch_size`` as they are) and, to tell two of one method apart, ``name``. ``seeds`` lists seeds. ``grid``
    names fields or parameters, each with a list of values: every combination is a part of the table. ``tune`` names
    parameters likewise: for each method the best combination on validation data is taken; one that a method has itself
    holds for it alone, in place of that of all for the same parameter. All else is as in an experiment's file, and
    holds for all runs. Methods, data, model and loss may be objects, as for :func:`coterie.run`.

    Parameters
    ----------
    values
        The values.

    Returns
    -------
    ComparisonPlan
        The plan; every run's configuration has been checked.

    Raises
    ------
    ConfigError
        If something is missing, given twice, or of the wrong kind.
    """
    values, objects = _without_objects(values)
    shared = {name: value for name, value in values.items() if name not in _OWN and value is not None}
    for name, instead in _NOT_SHARED.items():
        if name in shared:
            raise ConfigError(f"{name} is {shared[name]!r}, but a comparison takes {instead}: give these instead")
    if values.get("methods") is None:  # because its name has a mistake in it, perhaps
        _refuse_unknown(shared, {})
    methods = _methods(values.get("methods"))
    _refuse_unknown(shared, methods)
    seeds = _seeds(values.get("seeds"))
    grid, tune = (_lists(name, values.get(name)) for name in ("grid", "tune"))
    _refuse_contradictions(methods, grid, tune)
    fields, parameters = _split(shared)
    if (tune or any(method["tune"] for method in methods.values())) and fields.get(
        "validation", ExperimentConfig.model_fields["validation"].default
    ) == 0:
        raise ConfigError("validation is 0, but tune chooses on validation data: hold some out with --validation 0.1")
    runs: list[PlannedRun] = []
    taken: set[str] = set()
    places: dict[tuple[str, ...], Values] = {}  # who the clients are, which data are asked for once: it takes as long
    for point in _points(grid):
        over_fields, over_parameters = _split(point)
        given = {**fields, **over_fields}
        data = tuple(str(given.get(name)) for name in ("data", "partition", "clients"))
        for label, method in methods.items():
            known = registry.get(method["algorithm"]).model_fields
            for candidate in _points({name: found for name, found in tune.items() if name in known} | method["tune"]):
                settings = parameters | over_parameters | method["settings"] | candidate
                for seed in seeds:
                    own = {"algorithm": method["algorithm"], "settings": settings, "seed": seed}
                    config = from_mapping({**given, **places.get(data, {}), **own})
                    places[data] = {"partition": config.partition, "clients": config.clients}
                    name = _folder_name([*_words(point), label, *_words(candidate), f"seed{seed}"], taken)
                    runs.append(PlannedRun(name, label, point, candidate, config))
    return ComparisonPlan(tuple(runs), tuple(methods), _titles(methods), tuple(seeds), grid, tune, objects)


def _without_objects(values: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[HeldObject, ...]]:
    """Name all objects by text."""
    methods = values.get("methods")
    methods = list(methods) if isinstance(methods, list | tuple) else []
    given = [*(values.get(name) for name in ("data", "model", "loss")), *methods]
    given += [each.get("algorithm") for each in methods if isinstance(each, Mapping)]
    if all(isinstance(each, str | Mapping | None) for each in given if each is not values.get("data")) and isinstance(
        values.get("data"), str | None
    ):
        return values, ()
    from coterie.runs import handed_over  # with PyTorch, which a plan of text is checked without

    plain, held = handed_over.as_text({name: value for name, value in values.items() if name not in _OWN})
    named: list[Any] = []
    for each in methods:
        if isinstance(each, Mapping):
            own = each.get("algorithm")
            named.append({**each, **({} if isinstance(own, str | None) else handed_over.method(own, each))})
        else:
            named.append(each if isinstance(each, str) else handed_over.method(each, {}))
    rest = {name: value for name, value in values.items() if name in _OWN and name != "methods"}
    return {**plain, **rest, "methods": named or values.get("methods")}, tuple(held)


def _methods(given: Any) -> dict[str, Values]:
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        told = "missing" if given is None else repr(given)
        raise ConfigError(f"methods is {told}, but must list at least one method: methods: [fedacs, fedavg]")
    found: dict[str, Values] = {}
    for each in given:
        method = {"algorithm": each} if isinstance(each, str) else each
        if not isinstance(method, Mapping) or not isinstance(method.get("algorithm"), str):
            raise ConfigError(
                f"methods has {each!r}, but each must be a name, or a mapping with algorithm and settings"
            )
        for name in method:
            if name not in _OF_METHODS:
                raise UnknownName("entry of a method called", str(name), _OF_METHODS)
        fields, settings = _split(
            {key: value for key, value in method.items() if key not in ("algorithm", "name", "tune")}
        )
        assert not fields
        name = registry.get(method["algorithm"]).name
        label = str(method.get("name") or name)
        if label in found:
            raise ConfigError(
                f"methods has {label!r} twice: give one of them another name, as {{algorithm: …, name: …}}"
            )
        tune = _lists(f"tune of the method {label!r}", method.get("tune"))
        found[label] = {"algorithm": method["algorithm"], "settings": settings, "tune": tune}
    return found


def _refuse_unknown(shared: Values, methods: Mapping[str, Values]) -> None:
    """See that what holds for all runs are fields of an experiment, or parameters of a method."""
    fields = [name for name in ExperimentConfig.model_fields if name not in _NOT_SHARED]
    parameters = [name for method in methods.values() for name in registry.get(method["algorithm"]).model_fields]
    known = dict.fromkeys([*_OWN, *fields, *SHORTHANDS, *parameters])
    for name in shared:
        if name not in known:
            raise UnknownName("field or parameter of a comparison called", name, known)


def _titles(methods: Mapping[str, Values]) -> dict[str, str]:
    """Say what people see methods called; a title that another method has been given as its name is no help."""
    algorithms = {label: registry.get(method["algorithm"]) for label, method in methods.items()}
    return {
        label: algorithm.title if label == algorithm.name and algorithm.title not in methods else label
        for label, algorithm in algorithms.items()
    }


def _seeds(given: Any) -> list[int]:
    seeds = [1] if given is None else given
    if not isinstance(seeds, Sequence) or isinstance(seeds, str) or not seeds:
        raise ConfigError(f"seeds is {given!r}, but must list at least one whole number")
    for seed in seeds:
        if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
            raise ConfigError(f"seeds has {seed!r}, but each must be a whole number of at least 0")
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds are {', '.join(map(str, seeds))}, but each must be given once")
    return list(seeds)


def _lists(where: str, given: Any) -> dict[str, list[Any]]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} is {given!r}, but must map names to lists of values")
    found: dict[str, list[Any]] = {}
    for name, listed in given.items():
        values = [_number(value) for value in listed] if isinstance(listed, list) else listed
        if not isinstance(values, list) or not values or any(value in values[:k] for k, value in enumerate(values)):
            raise ConfigError(f"{where} has {values!r} for {name}, but must list at least one value, each once")
        if any(isinstance(value, list | dict) for value in values):
            raise ConfigError(f"{where} has {values!r} for {name}, but each value must be a number or a word")
        found[str(name)] = values
    return found


def _number(value: Any) -> Any:
    """Read a number such as 1e-3, which YAML takes for a word where it has no point."""
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _refuse_contradictions(methods: Mapping[str, Values], grid: Values, tune: Values) -> None:
    for name in grid:
        if name in (*_NOT_SHARED, "settings"):
            raise ConfigError(f"grid has {name!r}, which it cannot vary: use methods and seeds")
        if name in tune:
            raise ConfigError(f"{name} is both in grid and in tune: it can only be in one")
    for label, method in methods.items():
        for where, names in (("grid", grid), ("tune", tune), ("tune", method["tune"])):
            for name in names:
                if name in method["settings"]:
                    raise ConfigError(f"the method {label!r} sets {name}, which {where} varies: leave it out of one")
        own = registry.get(method["algorithm"]).model_fields
        for name in method["tune"]:
            if name in grid:
                raise ConfigError(f"the method {label!r} tunes {name}, which grid varies: leave it out of one")
            if name not in own:
                raise UnknownName(f"parameter of {method['algorithm']} called", name, own)
    known = {name for method in methods.values() for name in registry.get(method["algorithm"]).model_fields}
    for name in tune:
        if name not in known:
            raise UnknownName("parameter of these methods called", name, known)


def _split(values: Mapping[str, Any]) -> tuple[Values, Values]:
    """Separate the configuration's own fields from the methods' parameters."""
    settings = values.get("settings") or {}
    if not isinstance(settings, Mapping):
        raise ConfigError(f"settings is {settings!r}, but must map the method's parameters to values")
    own = ExperimentConfig.model_fields
    fields = {name: value for name, value in values.items() if name in own and name != "settings"}
    parameters = {name: value for name, value in values.items() if name not in own}
    for name in parameters:
        if name in settings and settings[name] != parameters[name]:
            raise ConfigError(f"{name} is given twice: as {parameters[name]!r} and, in settings, as {settings[name]!r}")
    return fields, {**settings, **parameters}


def _points(lists: Mapping[str, list[Any]]) -> Iterator[Values]:
    for values in itertools.product(*lists.values()):
        yield dict(zip(lists, values, strict=True))


def _words(values: Values) -> list[str]:
    return [f"{name}-{value}" for name, value in values.items()]


def _folder_name(parts: Sequence[str], taken: set[str]) -> str:
    """Make a folder's name that no other run has, whatever the values are made of."""
    stem = re.sub(r"[^\w.-]+", "-", "-".join(Path(part).name if part.endswith(".py") else part for part in parts))
    stem = stem.lstrip(".-")[:120]
    name = next(name for k in itertools.count(1) if (name := stem if k == 1 else f"{stem}-{k}").lower() not in taken)
    taken.add(name.lower())
    return name
