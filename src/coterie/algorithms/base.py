"""What an algorithm is: a server's half that asks, a client's half that folds over its data.

An :class:`Algorithm` is one frozen, validated object whose fields are its hyper-parameters.

- The **server's half** is the generator :meth:`Algorithm.round`. It yields an :class:`Ask` (which task, with which
  messages) and is handed :class:`Replies`: rows with their client numbers, always in increasing order of client and
  possibly fewer than were asked. It sees nothing but what was sent.
- The **client's half** is a :class:`Task`: :meth:`Task.start`, a sequence of :class:`Fold` over the client's samples,
  :meth:`Task.finish`. It is written on rows and never mixes rows: a simulation hands it the rows of a whole cohort, a
  real node hands it one.

State is explicit: dictionaries of named tensors. The server's state belongs to the server; the clients' state has a row
per client and never leaves the client. Together they are the checkpoint.
"""

from __future__ import annotations

import abc
from collections.abc import Generator
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from coterie.algorithms.batch import Batch, Net
from coterie.algorithms.client import ClientContext, Fold, FullPass, Minibatches, Task
from coterie.algorithms.messages import Ask, Cohort, Message, Replies, Start, Weights
from coterie.rows import Rows

__all__ = [
    "Algorithm",
    "Ask",
    "Batch",
    "ClientContext",
    "Cohort",
    "Fold",
    "FullPass",
    "Info",
    "Message",
    "Minibatches",
    "Net",
    "Personalise",
    "Replies",
    "Round",
    "Start",
    "State",
    "Task",
    "Weights",
    "facts",
]

State = dict[str, Tensor]
"""The server's named tensors."""

Info = dict[str, "Tensor | Weights"]
"""What a round reports beside its state: numbers to record, and :class:`Weights` of collaboration."""

Round = Generator[Ask, Replies, tuple[State, Info]]
"""The server's half of a round: yields asks, is handed replies, returns the new server state and what to record."""

Personalise = Generator[Ask, Replies, Message]
"""Like :data:`Round`, but for evaluation: its effects on clients are dropped, and it returns a last message."""


def _nothing() -> Personalise:
    yield from ()
    return Message()


