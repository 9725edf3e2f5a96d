"""Cells of a recipe's tables, and the little language in which criteria name them.

::

    address := METHOD | METHOD "|" READING | METHOD "|" READING "|" SETTING
    term    := address | address " minus " address | address " over " address

``METHOD`` is what the plan calls a method, ``READING`` one of the part's readings (the first if left out), ``SETTING``
the label of a point of the plan's grid (each in turn if left out). ``*`` for ``METHOD`` stands for every method of the
part that the criterion does not name.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Self

from pydantic import GetCoreSchemaHandler
from pydantic_core import core_schema

EVERY_OTHER = "*"
"""Stands for all methods that a criterion does not name."""

_BETWEEN = "|"
_OPERATIONS = ("minus", "over")
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"


@dataclass(frozen=True)
class CellName:
    """Which cell of which part.

    Parameters
    ----------
    part
        The part's name.
    setting
        The label of the point of the grid, empty if the plan has no grid.
    method
        What the plan calls the method.
    reading
        The reading's name.
    """

    part: str
    setting: str
    method: str
    reading: str


@dataclass(frozen=True)
class Address:
    """A cell within a part, as a recipe writes it.

    Parameters
    ----------
    method
        The method, or ``*``.
    reading
        The reading; empty for the part's first.
    setting
        The label of the point of the grid; empty for each in turn.
    """

    method: str
    reading: str = ""
    setting: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``METHOD``, ``METHOD | READING`` or ``METHOD | READING | SETTING``."""
        pieces = [piece.strip() for piece in text.split(_BETWEEN)]
        if len(pieces) > 3 or not pieces[0]:
            raise ValueError(f"the cell {text!r} must be METHOD, METHOD | READING or METHOD | READING | SETTING")
        return cls(*pieces)

    def __str__(self) -> str:
        pieces = [self.method, self.reading, self.setting]
        while not pieces[-1]:
            pieces.pop()
        return f" {_BETWEEN} ".join(pieces)


@dataclass(frozen=True)
class Term:
    """What a criterion compares: a cell, the difference of two, or their ratio.

    Parameters
    ----------
    cells
        One cell or two.
    operation
        ``"minus"``, ``"over"``, or empty for a single cell.
    """

    cells: tuple[Address, ...]
    operation: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an address, or two with ``minus`` or ``over`` between them."""
        pieces = re.split(rf"\s({'|'.join(_OPERATIONS)})\s", text)
        if len(pieces) > 3:
            raise ValueError(f"{text!r} must be one cell, or two with minus or over between them")
        return cls(tuple(Address.parse(piece) for piece in pieces[::2]), pieces[1] if len(pieces) == 3 else "")

    def __str__(self) -> str:
        return f" {self.operation} ".join(map(str, self.cells))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Let a recipe's file write terms as text."""
        made = core_schema.no_info_after_validator_function(cls.parse, core_schema.str_schema())
        return core_schema.json_or_python_schema(
            json_schema=made, python_schema=made, serialization=core_schema.to_string_ser_schema()
        )


@dataclass(frozen=True)
class PaperNumber:
    """A number that a paper prints.

    Parameters
    ----------
    mean
        The number.
    std
        What stands behind the plus-minus sign, ``None`` if nothing does.
    """

    mean: float
    std: float | None = None

    @classmethod
    def parse(cls, given: Any) -> Self:
        """Read a number, or a text ``MEAN±STD``."""
        if isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given):
            return cls(float(given))
        found = re.fullmatch(rf"\s*({_NUMBER})\s*(?:±\s*({_NUMBER})\s*)?", given) if isinstance(given, str) else None
        if found is None:
            raise ValueError(f"the number {given!r} must be a number, or MEAN±STD")
        return cls(float(found[1]), None if found[2] is None else float(found[2]))

    def __str__(self) -> str:
        return f"{self.mean:g}" + ("" if self.std is None else f"±{self.std:g}")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Let a recipe's file write numbers as the paper prints them."""
        made = core_schema.no_info_plain_validator_function(cls.parse)
        return core_schema.json_or_python_schema(
            json_schema=made, python_schema=made, serialization=core_schema.to_string_ser_schema()
        )
