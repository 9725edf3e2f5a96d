"""A batch of samples for each row, and the derivatives of the loss on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from coterie.algorithms.row_numbers import Number, fitting, nonzero
from coterie.rows import Columns, Layout


class Net(Protocol):
    """A model applied to rows: row ``r`` of the parameters to row ``r`` of the samples."""

    layout: Layout

    def outputs(self, params: Tensor, x: Tensor, key: Tensor | None = None) -> Tensor:
        """Apply the model.

        Parameters
        ----------
        params
            Rows ``[rows, parameters]``.
        x
            Samples ``[rows, samples, ...]``.
        key
            Stream keys ``[rows]`` for dropout; ``None`` means evaluation, without dropout.

        Returns
        -------
        Tensor
            Outputs ``[rows, samples, ...]``.
        """
        ...

    def sub(self, *path: str | slice) -> Net:
        """Return a part of the model as a net of its own, with its own layout.

        Parameters
        ----------
        *path
            Names of nested children; a slice takes layers of an ``nn.Sequential``.

        Returns
        -------
        Net
            The part; its rows hold only its own parameters, none at all if it has nothing to train.
        """
        ...

    def columns(self, *path: str | slice) -> Columns:
        """Return the columns of this net's rows that hold the parameters of :meth:`sub`.

        Parameters
        ----------
        *path
            As for :meth:`sub`.

        Returns
        -------
        Columns
            Their columns.
        """
        ...

    @property
    def split(self) -> int:
        """How many layers of the part ``body`` a client holds when the model is split between client and server."""
        ...


@dataclass(frozen=True)
class Batch:
    """Some samples of each row, and derivatives of the loss on them.

    Parameters
    ----------
    net
        The model.
    per_sample
        Loss of each sample.
    x
        Samples ``[rows, samples, ...]``.
    y
        Targets ``[rows, samples]``.
    weight
        Weight of each sample in the row's mean ``[rows, samples]``: one over the row's number of real samples, 0 for
        padding.
    share
        Which fraction of the client's samples this is, ``[rows]``: shares of a whole pass sum to one.
    key
        Dropout keys ``[rows]``, or ``None`` in a pass that evaluates.
    alike
        Where classes have weights, what ``weight`` would be without them, else ``None``.
    """

    net: Net
    per_sample: Callable[[Tensor, Tensor], Tensor]
    x: Tensor
    y: Tensor
    weight: Tensor
    share: Tensor
    key: Tensor | None = None
    alike: Tensor | None = None

    def measuring(self, model: str | None) -> Self:
        """Return the same samples, for passes of another model than the one that is kept.

        In training, the passes of a model with BatchNorm layers move its running statistics. Those of a model that is
        only passed by, such as one that a gradient is taken at on the way, should not.

        Parameters
        ----------
        model
            A name for a model whose running statistics the client keeps apart
            (:attr:`coterie.algorithms.base.Algorithm.own_statistics`); ``None`` for one that has none to keep.

        Returns
        -------
        Self
            A batch whose passes do so; the batch itself where the model has no running statistics.
        """
        other = getattr(self.net, "measuring", None)
        return self if other is None else replace(self, net=other(model))

    def mean_loss(self, outputs: Tensor, per_sample: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
        """Mean loss of each row for given outputs.

        Parameters
        ----------
        outputs
            Outputs ``[rows, samples, ...]``.
        per_sample
            Another loss than the problem's.

        Returns
        -------
        Tensor
            Losses ``[rows]``.
        """
        losses = (per_sample or self.per_sample)(outputs.flatten(0, 1), self.y.flatten(0, 1))
        return (losses.view(self.weight.shape) * self.weight).sum(1)

    def loss(self, params: Tensor) -> Tensor:
        """Mean loss of each row's model on its samples.

        Parameters
        ----------
        params
            Rows ``[rows, parameters]``.

        Returns
        -------
        Tensor
            Losses ``[rows]``.
        """
        return self.mean_loss(self.net.outputs(params, self.x, self.key))

    def grad(self, params: Tensor) -> Tensor:
        """Gradient of :meth:`loss`, a row for each row.

        Parameters
        ----------
        params
            Rows ``[rows, parameters]``.

        Returns
        -------
        Tensor
            Gradients ``[rows, parameters]``.
        """
        (gradient,) = self.grad_of(self.loss, params)
        return gradient

    def loss_and_grad(self, params: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss of each row and its gradient, from one pass.

        Parameters
        ----------
        params
            Rows ``[rows, parameters]``.

        Returns
        -------
        tuple of Tensor
            Losses ``[rows]`` and gradients ``[rows, parameters]``.
        """
        with torch.enable_grad():
            leaf = params.detach().requires_grad_()
            losses = self.loss(leaf)
            (gradient,) = torch.autograd.grad(losses.sum(), (leaf,))
        return losses.detach(), gradient

    def descend_(self, params: Tensor, rate: Tensor, pull: Number = 0.0, centre: Tensor | None = None) -> None:
        """Take one step of ``w ← w − rate (∇loss(w) + pull (w − centre))`` in place.

        The same step as with :meth:`grad`, but a net may take it without ever storing the gradient. Use it only for
        rows that the task made itself (in ``start``), for what it was given must not change.

        Parameters
        ----------
        params
            Rows ``[rows, parameters]``; changed.
        rate
            Step of each row ``[rows, 1]``.
        pull
            Weight of the proximal term, one for all rows or a column ``[rows, 1]``.
        centre
            Its centre ``[rows, parameters]``, needed unless ``pull`` is 0.
        """
        fused = getattr(self.net, "descend_", None)
        towards = params - centre if nonzero(pull) and centre is not None else None
        if fused is None:
            params.addcmul_(self.grad(params), rate, value=-1)
        else:
            fused(params, rate, self, self.mean_loss)
        if towards is None:
            return
        if isinstance(pull, Tensor):
            params.addcmul_(towards * -fitting(pull, towards), rate)
        else:
            params.addcmul_(towards, rate, value=-pull)

    def grad_of(self, losses: Callable[..., Tensor], *params: Tensor) -> tuple[Tensor, ...]:
        """Gradients of a loss of the method's own, over one or more parameter matrices.

        Rows are independent, so the gradient of the sum over rows holds each row's own gradient.

        Parameters
        ----------
        losses
            From the parameter matrices to a loss for each row.
        *params
            The matrices, each with a row per row.

        Returns
        -------
        tuple of Tensor
            A gradient for each matrix.
        """
        if torch.compiler.is_compiling():  # which traces torch.func, but not autograd.grad
            total = torch.func.grad(lambda *p: losses(*p).sum(), argnums=tuple(range(len(params))))
            return tuple(total(*params))
        with torch.enable_grad():
            leaves = tuple(value.detach().requires_grad_() for value in params)
            return torch.autograd.grad(losses(*leaves).sum(), leaves)