class Algorithm(BaseModel, abc.ABC):
    """A federated method: both halves, in one place; the fields are its hyper-parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: ClassVar[str]
    """The registry's name, which is the file's name."""
    title: ClassVar[str]
    """How people write it."""
    citation: ClassVar[str]
    """Where it comes from."""
    federates: ClassVar[bool] = True
    """Whether clients learn anything from one another."""
    has_personal: ClassVar[bool] = True
    """Whether it makes a model for each client."""
    has_global: ClassVar[bool] = False
    """Whether it makes one model for all."""
    derived_global: ClassVar[bool] = False
    """Whether the global model is ours (the mean of the personal ones) rather than the method's."""
    has_hybrid: ClassVar[bool] = False
    """Whether the method chooses, for each client, between its personal and the global model."""

    own_statistics: ClassVar[str | None] = None
    """The name under which batches measure (:meth:`~coterie.algorithms.batch.Batch.measuring`) the running statistics
    of personal models, where a client keeps these apart from those of the model that it sends."""

    def check_clients(self, count: int) -> None:
        """Refuse a number of clients with which the parameters make no sense, with a ``ConfigError``; by default none.

        Parameters
        ----------
        count
            How many clients take part in training.
        """

    @abc.abstractmethod
    def init(self, start: Start) -> tuple[State, Rows]:
        """Make the state before the first round.

        Parameters
        ----------
        start
            The initial model and what is known of the federation.

        Returns
        -------
        tuple
            The server's state, and the clients' state with a row per client.
        """

    @abc.abstractmethod
    def tasks(self) -> dict[str, Task]:
        """Return the client's half.

        Returns
        -------
        dict of str to Task
            Tasks by the names that asks use.
        """

    @abc.abstractmethod
    def round(self, server: State, cohort: Cohort) -> Round:
        """Play the server's half of a round.

        Parameters
        ----------
        server
            The server's state.
        cohort
            The clients of this round.

        Returns
        -------
        Round
            A generator of asks that returns the new server state and what to record.
        """

    def welcome(self, server: State, cohort: Cohort) -> Round:
        """Play the server's half of the first round of newcomers: clients that no round has asked before.

        Parameters
        ----------
        server
            The server's state.
        cohort
            The newcomers.

        Returns
        -------
        Round
            As :meth:`round`, which it is by default.
        """
        return self.round(server, cohort)

    @property
    def settles(self) -> bool:
        """Whether newcomers are treated otherwise than clients before the first round; by default they are not."""
        return False

    def admit(self, server: State, welcomed: State, clients: Tensor) -> State:
        """Let newcomers be members, in a federation in which they stay.

        Parameters
        ----------
        server
            The server's state after a round of the others.
        welcomed
            Its state after :meth:`welcome`, which was played at the same time.
        clients
            The newcomers that replied.

        Returns
        -------
        State
            The state with what it holds of each newcomer; by default it holds nothing.
        """
        return server

    def personalise(self, server: State, cohort: Cohort) -> Personalise:
        """Prepare personal models for evaluation; what it does to clients is dropped afterwards.

        Parameters
        ----------
        server
            The server's state.
        cohort
            The clients to evaluate.

        Returns
        -------
        Personalise
            A generator of asks that returns a last message, from which and from its own state each client makes its
            model with :meth:`personal`. By default it asks nothing and says nothing.
        """
        return _nothing()

    def personal(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Make the personal models, on the clients.

        Parameters
        ----------
        context
            What the clients know about themselves.
        state
            Their state.
        message
            The last message of :meth:`personalise`, as rows.

        Returns
        -------
        Rows
            What :meth:`predict` needs, a row per client.
        """
        return {"w": state["w"]}

    @property
    def evaluated_together(self) -> bool:
        """Whether a client's personal model depends on who else is evaluated, so that all are made at once."""
        return False

    def global_model(self, server: State) -> Rows | None:
        """Return the global model, if there is one.

        Parameters
        ----------
        server
            The server's state.

        Returns
        -------
        Rows or None
            What :meth:`predict` needs, without a client axis.
        """
        return None

    def other_models(self, server: State) -> dict[str, Rows]:
        """Return further models for each client that are worth a line in the records.

        Parameters
        ----------
        server
            The server's state.

        Returns
        -------
        dict of str to Rows
            By name, what :meth:`predict` needs, a row per client of the federation.
        """
        return {}

    def predict(self, net: Net, rows: Rows, x: Tensor) -> Tensor:
        """Apply a model that :meth:`personal` or :meth:`global_model` made.

        Parameters
        ----------
        net
            The model.
        rows
            Its parameters, a row per client.
        x
            Samples ``[rows, samples, ...]``.

        Returns
        -------
        Tensor
            Outputs ``[rows, samples, ...]``.
        """
        return net.outputs(rows["w"], x)

    def joined_statistics(self, statistics: Tensor, shares: Tensor) -> Tensor:
        """Join the clients' running statistics, on the server: by default their mean by samples.

        Parameters
        ----------
        statistics
            Means, variances and counts of BatchNorm layers, a row for each client that replied.
        shares
            Each client's part of the samples; they sum to one.

        Returns
        -------
        Tensor
            One row.
        """
        return (shares.unsqueeze(1) * statistics.double()).sum(0).to(statistics.dtype)

    @classmethod
    def summary(cls) -> str:
        """Return the first line of the class's docstring.

        Returns
        -------
        str
            One line.
        """
        return (cls.__doc__ or "").strip().split("\n")[0]

    def settings(self) -> dict[str, Any]:
        """Return the hyper-parameters.

        Returns
        -------
        dict of str to object
            Plain values, fit for a YAML file.
        """
        return self.model_dump(mode="json")


_FACTS = ("name", "title", "citation", "federates", "has_personal", "has_global", "derived_global", "has_hybrid")


def facts(method: Algorithm) -> dict[str, Any]:
    """Return what a method says of itself, for one that stands around it.

    Parameters
    ----------
    method
        The method.

    Returns
    -------
    dict of str to object
        Its class's facts by name.
    """
    return {fact: getattr(method, fact) for fact in (*_FACTS, "own_statistics")}
