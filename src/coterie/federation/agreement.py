"""What all parties of a federation have agreed on: ``federation.yaml``, the same file at the server and at every node.

It fixes who takes part (the roster), what a sample is (the data schema), the model, how each node splits its own
samples, and which methods may be run. Its digest travels with every message: a node or a server whose file says
something else is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from coterie import options
from coterie.algorithms import registry
from coterie.config import ExperimentConfig, WeightsText, from_mapping
from coterie.data.table_schema import ColumnSchema, TableSchema, features_of
from coterie.errors import ConfigError
from coterie.simulation.privacy import Privacy
from coterie.tasks import BALANCED, TASKS, TaskName
from coterie.user_code import IMPORT
from coterie.yaml_file import read_yaml

FILE = "federation.yaml"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Member(_Frozen):
    """One party of the roster; its place in the list is its client number."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="the silo's name")
    key: str | None = Field(None, description="its node's public key, as in an OpenSSH .pub file")


class Origin(_Frozen):
    """Whose training samples statistics are of: who told them, and how they had split their samples."""

    members: tuple[str, ...] = Field(min_length=1, description="the members, in the order of the roster")
    seed: int = Field(description="the seed by which they split")
    validation: float = Field(description="fraction of training samples held out")
    test_fraction: float = Field(description="fraction of samples to test on")


class Schema(_Frozen):
    """What a sample is; every node's own data must agree."""

    task: TaskName = Field("multiclass", description="what is to be predicted")
    input_shape: tuple[int, ...] = Field(min_length=1, description="shape of one sample, as [channels, height, width]")
    words: bool = Field(False, description="inputs are whole numbers (of words), which reach the model as they are")
    classes: tuple[str, ...] = Field((), description="the classes' names, in the order of the model's outputs")
    columns: tuple[str, ...] = Field((), description="of a table: its columns in order, those of texts as name=text")
    mean: tuple[float, ...] = Field((0.0,), min_length=1, description="subtracted from inputs, one or one per channel")
    std: tuple[float, ...] = Field((1.0,), min_length=1, description="what inputs are then divided by")
    fill: tuple[float, ...] = Field((), description="of a table: what stands for a gap in each column; mean if empty")
    table: dict[str, ColumnSchema] = Field({}, description="of a table: what its columns are; each node's own if empty")
    told: Origin | None = Field(None, description="whose samples mean, std and fill are of, if they told")

    @model_validator(mode="after")
    def _consistent(self) -> Schema:
        if not TASKS[self.task].allows(len(self.classes)):
            raise ValueError(f"classes are {len(self.classes)}, which does not fit a {self.task} task")
        for what, names in (("classes", self.classes), ("columns", self.columns)):
            if len(set(names)) != len(names):
                raise ValueError(f"{what} must each be named once")
        if self.columns and self.input_shape != (len(self.columns),):
            raise ValueError(f"columns are {len(self.columns)}, but input_shape is {list(self.input_shape)}")
        if self.fill and len(self.fill) != len(self.columns):
            raise ValueError(f"columns are {len(self.columns)}, but fill has {len(self.fill)} numbers")
        if self.table and [each.name for each in features_of(TableSchema(columns=self.table))] != list(self.columns):
            raise ValueError("columns are not those that table comes to: take both from `coterie federate agree`")
        if len(self.mean) != len(self.std) or any(value <= 0 for value in self.std):
            raise ValueError("mean and std must have the same length, and each std must be positive")
        if self.words and (self.columns or set(self.mean) != {0.0} or set(self.std) != {1.0}):
            raise ValueError("words are neither columns of a table nor scaled: leave columns, mean and std out")
        if any(side < 1 for side in self.input_shape):
            raise ValueError(f"input_shape is {list(self.input_shape)}, but its sides must be at least 1")
        return self

    @property
    def outputs(self) -> int:
        """Outputs that a model needs."""
        return TASKS[self.task].outputs(len(self.classes))


class Promise(Privacy):
    """What nodes do to every reply before they send it, and which metrics they send with it."""

    budget: float | None = Field(None, gt=0, description="privacy loss ε over all runs at which a node stops replying")
    tell_metrics: bool = Field(False, description="send the server the metrics of models on a node's own samples")


