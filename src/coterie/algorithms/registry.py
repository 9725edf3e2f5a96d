"""The algorithms by name: one file in this package each, and the user's own."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from coterie import options, user_code
from coterie.algorithms.base import Algorithm
from coterie.errors import ConfigError, UnknownName

_FACTS = ("name", "title", "citation")
_registered: dict[str, type[Algorithm]] = {}


def register(algorithm: type[Algorithm]) -> type[Algorithm]:
    """Make an algorithm of the user's known by its name; use as a decorator.

    Parameters
    ----------
    algorithm
        The class; one that was registered before from the same place may be registered anew, as a notebook does.

    Returns
    -------
    type
        The same class.

    Raises
    ------
    ConfigError
        If the class is not complete, or another class has its name already.
    """
    missing = _missing(algorithm)
    if missing:
        raise ConfigError(f"{algorithm.__name__} cannot be registered: it lacks {missing}")
    _load_ours()
    known = _registered.get(algorithm.name)
    if known is not None and _place(known) != _place(algorithm):
        raise ConfigError(f"an algorithm named {algorithm.name!r} is registered already ({'.'.join(_place(known))})")
    _registered[algorithm.name] = algorithm
    return algorithm


def _place(algorithm: type[Algorithm]) -> tuple[str, str]:
    return algorithm.__module__, algorithm.__qualname__


def _missing(algorithm: type[Algorithm]) -> str:
    facts = [fact for fact in _FACTS if not isinstance(getattr(algorithm, fact, None), str)]
    return ", ".join([*facts, *sorted(algorithm.__abstractmethods__)])


def _of_module(module: ModuleType) -> list[type[Algorithm]]:
    return [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Algorithm) and value.__module__ == module.__name__
    ]


@functools.cache
def _load_ours() -> None:
    package = importlib.import_module("coterie.algorithms")
    for entry in pkgutil.iter_modules(package.__path__):
        for algorithm in _of_module(importlib.import_module(f"coterie.algorithms.{entry.name}")):
            if not _missing(algorithm):
                _registered[algorithm.name] = algorithm


def digest(path: Path) -> str:
    """Return the SHA-256 of a file that defines an algorithm.

    Parameters
    ----------
    path
        The file.

    Returns
    -------
    str
        Hexadecimal digits.

    Raises
    ------
    ConfigError
        If it cannot be read.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"the algorithm file {str(path)!r} cannot be read: {error.strerror or error}") from None


def _from_file(path: Path) -> type[Algorithm]:
    found = _of_module(user_code.load_file("algorithm", path))
    complete = [algorithm for algorithm in found if not _missing(algorithm)]
    if len(complete) != 1:
        lacking = [f"{algorithm.__name__} lacks {_missing(algorithm)}" for algorithm in found if _missing(algorithm)]
        raise ConfigError(
            f"the algorithm file {str(path)!r} defines {len(complete)} complete algorithms, and must define one"
            + (f" ({'; '.join(lacking)})" if lacking and not complete else "")
        )
    return complete[0]


def names() -> list[str]:
    """Return the names of all algorithms.

    Returns
    -------
    list of str
        In alphabetical order.
    """
    _load_ours()
    return sorted(_registered)


def is_file(name: str) -> bool:
    """Return whether a name is that of a file which defines an algorithm.

    Parameters
    ----------
    name
        What :func:`get` would be given.

    Returns
    -------
    bool
        Whether it ends as a Python file does.
    """
    return name.endswith(".py")


def get(name: str) -> type[Algorithm]:
    """Look an algorithm up.

    Parameters
    ----------
    name
        Its registered name, or the path of a Python file that defines one.

    Returns
    -------
    type
        Its class.

    Raises
    ------
    UnknownName
        If there is none of that name; a file that defines none is a :class:`~coterie.errors.ConfigError`.
    """
    if is_file(name):
        return _from_file(Path(name))
    _load_ours()
    if name not in _registered:
        raise UnknownName("algorithm", name, _registered)
    return _registered[name]


def make(name: str, settings: Mapping[str, Any] | None = None) -> Algorithm:
    """Make an algorithm with given hyper-parameters, the others at their defaults.

    A parameter that it does not have, or a value of the wrong type or range, is a
    :class:`~coterie.errors.ConfigError`.

    Parameters
    ----------
    name
        Its name.
    settings
        Hyper-parameters by name.

    Returns
    -------
    Algorithm
        The algorithm.
    """
    algorithm = get(name)
    return options.make(algorithm, settings or {}, algorithm.title)
