"""What a silo tells of its data, so that all can agree on what a sample is and on the statistics that scale it.

Statistics are of the samples that the node will train on, and of no other: which those are follows from the seed, the
fractions and the member's place in the roster, all of which ``federation.yaml`` holds before ``data`` are agreed on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from coterie import options
from coterie.data import Dataset
from coterie.data.bounded_statistics import BoundedColumns
from coterie.data.statistics import Moments, refuse_medians
from coterie.data.table_schema import ColumnSchema
from coterie.errors import ConfigError, DataError
from coterie.federation import agreement
from coterie.federation.agreement import Agreement
from coterie.federation.party_data import own_population, own_table, read_own
from coterie.federation.privacy_ledger import Ledger
from coterie.runs.storage.atomic_files import write_text
from coterie.tasks import TaskName
from coterie.yaml_file import read_yaml

_LEDGER = "statistics"  # what the ledger counts the reply under, beside runs


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Sums(_Frozen):
    """Of one column: how many values there are, their mean, and the sum of their squared deviations from it."""

    count: float = Field(ge=0)
    mean: float
    squares: float = Field(ge=0)


class Noisy(_Frozen):
    """Of one column, what :mod:`coterie.data.bounded_statistics` tells of it, with noise."""

    first: float
    second: float
    there: float | None = None


class NoiseFacts(_Frozen):
    """How much noise there is in a statement, and what its silo's privacy loss is by now."""

    clip: float
    noise: float
    delta: float
    epsilon: float | None = Field(description="over all that the silo has told so far; empty if unbounded")


class Statement(_Frozen):
    """What one silo tells."""

    version: Literal[1] = 1
    member: str = Field(description="who tells")
    place: int = Field(ge=0, description="its place in the roster")
    seed: int = Field(ge=0)
    validation: float = Field(ge=0, lt=1)
    test_fraction: float = Field(gt=0, lt=1)
    task: TaskName
    input_shape: tuple[int, ...] = Field(min_length=1)
    words: bool = Field(False, description="whether inputs are whole numbers (of words)")
    label: str = Field("", description="of a table: the column to predict")
    classes: tuple[str, ...] = ()
    table: dict[str, ColumnSchema] = Field({}, description="of a table: what its columns are")
    scale: bool = Field(True, description="whether inputs are brought to mean 0 and deviation 1")
    rows: int | None = Field(None, ge=0, description="training samples; not told with noise")
    exact: dict[str, Sums] = Field({}, description="statistics by column")
    noisy: dict[str, Noisy] = Field({}, description="statistics by column, with noise")
    privacy: NoiseFacts | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Statement:
        if (self.privacy is None) == (self.rows is None) or (self.privacy is None and self.noisy):
            raise ValueError("privacy belongs to noisy statistics, and rows to exact ones")
        return self

    @classmethod
    def read(cls, path: Path) -> Statement:
        """Read what :meth:`write` wrote."""
        return options.make(cls, read_yaml(path, "statement"), f"statement {path}")

    def write(self, path: Path) -> None:
        """Write it down; every number can be read back to the last bit."""
        plain = self.model_dump(mode="json", exclude_defaults=True)
        text = yaml.safe_dump({"version": 1, **plain}, sort_keys=False, allow_unicode=True, width=120)
        write_text(path, f"# What {self.member} tells of its data, for `coterie federate agree`.\n{text}")


def draft_of(folder: Path) -> tuple[Agreement, Mapping[str, Any]]:
    """Read a ``federation.yaml`` on whose data nobody has agreed yet; give what it says of data so far too."""
    found = read_yaml(folder / agreement.FILE)
    so_far = found.get("data") or {}
    so_far = so_far if isinstance(so_far, dict) else {}
    blank = {"task": "regression", "input_shape": [1]}
    return options.make(Agreement, {**found, "data": blank}, agreement.FILE), so_far


