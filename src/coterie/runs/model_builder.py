"""The model, the problem and the engine of an experiment, tried out before anything is computed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from coterie import models, randomness, user_code
from coterie.algorithms import registry
from coterie.compute.batched import BatchedEngine
from coterie.compute.engine import Engine
from coterie.compute.loop import LoopEngine
from coterie.compute.samples import Samples
from coterie.config import ExperimentConfig
from coterie.data import Dataset
from coterie.errors import ConfigError, CoterieError, ModelError
from coterie.evaluation import metrics as metric_table
from coterie.models.problem import LOSSES, PerSampleLoss, Problem
from coterie.runs.population import Population
from coterie.simulation import attacks
from coterie.tasks import TASKS
from coterie.user_code import IMPORT


def make_engine(
    config: ExperimentConfig, population: Population, device: torch.device, choices: Mapping[str, Any] | None = None
) -> Engine:
    """Put the samples on the device, build the model and the engine; ``choices`` are those of the same run before."""
    choices = choices or {}
    dataset, dtype = population.dataset, getattr(torch, config.dtype)
    _refuse_unfit(config, dataset)
    module = make_module(config, dataset)
    models.check(module)
    problem = Problem.of(
        module, dataset.task, loss=_loss(config.loss), metrics=config.metrics, dtype=dtype, device=device
    )
    labels = _poisoned(config, population) if len(population.roles.attackers) else None
    where = {"device": device, "dtype": dtype}
    samples = Samples.of(dataset, population.shares, seed=config.seed, **where, labels=labels, own=population.own)
    _try_out(config, problem, samples, dataset)
    if config.engine == "loop":
        return LoopEngine(problem, samples, config.seed)
    engine = BatchedEngine(
        problem,
        samples,
        config.seed,
        kernel=choices.get("kernel") or (None if config.kernel == "auto" else config.kernel),
        convolution=choices.get("convolution") or (None if config.convolution == "measured" else config.convolution),
        chunk=choices.get("chunk") or config.chunk,
        compile_steps=config.compile,
        precision=config.precision,
        batch=_batch_size(config),
    )
    if config.convolution == "measured" and "convolution" not in choices:
        engine.measure(_batch_size(config))
    return engine


def _batch_size(config: ExperimentConfig) -> int:
    """Give the largest batches that the clients take, 0 for all of a client's samples."""
    tasks = registry.make(config.algorithm, config.settings).tasks().values()
    sizes = [fold.over.size for task in tasks for fold in task.folds()]
    return 0 if not all(sizes) else max(sizes, default=0)


def make_module(config: ExperimentConfig, dataset: Dataset, purpose: str = "model") -> nn.Module:
    """Build the model with its initial parameters, drawn for a purpose."""
    with randomness.torch_stream(config.seed, purpose):
        return models.build(config.model, dataset.input_shape, dataset.num_outputs)


def _refuse_unfit(config: ExperimentConfig, dataset: Dataset) -> None:
    fitting = metric_table.names(dataset.task)
    for metric in config.metrics:
        if metric not in fitting:
            raise ConfigError(
                f"metric {metric!r} does not fit the {dataset.task} task of {dataset.name!r}: use {', '.join(fitting)}"
            )
    own = TASKS[dataset.task].loss
    if config.loss in LOSSES and config.loss != own:
        raise ConfigError(f"loss {config.loss!r} does not fit the {dataset.task} task of {dataset.name!r}: use {own}")


def _loss(name: str | None) -> str | PerSampleLoss | None:
    if name is None or not name.startswith(IMPORT):
        return name
    loss: PerSampleLoss = user_code.load(
        "loss",
        name,
        form="package.module:function",
        must_be="a function of outputs and targets that gives a loss for each sample",
    )
    return loss


def _try_out(config: ExperimentConfig, problem: Problem, samples: Samples, dataset: Dataset) -> None:
    """Run the model and the loss on a few real samples: what cannot work is said before anything is computed."""
    model = f"model {user_code.as_given(config.model)!r}"
    loss = f"loss {user_code.as_given(config.loss or TASKS[dataset.task].loss)!r}"
    client = int(samples.sizes("train").argmax())
    index = samples.splits["train"][client][:4].unsqueeze(0)
    x, y = (value[0] for value in samples.gather(index, index.new_tensor([client])))
    with _reported(model, f"inputs of shape {dataset.input_shape}"):
        models.check(problem.module, x)
        with torch.no_grad():
            outputs = problem.module(x)
    single = dataset.task != "multiclass"
    if (single and outputs[0].numel() != 1) or (
        not single and (outputs.dim() != 2 or outputs.shape[1] < dataset.num_outputs)
    ):
        raise ModelError(
            f"{model} gives outputs of shape {tuple(outputs.shape[1:])} for a sample, but "
            f"{dataset.name!r} needs {dataset.num_outputs}"
        )
    with _reported(loss, f"outputs of shape {tuple(outputs.shape)}"):
        losses = problem.loss(outputs, y)
    if losses.shape != y.shape:
        raise ConfigError(
            f"{loss} gives a result of shape {tuple(losses.shape)}, but must give one for each of {len(y)} samples"
        )


@contextlib.contextmanager
def _reported(what: str, on: str) -> Iterator[None]:
    """Turn whatever the user's own code raises into a sentence."""
    try:
        yield
    except CoterieError:
        raise
    except Exception as error:
        raise ModelError(f"{what} fails on {on} ({user_code.explain(error)})") from error


def _poisoned(config: ExperimentConfig, population: Population) -> Tensor | None:
    attack = attacks.parse(config.attack or "")
    if not isinstance(attack, attacks.LabelPoisoning):
        return None
    shares = population.shares
    mine = torch.cat([shares.train[int(client)] for client in population.roles.attackers])
    held = torch.cat([part.flat for part in (shares.train, shares.validation, shares.test)])
    if bool((held.bincount()[mine] > 1).any()):
        raise ConfigError(
            f"attack {config.attack!r} would poison samples that attackers share with others under the partition "
            f"{config.partition!r}: use one in which clients share none"
        )
    return attack.poison(population.dataset.y, mine, len(population.dataset.classes), seed=config.seed)
