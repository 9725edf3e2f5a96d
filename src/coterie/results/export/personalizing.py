"""A model for a client that was in no run, from a finished run's folder and that client's own samples alone."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie import randomness
from coterie.data.dataset import Dataset
from coterie.data.partitions import Ragged, Shares
from coterie.data.statistics import prepared
from coterie.errors import ConfigError, DataError, Diverged, RunFolderError
from coterie.results.export.model_folder import Exported, ModelFolder, drafted, opened
from coterie.results.export.newcomer_data import read_newcomer
from coterie.results.export.predictors import predictor
from coterie.results.export.restored import RestoredRun
from coterie.runs.builder import Population, Roles
from coterie.runs.model_inputs import read_inputs, stand_in
from coterie.simulation.scoring import Scorer

_TEST = 0.2
_NAME = "newcomer"


def personalize(
    run: str | os.PathLike[str],
    data: str | os.PathLike[str],
    out: str | os.PathLike[str] = "model",
    *,
    name: str | None = None,
    label: str | None = None,
    rounds: int | None = None,
    test_fraction: float | None = None,
    onnx: bool = False,
) -> Exported:
    """Make a model for a client that was in no run, as the run's method makes one for a newcomer.

    The client joins the finished run for a round of its own: it gets what the server knows, trains on its own samples,
    and ends with a personal model. Nothing in the run's folder is changed, and neither the other clients' samples nor
    the files that the run was made from need be there. What the columns are and how they are scaled is as in the run;
    where each client scaled its own samples, so does the newcomer.

    Parameters
    ----------
    run
        The folder of a finished run.
    data
        The client's samples: a CSV or Parquet file for a run on a table, else an ``.npz`` file with ``x`` and ``y``.
    out
        The folder to write, as :func:`export` does.
    name
        What the client is called; by default what its table says of itself, or ``"newcomer"``.
    label
        The column to predict; by default the run's.
    rounds
        How many rounds the client joins for; by default the run's ``adapt_rounds``, which is 1 unless given.
    test_fraction
        Which part of the samples is kept out of training, to measure the model; 0 for none. By default the run's, or a
        fifth.
    onnx
        Write the model as an ONNX file too.

    Returns
    -------
    Exported
        The folder and what is in it; ``about["clients"][0]["test"]`` is what was measured.

    Raises
    ------
    ConfigError
        If the method makes no personal models, or predicts in a way of its own.
    DataError
        If the samples are not as the run's, or a model that trains on them is no longer finite.
    RunFolderError
        If the run's folder does not say what its samples are, or the new folder cannot be written.
    """
    folder = Path(out)
    result = opened(run, folder, onnx)
    finished = bool(result.summary)
    inputs = read_inputs(result.path)
    if not finished or inputs is None or not result.has_shares:
        raise RunFolderError(f"the run in {result.path} does not say what its samples are: it cannot be joined")
    restored = RestoredRun(result, folder.absolute().parent, None)
    algorithm = restored.parts.simulation.algorithm
    if not algorithm.has_personal:
        raise ConfigError(f"{algorithm.title} makes no personal models: use coterie export {result.path} --best global")
    if rounds is not None and rounds < 1:
        raise ConfigError(f"rounds is {rounds}, but must be at least 1")
    if test_fraction is not None and not 0 <= test_fraction < 1:
        raise ConfigError(f"test_fraction is {test_fraction:g}, but must be from 0 to below 1")
    dataset, said = read_newcomer(Path(data), inputs, restored.config.data, label)
    fraction = (restored.config.test_fraction or _TEST) if test_fraction is None else test_fraction
    _refuse_too_few(Path(data), len(dataset), restored.config.validation, fraction)
    parts = restored.joined_by(_population(restored, dataset, fraction))
    number = len(parts.population.shares) - 1
    client = torch.tensor([number], device=parts.engine.device)
    lasting = rounds or max(1, restored.config.adapt_rounds)
    try:
        with torch.no_grad():
            rows = parts.simulation.adapt(client, restored.config.rounds, lasting)
            scores = Scorer(parts.simulation, client, client[:0]).score({"personal": rows})
    except Diverged:
        raise DataError(
            f"the model became NaN or infinite on the samples in {data}: look for numbers that are far from the run's"
        ) from None
    found = predictor(parts, {key: value[0] for key, value in rows.items()})
    if found is None:
        raise ConfigError(
            f"the personal model of {algorithm.title} is more than the model {result.config['model']!r} with other "
            "parameters: it cannot be exported"
        )
    form, module = found
    sizes = {split: int(parts.engine.host_sizes[split][number]) for split in ("train", "validation", "test")}
    entry: dict[str, Any] = {
        "client": number,
        "name": name or said or _NAME,
        "kind": "personal",
        **({"scaling": _scaling(parts.population.dataset)} if inputs["own_scaling"] else {}),
        "samples": sizes,
        "test": {score.metric: float(score.values[0]) for score in scores if score.split == "test"},
    }
    with drafted(folder) as draft:
        written = ModelFolder(draft, restored, onnx)
        written.add(entry, module)
        about = written.close("personal", module, form)
    return Exported(folder, about, written.onnx_files(folder))


def _refuse_too_few(path: Path, count: int, validation: float, fraction: float) -> None:
    uses = ["to train on"]
    uses += ["to choose by, as in the run"] if validation > 0 else []
    uses += ["to test on (--test-fraction 0 for none)"] if fraction > 0 else []
    if count < len(uses):
        *first, last = uses
        listed = f"{', '.join(first)} and {last}" if first else last
        raise DataError(f"{path} has too few samples ({count}): it needs one each {listed}")


def _population(restored: RestoredRun, own: Dataset, fraction: float) -> Population:
    """Give the run's clients, with blanks for samples, and one more that has its own."""
    config, inputs = restored.portable_config, restored.inputs
    blank = stand_in(config, inputs, restored.result.shares)
    count, others = len(own), len(blank.shares)
    order = torch.from_numpy(
        randomness.stream(config.seed, "partition: split", client=others).permutation(np.arange(count))
    )
    tested = _part(fraction, count)
    held = _part(config.validation, count - tested)
    mine = {"test": order[:tested], "validation": order[tested : tested + held], "train": order[tested + held :]}
    if inputs["own_scaling"]:
        own = prepared(own, [mine["train"]], "local")
    # One sample of each class stands for all those of the others.
    y = blank.dataset.y.to(own.y.dtype)
    whole = replace(
        own,
        x=torch.cat([own.x, torch.zeros(len(y), *own.input_shape, dtype=own.x.dtype)]),
        y=torch.cat([own.y, y]),
        train_count=count + len(y),
    )
    splits = {split: _joined(getattr(blank.shares, split), part.sort().values, count) for split, part in mine.items()}
    shares = Shares(splits["train"], splits["validation"], splits["test"], None, False, None, config.partition)
    newcomers = torch.cat([blank.roles.newcomers, torch.tensor([others])])
    return Population(whole, shares, Roles(blank.roles.trainers, newcomers, blank.roles.attackers))


def _joined(others: Ragged, mine: Tensor, shift: int) -> Ragged:
    return Ragged.of([*(others[client] + shift for client in range(len(others))), mine])


def _part(fraction: float, count: int) -> int:
    """Give how many of some samples are a fraction of them: one at least, and not all, unless none are wanted."""
    return min(max(1, round(fraction * count)), count - 1) if fraction > 0 else 0


def _scaling(dataset: Dataset) -> dict[str, list[float]]:
    return {"mean": list(dataset.mean), "std": list(dataset.std), "fill": list(dataset.fill)}
