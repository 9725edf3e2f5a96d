"""Things that are named in one line of text: ``name``, ``name:value`` or ``name:value,key=value,key=value``.

A :class:`Spec` is a frozen, validated set of parameters that can be written in that way and lists its parameters; each
mistake in them is an error of one sentence.
"""

from __future__ import annotations

import math
import os
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from coterie.errors import ConfigError, UnknownName, nearest

_AUTO = "auto"  # how None is written: the value then depends on the data


def split_at_plus(value: Any) -> Any:
    """Take a text such as ``name+date`` apart; what is no text stays as it is.

    Parameters
    ----------
    value
        The value of a field that holds several.

    Returns
    -------
    object
        The parts, without empty ones, or the value.
    """
    return [part for part in value.split("+") if part] if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(split_at_plus)]
"""Several names in one line of text, with ``+`` between them."""


@dataclass(frozen=True)
class Parameter:
    """One parameter, as the lists show it.

    Parameters
    ----------
    name
        What to write before ``=``.
    default
        Its value unless given, as text: ``"auto"`` where it depends on the data, empty where it must be given.
    allowed
        The values or the range it may have.
    doc
        One line.
    """

    name: str
    default: str
    allowed: str
    doc: str


class Spec(BaseModel):
    """Parameters under a name; the fields are the parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, defer_build=True)

    kind: ClassVar[str]
    name: ClassVar[str]
    citation: ClassVar[str]
    positional: ClassVar[str | None] = None  # the field that a bare value after the colon sets

    @classmethod
    def parse(cls, text: str, more: Mapping[str, Any] | None = None) -> Self:
        """Read ``value,key=value,...``, possibly empty; ``more`` are further parameters, given as values."""
        # A path may itself hold commas and equals signs: of a text that begins with a path, pieces are taken for
        # parameters from the right, while they begin with the name of one, or a path that exists ends before them.
        pieces = text.split(",") if text.strip() else []
        given: dict[str, Any] = {}
        while pieces and (cls._is_parameter(pieces[-1]) or cls._misspelt(pieces)):
            key, _, value = pieces.pop().partition("=")
            cls._put(given, key.strip(), value.strip())
        if pieces and cls.positional is None:
            raise ConfigError(f"{cls.kind} {cls.name!r}: write parameters as key=value, not {pieces[-1].strip()!r}")
        if pieces and cls.positional is not None:
            cls._put(given, cls.positional, ",".join(pieces).strip())
        for key, value in (more or {}).items():
            cls._put(given, key, value)
        return make(cls, given, f"{cls.kind} {cls.name!r}")

    @classmethod
    def _is_parameter(cls, piece: str) -> bool:
        key, equals, _ = piece.partition("=")
        return bool(equals) and (key.strip() in cls.model_fields or not cls._begins_with_path())

    @classmethod
    def _begins_with_path(cls) -> bool:
        return cls.positional is not None and cls.model_fields[cls.positional].annotation is Path

    @classmethod
    def _misspelt(cls, pieces: list[str]) -> bool:
        """Return whether the last piece can only be a parameter of another name: the path ends before it."""
        if "=" not in pieces[-1] or not cls._begins_with_path():
            return False
        # Unlike those of Path, these functions answer for any text, such as one that is too long for a name.
        paths = (os.path.expanduser(",".join(pieces[:end]).strip()) for end in range(1, len(pieces) + 1))
        *shorter, whole = map(os.path.exists, paths)
        return not whole and any(shorter)

    @classmethod
    def _put(cls, given: dict[str, Any], key: str, value: Any) -> None:
        if key in given:
            raise ConfigError(f"{cls.kind} {cls.name!r}: the parameter {key!r} is given twice")
        given[key] = value

    def text(self) -> str:
        """Write the text that :func:`resolve` reads back: parameters at their default are left out."""
        shown: list[str] = []
        for key, info in type(self).model_fields.items():
            value = getattr(self, key)
            if key == self.positional and value is not None:
                shown.insert(0, plain(value))
            elif value != info.default:
                shown.append(f"{key}={plain(value)}")
        return self.name + (":" + ",".join(shown) if shown else "")

    @classmethod
    def parameters(cls) -> tuple[Parameter, ...]:
        """List the parameters, in the order in which they are declared."""
        return tuple(
            Parameter(key, "" if info.is_required() else plain(info.default), allowed(info), info.description or "")
            for key, info in cls.model_fields.items()
        )

    @classmethod
    def summary(cls) -> str:
        """Give the first line of the class's docstring."""
        return (cls.__doc__ or "").strip().splitlines()[0]


