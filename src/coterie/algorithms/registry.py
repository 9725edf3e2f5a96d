"""The algorithms by name: one file in this package each, and the user's own.

A method's name is that of its file, so that all names are known before any file is imported.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from coterie import options, user_code
from coterie.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    from coterie.algorithms.base import Algorithm

_FACTS = ("name", "title", "citation")
# What methods use, in the same folder.
_NO_METHODS = (
    *(
        "base",
        "batch",
        "body_and_head",
        "client",
        "contract",
        "last_models",
        "local_part",
        "local_training",
        "messages",
        "row_numbers",
    ),
    *("registry", "running_statistics"),
)
_registered: dict[str, type[Algorithm]] = {}
_handed_over: dict[str, str] = {}  # of classes that a program handed over: their digests by name


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
    known = get(algorithm.name) if algorithm.name in names() else None
    if known is not None and _place(known) != _place(algorithm):
        raise ConfigError(f"an algorithm named {algorithm.name!r} is registered already ({'.'.join(_place(known))})")
    _registered[algorithm.name] = algorithm
    return algorithm


def hand_over(algorithm: type[Algorithm]) -> str:
    """Register a class that a program hands over, under its name and digest; give the name."""
    from coterie.algorithms.base import Algorithm

    if not (inspect.isclass(algorithm) and issubclass(algorithm, Algorithm)):
        raise ConfigError(f"algorithm is {algorithm!r}, but must be a name, or a class or object of an Algorithm")
    if algorithm.__module__.startswith("coterie.algorithms."):
        return algorithm.name
    from coterie.user_code.digests import digest_of

    name = register(algorithm).name
    _handed_over[name] = digest_of(algorithm)
    return name


def handed_over(name: str) -> str | None:
    """Give the digest of a class that a program handed over; ``None`` for all other names."""
    return _handed_over.get(name)


def refuse_missing(name: str, digest: str | None) -> None:
    """Refuse a method that a program handed over when the run began, and that is not here."""
    if digest is not None and not is_file(name) and name not in names():
        raise ConfigError(
            f"algorithm is {name!r}, a class of the Python program that began the run, which is not here: hand it over "
            "again with coterie.resume(PATH, algorithm=...)"
        )


def _place(algorithm: type[Algorithm]) -> tuple[str, str]:
    return algorithm.__module__, algorithm.__qualname__


def _missing(algorithm: type[Algorithm]) -> str:
    facts = [fact for fact in _FACTS if not isinstance(getattr(algorithm, fact, None), str)]
    return ", ".join([*facts, *sorted(algorithm.__abstractmethods__)])


def _of_module(module: ModuleType) -> list[type[Algorithm]]:
    from coterie.algorithms.base import Algorithm

    return [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Algorithm) and value.__module__ == module.__name__
    ]


@functools.cache
def _ours() -> frozenset[str]:
    """Name the methods of this package, after their files."""
    entries = pkgutil.iter_modules([str(Path(__file__).parent)])
    return frozenset(
        entry.name
        for entry in entries
        if not entry.ispkg and not entry.name.startswith("_") and entry.name not in _NO_METHODS
    )


def _load(name: str) -> type[Algorithm]:
    module = importlib.import_module(f"coterie.algorithms.{name}")
    found = [algorithm for algorithm in _of_module(module) if vars(algorithm).get("name") == name]
    if not found:
        raise ConfigError(f"{module.__name__} is taken for a method, but defines no algorithm named {name!r}")
    return found[0]


def digest(path: Path) -> str:
    """Give the SHA-256 of a file that defines an algorithm, as hexadecimal digits."""
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


def imported(spec: str) -> type[Algorithm]:
    """Import and register the class that ``import:package.module:Class`` names."""
    from coterie.algorithms.base import Algorithm

    found: type[Algorithm] = user_code.load(
        "algorithm",
        spec,
        form="package.module:Class",
        must_be="a class of an Algorithm",
        accepts=lambda value: inspect.isclass(value) and issubclass(value, Algorithm),
    )
    return register(found)


def names() -> list[str]:
    """Return the names of all algorithms.

    Returns
    -------
    list of str
        In alphabetical order.
    """
    return sorted(_ours() | _registered.keys())


def is_file(name: str) -> bool:
    """Say whether a name is that of a Python file, which may define an algorithm."""
    return name.endswith(".py")


def get(name: str) -> type[Algorithm]:
    """Look an algorithm up.

    A name that no algorithm has is an :class:`~coterie.errors.UnknownName`, a file that defines none a
    :class:`~coterie.errors.ConfigError`.

    Parameters
    ----------
    name
        Its registered name, or the path of a Python file that defines one.

    Returns
    -------
    type
        Its class.
    """
    if is_file(name):
        return _from_file(Path(name))
    check(name)
    if name not in _registered:
        _registered[name] = _load(name)
    return _registered[name]


def check(name: str) -> None:
    """Refuse a name that no algorithm has, before anything is imported; a file is looked at when it is loaded."""
    if not is_file(name) and name not in _ours() and name not in _registered:
        if name.startswith("import:") or "/" in name:
            raise ConfigError(
                f"there is no algorithm {name!r}: a method of your own is named by its file (./my_method.py), which "
                "defines one class"
            )
        raise UnknownName("algorithm", name, names())


def title(name: str) -> str:
    """Give the name that an algorithm has in its paper, for instance ``FedAvg-FT``; an unknown name is given back."""
    known = not is_file(name) and name in names()
    return get(name).title if known else name


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


def recorded(name: str, before: str | None) -> dict[str, str]:
    """Give what a configuration records of a method that is not the library's own; ``before`` is what it recorded.

    Parameters
    ----------
    name
        The method's name, or its file.
    before
        The digest of its code when the run began, if it has begun.

    Returns
    -------
    dict of str to str
        The method's file, its digest; empty for one of the library's own.

    Raises
    ------
    ConfigError
        If its code is not what it was.
    """
    if not is_file(name):
        known = handed_over(name)
        if before not in (None, known):
            raise ConfigError(
                f"algorithm {name!r} is not the class that the run began with: hand the old one over, or begin a new "
                "run"
            )
        return {} if known is None else {"algorithm_sha256": known}
    path = Path(name).expanduser().resolve()
    content = digest(path)
    if before not in (None, content):
        raise ConfigError(
            f"the algorithm file {str(path)!r} is not the one that the run began with: put the old one back, or begin "
            "a new run"
        )
    return {"algorithm": str(path), "algorithm_sha256": content}
