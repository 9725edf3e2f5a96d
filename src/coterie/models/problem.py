"""What is being learnt: a module, its loss and its metrics, and where the module's parameters lie in a row."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from coterie.errors import ConfigError, ModelError, UnknownName
from coterie.models.batch_norm import (
    COUNT,
    MEAN,
    VARIANCE,
    layers_of,
    norms_of,
    statistics_layout,
    statistics_row,
    use_running_statistics,
)
from coterie.models.buffer_policy import is_meant, policies
from coterie.models.dropout import StreamDropout, find_sample_axes
from coterie.models.own_buffers import find_own_buffers, freeze, moving_buffers, own_buffers, set_mode
from coterie.models.streams import use_streams
from coterie.rows import Layout
from coterie.tasks import TASKS

NORM = "norm"
"""The pattern that stands for the parameters of all layers that normalise."""
_NORMALISERS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, _NormBase)

PerSampleLoss = Callable[[Tensor, Tensor], Tensor]
"""From outputs ``[samples, outputs]`` and targets ``[samples]`` to a loss for each sample."""


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def _binary(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs.squeeze(-1), targets.to(outputs.dtype), reduction="none")


def _squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs.squeeze(-1) - targets.to(outputs.dtype)).square()


LOSSES: Mapping[str, PerSampleLoss] = {
    "cross_entropy": _cross_entropy,
    "binary": _binary,
    "squared_error": _squared_error,
}
"""Losses by name; ``squared_error`` is half the squared residual, so that its gradient is the residual."""


def logits_alone(module: nn.Module, given: object, outputs: Any) -> Any:
    """Take the logits of an output that has them beside other things, as a hook on a module.

    Parameters
    ----------
    module
        The module.
    given
        What it was given.
    outputs
        What it gave.

    Returns
    -------
    Any
        The logits, or what was given where there are none.
    """
    return outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", outputs)


@dataclass(frozen=True)
class Problem:
    """A module with its loss and metrics.

    Parameters
    ----------
    module
        The model; its trainable parameters make a row, its frozen ones are shared by all clients.
    layout
        Where the trainable parameters lie in a row.
    loss
        Loss of each sample.
    metrics
        Names of the metrics to record beside the loss, the primary one first.
    start
        The initial row.
    statistics
        Where running statistics, those of BatchNorm layers and the buffers that ``forward`` changes, lie in a row of
        their own; empty if there are none.
    running
        The initial row of running statistics.
    policies
        What becomes of them, by BatchNorm layer and by other buffer, where that was said.
    """

    module: nn.Module
    layout: Layout
    loss: PerSampleLoss
    metrics: tuple[str, ...]
    start: Tensor
    statistics: Layout = field(default_factory=lambda: Layout((), (), (0,)))
    running: Tensor = field(default_factory=lambda: torch.zeros(0))
    policies: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        task: str = "multiclass",
        *,
        loss: str | PerSampleLoss | None = None,
        metrics: tuple[str, ...] = (),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        buffers: str = "",
        sample: Tensor | None = None,
    ) -> Problem:
        """Make a problem of a module.

        Parameters
        ----------
        module
            The model. It is changed in place: moved to the device, cast, and where it draws random numbers (dropout,
            also inside of recurrent and attention layers) these come from the clients' streams
            (:func:`coterie.models.streams.use_streams`); BatchNorm layers take their statistics from rows. Of an output
            with ``logits`` it gives these alone.
        task
            ``"multiclass"``, ``"binary"`` or ``"regression"``; decides the loss and metric where they are not given.
        loss
            A name from :data:`LOSSES`, or a function from outputs and targets to a loss for each sample.
        metrics
            Metrics to record, the primary one first; empty for the task's own.
        dtype
            Type of all floating-point numbers.
        device
            Where the model lives.
        buffers
            What becomes of running statistics between clients and server: ``"averaged"``, ``"local"`` or ``"frozen"``,
            or ``"pattern=policy"`` for some layers, between commas. Averaged by default, and local in layers whose
            parameters are. A buffer that ``forward`` changes is meant by its own name too.
        sample
            A few inputs, of whatever values, by which it is found which buffers ``forward`` changes. Without them it
            may change none.

        Returns
        -------
        Problem
            The problem.

        Raises
        ------
        ConfigError
            If the task is not one of the three, or ``buffers`` names no such layer or policy.
        UnknownName
            If no loss has that name.
        ModelError
            If the module cannot be trained as rows.
        """
        if task not in TASKS:
            raise ConfigError(f"task is {task!r}: allowed are {', '.join(TASKS)}")
        loss = TASKS[task].loss if loss is None else loss
        if isinstance(loss, str):
            if loss not in LOSSES:
                raise UnknownName("loss", loss, LOSSES)
            loss = LOSSES[loss]
        use_streams(module)
        use_running_statistics(module)
        module.register_forward_hook(logits_alone)
        if not all(value.is_floating_point() for value in module.parameters()):
            raise ModelError(
                f"{type(module).__name__} has parameters that are not real floating-point numbers; keep whole numbers "
                "in a buffer (register_buffer), and the parts of a complex parameter in two (torch.complex joins them)"
            )
        imaginary = {name: value for name, value in module.named_buffers() if value.is_complex()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Casting complex values to real")
            module.to(device=device, dtype=dtype)
        for name, value in imaginary.items():  # of which that has left the real parts
            owner, _, short = name.rpartition(".")
            setattr(module.get_submodule(owner), short, value.to(device=device, dtype=dtype.to_complex()))
        module.train()
        if sample is not None:
            find_own_buffers(module, sample.to(device))
        places = _places(module)
        held = {name: places[layer] for name, layer in layers_of(module)}
        held |= {each.name: [_join(place, each.short) for place in places[each.owner]] for each in own_buffers(module)}
        given = policies(buffers, held)
        # A module's own train() may keep parts of it in evaluation, as that of a frozen body often does.
        for name, layer in layers_of(module):
            layer.frozen = given.get(name) == "frozen" or not layer.training
        for each in own_buffers(module):
            each.owner.register_buffer(each.short, each.value)  # a part of the model, also where its author saves none
            if given.get(each.name) == "frozen":
                freeze(each)
        set_mode(module, training=False)
        drops = [layer for layer in module.modules() if isinstance(layer, StreamDropout)]
        for drop in drops:
            drop.p = drop.p if drop.training else 0.0
        if sample is not None and any(drop.p for drop in drops):
            find_sample_axes(module, drops, sample.to(device))
        layout = Layout.of(module, {name: (name,) for name, _ in module.named_children()})
        start = layout.row_of(dict(module.named_parameters()))
        running = statistics_row(module, start)
        names = tuple(metrics) or (TASKS[task].metric,)
        return cls(module, layout, loss, names, start, statistics_layout(module), running, given)

    def matching(self, patterns: Iterable[str]) -> tuple[str, ...]:
        """Name the parameters that patterns choose.

        Parameters
        ----------
        patterns
            Each is a parameter's name, or that of a module, which stands for all its parameters, with the wildcards
            ``*``, ``?`` and ``[...]``; or the word ``norm`` for the parameters of all layers that normalise. A
            parameter that layers share is meant by each of its names.

        Returns
        -------
        tuple of str
            Names of trainable parameters, in row order.

        Raises
        ------
        ConfigError
            If a pattern chooses none.
        """
        chosen: set[str] = set()
        rows = self._row_names()
        for pattern in patterns:
            found = {row for name, row in rows.items() if is_meant(name, pattern)}
            if pattern == NORM:
                found |= {rows[name] for name in self._normalisers() if name in rows}
            if not found:
                self._refuse_statistics_alone(pattern)
                names = self.layout.names  # of many the first, and the last, which are the head's as a rule
                known = ", ".join(names if len(names) <= 9 else [*names[:4], "...", *names[-4:]])
                raise ConfigError(f"local has {pattern!r}, which matches no parameter of the model: it has {known}")
            chosen |= found
        return tuple(name for name in self.layout.names if name in chosen)

    def local_statistics(self, patterns: Iterable[str] = ()) -> tuple[str, ...]:
        """Name the running statistics that stay with their client.

        Parameters
        ----------
        patterns
            Those of the parameters that stay, as :meth:`matching` takes them: a layer's running statistics stay with
            its parameters, unless the problem's policy says otherwise.

        Returns
        -------
        tuple of str
            Their names, in row order.
        """
        patterns = tuple(patterns)
        stays, rows, places = set(self.matching(patterns)), self._row_names(), _places(self.module)
        found: set[str] = set()
        for name, place, layer, its in self._holders():
            full = [_join(place, each) for each, _ in layer.named_parameters()]
            own = {rows[each] for each in full if each in rows}
            named = any(self._means(each, layer, places[layer]) for each in patterns)
            with_parameters = own <= stays if own else named
            if self.policies.get(name, "local" if with_parameters else "averaged") == "local":
                found |= its
        return tuple(each for each in self.statistics.names if each in found)

    def _holders(self) -> Iterator[tuple[str, str, nn.Module, set[str]]]:
        """Give what policies are for, the place of its layer, that layer, and its names in rows of statistics."""
        for prefix, layer in norms_of(self.module):
            name = prefix.removesuffix(".")
            yield name, name, layer, {prefix + each for each in (MEAN, VARIANCE, COUNT)}
        for buffer in moving_buffers(self.module):
            yield buffer.name, buffer.name.rpartition(".")[0], buffer.owner, {buffer.name}

    def _means(self, pattern: str, layer: nn.Module, names: Iterable[str]) -> bool:
        """Return whether a pattern of what stays means a layer, whether it has parameters or not."""
        return (pattern == NORM and isinstance(layer, _NormBase)) or any(is_meant(name, pattern) for name in names)

    def _refuse_statistics_alone(self, pattern: str) -> None:
        """Say how running statistics are kept at home whose layer has no parameters that could be."""
        places = _places(self.module)
        for name, _, layer, _ in self._holders():
            if self._means(pattern, layer, places[layer]):
                raise ConfigError(
                    f"local has {pattern!r}, which matches no parameter that is trained: what changes there are "
                    f"running statistics, which stay with --buffers '{name}=local'"
                )

    def _normalisers(self) -> set[str]:
        layers = [(name, layer) for name, layer in self.module.named_modules() if isinstance(layer, _NORMALISERS)]
        return {_join(name, own) for name, layer in layers for own, _ in layer.named_parameters()}

    def _row_names(self) -> dict[str, str]:
        """Give for every name of a trained parameter the one that it has in rows, the first of those it has."""
        first = {value: name for name, value in self.module.named_parameters()}
        every = self.module.named_parameters(remove_duplicate=False)
        return {name: first[value] for name, value in every if value.requires_grad}


def _join(place: str, own: str) -> str:
    return f"{place}.{own}" if place else own


def _places(module: nn.Module) -> dict[nn.Module, list[str]]:
    """Give all names of each layer: several where the model uses it in several places."""
    found: dict[nn.Module, list[str]] = {}
    for name, layer in module.named_modules(remove_duplicate=False):
        found.setdefault(layer, []).append(name)
    return found
