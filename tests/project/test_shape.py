"""The shape of the source: variants are parts and not subclasses, a name for one thing, docstrings that say something.

Read from the syntax trees, so that a package that needs an extra is looked at where the extra is not installed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"

OVERRIDES: dict[str, str] = {}
"""Classes that may override private methods of their bases, as ``module.Class``, and why. None has to."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A module's classes, and where the names that it imports come from."""

    name: str
    tree: ast.Module

    @property
    def classes(self) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)}

    @property
    def imported(self) -> dict[str, str]:
        found = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {alias.asname: alias.name for alias in node.names if alias.asname}
        return found


def read(name: str, text: str) -> Module:
    return Module(name, ast.parse(text))


@cache
def modules() -> dict[str, Module]:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        found[name] = read(name, path.read_text(encoding="utf-8"))
    assert len(found) > 150
    return found


def find(name: str, among: dict[str, Module]) -> tuple[Module, ast.ClassDef] | None:
    """Find a class by its dotted name, through the packages that hand it on; nothing if it is not ours."""
    module, _, own = name.rpartition(".")
    if module not in among:
        return None
    if own in among[module].classes:
        return among[module], among[module].classes[own]
    onwards = among[module].imported.get(own)
    return None if onwards in (None, name) else find(onwards, among)


def bases(module: Module, node: ast.ClassDef, among: dict[str, Module]) -> Iterator[tuple[Module, ast.ClassDef]]:
    """All classes of ours that a class inherits from."""
    for written in node.bases:
        expression = written.value if isinstance(written, ast.Subscript) else written  # Base[T]
        first, _, rest = ast.unparse(expression).partition(".")
        if first in module.classes and not rest:
            name = f"{module.name}.{first}"
        else:
            name = ".".join(filter(None, (module.imported.get(first, first), rest)))
        base = find(name, among)
        if base is not None and base[1] is not node:
            yield base
            yield from bases(*base, among)


def private_methods(node: ast.ClassDef) -> set[str]:
    names = {each.name for each in node.body if isinstance(each, Function)}
    return {name for name in names if name.startswith("_") and not name.endswith("__")}


def overrides(among: dict[str, Module]) -> dict[str, list[str]]:
    found = {}
    for module in among.values():
        for name, node in module.classes.items():
            theirs = {method for _, base in bases(module, node, among) for method in private_methods(base)}
            if both := sorted(private_methods(node) & theirs):
                found[f"{module.name}.{name}"] = both
    return found


def test_no_class_overrides_a_private_method_of_its_base() -> None:
    found = overrides(modules())
    assert {name: both for name, both in found.items() if name not in OVERRIDES} == {}
    assert OVERRIDES.keys() <= found.keys(), "an exception that is no longer needed"


def test_overrides_are_found_through_packages_generics_and_aliases() -> None:
    texts = {
        "coterie.a": "class Base:\n    def _step(self): ...\n    def run(self): ...\n    def __len__(self): ...",
        "coterie.b": "from coterie.a import Base as Face",
        "coterie.c": "from coterie.b import Face\nclass One(Face):\n    def _step(self): ...",
        "coterie.d": "import coterie.a as a\nclass Two(a.Base[int]):\n    async def _step(self): ...",
        "coterie.e": "from coterie import c\nclass Three(c.One):\n    @property\n    def _step(self): ...",
        "coterie.f": "from coterie.a import Base\nclass Four(Base):\n    def run(self): ...\n    def __len__(_): ...",
        "coterie.g": "from torch.nn import Module\nclass Five(Module):\n    def _step(self): ...",
    }
    found = overrides({name: read(name, text) for name, text in texts.items()})
    assert found == {name: ["_step"] for name in ("coterie.c.One", "coterie.d.Two", "coterie.e.Three")}


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for module in modules().values():
        for name in module.classes:
            if not name.startswith("_"):
                places.setdefault(name, []).append(module.name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


EMPTY = re.compile(r"(?i)(?:see|as|like)(?: in| at)? (?::\w+:)?`[^`]+`(?:, which see)?|see (?:also |the )[\w ./`]+|\w+")
"""A sentence that says nothing: only where to look, or one word."""


def says_nothing(docstring: str) -> bool:
    return EMPTY.fullmatch(" ".join(docstring.split()).rstrip(".")) is not None


def test_no_docstring_only_says_where_to_look() -> None:
    found = []
    for module in modules().values():
        for node in ast.walk(module.tree):
            if isinstance(node, (ast.ClassDef, *Function.__args__)) and says_nothing(ast.get_docstring(node) or "."):
                found.append(f"{module.name}:{node.lineno} {node.name}")
    assert found == []


@pytest.mark.parametrize(
    ("docstring", "empty"),
    [
        ("See :meth:`Backend.changed`.", True),
        ("See the base class.", True),
        ("They.", True),
        ("As `Backend.read`.", True),
        ("Read the rows that changed since the last round.", False),
        ("See that the tensors have their size, which is what a crash can spoil, and raise otherwise.", False),
    ],
)
def test_what_says_nothing(docstring: str, empty: bool) -> None:
    assert says_nothing(docstring) is empty
