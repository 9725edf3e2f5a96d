"""Personalised federated learning: right, fast, real.

>>> import coterie
>>> result = coterie.run("fedacs", data="digits", clients=20, rounds=50)  # doctest: +SKIP
>>> result.table()  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coterie.version import __version__

if TYPE_CHECKING:
    from coterie.algorithms.registry import register
    from coterie.api import load, resume, run
    from coterie.errors import CoterieError
    from coterie.results import Result

__all__ = ["CoterieError", "Result", "__version__", "load", "register", "resume", "run"]

_PLACES = {
    "run": "coterie.api",
    "resume": "coterie.api",
    "load": "coterie.api",
    "Result": "coterie.results",
    "register": "coterie.algorithms.registry",
    "CoterieError": "coterie.errors",
}


def __getattr__(name: str) -> Any:
    # Names are brought in when first used: `import coterie` stays quick, and a part never imports the whole.
    if name not in _PLACES:
        raise AttributeError(f"module 'coterie' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PLACES[name]), name)
