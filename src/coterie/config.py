"""The configuration of an experiment: typed, validated, and complete enough to repeat it.

What only needs the fields, or the names of what there is, imports neither PyTorch nor any method, data set or model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from coterie import options
from coterie.algorithms import registry
from coterie.data.owners import clients_of_the_data
from coterie.data.partitions.registry import SCHEMES
from coterie.data.registry import SOURCES
from coterie.errors import ConfigError, UnknownName
from coterie.models import buffer_policy
from coterie.models.hugging_face_spec import spec_of
from coterie.models.registry import check_name as check_model
from coterie.simulation.attack_registry import ATTACKS
from coterie.tasks import BALANCED, read_weights, written_weights
from coterie.user_code import IMPORT, OBJECT
from coterie.yaml_file import read_yaml

if TYPE_CHECKING:
    import torch

SHORTHANDS = ("local_epochs", "batch_size", "lr")
"""Algorithm settings that have an option of their own on the command line."""


class Kind(StrEnum):
    """What a field of the configuration decides."""

    WHAT = "what"
    """What is computed, and with which numbers: another value gives other results."""

    HOW = "how"
    """How it is computed: another value gives the same results, but for the rounding of a sum."""

    RECORD = "record"
    """What is recorded on the way: another value changes no model."""


Value = TypeVar("Value")
What = Annotated[Value, Kind.WHAT]
How = Annotated[Value, Kind.HOW]
Record = Annotated[Value, Kind.RECORD]
Place = Literal["auto", "device", "host", "disk"]


def _split(value: Any) -> Any:
    return [part.strip() for part in value.split("+")] if isinstance(value, str) else value


Fraction = Annotated[float, Field(ge=0, le=1)]
Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
Fractions = Annotated[tuple[Fraction, ...], BeforeValidator(_split)]
WeightsText = Annotated[str | None, BeforeValidator(written_weights)]


class ExperimentConfig(BaseModel):
    """Everything that decides an experiment's result."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), defer_build=True)

    algorithm: What[str] = Field(description="the method's name, or the path of a Python file that defines one")
    algorithm_sha256: What[str | None] = Field(
        None, description="checksum of the file or class that defines the method"
    )
    settings: What[dict[str, Any]] = Field(default_factory=dict, description="the method's own parameters")
    data: What[str] = Field("digits", description="the data set, with options after a colon")
    partition: What[str] = Field(
        "dirichlet:0.5", description="how samples are dealt out; natural if your data name their clients"
    )
    clients: What[int] = Field(
        20, ge=1, description="how many clients there are; as many as your data name, if they name any"
    )
    rounds: What[int] = Field(50, ge=1, description="how many rounds are played")
    participation: What[float] = Field(1.0, gt=0, le=1, description="fraction of the clients that take part in a round")
    model: What[str] = Field("mlp", description="the model, with options after a colon")
    local: What[str] = Field(
        "",
        description="parameters that stay with their client: names or patterns, between commas; norm stands for "
        "those of all layers that normalise, and head is what the models here call their last layer",
    )
    buffers: What[str] = Field(
        "",
        description="running statistics of BatchNorm layers, and buffers that the model changes: averaged, local or "
        "frozen, or pattern=policy between commas; averaged by default, local in layers that stay with their client",
    )
    loss: What[str | None] = Field(
        None, description="the loss by name, or import:module:function; the task's own by default"
    )
    class_weights: What[WeightsText] = Field(
        None, description="how samples count in training by class: balanced (rare classes more), or as no=1,yes=3"
    )
    metrics: What[Names] = Field((), description="metrics to record, the primary one first; the task's own if none")
    seed: What[int] = Field(1, ge=0, description="the seed of everything that is drawn")
    validation: What[float] = Field(0.1, ge=0, lt=1, description="fraction of a client's training samples held out")
    test_fraction: What[float | None] = Field(None, gt=0, lt=1, description="fraction of a client's samples to test on")
    scarcity: What[int | None] = Field(None, ge=1, description="keep this many training samples per client")
    max_test: What[int | None] = Field(None, ge=1, description="keep at most this many test samples per client")
    scope: What[Literal["federated", "local", "pooled"]] = Field(
        "federated", description="whose training samples scale your inputs and fill gaps (Local: always a client's own)"
    )
    hold_out: What[float] = Field(
        0.0, ge=0, lt=1, description="fraction of clients that never train, then are personalised"
    )
    adapt_rounds: What[int] = Field(
        1, ge=0, description="rounds that held-out clients join for before they are evaluated"
    )
    attack: What[str | None] = Field(None, description="an attack as kind:fraction, for instance gaussian:0.2")
    privacy: What[str | None] = Field(None, description="clip replies and add noise, for instance clip=1.0,noise=0.8")
    eval_every: Record[int] = Field(1, ge=1, description="evaluate after every so many rounds (and after the last)")
    eval_train: Record[bool] = Field(False, description="evaluate on training samples too")
    matrix: Record[bool] = Field(
        False, description="measure each personal model on each client's test samples at the end"
    )
    matrix_every: Record[int | None] = Field(
        None, ge=1, description="measure that matrix at every so many evaluations too"
    )
    s_acc: Record[Fractions] = Field(
        (0.5,), description="fractions of the other clients on which S-acc of the matrix is measured"
    )
    checkpoint_every: How[int | None] = Field(
        None,
        ge=1,
        description="write a checkpoint after every so many rounds (a large state's less often); by default as often "
        "as takes a fiftieth of the time",
    )
    engine: How[Literal["batched", "loop", "sharded"]] = Field(
        "batched", description="how clients are computed (sharded: by all processes that torchrun starts)"
    )
    device: How[str] = Field("cpu", description="where to compute: cpu, cuda, cuda:N, or auto")
    dtype: What[Literal["float32", "float64"]] = Field("float32", description="type of all numbers")
    kernel: How[Literal["auto", "stacked", "vmap", "module"]] = Field(
        "auto", description="how the model is applied to rows"
    )
    convolution: How[Literal["auto", "measured", "fused", "grouped", "unfold", "single"]] = Field(
        "auto", description="how convolutions are computed (measured: as is fastest here, which is then kept)"
    )
    chunk: How[int | None] = Field(None, ge=1, description="clients computed at once; chosen if not given")
    keep: How[Place] = Field("auto", description="where the rows of all clients are kept; auto is the first with room")
    keep_samples: How[Place] = Field("auto", description="where samples are kept; auto is the first with room")
    scratch: How[str | None] = Field(None, description="folder for what is kept on disk; near the run by default")
    compile: How[bool] = Field(False, description="compile the clients' steps with torch.compile")
    precision: What[Literal["float32", "tf32", "bf16"]] = Field(
        "float32", description="how a GPU rounds what it multiplies (tf32 and bf16 are faster and less exact)"
    )
    threads: How[int | None] = Field(
        None, ge=1, le=1024, description="CPU threads; if not given, as many as pay, up to PyTorch's own choice"
    )

    @model_validator(mode="after")
    def _consistent(self) -> ExperimentConfig:
        given = {"kernel": self.kernel != "auto", "convolution": self.convolution != "auto"}
        given |= {"chunk": self.chunk is not None, "compile": self.compile, "precision": self.precision != "float32"}
        if self.engine == "loop" and any(given.values()):
            names = ", ".join(name for name, is_given in given.items() if is_given)
            raise ValueError(f"engine=loop contradicts {names}, which only engine=batched and engine=sharded have")
        if not re.fullmatch(r"cpu|auto|cuda(:\d+)?", self.device):
            raise ValueError(f"device is {self.device!r}, but must be cpu, cuda, cuda:N or auto")
        if self.class_weights not in (None, BALANCED):
            read_weights(self.class_weights)
        buffer_policy.parse(self.buffers)
        if len(set(self.metrics)) != len(self.metrics):
            raise ValueError(f"metrics are {'+'.join(self.metrics)}, but each must be named once")
        if len(set(self.s_acc)) != len(self.s_acc):
            raise ValueError(f"s_acc is {'+'.join(map(str, self.s_acc))}, but each fraction must be given once")
        if not self.matrix and (self.matrix_every is not None or self.s_acc != (0.5,)):
            raise ValueError("matrix_every and s_acc say how the matrix is measured: give matrix=true (--matrix) too")
        return self

    @property
    def local_patterns(self) -> tuple[str, ...]:
        """The patterns of ``local``, one by one."""
        return tuple(part.strip() for part in self.local.split(",") if part.strip())

    def torch_device(self) -> torch.device:
        """Give the device to compute on.

        Returns
        -------
        torch.device
            The device.

        Raises
        ------
        ConfigError
            If it is not there.
        """
        import torch

        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if self.device == "auto":
            return torch.device("cuda" if there else "cpu")
        device = torch.device(self.device)
        if device.type == "cuda" and (device.index or 0) >= there:
            found = f"only {there} CUDA device(s)" if there else "no CUDA device"
            raise ConfigError(f"device is {self.device!r}, but PyTorch finds {found} here: use --device cpu or auto")
        return device

    def plain(self) -> dict[str, Any]:
        """Give the configuration as plain YAML types, the method's parameters complete with defaults.

        Returns
        -------
        dict of str to object
            What :func:`from_mapping` takes.
        """
        plain = self.model_dump(mode="json")
        plain["settings"] = registry.make(self.algorithm, self.settings).settings()
        return plain


