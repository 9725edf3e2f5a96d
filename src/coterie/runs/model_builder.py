"""The model, the problem and the engine of an experiment, tried out before anything is computed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coterie import models, randomness, user_code
from coterie.algorithms import registry
from coterie.compute.batched import BatchedEngine
from coterie.compute.class_weights import ClassWeights, balanced
from coterie.compute.engine import Engine
from coterie.compute.loop import LoopEngine
from coterie.compute.samples import Once, Samples
from coterie.config import ExperimentConfig
from coterie.data import Dataset
from coterie.errors import ConfigError, CoterieError, ModelError
from coterie.evaluation import metrics as metric_table
from coterie.models.lookups import CheckedLookups
from coterie.models.own_buffers import probe_inputs
from coterie.models.problem import LOSSES, PerSampleLoss, Problem
from coterie.models.remade import refuse_hidden_numbers
from coterie.runs.population import Population
from coterie.simulation import attacks
from coterie.tasks import BALANCED, TASKS, read_weights
from coterie.user_code import IMPORT, OBJECT


def make_engine(
    config: ExperimentConfig,
    population: Population,
    device: torch.device,
    choices: Mapping[str, Any] | None = None,
    hold: Callable[[Samples], Samples] = lambda samples: samples,
    scratch: Path | None = None,
    once: Once = lambda key, make: make(),
) -> Engine:
    """Put the samples on the device, build the model and the engine; ``choices`` are those of the same run before.

    ``hold`` may put in place of samples the same ones that are held already, and ``once`` in place of their inputs.
    Samples that are kept on disk lie in the folder ``scratch``.
    """
    choices = choices or {}
    dataset, dtype = population.dataset, getattr(torch, config.dtype)
    _refuse_unfit(config, dataset)
    module = make_module(config, dataset)
    with _reported(_model(config), "a look at its layers"):
        models.check(module)
        if _is_made_by_their_code(config.model):
            words = dataset.x.dtype == torch.int64
            refuse_hidden_numbers(module, lambda: make_module(config, dataset, "again"), dataset.input_shape, words)
    problem = Problem.of(
        module,
        dataset.task,
        loss=_loss(config.loss),
        metrics=config.metrics,
        dtype=dtype,
        device=device,
        buffers=config.buffers,
        sample=probe_inputs(module, dataset.input_shape, dataset.x.dtype == torch.int64, dtype),
    )
    if config.compile and problem.statistics.size:
        raise ConfigError(
            "compile is true, but a model with BatchNorm layers, or with buffers that it changes itself, cannot be "
            "compiled: leave it out"
        )
    labels = _poisoned(config, population) if len(population.roles.attackers) else None
    where = {"device": device, "dtype": dtype, "keep": config.keep_samples, "scratch": scratch}
    made = Samples.of(
        dataset, population.shares, seed=config.seed, **where, labels=labels, own=population.own, once=once
    )
    samples = hold(made)
    if config.class_weights is not None:
        values = _class_weights(config, population, samples).to(device=device, dtype=dtype)
        samples = replace(samples, class_weights=ClassWeights.of(values, samples))
    _try_out(config, problem, samples, dataset)
    if config.engine == "loop":
        loop = LoopEngine(problem, samples, config.seed)
        loop.all_threads = config.threads is not None
        return loop
    engine = BatchedEngine(
        problem,
        samples,
        config.seed,
        kernel=choices.get("kernel") or (None if config.kernel == "auto" else config.kernel),
        convolution=choices.get("convolution") or (None if config.convolution == "measured" else config.convolution),
        chunk=choices.get("chunk") or config.chunk,
        compile_steps=config.compile,
        precision=config.precision,
        batch=batch_size(config),
    )
    engine.all_threads = config.threads is not None
    if config.convolution == "measured" and "convolution" not in choices:
        engine.measure(batch_size(config))
    return engine


def batch_size(config: ExperimentConfig) -> int:
    """Give the largest batches that the clients take, 0 for all of a client's samples."""
    tasks = registry.make(config.algorithm, config.settings).tasks().values()
    sizes = [fold.over.size for task in tasks for fold in task.folds()]
    return 0 if not all(sizes) else max(sizes, default=0)


def make_module(config: ExperimentConfig, dataset: Dataset, purpose: str = "model") -> nn.Module:
    """Build the model with its initial parameters, drawn for a purpose."""
    with randomness.torch_stream(config.seed, purpose):
        return models.build(config.model, dataset.input_shape, dataset.num_outputs)


def _is_made_by_their_code(model: str) -> bool:
    made = not model.startswith(OBJECT) or not isinstance(user_code.find("model", model), nn.Module)
    return model.startswith((IMPORT, OBJECT)) and made


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


