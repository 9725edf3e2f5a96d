"""Training on the client's own samples, on rows: optimisers, and the proximal epochs that many methods share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from coterie import kernels
from coterie.algorithms.base import Algorithm, Batch, ClientContext, Fold, Minibatches, Start, State, Task
from coterie.algorithms.row_numbers import Number, add_times, nonzero
from coterie.errors import ConfigError
from coterie.rows import Rows

ANEW = "anew"
"""The name, in a message, of a number for each client: above 0 if it is to start from what it is sent."""
PASSES = 5
"""How many rounds' local work a newcomer does in an exchange with ``newcomers="averaged"``. Of 1 to 12 with FLAME, by
newcomers' validation samples, fewer than five were worse and more hardly better."""


@dataclass(frozen=True)
class Optimiser:
    """A first-order optimiser whose state has a row per client.

    The updates are those of ``torch.optim``: weight decay adds ``weight_decay · w`` to the gradient.

    Parameters
    ----------
    kind
        ``"sgd"`` (with momentum if that is not 0) or ``"adam"``.
    lr
        Learning rate in the first round.
    momentum
        Factor of the velocity, for ``"sgd"``.
    weight_decay
        Coefficient of the L2 term.
    lr_decay
        Factor by which the learning rate shrinks each round.
    """

    per_row: ClassVar[tuple[str, ...]] = ("momentum", "weight_decay")
    outside_steps: ClassVar[tuple[str, ...]] = ("lr", "lr_decay")

    kind: Literal["sgd", "adam"] = "sgd"
    lr: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    lr_decay: float = 1.0

    @property
    def plain(self) -> bool:
        """Whether a step is ``w − lr · gradient`` and nothing else."""
        return self.kind == "sgd" and not nonzero(self.momentum) and not nonzero(self.weight_decay)

    def init(self, context: ClientContext, params: Tensor, prefix: str = "") -> Rows:
        """Make the optimiser's rows.

        Parameters
        ----------
        context
            The clients; the round decides the learning rate.
        params
            What will be optimised ``[rows, parameters]``.
        prefix
            Put before each name, where a task optimises more than one matrix.

        Returns
        -------
        Rows
            Working rows for :meth:`update`.
        """
        rate = self.lr * self.lr_decay ** (context.round - 1)
        rows = {f"{prefix}lr": torch.full((len(params), 1), rate, dtype=params.dtype, device=params.device)}
        if self.kind == "adam":
            # Names that no task gives its own rows.
            rows[f"{prefix}adam first"] = torch.zeros_like(params)
            rows[f"{prefix}adam second"] = torch.zeros_like(params)
            rows[f"{prefix}adam count"] = torch.zeros(len(params), 1, dtype=params.dtype, device=params.device)
        elif self.momentum:
            rows[f"{prefix}velocity"] = torch.zeros_like(params)
        return rows

    def update(self, work: Rows, name: str, gradient: Tensor, prefix: str = "") -> Rows:
        """Take one step.

        Parameters
        ----------
        work
            Working rows that hold the parameters and the optimiser's rows.
        name
            Name of the parameters.
        gradient
            Their gradient.
        prefix
            As given to :meth:`init`.

        Returns
        -------
        Rows
            The names that changed: put them over ``work``.
        """
        params, rate = work[name], work[f"{prefix}lr"]
        if nonzero(self.weight_decay):
            gradient = add_times(gradient, params, self.weight_decay)
        if self.kind == "adam":
            first = torch.lerp(work[f"{prefix}adam first"], gradient, 1 - 0.9)
            second = work[f"{prefix}adam second"].mul(0.999).addcmul_(gradient, gradient, value=1 - 0.999)
            count = work[f"{prefix}adam count"] + 1
            scale = rate / (1 - 0.9**count)
            spread = (second.sqrt() / (1 - 0.999**count).sqrt()).add_(1e-8)
            step = {name: params - scale * (first / spread)}
            names = (f"{prefix}adam {name}" for name in ("first", "second", "count"))
            return step | dict(zip(names, (first, second, count), strict=True))
        if nonzero(self.momentum):
            velocity = add_times(gradient, work[f"{prefix}velocity"], self.momentum)
            return {name: torch.addcmul(params, velocity, rate, value=-1), f"{prefix}velocity": velocity}
        return {name: torch.addcmul(params, gradient, rate, value=-1)}

    def step_(
        self, work: Rows, name: str, gradient: Tensor, pull: Number = 0.0, centre: str = "", prefix: str = ""
    ) -> Rows:
        """Take one step of :meth:`update` along ``gradient + pull · (w − centre)``, in place where that is faster.

        Use it only for rows that the task made itself (in ``start``), for what it was given must not change.

        Parameters
        ----------
        work
            Working rows that hold the parameters, their centre and the optimiser's rows.
        name
            Name of the parameters.
        gradient
            Their gradient.
        pull
            Weight of a proximal term, one for all rows or a column ``[rows, 1]``.
        centre
            Name of its centre, needed unless ``pull`` is 0.
        prefix
            As given to :meth:`init`.

        Returns
        -------
        Rows
            The names that changed otherwise than in place: put them over ``work``.
        """
        params = work[name]
        if self.kind == "sgd" and kernels.usable(params, gradient):
            from coterie.kernels.steps import descend_

            descend_(
                params,
                gradient,
                work[f"{prefix}lr"],
                pull=pull,
                centre=work[centre] if nonzero(pull) else None,
                decay=self.weight_decay,
                momentum=self.momentum,
                velocity=work[f"{prefix}velocity"] if nonzero(self.momentum) else None,
            )
            return {}
        if nonzero(pull):
            gradient = add_times(gradient, params - work[centre], pull)
        return self.update(work, name, gradient, prefix)


