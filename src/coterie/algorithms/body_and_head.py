"""Models taken apart: a body that makes features, and a head that makes outputs of them."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.algorithms.base import Batch, ClientContext, Minibatches, Net, Start, Task
from coterie.algorithms.local_training import Optimiser
from coterie.errors import ModelError
from coterie.rows import Rows


def apply_parts(net: Net, body: Tensor, head: Tensor, x: Tensor, key: Tensor | None = None) -> Tensor:
    """Apply a model whose body and head are held apart: ``head(body(x))``.

    Parameters
    ----------
    net
        The model.
    body
        Rows of the body's parameters.
    head
        Rows of the head's parameters.
    x
        Samples ``[rows, samples, ...]``.
    key
        Stream keys ``[rows]`` for dropout; ``None`` means evaluation.

    Returns
    -------
    Tensor
        Outputs ``[rows, samples, ...]``.
    """
    return net.sub("head").outputs(head, net.sub("body").outputs(body, x, key), key)


def join_parts(net: Net, body: Tensor, head: Tensor) -> Tensor:
    """Put rows of a body and rows of a head together into rows of the model.

    Parameters
    ----------
    net
        The model.
    body
        Rows of the body's parameters.
    head
        Rows of the head's parameters.

    Returns
    -------
    Tensor
        Rows ``[rows, parameters]``.
    """
    empty = body.new_zeros(len(body), net.layout.size)
    return net.columns("head").put(net.columns("body").put(empty, body), head)


def require_parts(start: Start, title: str, outputs: int = 1) -> int:
    """Refuse a model that is not ``head(body(x))``.

    Parameters
    ----------
    start
        What there is before the first round.
    title
        The method, for the message.
    outputs
        How many outputs it must have at least; 2 for methods that need one for each class.

    Returns
    -------
    int
        How many outputs the model has.

    Raises
    ------
    ModelError
        If it has no body and head, does something else besides applying one after the other, or has too few outputs.
    """
    net, row, x = start.net, start.row.unsqueeze(0), start.probe.unsqueeze(0)
    body, head = net.columns("body").take(row), net.columns("head").take(row)
    with torch.no_grad():
        whole = net.outputs(row, x)
        try:
            parts = apply_parts(net, body, head, x)
        except (RuntimeError, ValueError, TypeError, IndexError):
            parts = whole.new_empty(0)
    if parts.shape != whole.shape or not torch.allclose(parts, whole, rtol=1e-4, atol=1e-5):
        raise ModelError(
            f"{title} needs a model whose outputs are head(body(x)), and this model's forward does something else; "
            "move what lies between into the body"
        )
    found = whole[0, 0].numel()
    if found < outputs:
        raise ModelError(f"{title} needs a model with an output for each class, at least {outputs}, not {found}")
    return found


@dataclass(frozen=True)
class PartsTraining(Task):
    """Epochs that train named parts of a model, each with an optimiser state of its own.

    Parameters
    ----------
    optimiser
        How to step.
    data
        Which minibatches.
    """

    optimiser: Optimiser
    data: Minibatches

    def parts(self, context: ClientContext, **rows: Tensor) -> Rows:
        """Return working rows of parts with their optimiser states.

        Parameters
        ----------
        context
            The clients.
        **rows
            The parts.

        Returns
        -------
        Rows
            Working rows for :meth:`step_on`.
        """
        work: Rows = dict(rows)
        for name, value in rows.items():
            work |= self.optimiser.init(context, value, f"{name}_")
        return work

    @abc.abstractmethod
    def losses(self, work: Rows, batch: Batch) -> Tensor:
        """Return each row's loss.

        Parameters
        ----------
        work
            Working rows; those of parts in training are variables.
        batch
            A minibatch.

        Returns
        -------
        Tensor
            Losses ``[rows]``.
        """

    def step_on(self, *names: str) -> Callable[[Rows, Batch], Rows]:
        """Return the step that trains some parts at once and leaves the others.

        Parameters
        ----------
        *names
            The parts.

        Returns
        -------
        callable
            From working rows and a minibatch to new working rows.
        """

        def step(work: Rows, batch: Batch) -> Rows:
            def losses(*rows: Tensor) -> Tensor:
                return self.losses(work | dict(zip(names, rows, strict=True)), batch)

            gradients = batch.grad_of(losses, *(work[name] for name in names))
            new = work
            for name, gradient in zip(names, gradients, strict=True):
                new = new | self.optimiser.update(work, name, gradient, f"{name}_")
            return new

        return step
