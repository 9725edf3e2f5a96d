"""The samples as each party sees them: a node its own and nobody else's, the server none.

Clients keep their numbers: a node's population has as many clients as the federation, all but its own without samples,
so that streams, sizes and class counts are those of a simulation of the whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coterie import data, models, options, randomness
from coterie.algorithms import registry
from coterie.compute.engine import Engine
from coterie.compute.single_values import refuse_single_values
from coterie.config import ExperimentConfig
from coterie.data import Dataset
from coterie.data.dataset import GapFilling, Preparation
from coterie.data.partitions import Ragged, Shares
from coterie.data.registry import SOURCES
from coterie.data.statistics import prepared
from coterie.data.table import TableSource
from coterie.data.table_schema import MISSING, ColumnSchema, TableSchema
from coterie.errors import ConfigError, DataError
from coterie.federation.agreement import FILE, Agreement, Schema
from coterie.models.problem import Problem
from coterie.runs.builder import Population, Roles, make_engine
from coterie.simulation.simulation import Simulation
from coterie.user_code import IMPORT

_TABLES = (".csv", ".parquet")


def load_own(source: str, folder: Path, agreement: Agreement) -> Dataset:
    """Load a node's own samples and see that they are what was agreed on.

    The source is a folder of images, an ``.npz`` file, a data set's text such as ``table:path=a.csv,label=outcome``, or
    ``import:package.module:function`` for a function that takes nothing and gives a :class:`~coterie.data.Dataset`.
    """
    schema = agreement.data
    return _agreed(read_own(source, folder, schema.task, schema.table), agreement)


def read_own(
    source: str, folder: Path, task: str | None = None, table: Mapping[str, ColumnSchema] | None = None
) -> Dataset:
    """Load a node's own samples as they are.

    ``task`` and ``table`` are for a table that does not say itself what is to be predicted, and what its columns are.
    """
    own = own_table(source, folder, task)
    if own is None:
        return data.load(source if source.startswith(IMPORT) else _located(source, folder, task))
    return own.load_as(TableSchema(columns=dict(table)) if table and own.columns is None else None)


def own_table(source: str, folder: Path, task: str | None = None) -> TableSource | None:
    """Give a node's own table, its paths beginning at a folder; nothing if its data are none."""
    if source.startswith(IMPORT):
        return None
    found = options.resolve("data set", _located(source, folder, task), SOURCES)
    if not isinstance(found, TableSource):
        return None
    where = None if found.columns is None else folder / found.columns.expanduser()
    return found.model_copy(update={"columns": where})


def _located(source: str, folder: Path, task: str | None) -> str:
    kind, _, rest = source.partition(":")
    if kind in data.names() and rest:
        first, comma, more = rest.removeprefix("path=").partition(",")
        text = f"{kind}:path={(folder / Path(first).expanduser()).absolute()}{comma}{more}"
        return f"{text},task={task}" if kind == "table" and task and ",task=" not in text else text
    if kind in data.names():
        return source
    path = (folder / Path(source).expanduser()).absolute()
    if path.suffix in _TABLES:
        raise ConfigError(f"data is {source!r}, but a table needs its label column: table:path={source},label=COLUMN")
    try:
        return f"folder:path={path}" if path.is_dir() else f"npz:path={path}"
    except OSError as error:  # a name that no file can have
        raise DataError(f"data is {source!r}, which cannot be read: {error.strerror}") from error


def _agreed(found: Dataset, agreement: Agreement) -> Dataset:
    schema = agreement.data
    if found.task != schema.task:
        raise DataError(f"the node's own data are a {found.task} task, but {FILE} agrees on {schema.task}")
    found = _in_order(found, schema)
    if found.input_shape != schema.input_shape:
        raise DataError(
            f"a sample of the node's own data has shape {list(found.input_shape)}, but {FILE} agrees on "
            f"{list(schema.input_shape)}"
        )
    if (found.x.dtype == torch.int64) != schema.words:
        own = "whole numbers (of words)" if found.x.dtype == torch.int64 else "numbers"
        raise DataError(
            f"inputs of the node's own data are {own}, but {FILE} agrees on words: {str(schema.words).lower()}"
        )
    y = found.y
    strangers = [name for name in found.classes if name not in schema.classes]
    if strangers:
        raise DataError(
            f"the node's own data have the class {strangers[0]!r}, but {FILE} agrees on {', '.join(schema.classes)}"
        )
    if found.classes:
        y = torch.tensor([schema.classes.index(name) for name in found.classes])[y]
    return replace(
        found,
        y=y,
        classes=schema.classes,
        mean=schema.mean,
        std=schema.std,
        owner=None,
        owner_names=(),
        groups=None,
        superclasses=(),
    )


def _in_order(found: Dataset, schema: Schema) -> Dataset:
    """Put a table's columns in the agreed order and say what fills gaps; of a text that a node lacks, all are 0."""
    columns = schema.columns
    if not found.features:
        return found
    if not columns:
        raise DataError(
            f"the node's own data are a table, but {FILE} does not name its columns, so that all mean the same by "
            f"them: agree on `columns: {json.dumps(list(found.features), ensure_ascii=False)}` under data"
        )
    for name in found.features:
        if name not in columns:
            raise DataError(
                f"the node's table has {name!r}, which is not among the columns that {FILE} names: leave it out with "
                "drop=, or agree on it"
            )
    texts = {name.partition("=")[0] for name in found.features if "=" in name}
    x = torch.zeros(len(found), len(columns))
    for place, name in enumerate(columns):
        if name in found.features:
            x[:, place] = found.x[:, found.features.index(name)]
        elif name.removesuffix(MISSING) in (*found.features, *texts):
            continue  # nothing is missing here
        elif "=" not in name or name.partition("=")[0] not in texts:
            raise DataError(f"the node's table has no column for {name!r}, which {FILE} names")
    preparation = _reordered(found, columns)
    has_gaps = preparation is not None and bool(preparation.gaps)
    ones = (0.0,) * len(columns), (1.0,) * len(columns)
    return replace(
        found,
        x=x,
        features=columns,
        mean=ones[0],
        std=ones[1],
        fill=filling(schema) if has_gaps else (),
        preparation=preparation,
    )