Named = TypeVar("Named", bound=Spec)
Made = TypeVar("Made", bound=BaseModel)


def make(model: type[Made], values: Mapping[str, Any], what: str) -> Made:
    """Make a validated object of named values, which may be texts; one sentence names all mistakes, and ``what``.

    Beyond what the fields themselves say, a truth value is not a number, a number is finite, and ``auto`` is how the
    absence of a value is written.
    """
    given: dict[str, Any] = {}
    for key, value in values.items():
        info = model.model_fields.get(key)
        if info is None:
            fields = list(model.model_fields)
            known = f"its parameters are {', '.join(fields)}" if fields else "it has none"
            raise ConfigError(f"{what} has no parameter {key!r}: {nearest(str(key), fields)}{known}")
        if isinstance(value, bool) and not _takes_bool(info.annotation):
            raise ConfigError(f"{what}: {_wrong(key, value, info)}")
        nothing = value == _AUTO if isinstance(value, str) else value is None
        given[key] = None if nothing and _takes_none(info) else value
    try:
        made = model(**given)
    except ValidationError as error:
        raise ConfigError(f"{what}: {_problems(error, model)}") from None
    for key, info in model.model_fields.items():
        value = getattr(made, key)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{what}: {_wrong(key, value, info)}, and finite")
    return made


def _wrong(key: str, value: object, info: FieldInfo) -> str:
    return f"{key} is {value!r}, but must be {allowed(info)}"


def _problems(error: ValidationError, model: type[BaseModel]) -> str:
    found: dict[str, str] = {}
    for item in error.errors(include_url=False):
        key = str(item["loc"][0]) if item["loc"] else ""
        info = model.model_fields.get(key)
        if item["type"] == "missing":
            text = f"the parameter {key!r} must be given"
        elif info is None or item["type"] == "value_error":
            text = str(item["msg"]).removeprefix("Value error, ")
        else:
            text = _wrong(key, item["input"], info)
        found.setdefault(key, text)  # a union reports every one of its members
    return "; ".join(found.values())


def _takes_bool(annotation: Any) -> bool:
    return annotation in (bool, Any) or any(_takes_bool(part) for part in get_args(annotation))


def _takes_none(info: FieldInfo) -> bool:
    kinds = get_args(info.annotation)
    return info.default is None or (type(None) in kinds and str not in kinds)


def resolve(kind: str, text: str, known: Mapping[str, type[Named]], more: Mapping[str, Any] | None = None) -> Named:
    """Make what a line of text names: ``name`` or ``name:value,key=value,...``; ``kind`` is for the error message."""
    name, _, rest = text.partition(":")
    if name.strip() not in known:
        raise UnknownName(kind, name.strip(), known)
    return known[name.strip()].parse(rest, more)


def plain(value: object) -> str:
    """Write a number, text, truth value, path, ``None`` or tuple of these as :meth:`Spec.parse` reads it."""
    if value is None:
        return _AUTO
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "+".join(map(plain, value))
    return str(value)


def allowed(info: FieldInfo) -> str:
    """Say in words which values a field may have, for instance ``integer ≥ 1`` or ``fine or coarse``."""
    return _bounded(_type_words(info.annotation), info.metadata)


def _bounded(words: str, metadata: Iterable[Any]) -> str:
    limits = [limit for entry in metadata for limit in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [
        f"{sign} {getattr(limit, attribute)}"
        for attribute, sign in signs.items()
        for limit in limits
        if getattr(limit, attribute, None) is not None
    ]
    return " ".join([words, " and ".join(bounds)]).strip()


def _type_words(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        return _bounded(_type_words(inner), metadata)
    if get_origin(annotation) is Literal:
        return " or ".join(map(str, get_args(annotation)))
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_type_words(part) for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is tuple:
        return f"{_type_words(get_args(annotation)[0])} values joined by +"
    if get_origin(annotation) is list:
        return f"a list of {_type_words(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return "values by name"
    words = {int: "integer", float: "number", bool: "true or false", str: "text", Path: "path"}
    return words.get(annotation, getattr(annotation, "__name__", str(annotation)))
