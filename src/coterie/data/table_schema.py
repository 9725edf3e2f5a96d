"""What a table's columns are: found out from the table, or written down, and how they become numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from coterie import options
from coterie.data.dataset import GapFilling, Preparation
from coterie.yaml_file import read_yaml

MOST_TEXTS = 100  # a column with more different texts is an identifier or free text, which one-hot columns do not help
_MOSTLY = 0.5  # a column of texts of which more than this part are numbers was meant to hold numbers
_GAPS = 6  # up to so many different texts among numbers may all be ways to write a gap
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}([T ].*)?")
_TRUTHS = {"true": 1.0, "false": 0.0}
_NAMED = 3  # unknown categories of a column that are named

MISSING = " is missing"
"""How the name of a column ends that says where another has gaps."""

Floats = npt.NDArray[np.float64]


def _days(value: Any) -> Any:
    """Make days since 1970 of a date, as columns of dates have them; leave anything else as it is."""
    if isinstance(value, str | date):
        when = pd.Timestamp(value)
        when = when.tz_localize("UTC") if when.tzinfo is None else when
        return (when - pd.Timestamp(0, tz="UTC")) / pd.Timedelta(days=1)
    return value


Bound = Annotated[float, BeforeValidator(_days)]
Bounds = tuple[Bound, Bound]


class ColumnSchema(BaseModel):
    """What one column is, and what is done about its gaps."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["number", "category", "boolean", "date"] = Field(description="what its values are")
    gaps: Literal["none", "mean", "median", "zero", "own"] = Field(
        "none", description="what fills a gap; own: a category of its own; none: there may be no gap"
    )
    indicator: bool = Field(True, description="whether a column of its own says where gaps were")
    categories: tuple[str, ...] = Field((), description="the categories, of which each becomes a column")
    missing: tuple[str, ...] = Field((), description="texts that stand for a gap, besides blanks, NA and the like")
    bounds: Bounds | None = Field(
        None, description="of a number or a date, between which values count where statistics are told with noise"
    )

    @model_validator(mode="after")
    def _consistent(self) -> ColumnSchema:
        if (self.kind == "category") != bool(self.categories):
            raise ValueError(
                f"kind is {self.kind}, which {'needs' if self.kind == 'category' else 'has no'} categories"
            )
        if self.kind == "category" and self.gaps not in ("none", "own"):
            raise ValueError(f"gaps is {self.gaps}, but must be none or own in a category")
        if self.kind != "category" and self.gaps == "own":
            raise ValueError(f"gaps is own, but must be none, mean, median or zero in a {self.kind}")
        if self.bounds is not None and self.kind not in ("number", "date"):
            raise ValueError(f"bounds are of a number or a date, not of a {self.kind}")
        if self.bounds is not None and not self.bounds[0] < self.bounds[1]:
            raise ValueError(f"bounds are {list(self.bounds)}, but the second must be larger than the first")
        return self


