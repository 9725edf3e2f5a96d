"""Names that users import have docstrings that name every parameter; lint asks that of nothing else."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pydantic
import pytest
import torch

import coterie
from tests.project.test_site import ROOMS, public_names

SECTION = re.compile(r"^Parameters\n-+\n(.*?)(?=^\w[\w ]*\n-+$|\Z)", re.M | re.S)


def documented(docstring: str) -> set[str]:
    """The names in the section Parameters of a docstring, without the stars of ``*args``."""
    found = SECTION.search(inspect.cleandoc(docstring))
    lines = re.findall(r"^(\S[^\n:]*?)(?: *:[^\n]*)?$", found[1], re.M) if found else []
    return {name.strip("* ") for line in lines for name in line.split(",")}


def parameters(function: Callable[..., Any], method: bool = False) -> set[str]:
    taken = list(inspect.signature(function).parameters.values())[1 if method else 0 :]
    return {each.name for each in taken if not each.name.startswith("_")}


def missing(what: str, docstring: str | None, wanted: set[str]) -> Iterator[str]:
    if not docstring:
        yield f"{what} has no docstring"
        return
    told = documented(docstring)
    if left_out := sorted(wanted - told):
        yield f"{what} does not say what {', '.join(left_out)} is"
    if gone := sorted(told - wanted):
        yield f"{what} speaks of {', '.join(gone)}, which it does not have"


def of_function(what: str, function: Callable[..., Any], method: bool = False) -> Iterator[str]:
    yield from missing(what, inspect.getdoc(function), parameters(function, method))


def of_class(what: str, each: type) -> Iterator[str]:
    own = vars(each)
    if issubclass(each, pydantic.BaseModel):
        yield from of_model(what, each)
    elif dataclasses.is_dataclass(each):
        fields = {field.name for field in dataclasses.fields(each) if field.init}
        yield from missing(what, each.__doc__, {name for name in fields if not name.startswith("_")})
    elif issubclass(each, tuple) and hasattr(each, "_fields"):
        yield from missing(what, each.__doc__, set(each._fields))
    elif inspect.isfunction(own.get("__init__")) and not getattr(each, "_is_protocol", False):
        taken = parameters(own["__init__"], method=True)
        base = each.__mro__[1]
        same = inspect.isfunction(vars(base).get("__init__")) and parameters(vars(base)["__init__"], True) == taken
        yield from missing(what, each.__doc__, set() if same else taken)  # the base says what they are
    else:
        yield from missing(what, each.__doc__, set())
    for name, value in own.items():
        if not name.startswith("_"):
            yield from of_member(f"{what}.{name}", each, name, value)


def of_model(what: str, each: type[pydantic.BaseModel]) -> Iterator[str]:
    """A field is described where it is declared, in the docstring, or, if it is a model, by that model."""
    told = documented(each.__doc__ or "")
    yield from missing(what, each.__doc__, told & each.model_fields.keys())
    for name, field in each.model_fields.items():
        kinds = [kind for kind in typing.get_args(field.annotation) or [field.annotation] if inspect.isclass(kind)]
        elsewhere = any(issubclass(kind, pydantic.BaseModel) and kind.__doc__ for kind in kinds)
        if not (field.description or name in told or elsewhere):
            yield f"{what} has a field {name} without a description"


def of_member(what: str, each: type, name: str, value: Any) -> Iterator[str]:
    if isinstance(value, property):
        yield from missing(what, value.fget.__doc__, set())
        return
    bound = isinstance(value, classmethod)
    function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    if not inspect.isfunction(function):
        return
    base = next((getattr(other, name) for other in each.__mro__[1:] if hasattr(other, name)), None)
    if base is not None and inspect.getdoc(base) and parameters(base, True) == parameters(function, True):
        return  # the method of a base is documented, and this is one way to do what it says
    if name == "forward" and issubclass(each, torch.nn.Module):
        told = documented(function.__doc__ or "")  # from inputs to outputs: there need not be a list of them
        yield from missing(what, function.__doc__, told & parameters(function, True))
        return
    yield from of_function(what, function, method=bound or not isinstance(value, staticmethod))


def modules() -> Iterator[ModuleType]:
    """What the reference is about: the face, the rooms, and the servers' mathematics."""
    yield coterie
    yield from (importlib.import_module(f"coterie.{room}") for room in ROOMS)
    server_math = importlib.import_module("coterie.algorithms.server_math")
    for entry in pkgutil.iter_modules(server_math.__path__):
        yield importlib.import_module(f"{server_math.__name__}.{entry.name}")


def names() -> dict[str, Any]:
    """Everything that the reference documents, once, under the name it has where it is defined."""
    found = {}
    for module in modules():
        for name in public_names(module):
            value = getattr(module, name)
            if inspect.isfunction(value) or inspect.isclass(value):
                found[f"{value.__module__}.{value.__qualname__}"] = value
    return found


NAMES = names()


def test_there_are_names() -> None:
    assert len(NAMES) > 150 and {"coterie.api.run", "coterie.rows.layout.Layout"} <= NAMES.keys()


@pytest.mark.parametrize("name", sorted(NAMES))
def test_its_docstring_names_every_parameter(name: str) -> None:
    value = NAMES[name]
    assert list(of_class(name, value) if inspect.isclass(value) else of_function(name, value)) == []


# --------------------------------------------------------------------------------------------- and it would be noticed


@dataclass
class Documented:
    """A thing.

    Parameters
    ----------
    one, two
        Numbers.
    """

    one: int
    two: int

    def add(self, other: int, *more: int, quietly: bool = False) -> int:
        """Add.

        Parameters
        ----------
        other
            Another.
        *more
            Others.
        quietly : bool
            Say nothing.

        Returns
        -------
        int
            The sum.
        """
        return self.one + self.two + other + sum(more)


class Undocumented(Documented):
    """The same.

    Parameters
    ----------
    one
        A number.
    three
        It has none.
    """

    def add(self, other: int, *more: int, quietly: bool = False) -> int:
        return 0  # the base says what it does

    def less(self, other: int) -> int:
        """Subtract."""
        return self.one - other

    @property
    def name(self) -> str:
        return ""


def test_what_is_whole_is_passed_and_what_is_dropped_is_found() -> None:
    assert list(of_class("D", Documented)) == []
    assert list(of_class("U", Undocumented)) == [
        "U does not say what two is",
        "U speaks of three, which it does not have",
        "U.less does not say what other is",
        "U.name has no docstring",
    ]


class Settings(pydantic.BaseModel):
    """Some."""

    told: int = pydantic.Field(1, description="a number")
    untold: int = 2


def test_fields_have_descriptions() -> None:
    assert list(of_class("S", Settings)) == ["S has a field untold without a description"]