@dataclass(frozen=True)
class ProximalTraining(Task):
    """Epochs of ``w ← w − η (∇f_i(w; batch) + prox (w − centre))``; the client keeps ``w`` and sends it.

    The message holds ``w``, the centre. The client's state holds ``w``, its own model. A message may say with ``anew``
    that a client is to start at the centre wherever it would start by itself. Steps are taken in place, so that another
    ``start`` must make rows ``w`` of its own, too.

    Parameters
    ----------
    optimiser
        How to step.
    data
        Which minibatches.
    prox
        Weight of the proximal term; 0 for plain training.
    from_own
        Start at the client's own ``w`` instead of the message's.
    reply
        Send the trained model; otherwise it stays with the client.
    """

    per_row: ClassVar[tuple[str, ...]] = ("prox",)
    outside_steps: ClassVar[tuple[str, ...]] = ("from_own", "reply", "data.epochs")

    optimiser: Optimiser
    data: Minibatches
    prox: float = 0.0
    from_own: bool = False
    reply: bool = True

    def start(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Start at the centre, or at the client's own model."""
        first = state["w"] if self.from_own else message["w"]
        if self.from_own and ANEW in message:
            first = torch.where(message[ANEW] > 0, message["w"], first)
        params = first.clone(memory_format=torch.contiguous_format)
        work = {"w": params, **self.optimiser.init(context, params)}
        return work | ({"centre": message["w"]} if self.prox else {})

    def step(self, work: Rows, batch: Batch) -> Rows:
        """Take one step.

        Parameters
        ----------
        work
            Working rows.
        batch
            A minibatch.

        Returns
        -------
        Rows
            New working rows.
        """
        if self.optimiser.plain:
            batch.descend_(work["w"], work["lr"], self.prox, work.get("centre"))  # `start` made these rows ours
            return work
        return work | self.optimiser.step_(work, "w", batch.grad(work["w"]), self.prox, "centre")

    def folds(self) -> tuple[Fold, ...]:
        """Make one pass over minibatches."""
        return (Fold(self.data, self.step),)

    def finish(self, context: ClientContext, work: Rows) -> tuple[Rows, Rows]:
        """Keep the trained model, and send it if ``reply`` says so."""
        return {"w": work["w"]}, ({"w": work["w"]} if self.reply else {})


@dataclass(frozen=True, kw_only=True)
class AveragedTraining(ProximalTraining):
    """Several rounds' local work in one, each from where the last one ended: the model is the mean of these ends.

    Parameters
    ----------
    passes
        How many.
    """

    per_row: ClassVar[tuple[str, ...]] = ("prox",)
    outside_steps: ClassVar[tuple[str, ...]] = ("from_own", "reply", "data.epochs")

    passes: int

    def start(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Start where one round's work would."""
        work = super().start(context, state, message)
        return work | {"mean": torch.zeros_like(work["w"])}

    def folds(self) -> tuple[Fold, ...]:
        """Do a round's local work several times."""
        return tuple(Fold(self.data, self.step, self.count) for _ in range(self.passes))

    def count(self, context: ClientContext, work: Rows) -> Rows:
        """Let where a pass ended count in the mean."""
        return work | {"mean": work["mean"] + work["w"] / self.passes}

    def finish(self, context: ClientContext, work: Rows) -> tuple[Rows, Rows]:
        """Take the mean, and go on as in any round."""
        return super().finish(context, work | {"w": work["mean"]})


class LocalTraining(Algorithm):
    """The fields of every method whose clients train by minibatches."""

    local_epochs: int = Field(
        5, ge=1, le=Minibatches.MOST, description="passes over the client's training samples in a round"
    )
    batch_size: int = Field(10, ge=0, description="samples in a minibatch; 0 means all")
    lr: float = Field(0.05, ge=0, description="learning rate")
    optimiser: Literal["sgd", "adam"] = Field("sgd", description="local optimiser")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of the local optimiser (sgd)")
    weight_decay: float = Field(0.0, ge=0, description="weight decay of the local optimiser")
    lr_decay: float = Field(1.0, gt=0, le=1, description="factor on the learning rate after each round")

    @model_validator(mode="after")
    def _adam_has_no_momentum(self) -> LocalTraining:
        if self.optimiser == "adam" and self.momentum:
            raise ValueError("momentum belongs to optimiser=sgd; leave it at 0 with optimiser=adam")
        return self

    @property
    def stepper(self) -> Optimiser:
        """The local optimiser, made of the fields."""
        return Optimiser(self.optimiser, self.lr, self.momentum, self.weight_decay, self.lr_decay)

    @property
    def minibatches(self) -> Minibatches:
        """The minibatches of the local epochs."""
        return Minibatches(self.batch_size, self.local_epochs)


def refuse_unstable(lr: float, prox: float, optimiser: str = "sgd", name: str = "prox", rate: str = "lr") -> None:
    """Refuse a proximal weight under which explicit steps diverge whatever the loss.

    ``w ← w − η·prox (w − centre)`` multiplies the distance to the centre by ``1 − η·prox``.

    Parameters
    ----------
    lr
        Learning rate η.
    prox
        Proximal weight.
    optimiser
        Only ``"sgd"`` takes steps of that size.
    name
        What the method calls the weight.
    rate
        What the method calls the learning rate.

    Raises
    ------
    ConfigError
        If ``lr * prox`` is above 2.
    """
    if optimiser == "sgd" and lr * prox > 2:
        raise ConfigError(
            f"{rate} * {name} is {lr * prox:g}: above 2 the steps diverge whatever the data; "
            f"lower {rate} below {2 / prox:g}"
        )


class GlobalTraining(LocalTraining):
    """What methods share whose clients train copies of one global model.

    The server holds ``w``. A client keeps its copy as it was after its last training, before the server joined them:
    that is its personal model.
    """

    has_global: ClassVar[bool] = True

    def init(self, start: Start) -> tuple[State, Rows]:
        """Start every model at the initial one."""
        return {"w": start.row}, {"w": start.rows()}

    def tasks(self) -> dict[str, Task]:
        """Return plain training from the global model."""
        return {"train": ProximalTraining(self.stepper, self.minibatches)}

    def global_model(self, server: State) -> Rows | None:
        """Return the server's model."""
        return {"w": server["w"]}
