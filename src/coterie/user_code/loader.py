"""Loads what ``import:package.module:name`` names, and Python files by their path."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from coterie.errors import ConfigError, CoterieError
from coterie.user_code.copies import as_given, module_of_copy

IMPORT = "import:"
"""What the name of something of the user's own begins with."""

_LONGEST = 500  # characters of what somebody else's code says
_SPEC = re.compile(r"import:([\w.]+):(\w+)")


def explain(error: BaseException) -> str:
    """Say what the user's code raised, in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    # PyTorch's own words can go on for pages, as with all the backends that an operation exists for.
    return text if len(text) <= _LONGEST else text[:_LONGEST].rpartition(" ")[0] + " ..."


def load(
    field: str,
    spec: str,
    *,
    form: str,
    must_be: str,
    error: type[CoterieError] = ConfigError,
    accepts: Callable[[Any], bool] = callable,
) -> Any:
    """Import what ``import:package.module:name`` names.

    ``field`` is the setting that the text was given for, ``form`` says in words what stands after ``import:``, and
    ``must_be`` what has to be found there. Text of another form is a ``ConfigError``; whatever is wrong with the
    module, or with what it holds, is an ``error``.
    """
    shown = f"{field} {as_given(spec)!r}"
    parts = _SPEC.fullmatch(spec)
    if parts is None:
        raise ConfigError(f"{shown} must read {IMPORT}{form}")
    module, name = parts.groups()
    try:
        with _own_numbers(module) if field == "model" else contextlib.nullcontext():
            found = importlib.import_module(module)
    except CoterieError:
        raise
    except Exception as failure:
        raise error(f"{shown} cannot be imported: {_reason(module, failure)}") from failure
    if not hasattr(found, name):
        raise error(f"{shown}: {name!r} is missing in {as_given(module)!r}; it must be {must_be}")
    value = getattr(found, name)
    if not accepts(value):
        raise error(f"{shown}: {name!r} is a {type(value).__name__}; it must be {must_be}")
    return value


@contextlib.contextmanager
def _own_numbers(module: str) -> Iterator[None]:
    """Let a model's file draw the same random numbers whenever it is imported, and none of those that are its model's.

    Files of data and of all else are imported as Python does it: what they seed stays seeded.
    """
    if module in sys.modules:
        yield
        return
    from coterie import randomness

    with randomness.torch_stream(0, "import"):
        yield


def _reason(module: str, failure: Exception) -> str:
    """Say whether a module is not there, or is there and failed itself: then where."""
    absent = failure.name if isinstance(failure, ModuleNotFoundError) else None
    if absent is not None and f"{module}.".startswith(f"{absent}."):
        return f"{explain(failure)}; is it installed, or on PYTHONPATH?"
    return f"the module was found, but raised {explain(failure)}{place(failure)}"


def place(failure: BaseException) -> str:
    """Name the line of the user's code that raised something, with a space in front; nothing if none did."""
    theirs = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
    frames = traceback.extract_tb(failure.__traceback__)
    found = [frame for frame in frames if not frame.filename.startswith(theirs)]
    return f" ({Path(found[-1].filename).name}, line {found[-1].lineno})" if found else ""


def load_file(field: str, path: Path) -> ModuleType:
    """Load a Python file as a module of its own; the same content at the same path is loaded once."""
    shown, place = f"the {field} file {str(path)!r}", path.expanduser().resolve()
    name, content = module_of_copy(place), b""
    is_copy = name is not None
    if name is None:
        try:
            content = place.read_bytes()
        except OSError as failure:
            raise ConfigError(f"{shown} cannot be read: {failure.strerror or failure}") from None
        # Named by path and content: two files may share a stem, and a changed file is another module.
        key = hashlib.sha256(str(place).encode() + b"\0" + content).hexdigest()[:16]
        name = f"coterie_user_{place.stem}_{key}"
    if name in sys.modules:
        return sys.modules[name]
    try:
        return importlib.import_module(name) if is_copy else _execute(name, place, content)
    except CoterieError:
        raise
    except Exception as failure:
        raise ConfigError(f"{shown} cannot be loaded ({explain(failure)})") from failure


def _execute(name: str, path: Path, content: bytes) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise ImportError("it is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        # The content whose digest is in the name, and not what the file may hold by now.
        exec(compile(content, path, "exec", dont_inherit=True), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module
