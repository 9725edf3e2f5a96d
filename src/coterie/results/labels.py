"""What runs beside each other are called: the method's title, and as much of the configuration as tells them apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.algorithms import registry
from coterie.config import fields as config_fields
from coterie.errors import CoterieError
from coterie.results.figures import Line
from coterie.simulation import attacks

if TYPE_CHECKING:
    from coterie.results.result import Result

# The method has a label of its own, and runs that differ by their seed alone are one line.
_SAID_OTHERWISE = frozenset({"algorithm", "algorithm_sha256", "settings", "seed"})


def method_title(name: str) -> str:
    """Give the title of a method by its name, or the name itself where no such method is registered here."""
    if registry.is_file(name):  # code that a run names, which nobody who looks at results has asked to run
        return Path(name).stem
    try:
        return registry.get(name).title
    except CoterieError:  # a run of somebody else's method
        return name


def run_title(result: Result) -> str:
    """Give the title of a run's method; of one that is not registered here, the title or name that the run recorded."""
    given = str(result.config.get("algorithm", "?"))
    if given in registry.names():
        return method_title(given)
    return str(result.summary.get("title", recorded_name(result))) if result.finished else recorded_name(result)


def recorded_name(result: Result) -> str:
    """Give the registered name of a run's method; of a file that a run is still going on with, the file's."""
    if result.finished:
        return str(result.summary["algorithm"])
    given = str(result.config.get("algorithm", "?"))
    return Path(given).stem if registry.is_file(given) else given


def lines_of(
    results: Sequence[Result],
    leave_out: Collection[str] = (),
    names: Sequence[str | None] | None = None,
    tuned: Collection[str] = (),
) -> list[Line]:
    """Say to which line each run belongs: runs of one line differ by their seed alone.

    Fields in ``leave_out`` and parameters in ``tuned`` tell no lines apart. ``names`` is what a plan calls the method
    of each run, ``None`` where there is no plan. Two runs that are alike even in their seed are told apart by their
    folders.
    """
    configs = [result.config for result in results]
    methods = [_method(result, name) for result, name in zip(results, names or [None] * len(results), strict=True)]
    immaterial = {*_SAID_OTHERWISE, *config_fields("how"), *config_fields("record"), *leave_out}
    fields = [name for name in _all_names(configs) if name not in immaterial]
    found = []
    for config, method in zip(configs, methods, strict=True):
        alike = [other.get("settings") or {} for other, name in zip(configs, methods, strict=True) if name == method]
        parameters = [each for each in _all_names(alike) if each not in tuned]
        own = _differences(config.get("settings") or {}, alike, parameters)
        found.append(Line(f"{method} ({own})" if own else method, _differences(config, configs, fields)))
    if leave_out:
        return found
    for key in (_folder_name, str):
        times = Counter((line, config.get("seed")) for line, config in zip(found, configs, strict=True))
        found = [
            line if times[line, config.get("seed")] == 1 else Line(line.method, _with(line.setting, key(result.path)))
            for line, config, result in zip(found, configs, results, strict=True)
        ]
    return found


def attack_label(result: Result) -> tuple[str, float]:
    """Give the kind of attack, with its options, and the fraction of attackers; no kind if there are none."""
    text = result.config.get("attack")
    if not text:
        return "", 0.0
    attack, options = attacks.parse(str(text)), str(text).partition(",")[2]
    kind = f"{attack.kind} ({options})" if options else attack.kind
    return (kind if attack.fraction else ""), attack.fraction


def _method(result: Result, name: str | None) -> str:
    # A plan calls a method by its registered name unless its author chose another.
    return run_title(result) if name is None or name == recorded_name(result) else name


def _folder_name(path: Path) -> str:
    return path.name


def _all_names(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for config in configs for name in config))


def _differences(config: Mapping[str, Any], among: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Write those of the values in which the configurations differ."""
    differ = [name for name in names if any(other.get(name) != among[0].get(name) for other in among)]
    return ", ".join(f"{name}={_value(config.get(name))}" for name in differ)


def _value(value: Any) -> str:
    return "none" if value is None else "+".join(map(str, value)) if isinstance(value, list) else str(value)


def _with(setting: str, folder: str) -> str:
    return f"{setting}, {folder}" if setting else folder
