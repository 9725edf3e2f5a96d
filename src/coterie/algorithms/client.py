"""The client's half of an algorithm: tasks that fold over a client's samples, written on rows that never mix.

A simulation hands a task the rows of a whole cohort; a real node hands it one.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from coterie.algorithms.batch import Net
from coterie.rows import Layout, Rows


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
    repeats
        Gradient steps that each step takes on what it is given.

    Attributes
    ----------
    MOST
        The most passes or steps that a setting of a method may ask for in a round: a slip, or a message from somebody
        else, must not keep a client busy for ever.
    """

    MOST: ClassVar[int] = 10_000

    size: int
    epochs: int | tuple[int, int] = 1
    steps: int | None = None
    draws: int = 1
    repeats: int = 1


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
    per_row: ClassVar[tuple[str, ...]] = ()
    """Fields with a number that a step may find as a column ``[rows, 1]``, one for each row, if runs that differ in it
    are computed together (:mod:`coterie.algorithms.row_numbers`). A class says this for itself: it is not inherited."""
    outside_steps: ClassVar[tuple[str, ...]] = ()
    """Fields that no step looks at, only :meth:`start`, :attr:`Fold.then` and :meth:`finish`: runs that differ in them
    are computed together too; ``data.epochs`` names a field of the field ``data``. Not inherited either."""
    moves_statistics: ClassVar[bool] = True
    """Whether its passes over training samples may move the running statistics of BatchNorm layers; false for one that
    takes losses and no gradient, whose message and reply then need not carry them."""

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
        """Return which passes over data the task makes.

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
