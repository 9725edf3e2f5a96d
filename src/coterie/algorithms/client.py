"""The client's half of an algorithm: tasks that fold over a client's samples, written on rows that never mix.

A simulation hands a task the rows of a whole cohort; a real node hands it one.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from coterie.rows import Columns, Layout, Rows


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
        """Give a part of the model as a net of its own, with its own layout.

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
        """Say where the parameters of :meth:`sub` lie in this net's rows.

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
    """

    net: Net
    per_sample: Callable[[Tensor, Tensor], Tensor]
    x: Tensor
    y: Tensor
    weight: Tensor
    share: Tensor
    key: Tensor | None = None

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
        """Both, for the price of one.

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

    def descend_(self, params: Tensor, rate: Tensor, pull: float = 0.0, centre: Tensor | None = None) -> None:
        """Take one step of ``w ← w − rate (∇loss(w) + pull (w − centre))`` in place.

        The same step as with :meth:`grad`, but a net may take it without ever holding the gradient. Only for rows that
        the task made itself (in ``start``): what it was given must stay as it was.

        Parameters
        ----------
        params
            Rows ``[rows, parameters]``; changed.
        rate
            Step of each row ``[rows, 1]``.
        pull
            Weight of the proximal term.
        centre
            Its centre ``[rows, parameters]``, needed unless ``pull`` is 0.
        """
        fused = getattr(self.net, "descend_", None)
        towards = params - centre if pull and centre is not None else None
        if fused is None:
            params.addcmul_(self.grad(params), rate, value=-1)
        else:
            fused(params, rate, self, self.mean_loss)
        if towards is not None:
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
        if torch.compiler.is_compiling():
            total = torch.func.grad(lambda *p: losses(*p).sum(), argnums=tuple(range(len(params))))
            return tuple(total(*params))
        with torch.enable_grad():
            leaves = tuple(value.detach().requires_grad_() for value in params)
            return torch.autograd.grad(losses(*leaves).sum(), leaves)


@dataclass(frozen=True)
class Minibatches:
    """A pass over shuffled minibatches of the training samples, in training mode.

    Parameters
    ----------
    size
        Samples in a batch; the last of an epoch may be smaller; 0 means all of them.
    epochs
        Passes over the data; a pair draws each client's number uniformly from that range, both ends included.
    steps
        Instead of epochs, the number of batches, starting a new epoch when one ends.
    draws
        Independent batches that each step is given.
    """

    size: int
    epochs: int | tuple[int, int] = 1
    steps: int | None = None
    draws: int = 1


@dataclass(frozen=True)
class FullPass:
    """One pass over all samples of a split in a fixed order, in evaluation mode: for losses and full gradients.

    Parameters
    ----------
    split
        ``"train"`` or ``"validation"``.
    size
        Samples taken at a time; does not change the result but for rounding.
    """

    split: Literal["train", "validation"] = "train"
    size: int = 256


@dataclass(frozen=True)
class Fold:
    """One pass over data within a task.

    Parameters
    ----------
    over
        The data.
    step
        From working rows and a batch (or several, see :attr:`Minibatches.draws`) to the new working rows. It must
        return the names it was given, and must not mix rows.
    then
        What to do after the pass, before the next one.
    """

    over: Minibatches | FullPass
    step: Callable[..., Rows]
    then: Callable[[ClientContext, Rows], Rows] | None = None


@dataclass(frozen=True)
class ClientContext:
    """What clients know about themselves.

    Parameters
    ----------
    clients
        Their numbers ``[rows]``.
    round
        The round, counted from 1.
    sizes
        Training samples of each ``[rows]``.
    validation_sizes
        Validation samples of each ``[rows]``.
    class_counts
        Training samples of each class ``[rows, classes]``; no columns where there are no classes.
    key
        Stream keys ``[rows]`` for whatever the task draws itself.
    net
        The model.
    seed
        The experiment's seed, for what all clients and the server draw alike.
    """

    clients: Tensor
    round: int
    sizes: Tensor
    validation_sizes: Tensor
    class_counts: Tensor
    key: Tensor
    net: Net
    seed: int

    @property
    def layout(self) -> Layout:
        """Where parameters lie in a row."""
        return self.net.layout


class Task(abc.ABC):
    """The client's half of an exchange, on rows.

    Every method is pure: it returns new rows and leaves what it was given as it was.
    """

    references: ClassVar[Mapping[str, str | None]] = {}
    """For a tensor of the reply, the tensor of the message of which it is a changed copy; ``None`` for a gradient, a
    difference or a number. By default that of the same name. Clipping
    (:mod:`coterie.simulation.privacy`) is of the change."""

    @abc.abstractmethod
    def start(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Make the working rows from the client's state and the message.

        Parameters
        ----------
        context
            What the clients know about themselves.
        state
            Their state.
        message
            What the server sent; what it sent to all alike is repeated for each row, without a copy.

        Returns
        -------
        Rows
            Working rows.
        """

    @abc.abstractmethod
    def folds(self) -> tuple[Fold, ...]:
        """Say which passes over data the task makes.

        Returns
        -------
        tuple of Fold
            The passes, in order.
        """

    @abc.abstractmethod
    def finish(self, context: ClientContext, work: Rows) -> tuple[Rows, Rows]:
        """End the task.

        Parameters
        ----------
        context
            What the clients know about themselves.
        work
            Working rows after the last fold.

        Returns
        -------
        tuple of Rows
            The names of the client's state that change, with their new rows; and the reply.
        """
