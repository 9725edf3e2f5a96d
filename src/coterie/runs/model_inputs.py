"""What a run's models are fed with, written down so that they can be used, and made again, without the data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from coterie.config import ExperimentConfig
from coterie.data import Dataset
from coterie.data.partitions import Ragged, Shares
from coterie.runs.population import Population, roles
from coterie.runs.storage.atomic_files import read_json

INPUTS = "inputs.json"


def describe_inputs(population: Population) -> dict[str, Any]:
    """Say what a sample is, how it is scaled and filled (for all clients or for each), and what the outputs mean."""
    dataset = population.dataset
    return {
        "task": dataset.task,
        "classes": list(dataset.classes),
        "outputs": dataset.num_outputs,
        "type": str(dataset.x.dtype).removeprefix("torch."),
        "shape": list(dataset.input_shape),
        "features": list(dataset.features),
        "columns": {
            name: {key: column[key] for key in ("kind", "gaps", "indicator", "categories", "missing")}
            for name, column in dataset.columns.items()
        },
        "scaling": _scaling(dataset),
        "own_scaling": [_scaling(own) for own in population.own],
    }


def _scaling(dataset: Dataset) -> dict[str, list[float]]:
    return {"mean": list(dataset.mean), "std": list(dataset.std), "fill": list(dataset.fill)}


def read_inputs(path: Path) -> dict[str, Any] | None:
    """Read what a run's models are fed with; ``None`` if the run does not say."""
    return read_json(path / INPUTS) if (path / INPUTS).exists() else None


def stand_in(config: ExperimentConfig, inputs: Mapping[str, Any], shares: pd.DataFrame) -> Population:
    """Give clients with as many samples of each class as they had, all of them zeros.

    That is all that making models from a checkpoint asks of samples: their number, their classes, their shape. Of a
    federation's members a server does not know the classes, nor under a promise of privacy the number.
    """
    classes = len(inputs["classes"])
    kind = torch.int64 if inputs["type"] == "int64" else torch.float32
    x = torch.zeros(max(1, classes), *inputs["shape"], dtype=kind)
    y = torch.arange(classes) if classes else torch.zeros(1)
    dataset = Dataset(config.data, x, y, len(x), inputs["task"], tuple(inputs["classes"]), (0.0,), (1.0,))
    known = [f"class {name}" for name in inputs["classes"] if f"class {name}" in shares]
    counts = [torch.tensor(shares[name].to_numpy()) for name in known]
    train = Ragged.of(_each_class(torch.stack(counts, 1)) if counts else _first_sample(shares["train"]))
    validation, test = (Ragged.of(_first_sample(shares[name])) for name in ("validation", "test"))
    return Population(dataset, Shares(train, validation, test, None, False, None, config.partition), roles(config))


def _each_class(counts: Tensor) -> list[Tensor]:
    return [torch.arange(len(row)).repeat_interleave(row) for row in counts]


def _first_sample(sizes: pd.Series[Any]) -> list[Tensor]:
    return [torch.zeros(int(size), dtype=torch.int64) for size in sizes]
