"""Programs that are no part of the package, as modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def load_program(path: Path, name: str = "") -> ModuleType:
    """Run a file that is not on the path as a module of that name, or of its own."""
    place = importlib.util.spec_from_file_location(name or path.stem, path)
    assert place is not None and place.loader is not None
    program = importlib.util.module_from_spec(place)
    place.loader.exec_module(program)
    return program