class TableSchema(BaseModel):
    """What the columns are from which something is predicted, in their order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    columns: dict[str, ColumnSchema] = Field(description="the columns by name")

    @classmethod
    def read(cls, path: Path) -> TableSchema:
        """Read a schema that was written down."""
        found = read_yaml(path, "schema")
        columns = found.get("columns")
        if not isinstance(columns, dict) or set(found) != {"columns"}:
            return options.make(cls, found, f"schema {path}")
        made = {
            str(name): options.make(ColumnSchema, value if isinstance(value, dict) else {}, f"schema {path}, {name}")
            for name, value in columns.items()
        }
        return cls(columns=made)

    def with_missing(self, missing: tuple[str, ...]) -> TableSchema:
        """Add texts that stand for a gap in every column."""
        columns = {
            name: column.model_copy(update={"missing": tuple(dict.fromkeys((*column.missing, *missing)))})
            for name, column in self.columns.items()
        }
        return TableSchema(columns=columns)

    def write(self, path: Path) -> None:
        """Write it down, so that :meth:`read` reads it back."""
        plain = {name: column.model_dump(mode="json", exclude_defaults=True) for name, column in self.columns.items()}
        text = yaml.safe_dump({"columns": plain}, sort_keys=False, allow_unicode=True)
        path.write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class Feature:
    """One column as a model sees it: its name, its values with NaN for gaps, and what is done to it."""

    name: str
    values: Floats
    scaled: bool = False
    gaps: GapFilling = ""
    bounds: tuple[float, float] | None = None


def with_gaps(column: pd.Series[Any], missing: tuple[str, ...]) -> pd.Series[Any]:
    """Make gaps of blank texts and of those that are said to stand for one; if numbers are left, give these."""
    if column.dtype != object and not pd.api.types.is_string_dtype(column.dtype):
        return column
    gaps = {"", *(text.strip() for text in missing)}
    found = column.map(lambda value: isinstance(value, str) and value.strip() in gaps).to_numpy(dtype=bool)
    if not found.any():
        return column
    rest = column.mask(found)
    numbers = pd.to_numeric(rest, errors="coerce")
    return numbers if numbers.count() == rest.count() else rest


def infer(frame: pd.DataFrame, missing: tuple[str, ...] = ()) -> tuple[TableSchema, list[str]]:
    """Find out what the columns of a table with gaps are; give what cannot be used too, in sentences.

    ``missing`` is what stood for gaps, which the schema keeps for rows that are read later.
    """
    columns: dict[str, ColumnSchema] = {}
    problems: list[str] = []
    for name in frame.columns:
        found = _infer_column(frame[name], str(name))
        if isinstance(found, str):
            problems.append(found)
        else:
            columns[str(name)] = found
    return TableSchema(columns=columns).with_missing(missing), problems


def _infer_column(column: pd.Series[Any], name: str) -> ColumnSchema | str:
    there = column.dropna()
    if there.empty:
        return f"column {name!r} has no value at all: give drop={name}"
    has_gaps = len(there) < len(column)
    kind = _kind_of(there)
    if kind != "category":
        fill: Literal["none", "mean", "zero"] = "zero" if kind == "boolean" else "mean"
        return ColumnSchema(kind=kind, gaps=fill if has_gaps else "none")
    texts = there.astype(str)
    numeric = pd.to_numeric(texts, errors="coerce")
    if numeric.notna().all():  # numbers in a column of objects, as a data frame may have them
        return ColumnSchema(kind="number", gaps="mean" if has_gaps else "none")
    for what, fits in (("number", numeric.notna()), ("date", texts.str.fullmatch(_DATE))):
        if fits.mean() > _MOSTLY:
            return _mixed(texts[~fits], int(fits.sum()), what, name)
    found = sorted(texts.unique())
    if len(found) > MOST_TEXTS:
        return (
            f"there are {len(found)} different texts in column {name!r}, more than {MOST_TEXTS}: give drop={name}, "
            "or make numbers of them"
        )
    return ColumnSchema(kind="category", gaps="own" if has_gaps else "none", categories=tuple(found))


def _mixed(others: pd.Series[Any], count: int, what: str, name: str) -> str:
    row, found = others.index[0], others.str.strip().unique()
    if len(found) <= _GAPS and not any("+" in text or "," in text for text in found):
        advice = f"give missing={'+'.join(found)} if they stand for gaps, or make {what}s of them"
    else:
        advice = f"make {what}s of them, or leave them empty"
    such = f"such as {others[row]!r} in row {row}"
    return f"column {name!r} has {count} {what}s and {len(others)} texts, {such}: {advice}"


def _kind_of(there: pd.Series[Any]) -> Literal["number", "category", "boolean", "date"]:
    if pd.api.types.is_bool_dtype(there.dtype):
        return "boolean"
    if pd.api.types.is_numeric_dtype(there.dtype):
        return "number"
    if pd.api.types.is_datetime64_any_dtype(there.dtype):
        return "date"
    texts = there.astype(str)
    if texts.str.lower().isin(list(_TRUTHS)).all():
        return "boolean"
    return "date" if texts.str.fullmatch(_DATE).all() else "category"


def encode(frame: pd.DataFrame, schema: TableSchema) -> tuple[list[Feature], list[str]]:
    """Make numbers of a table; give what does not fit the schema too, in sentences."""
    features: list[Feature] = []
    problems = [f"there is no column {name!r}, which the schema names" for name in schema.columns if name not in frame]
    problems += [
        f"column {name!r} is not in the schema: give drop={name}"
        for name in frame.columns
        if name not in schema.columns
    ]
    for name, column in schema.columns.items():
        if name not in frame:
            continue
        given = with_gaps(frame[name], column.missing)
        gaps = given.isna().to_numpy()
        if column.kind == "category":
            features += _one_hot(given, name, column.categories)
        else:
            values = _numbers(given, column.kind)
            problems += _wrong(given, values, gaps, name, column.kind)
            fill: GapFilling = column.gaps if column.gaps in ("mean", "median", "zero") else ""
            features.append(Feature(name, values, column.kind != "boolean", fill, column.bounds))
        if column.gaps == "none":
            if gaps.any():
                where = f"column {name!r} has a gap in row {int(gaps.argmax())}"
                problems.append(f"{where}, but none are allowed there: fill it, or leave the row out")
        elif column.indicator:
            features.append(Feature(f"{name}{MISSING}", gaps.astype(np.float64)))
    return features, problems


def unknown_categories(frame: pd.DataFrame, schema: TableSchema) -> list[str]:
    """Say in sentences which categories of a table the schema does not have: they count as none of those it has."""
    said = []
    for name, column in schema.columns.items():
        if column.kind != "category" or name not in frame:
            continue
        given = with_gaps(frame[name], column.missing)
        known = np.sum([each.values for each in _one_hot(given, name, column.categories)], axis=0) > 0
        unknown = given[given.notna().to_numpy() & ~known].astype(str)
        if len(unknown):
            kinds = unknown.unique().tolist()
            some = ", ".join(repr(one) for one in kinds[:_NAMED]) + (" and more" if len(kinds) > _NAMED else "")
            rows = f"{len(unknown):,} rows" if len(unknown) > 1 else "one row"
            said.append(f"column {name!r} has {some} in {rows}, which counts as none of the known categories there")
    return said


def features_of(schema: TableSchema) -> list[Feature]:
    """Give the columns that a table of this schema becomes, without values."""
    empty = pd.DataFrame({name: pd.Series(dtype=object) for name in schema.columns})
    return encode(empty, schema)[0]


def preparation_of(features: list[Feature], scale: bool) -> Preparation | None:
    """Say what is to be done to columns with statistics; ``scale`` is whether numbers are scaled at all."""
    scaled = tuple(each.scaled and scale for each in features)
    gaps = tuple(each.gaps for each in features)
    bounds = tuple(each.bounds for each in features)
    if not any(scaled) and not any(gaps):
        return None
    return Preparation(scaled, gaps if any(gaps) else (), bounds if any(bounds) else ())


def _one_hot(column: pd.Series[Any], name: str, categories: tuple[str, ...]) -> list[Feature]:
    there = column.notna().to_numpy()
    values, wanted = column.astype(str).to_numpy(dtype=object), list[Any](categories)
    for kind in ("number", "boolean"):  # whole numbers beside gaps are read as 1.0, and True may be written as true
        known = _numbers(pd.Series(wanted, dtype=object), kind)
        if not np.isnan(known).any():
            values, wanted = _numbers(column, kind).astype(object), known.tolist()
            break
    # A category that the schema does not have is 0 in all of them.
    return [
        Feature(f"{name}={one}", ((values == value) & there).astype(np.float64))
        for one, value in zip(categories, wanted, strict=True)
    ]


def _numbers(column: pd.Series[Any], kind: str) -> Floats:
    if kind == "date":
        # Days since 1970: as float32 they tell minutes apart.
        when = pd.to_datetime(column, format="ISO8601", errors="coerce", utc=True)
        return _floats((when - pd.Timestamp(0, tz="UTC")) / pd.Timedelta(days=1))
    if kind == "boolean" and not pd.api.types.is_numeric_dtype(column.dtype):
        return _floats(column.astype(str).str.lower().map(_TRUTHS))
    return _floats(pd.to_numeric(column, errors="coerce"))


def _floats(column: pd.Series[Any]) -> Floats:
    return np.asarray(column.to_numpy(dtype=np.float64, na_value=np.nan), dtype=np.float64)


def _wrong(column: pd.Series[Any], values: Floats, gaps: npt.NDArray[np.bool_], name: str, kind: str) -> list[str]:
    problems = []
    infinite, unread = np.isinf(values), np.isnan(values) & ~gaps
    if infinite.any():
        problems.append(f"there is an infinite value in column {name!r}, row {int(infinite.argmax())}")
    if unread.any():
        row = int(unread.argmax())
        problems.append(f"column {name!r} has {column.iloc[row]!r} in row {row}, which is no {kind}")
    return problems
