"""Names whose modules are imported when they are first used.

The command line has to know what there is (methods, data sets, models) before it needs any of it, and PyTorch alone
takes seconds to import.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

Entry = TypeVar("Entry")


def exports(package: str, **modules: str) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a package; each of its modules is given with the names it defines, between blanks.

    Its ``__dir__`` is made as well, so that editors and notebooks complete them.
    """
    places = {name: module for module, listed in modules.items() for name in listed.split()}
    here = vars(sys.modules[package])

    def attribute(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{places[name]}"), name)
        here[name] = value  # found without this function from now on
        return value

    def names() -> list[str]:
        return sorted({*here, *places})

    here["__dir__"] = names
    return attribute


class Registry(Mapping[str, Entry]):
    """Things by name, each imported from its place, ``module:attribute``, when it is first looked up."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = dict(places)

    def __getitem__(self, name: str) -> Entry:
        module, _, attribute = self._places[name].partition(":")
        entry: Entry = getattr(importlib.import_module(module), attribute)
        return entry

    def __contains__(self, name: object) -> bool:
        return name in self._places  # Mapping's own would import the entry

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
