"""Digests of objects of the user's own: functions by their bytecode and what they close over, modules by their weights.

Two objects have the same digest if they were written and filled in the same way, wherever: a function that is defined
anew from the same source keeps its digest, one that reads another value of a variable gets another. What is installed
counts by its name. Bytecode belongs to a minor version of Python, and so do these digests.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import re
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coterie.user_code.copies import is_installed

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
# Of a class: what Python and pydantic put there beside what was written.
_NOT_WRITTEN = re.compile(
    r"__(dict|weakref|module|doc|annotations|annotate|annotate_func|qualname|firstlineno|static_attributes|parameters|"
    r"abstractmethods|signature|class_vars|private_attributes|pydantic_\w+)__|_abc_impl|model_\w+"
)


def digest_of(value: object) -> str:
    """Give 32 hexadecimal digits that stand for an object."""
    digest = _Digest()
    digest.add(value)
    return digest.hexdigest()


class _Digest:
    """Feeds an object to a hash, and of all that is in it the digests; where it lies in memory does not count."""

    def __init__(self) -> None:
        self._hash = _new_hash()
        self._digests: dict[int, str] = {}
        self._within: list[int] = []
        self._alive: list[object] = []  # an object that is gone would lend its id to the next one

    def hexdigest(self) -> str:
        return str(self._hash.hexdigest())

    def _tell(self, *words: object) -> None:
        for word in words:
            data = word if isinstance(word, bytes) else str(word).encode()
            self._hash.update(len(data).to_bytes(8, "little") + data)

    def add(self, value: object) -> None:
        place = id(value)
        if isinstance(value, _PLAIN):
            self._tell(type(value).__name__, repr(value))
        elif place in self._within:  # a function that calls itself, a list that holds itself
            self._tell("itself", len(self._within) - self._within.index(place))
        else:
            if place not in self._digests:
                self._alive.append(value)
                around, self._hash = self._hash, _new_hash()
                self._within.append(place)
                self._content(value)
                self._within.pop()
                self._digests[place] = self._hash.hexdigest()
                self._hash = around
            self._tell("digest", self._digests[place])

    def _content(self, value: object) -> None:
        if isinstance(value, types.CodeType):
            self._code(value)
        elif inspect.isfunction(value):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        else:
            self._instance(value)

    def _all(self, kind: str, *values: object) -> None:
        self._tell(kind, len(values))
        for value in values:
            self.add(value)

    def _code(self, code: types.CodeType) -> None:
        # Neither names of files nor lines, nor the function's own name: the same text elsewhere is the same function.
        self._tell("code", code.co_code, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
        self._tell(code.co_flags, *code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars)
        self._all("constants", *code.co_consts)

    def _function(self, function: types.FunctionType) -> None:
        if not _is_own(function.__module__, function.__code__.co_filename):
            return self._tell("installed function", function.__module__, function.__qualname__)
        self._all("function", function.__code__, function.__defaults__, function.__kwdefaults__)
        closure = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self._mapping("closure", {name: cell.cell_contents for name, cell in closure if _filled(cell)})
        names = sorted(set(_global_names(function.__code__)))
        found = {name: function.__globals__[name] for name in names if name in function.__globals__}
        self._mapping("globals", found)

    def _class(self, kind: type) -> None:
        if not _is_own(kind.__module__, _file_of(kind)):
            return self._tell("installed class", kind.__module__, kind.__qualname__)
        self._all("class", kind.__name__, *kind.__bases__)
        written = {name: value for name, value in vars(kind).items() if not _NOT_WRITTEN.fullmatch(name)}
        self._mapping("written", written)
        fields: Mapping[str, Any] = getattr(kind, "__pydantic_fields__", {})
        self._mapping("fields", {name: _without_address(repr(info)) for name, info in fields.items()})

    def _mapping(self, kind: str, found: Mapping[Any, object]) -> None:
        self._tell(kind, len(found))
        for name, value in found.items():
            self.add(name)
            self.add(value)

    def _instance(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, types.ModuleType):
            self._tell("module", value.__name__)
        elif isinstance(value, staticmethod | classmethod):
            self._all(kind.__name__, value.__func__)
        elif isinstance(value, property):
            self._all("property", value.fget, value.fset, value.fdel)
        elif isinstance(value, types.MethodType):
            self._all("method", value.__func__, value.__self__)
        elif isinstance(value, functools.partial):
            self._all("partial", value.func, *value.args)
            self._mapping("keywords", value.keywords)
        elif isinstance(value, Mapping):
            self._mapping("mapping", value)
        elif isinstance(value, list | tuple):
            self._all(kind.__name__, *value)
        elif isinstance(value, set | frozenset):
            self._all("set", *sorted(value, key=repr))
        elif isinstance(value, enum.Enum | Path):
            self._tell(kind.__name__, repr(value))
        elif _is_tensor(value):
            self._tensor(value)
        elif hasattr(value, "named_parameters") and hasattr(value, "named_modules"):
            self._module(value)
        elif hasattr(value, "__array__") and hasattr(value, "dtype"):
            self._array(value)
        else:
            self._other(value)

    def _tensor(self, value: Any) -> None:
        flat = value.detach().cpu().contiguous()
        self._tell("tensor", flat.dtype, tuple(flat.shape), value.requires_grad)
        import torch

        for piece in flat.reshape(-1).split(2**24):
            self._hash.update(piece.view(torch.uint8).numpy().data)

    def _array(self, value: Any) -> None:
        import numpy as np

        array = np.ascontiguousarray(value)
        self._tell(
            "array", array.dtype, array.shape, repr(array.tolist()) if array.dtype == object else array.tobytes()
        )

    def _module(self, module: Any) -> None:
        self._tell("network", module)  # its text: the layers with their sizes
        for name, layer in module.named_modules():
            self._tell(name)
            self.add(type(layer))
            # Not all that matters is in the text: the reduction of a loss is not.
            self._mapping("attributes", {key: each for key, each in vars(layer).items() if not key.startswith("_")})
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            self._tell(name)
            self._tensor(value)

    def _other(self, value: Any) -> None:
        self.add(type(value))
        if _is_own(type(value).__module__, _file_of(type(value))):
            self._mapping("state", getattr(value, "__dict__", {}))
        else:
            self._tell(_without_address(repr(value)))


def _new_hash() -> Any:
    return hashlib.blake2b(digest_size=16, person=b"coterie object")


def _is_tensor(value: object) -> bool:
    return type(value).__module__.startswith("torch") and hasattr(value, "requires_grad") and hasattr(value, "detach")


def _without_address(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _file_of(kind: type) -> str | None:
    return getattr(sys.modules.get(kind.__module__), "__file__", None)


def _is_own(module: str | None, file: str | None) -> bool:
    """Say whether something was written by the user: in a file that is not installed, or in none, as in a notebook."""
    if module is None or module == "builtins" or (file is None and module != "__main__"):
        return False
    if file is None or module == "__main__":
        return True
    return file.startswith("<") or not is_installed(Path(file).absolute())