def from_mapping(values: Mapping[str, Any]) -> ExperimentConfig:
    """Make a configuration of named values, as a YAML file or keyword arguments give them.

    ``lr``, ``local_epochs`` and ``batch_size`` may stand beside the others instead of under ``settings``. Relative
    paths are made absolute, so that the configuration means the same wherever it is read again.

    Parameters
    ----------
    values
        The values.

    Returns
    -------
    ExperimentConfig
        The configuration; names and the method's parameters have been checked too.

    Raises
    ------
    UnknownName
        If there is no such field.
    ConfigError
        If a value has the wrong type or range, or contradicts another.
    """
    values = _gathered(values, "settings")
    if values.get("algorithm") is None:
        raise ConfigError("algorithm is missing: name the method to run")
    registry.refuse_missing(str(values["algorithm"]), values.get("algorithm_sha256"))
    check_names(values)
    for name in values:
        if name not in ExperimentConfig.model_fields:
            asked = registry.get(str(values["algorithm"]))
            if name in asked.model_fields:
                raise ConfigError(f"{name} is a parameter of {asked.title}: put it under settings (--set {name}=...)")
            raise UnknownName("setting", str(name), [*ExperimentConfig.model_fields, *SHORTHANDS])
    config = options.make(ExperimentConfig, values, "experiment")
    method = registry.make(config.algorithm, config.settings)
    if config.matrix and not method.has_personal:
        raise ConfigError(f"matrix=true measures personal models, and {method.title} has none")
    _check_specs(config)
    given = {name for name in ("partition", "clients") if values.get(name) is not None}
    places = {
        "data": _with_absolute_paths(config.data),
        "model": config.model if (spec := spec_of(config.model)) is None else spec.with_absolute_folder().text(),
        **clients_of_the_data(config.data, config.partition, given),
        "privacy": None if config.privacy is None else _written_privacy(config.privacy),
        "scratch": None if config.scratch is None else str(Path(config.scratch).expanduser().absolute()),
        **registry.recorded(config.algorithm, config.algorithm_sha256),
    }
    return config.model_copy(update=places)