class Agreement(_Frozen):
    """What ``federation.yaml`` holds."""

    version: Literal[1] = Field(1, description="version of this file's form")
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="the federation's name")
    members: tuple[Member, ...] = Field(min_length=1, description="the roster; a member's place is its client number")
    data: Schema = Field(description="what a sample is")
    model: str = Field("mlp", description="the model, with options after a colon")
    local: str = Field("", description="parameters that never leave a node, by patterns of their names")
    buffers: str = Field("", description="running statistics of BatchNorm layers: averaged, local or frozen")
    loss: str | None = Field(None, description="the loss by name, or import:module:function")
    class_weights: WeightsText = Field(
        None, description="how samples count in training by class: balanced (by a node's own counts), or as no=1,yes=3"
    )
    metrics: tuple[str, ...] = Field((), description="metrics to record, the primary one first")
    dtype: Literal["float32", "float64"] = Field("float32", description="type of all numbers")
    seed: int = Field(1, ge=0, description="the seed of everything that is drawn")
    validation: float = Field(0.1, ge=0, lt=1, description="fraction of a node's training samples held out")
    test_fraction: float = Field(0.2, gt=0, lt=1, description="fraction of a node's samples to test on")
    algorithms: tuple[str, ...] = Field(
        (), description="methods that nodes agree to run, by name or import:module:Class; all of the library's if empty"
    )
    privacy: Promise | None = Field(None, description="clipping and noise on what nodes send; none by default")
    threads: int = Field(1, ge=1, le=1024, description="CPU threads of every party; decides the last bits of results")
    message_limit_mb: int = Field(512, ge=1, description="no message may be larger")

    @model_validator(mode="after")
    def _consistent(self) -> Agreement:
        names = [member.name for member in self.members]
        if len(set(names)) != len(names):
            raise ValueError("members must have different names")
        keys = [member.key for member in self.members if member.key is not None]
        if len({_bare(key) for key in keys}) != len(keys):
            raise ValueError("members must have different keys")
        if self.data.told is not None:
            told = self.data.told
            if list(told.members) != names:
                raise ValueError(
                    f"members are {', '.join(names)}, but data has statistics that {', '.join(told.members)} told: "
                    "agree on data anew"
                )
            for field in ("seed", "validation", "test_fraction"):
                if getattr(self, field) != getattr(told, field):
                    raise ValueError(
                        f"{field} is {getattr(self, field)}, but data has statistics of samples that were split with "
                        f"{getattr(told, field)}: agree on data anew"
                    )
        return self

    @property
    def digest(self) -> str:
        """Names the agreement: equal for two files that say the same."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16, person=b"coterie fed").hexdigest()

    @property
    def limit(self) -> int:
        """Bytes that a message may have."""
        return self.message_limit_mb * 2**20

    def number(self, name: str) -> int:
        """Give a member's client number: its place in the roster."""
        names = [member.name for member in self.members]
        if name not in names:
            raise ConfigError(f"{name!r} is not in the roster of {FILE}: members are {', '.join(names)}")
        return names.index(name)

    def methods(self) -> list[str]:
        """Name the methods that ``algorithms`` agrees on; those of the members' own are imported and made known."""
        return [registry.imported(spec).name if spec.startswith(IMPORT) else spec for spec in self.algorithms]

    def experiment(self, algorithm: str, settings: Mapping[str, Any], **others: Any) -> ExperimentConfig:
        """Make the configuration of a run; ``others`` are further fields of it, such as ``rounds``.

        It is that of a simulation with the loop engine on a CPU in which each client has its own data, so that the
        rounds of a federation and of a simulation are the same. Fields that ``federation.yaml`` fixes are taken from
        there.
        """
        if registry.is_file(algorithm):
            raise ConfigError(
                f"algorithm is {algorithm!r}, but a federation runs registered methods, not files: name yours in the "
                f"algorithms of {FILE} as import:package.module:Class"
            )
        if others.get("matrix"):
            raise ConfigError("matrix is true, but in a federation nobody has everybody's samples: leave it out")
        if self.algorithms and algorithm not in (methods := self.methods()):
            allowed = ", ".join(methods)
            raise ConfigError(f"algorithm is {algorithm!r}, but {FILE} agrees on {allowed} only")
        fixed = {
            "data": "npz:each-node-its-own",
            "partition": "natural",
            "clients": len(self.members),
            "model": self.model,
            "local": self.local,
            "buffers": self.buffers,
            "loss": self.loss,
            "class_weights": self.class_weights,
            "metrics": self.metrics,
            "seed": self.seed,
            "validation": self.validation,
            "test_fraction": self.test_fraction,
            "dtype": self.dtype,
            "engine": "loop",
            "device": "cpu",
            "threads": self.threads,
            "checkpoint_every": 1,
            "privacy": None if self.privacy is None else self.privacy.written(),
        }
        if self.class_weights == BALANCED:
            fixed["scope"] = "local"  # what a node can count by itself
        return from_mapping({"algorithm": algorithm, "settings": dict(settings), **fixed, **others})


def read(path: Path) -> Agreement:
    """Read ``federation.yaml``; its ``data`` may be the name of a file beside it that holds them."""
    found = read_yaml(path)
    if isinstance(found.get("data"), str):
        found["data"] = read_yaml(path.parent / found["data"], "schema")
    return options.make(Agreement, found, FILE)


def same_key(first: str, second: str) -> bool:
    """Say whether two OpenSSH public keys are the same, whatever their comments."""
    return _bare(first) == _bare(second)


def _bare(key: str) -> tuple[str, ...]:
    return tuple(key.split()[:2])