def make_statement(folder: Path, member: str, source: str) -> Statement:
    """Say what a node's own data are; under ``privacy`` with noise, which the node's ledger counts."""
    draft, so_far = draft_of(folder)
    place = draft.number(member)
    table = own_table(source, folder, so_far.get("task"))
    dataset = read_own(source, folder, so_far.get("task"))
    config = draft.experiment(draft.algorithms[0] if draft.algorithms else "fedavg", {})
    mine = own_population(dataset, place, config).shares.train[place]
    common: dict[str, Any] = {
        "member": member,
        "place": place,
        "seed": draft.seed,
        "validation": draft.validation,
        "test_fraction": draft.test_fraction,
        "task": dataset.task,
        "input_shape": dataset.input_shape,
        "words": dataset.x.dtype == torch.int64,
        "classes": dataset.classes,
    }
    if table is not None:
        common |= {
            "label": table.label,
            "table": table.content().schema.columns,
            "scale": table.norm == "own",
            "input_shape": (len(dataset.features),),
        }
    elif dataset.features:
        raise ConfigError(f"data is {source!r}, but columns with names can be agreed on for a table: alone")
    elif dataset.preparation is None:
        common["scale"] = False
    if draft.privacy is None:
        return Statement(**common, rows=len(mine), exact=_sums(dataset, mine))
    if table is not None and table.columns is None:
        raise ConfigError(
            f"data is {source!r}, but under privacy what the columns are must not be read off the samples: agree on a "
            "file for columns= first, with bounds"
        )
    if dataset.task != "regression":
        public = tuple(str(name) for name in so_far.get("classes") or ())
        if not public:
            raise ConfigError(
                f"{agreement.FILE} does not name the classes under data, which under privacy must not be read off the "
                "samples: agree on them first"
            )
        strange = [name for name in dataset.classes if name not in public]
        if strange:
            raise DataError(f"the node's own data have the class {strange[0]!r}, but {agreement.FILE} does not name it")
        common["classes"] = public
    return Statement(**common, **_noisy(dataset, mine, folder, draft, member))


def names_of(dataset: Dataset) -> tuple[str, ...]:
    """Name the entries of axis 1 of the inputs: a table's columns, or channels by number."""
    return dataset.features or tuple(str(place) for place in range(dataset.x.shape[1]))


def _sums(dataset: Dataset, mine: Tensor) -> dict[str, Sums]:
    preparation = dataset.preparation
    if preparation is None:
        return {}
    refuse_medians(preparation)
    moments, gaps = Moments.of(dataset.x, mine), preparation.gaps or ("",) * dataset.x.shape[1]
    return {
        name: Sums(
            count=float(moments.count[place]), mean=float(moments.mean[place]), squares=float(moments.squares[place])
        )
        for place, name in enumerate(names_of(dataset))
        if preparation.scaled[place] or gaps[place] == "mean"
    }


def _noisy(dataset: Dataset, mine: Tensor, folder: Path, draft: Agreement, member: str) -> dict[str, Any]:
    promise = draft.privacy
    assert promise is not None
    found: dict[str, Noisy] = {}
    ledger = Ledger(folder, promise)
    if dataset.preparation is not None:
        refuse_medians(dataset.preparation)
        names = names_of(dataset)
        columns = BoundedColumns(dataset.preparation, names, dataset.x.dtype == torch.uint8)
        size = promise.clip / columns.radius
        told = (columns.told(dataset.x[mine]) * size).unsqueeze(0)
        about = hashlib.blake2b(f"{draft.digest}\0{member}".encode()).digest()
        sent = ledger.release({"statistics": told}, {}, {"statistics": None}, _LEDGER, about)["statistics"][0] / size
        found = {names[place]: Noisy(**parts) for place, parts in columns.apart(sent).items()}
    loss = ledger.epsilon()
    facts = {"clip": promise.clip, "noise": promise.noise, "delta": promise.delta}
    return {
        "noisy": found,
        "privacy": NoiseFacts(**facts, epsilon=loss if loss < float("inf") else None),
    }
