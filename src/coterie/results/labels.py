"""What runs beside each other are called: the method, and no more of the configuration than tells them apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.config import fields
from coterie.results.figures import Line

if TYPE_CHECKING:
    from coterie.results.result import Result

# The method is shown apart and seeds are averaged over; how a run was computed and what was recorded tell none apart.
_IMMATERIAL = {"algorithm", "algorithm_sha256", "settings", "seed"} | fields("how") | fields("record")


def lines(
    results: Sequence[Result], leave_out: Collection[str] = (), called: Sequence[str | None] | None = None
) -> list[Line]:
    """Say to which line each run belongs: runs of one line differ by their seed alone.

    Parameters
    ----------
    results
        The runs.
    leave_out
        Fields of the configuration that are not to tell lines apart.
    called
        What somebody called the method of each run, ``None`` where nobody did; its own name by default.

    Returns
    -------
    list of Line
        A line for each run. Two runs that are alike even in their seed are told apart by their folders.
    """
    configs = [result.config for result in results]
    names = called or [None] * len(results)
    methods = [name or method_name(result) for name, result in zip(names, results, strict=True)]
    material = [name for name in _names(configs) if name not in _IMMATERIAL and name not in leave_out]
    found = []
    for config, method in zip(configs, methods, strict=True):
        alike = [other.get("settings") or {} for other, name in zip(configs, methods, strict=True) if name == method]
        own = _said(config.get("settings") or {}, alike, _names(alike))
        found.append(Line(f"{method} ({own})" if own else method, _said(config, configs, material)))
    if leave_out:
        return found
    for key in (_folder_name, str):
        times = Counter((line, config.get("seed")) for line, config in zip(found, configs, strict=True))
        found = [
            line if times[line, config.get("seed")] == 1 else Line(line.method, _with(line.setting, key(result.path)))
            for line, config, result in zip(found, configs, results, strict=True)
        ]
    return found


def method_name(result: Result) -> str:
    """Give the name of a run's method.

    Parameters
    ----------
    result
        The run, finished or not.

    Returns
    -------
    str
        As in the registry; of a Python file that a run is still going on with, the file's.
    """
    if result.finished:
        return str(result.summary["algorithm"])
    named = str(result.config.get("algorithm", "?"))
    return Path(named).stem if named.endswith(".py") else named


def _folder_name(path: Path) -> str:
    return path.name


def _names(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for config in configs for name in config))


def _said(config: Mapping[str, Any], among: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Write those of the values in which the configurations differ."""
    differ = [name for name in names if any(other.get(name) != among[0].get(name) for other in among)]
    return ", ".join(f"{name}={_value(config.get(name))}" for name in differ)


def _value(value: Any) -> str:
    return "none" if value is None else "+".join(map(str, value)) if isinstance(value, list) else str(value)


def _with(setting: str, folder: str) -> str:
    return f"{setting}, {folder}" if setting else folder