def check_names(values: Mapping[str, Any]) -> None:
    """Refuse a method, data set, partition, model or attack that does not exist; nothing is imported for it.

    Parameters
    ----------
    values
        Fields of the configuration, those that are there.

    Raises
    ------
    UnknownName
        If one of them begins with a name that is not known.
    """
    if "algorithm" in values:
        registry.check(str(values["algorithm"]))
    for field, kind, known in (
        ("data", "data set", SOURCES),
        ("partition", "partition", SCHEMES),
        ("attack", "attack", ATTACKS),
    ):
        value = values.get(field)
        name = value.partition(":")[0].strip() if isinstance(value, str) else None
        if name is not None and name not in known:
            raise UnknownName(kind, name, known)
    if isinstance(values.get("model"), str):
        check_model(values["model"])


def fields(kind: Literal["what", "how", "record"]) -> frozenset[str]:
    """Name the fields of the configuration that decide one kind of thing.

    Parameters
    ----------
    kind
        Whether they decide *what* is computed, *how* it is computed, or what is *recorded*.

    Returns
    -------
    frozenset of str
        Their names.

    Examples
    --------
    >>> "threads" in fields("how")
    True
    """
    return frozenset(name for name, info in ExperimentConfig.model_fields.items() if kind_of(info) == kind)


def kind_of(field: FieldInfo) -> Kind:
    """Give what a field of the configuration decides.

    Parameters
    ----------
    field
        The field, as ``ExperimentConfig.model_fields`` has it.

    Returns
    -------
    Kind
        Its kind.
    """
    return next(entry for entry in field.metadata if isinstance(entry, Kind))


def _check_specs(config: ExperimentConfig) -> None:
    """Read what is written in one line of text: attack, metrics, loss."""
    from coterie.evaluation import metrics as metric_table
    from coterie.models import problem
    from coterie.simulation import attacks

    if config.attack is not None:
        attacks.parse(config.attack)
    for metric in config.metrics:
        metric_table.get(metric)
    if config.loss is not None and config.loss not in problem.LOSSES and not config.loss.startswith((IMPORT, OBJECT)):
        raise UnknownName("loss", config.loss, [*problem.LOSSES, f"{IMPORT}module:function"])


def _written_privacy(text: str) -> str:
    from coterie.simulation import privacy

    return privacy.parse(text).written()


def _gathered(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Put shorthands under ``settings``."""
    out = dict(values)
    settings = out.pop("settings", None)
    if settings is None:
        settings = {}
    if not isinstance(settings, Mapping):
        raise ConfigError(f"settings is {settings!r}, but must map the method's parameters to values")
    settings = dict(settings)
    for name in SHORTHANDS:
        value = out.pop(name, None)
        if value is None:
            continue
        if name in settings and settings[name] != value:
            raise ConfigError(f"{name} is given twice: as {value!r} and, in {where}, as {settings[name]!r}")
        settings[name] = value
    return {**out, "settings": settings}


def _with_absolute_paths(text: str) -> str:
    source = options.resolve("data set", text, SOURCES)
    paths = {name: value.expanduser().absolute() for name, value in source if isinstance(value, Path)}
    return source.model_copy(update=paths).text()


def from_yaml(path: Path, overrides: Mapping[str, Any] | None = None) -> ExperimentConfig:
    """Read a configuration from a YAML file.

    Parameters
    ----------
    path
        The file.
    overrides
        Values that stand over the file's; ``settings`` are merged.

    Returns
    -------
    ExperimentConfig
        The configuration.
    """
    ours, theirs = _gathered(read_yaml(path, "experiment file"), "its settings"), _gathered(overrides or {}, "--set")
    return from_mapping({**ours, **theirs, "settings": {**ours["settings"], **theirs["settings"]}})