def _class_weights(config: ExperimentConfig, population: Population, samples: Samples) -> Tensor:
    """Give each client's weight of each class: as given, or by counts of the training samples that the scope names."""
    dataset, text = population.dataset, config.class_weights or ""
    if not dataset.classes:
        raise ConfigError(f"class_weights is {text!r}, but {dataset.name!r} has numbers to predict, not classes")
    counts = samples.class_counts.cpu()
    if text != BALANCED:
        given = read_weights(text)
        for name in given:
            if name not in dataset.classes:
                known = ", ".join(dataset.classes)
                raise ConfigError(f"class_weights names {name!r}, but the classes of {dataset.name!r} are {known}")
        return torch.tensor([given.get(name, 1.0) for name in dataset.classes]).double().expand(len(counts), -1)
    if config.scope == "local" or not registry.get(config.algorithm).federates:
        return balanced(counts)
    if config.scope == "pooled":
        whole = dataset.y[: dataset.train_count].bincount(minlength=len(dataset.classes))
        return balanced(whole).expand(len(counts), -1)
    if config.privacy is not None:
        raise ConfigError(
            "class_weights is balanced by counts of all clients, which privacy does not protect: give the weights as "
            "numbers, or use scope local"
        )
    return balanced(counts[population.roles.trainers].sum(0)).expand(len(counts), -1)


def _loss(name: str | None) -> str | PerSampleLoss | None:
    if name is not None and name.startswith(OBJECT):
        handed_over: PerSampleLoss = user_code.find("loss", name)
        return handed_over
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
    model, words = _model(config), samples.x.dtype == torch.int64
    loss = f"loss {user_code.as_given(config.loss or TASKS[dataset.task].loss)!r}"
    client = int(samples.sizes("train").argmax())
    index = samples.splits["train"][client][:4].unsqueeze(0)
    x, y = (value[0] for value in samples.gather(index, index.new_tensor([client])))
    kind = "numbers of words" if words else "inputs"
    remedy = partial(_remedy, problem.module, samples)
    with _reported(model, f"{kind} of shape {dataset.input_shape}", remedy), CheckedLookups():
        models.check(problem.module, x)
        with torch.no_grad():
            outputs = problem.module(x)
            if words:
                problem.module(_largest_word(samples).unsqueeze(0).to(x.device))
    single = dataset.task != "multiclass"
    if (single and outputs[0].numel() != 1) or (
        not single and (outputs.dim() != 2 or outputs.shape[1] < dataset.num_outputs)
    ):
        raise ModelError(
            f"{model} gives outputs of shape {tuple(outputs.shape[1:])} for a sample, but "
            f"{dataset.name!r} needs {dataset.num_outputs}: a class or function that takes outputs is given that number"
        )
    with _reported(loss, f"outputs of shape {tuple(outputs.shape)}"):
        losses = problem.loss(outputs, y)
        half = max(1, len(y) // 2)
        some = problem.loss(outputs[:half], y[:half])
    _refuse_other_than_one_each(loss, losses, some, y)


def _refuse_other_than_one_each(loss: str, losses: object, some: object, y: Tensor) -> None:
    """See that a loss is one of each sample: engines weigh and sum them, over samples of one client or of many."""
    wanted = f"but must give one for each of {len(y)} samples"
    if not isinstance(losses, Tensor) or not isinstance(some, Tensor):
        raise ConfigError(f"{loss} gives a {type(losses).__name__}, {wanted}: a tensor")
    if losses.dim() == 0:
        raise ConfigError(f"{loss} gives one number, {wanted}: leave the mean out (reduction='none')")
    if losses.shape != y.shape:
        raise ConfigError(f"{loss} gives a result of shape {tuple(losses.shape)}, {wanted}")
    if not torch.allclose(some, losses[: len(some)], rtol=1e-4, atol=1e-6, equal_nan=True):
        raise ConfigError(f"{loss} gives a sample another loss when other samples are there, {wanted} by itself")


def _model(config: ExperimentConfig) -> str:
    return f"model {user_code.as_given(config.model)!r}"


def _largest_word(samples: Samples) -> Tensor:
    """Give the sample, of those that anybody holds, with the largest number of a word."""
    held = torch.cat([part.flat for part in samples.splits.values()]).to(samples.x.device)
    largest = torch.cat([samples.x[some].flatten(1).amax(1) for some in held.split(2**14)])
    return samples.x[held[largest.argmax()]]


def _remedy(module: nn.Module, samples: Samples, error: Exception) -> str:
    """Say what to do where a model is given samples of another kind than it is made for."""
    words = samples.x.dtype == torch.int64
    if words and not any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in module.modules()):
        return ": a model of words looks them up first (nn.Embedding), so take another model"
    if words and isinstance(error, IndexError):
        most = int(_largest_word(samples).max())
        return f": the largest number of a word is {most}, so an nn.Embedding of words needs {most + 1} entries"
    if "same dtype" in str(error):
        return ": parameters are cast to the run's dtype, so a cast in forward has to follow them (x.to(weight.dtype))"
    if not words and "scalar types: Long, Int" in str(error):
        return ": it looks words up, but the data are no words; numbers of words are read with words=true"
    one_channel = samples.x.dim() == 4 and samples.x.shape[1] == 1
    if one_channel and any(
        isinstance(layer, nn.RNNBase | nn.Conv1d | nn.MultiheadAttention) for layer in module.modules()
    ):
        return ": samples are images of one channel; an .npz of measurements over time is read with series=true"
    return ""


@contextlib.contextmanager
def _reported(what: str, on: str, remedy: Callable[[Exception], str] = lambda error: "") -> Iterator[None]:
    """Turn whatever the user's own code raises into a sentence, and say of which part of the experiment it speaks."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{what}: {error}") from error
    except CoterieError:
        raise
    except Exception as error:
        raise ModelError(f"{what} fails on {on} ({user_code.explain(error)}){remedy(error)}") from error


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
