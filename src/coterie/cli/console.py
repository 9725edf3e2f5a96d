"""The two consoles: what people pipe goes to ``out``, what they read meanwhile to ``err``."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


class _Printer:
    """A console that is made when it first prints: most mistakes are answered without rich."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    @functools.cached_property
    def _console(self) -> Console:
        from rich.console import Console

        return Console(**self._settings)

    def print(self, *objects: Any, **how: Any) -> None:
        """Print as :meth:`rich.console.Console.print` does."""
        self._console.print(*objects, **how)


out = _Printer(soft_wrap=False)
err = _Printer(stderr=True, soft_wrap=True)