def filling(schema: Schema) -> tuple[float, ...]:
    """Give what fills gaps: what was agreed on; else means, of which a column that is not scaled has 0."""
    fill = schema.fill or schema.mean
    return fill * len(schema.columns) if len(fill) == 1 else fill


def _reordered(found: Dataset, columns: Sequence[str]) -> Preparation | None:
    """Say of the agreed columns what is done to them with a node's own statistics; nothing to those that it lacks."""
    own = found.preparation
    if own is None:
        return None
    places = [found.features.index(name) if name in found.features else None for name in columns]
    gaps: list[GapFilling] = ["" if place is None or not own.gaps else own.gaps[place] for place in places]
    scaled = (place is not None and own.scaled[place] for place in places)
    return Preparation(tuple(scaled), tuple(gaps) if any(gaps) else ())


def own_population(dataset: Dataset, client: int, config: ExperimentConfig) -> Population:
    """Make the population of one node, split as a simulation splits that client's part.

    For a method that does not federate, inputs are scaled by the node's own statistics and not by those agreed on, as
    in a simulation: it is what the silo would have by itself.
    """
    count = len(dataset)
    if count < 3:
        raise DataError(f"the node has {count} samples, but needs one each to train on, to choose by and to test on")
    order = randomness.stream(config.seed, "partition: split", client=client).permutation(np.arange(count))
    test = _part(config.test_fraction or 0.2, count)
    rest = order[test:]
    held = _part(config.validation, len(rest)) if config.validation else 0
    pieces = {"test": order[:test], "validation": rest[:held], "train": rest[held:]}
    splits = {name: _only(np.sort(piece), client, config.clients) for name, piece in pieces.items()}
    if not registry.get(config.algorithm).federates:
        dataset = prepared(dataset, [splits["train"][client]], "local")
    return Population(dataset, _shares(splits), _everyone(config.clients))


def blank_population(agreement: Agreement, sizes: Mapping[str, Sequence[int]]) -> Population:
    """Make the population of a server, which has no samples: one of zeros stands for all of them."""
    schema = agreement.data
    y = torch.zeros(1, dtype=torch.float32 if schema.task == "regression" else torch.int64)
    x = torch.zeros(1, *schema.input_shape, dtype=torch.int64 if schema.words else torch.float32)
    known: dict[str, Any] = {
        "features": schema.columns,
        "columns": {name: column.model_dump(mode="json") for name, column in schema.table.items()},
        "fill": filling(schema) if any(column.gaps for column in schema.table.values()) else (),
    }
    blank = Dataset("blank", x, y, 1, schema.task, schema.classes, schema.mean, schema.std, **known)
    splits = {split: Ragged.of([np.zeros(size, np.int64) for size in each]) for split, each in sizes.items()}
    return Population(blank, _shares(splits), _everyone(len(agreement.members)))


def fresh_row(config: ExperimentConfig, agreement: Agreement, client: int) -> Tensor:
    """Draw a client's own initial model, as a simulation does."""
    schema = agreement.data
    with randomness.torch_stream(config.seed, f"model of client {client}"):
        module = models.build(config.model, schema.input_shape, schema.outputs)
    return Problem.of(module, schema.task, dtype=getattr(torch, config.dtype)).start


def make_simulation(
    config: ExperimentConfig,
    agreement: Agreement,
    population: Population,
    sizes: Sequence[int] | None = None,
    scratch: Path | None = None,
) -> Simulation:
    """Put the method on a party's population; ``sizes`` are everybody's, where the method starts from them.

    With a folder for ``scratch``, the rows of all members lie there on disk: a node needs its own alone.
    """
    engine = engine_of(config, population)
    own, everyone = engine.sizes["train"], torch.ones(config.clients, dtype=torch.int64, device=engine.device)
    # A first state may depend on everybody's samples, which a party knows only where it is told.
    engine.sizes["train"] = everyone if sizes is None else torch.tensor(sizes, device=engine.device)
    simulation = Simulation(
        registry.make(config.algorithm, config.settings),
        engine,
        fresh=lambda client: fresh_row(config, agreement, client).to(engine.device),
        members=population.roles.trainers.to(engine.device),
        keep="device" if scratch is None else "disk",
        scratch=scratch,
        local=config.local_patterns,
    )
    engine.sizes["train"] = own
    refuse_single_values(engine, simulation.tasks.values())
    return simulation


def engine_of(config: ExperimentConfig, population: Population) -> Engine:
    """Make a party's engine: by default one client after another, on the CPU."""
    return make_engine(config, population, config.torch_device())


def _part(fraction: float, count: int) -> int:
    return min(max(1, round(fraction * count)), count - 1)


def _only(piece: npt.NDArray[np.int64], client: int, clients: int) -> Ragged:
    nothing = np.zeros(0, np.int64)
    return Ragged.of([piece if number == client else nothing for number in range(clients)])


def _shares(splits: Mapping[str, Ragged]) -> Shares:
    return Shares(splits["train"], splits["validation"], splits["test"], None, False, None, "natural")


def _everyone(clients: int) -> Roles:
    nobody = torch.zeros(0, dtype=torch.int64)
    return Roles(torch.arange(clients), nobody, nobody)
