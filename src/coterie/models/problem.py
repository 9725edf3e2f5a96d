"""What is being learnt: a module, its loss and its metrics, and where the module's parameters lie in a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from coterie import kernels, randomness
from coterie.errors import ConfigError, ModelError, UnknownName
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


class StreamDropout(nn.Module):
    """Dropout whose masks are a function of the client's stream and the step, equal on every engine and device.

    The engine passes the key as a buffer; without one (``key`` is 0, as in evaluation) the layer does nothing.

    Parameters
    ----------
    p
        Probability that an element is dropped.
    number
        The layer's place among the model's dropout layers, so that no two layers share a mask.
    """

    key: Tensor

    def __init__(self, p: float, number: int) -> None:
        super().__init__()
        self.p, self.number = p, number
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of one client's batch.

        Parameters
        ----------
        x
            Activations ``[samples, ...]``.

        Returns
        -------
        Tensor
            Activations with elements dropped and the others scaled by ``1 / (1 - p)``.
        """
        return x * self.factors(self.key, x)

    def factors(self, key: Tensor, x: Tensor) -> Tensor:
        """Give 0 where an element is dropped and ``1 / (1 - p)`` elsewhere, or 1 everywhere if ``key`` is 0.

        Parameters
        ----------
        key
            Keys, of any shape.
        x
            Activations of one client, or of as many clients as there are keys, shape ``[*key.shape, samples, ...]``.

        Returns
        -------
        Tensor
            Of the shape of ``x``.
        """
        count = x.shape[key.dim() :].numel()
        drawn = randomness.lanes(randomness.fold_in(key, self.number), count)
        kept = (drawn >= self._threshold).view(x.shape).to(x.dtype) * self._scale
        idle = (key == 0).view(*key.shape, *(1,) * (x.dim() - key.dim()))
        return torch.where(idle, torch.ones_like(kept), kept)

    def dropped(self, key: Tensor, x: Tensor) -> Tensor:
        """Drop elements of many clients' batches.

        Parameters
        ----------
        key
            Keys, one a client.
        x
            Activations of all of them, client after client.

        Returns
        -------
        Tensor
            As :meth:`forward` gives them, for each client with its own key.
        """
        if not kernels.usable(x):
            return x * self.factors(key, x.unflatten(0, (len(key), -1))).flatten(0, 1)
        from coterie.kernels.dropout import DropoutRule, drop

        constants = (randomness.GOLDEN, randomness.MIX_1, randomness.MIX_2)
        draw = DropoutRule(self._threshold, self._scale, constants)
        return drop(x, randomness.fold_in(key, self.number), key, draw)

    @property
    def _threshold(self) -> int:
        return round(self.p * 2**16) - 2**15

    @property
    def _scale(self) -> float:
        return 1.0 / (1.0 - self.p) if self.p < 1 else 0.0  # as torch has it: p = 1 drops everything

    def extra_repr(self) -> str:
        """Show the probability, as ``nn.Dropout`` does.

        Returns
        -------
        str
            The layer's settings.
        """
        return f"p={self.p}"


def _use_stream_dropout(module: nn.Module) -> None:
    number = 0
    for parent in module.modules():
        for name, child in list(parent.named_children()):
            if type(child) is nn.Dropout:
                setattr(parent, name, StreamDropout(child.p, number) if child.p > 0 else nn.Identity())
                number += 1


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
    """

    module: nn.Module
    layout: Layout
    loss: PerSampleLoss
    metrics: tuple[str, ...]
    start: Tensor

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
    ) -> Problem:
        """Make a problem of a module.

        Parameters
        ----------
        module
            The model. It is changed in place: moved to the device, cast, its ``nn.Dropout`` layers replaced by
            :class:`StreamDropout`.
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

        Returns
        -------
        Problem
            The problem.

        Raises
        ------
        ConfigError
            If the task is not one of the three.
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
        _use_stream_dropout(module)
        module.to(device=device, dtype=dtype)
        module.train()
        if not all(value.is_floating_point() for value in module.parameters()):
            raise ModelError(f"{type(module).__name__} has parameters that are not floating-point numbers")
        layout = Layout.of(module, {name: (name,) for name, _ in module.named_children()})
        start = layout.row_of(dict(module.named_parameters()))
        return cls(module, layout, loss, tuple(metrics) or (TASKS[task].metric,), start)

    def matching(self, patterns: Iterable[str]) -> tuple[str, ...]:
        """Name the parameters that patterns choose.

        Parameters
        ----------
        patterns
            Each is a parameter's name, or that of a module, which stands for all its parameters, with the wildcards
            ``*``, ``?`` and ``[...]``; or the word ``norm`` for the parameters of all layers that normalise.

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
        for pattern in patterns:
            found = {name for name in self.layout.names if fnmatchcase(name, pattern)}
            found |= {name for name in self.layout.names if fnmatchcase(name, f"{pattern}.*")}
            if pattern == NORM:
                found |= self._normalisers() & set(self.layout.names)
            if not found:
                known = ", ".join(self.layout.names[:8]) + (", ..." if len(self.layout.names) > 8 else "")
                raise ConfigError(f"local has {pattern!r}, which matches no parameter of the model: it has {known}")
            chosen |= found
        return tuple(name for name in self.layout.names if name in chosen)

    def _normalisers(self) -> set[str]:
        layers = [(name, layer) for name, layer in self.module.named_modules() if isinstance(layer, _NORMALISERS)]
        return {f"{name}.{own}" if name else own for name, layer in layers for own, _ in layer.named_parameters()}
