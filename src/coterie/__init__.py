"""Personalised federated learning: right, fast, real.

>>> import coterie
>>> result = coterie.run("fedacs", data="digits", clients=20, rounds=50)  # doctest: +SKIP
>>> result.table()  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coterie import lazy
from coterie.version import __version__

if TYPE_CHECKING:
    from coterie.algorithms.registry import register
    from coterie.api import load, resume, run
    from coterie.errors import CoterieError
    from coterie.results import Result
    from coterie.studies.choice import choose
else:
    # `import coterie` stays quick, and a part never imports the whole.
    __getattr__ = lazy.exports(
        __name__,
        **{"algorithms.registry": "register", "studies.choice": "choose"},
        api="load resume run",
        errors="CoterieError",
        results="Result",
    )

__all__ = ["CoterieError", "Result", "__version__", "choose", "load", "register", "resume", "run"]
