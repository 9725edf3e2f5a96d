"""FLAME: personal and global models by the alternating direction method of multipliers.

Zhu, Zeng, Wang, Sun, Li, Yao and Peng, "On ADMM in heterogeneous federated learning: personalization, robustness, and
fairness", 2024.

The problem is ``min Σ_i α_i (f_i(θ_i) + (λ/2) |θ_i − w_i|²)`` subject to ``w_i = w``, with duals ``π_i`` and penalty
``ρ``. At the start ``θ_i = w_i = w⁰`` and ``π_i = 0``, so ``u_i = w⁰``. Each round::

    server:          w = (1/m) Σ_{i=1..m} u_i                       (all clients; the absent ones' u_i are old)
    client i ∈ S:    θ_i ← H epochs of  θ ← θ − η (∇f_i(θ; batch) + λ (θ − c_i))                       (Eq. 11)
                     w_i ← (λ α_i θ_i + ρ w − π_i) / (λ α_i + ρ)                                       (Eq. 12)
                     π_i ← π_i + ρ (w_i − w)                                                           (Eq. 13)
                     u_i ← w_i + π_i / ρ, which it sends

The personal models are ``θ_i``, the global model is ``w`` after the last aggregation, and the hybrid takes for each
client the better of the two. ``α_i`` cancels in the first step of a client but not in the second. After every update
``π_i = λ α_i (θ_i − w_i)`` (Lemma 3).

Departures from the paper

- C-F1: the mean is over all clients that take part in training, the absent ones with their last message. The server
  keeps the sum of messages, changes it by differences, and takes it anew every 100 rounds so that rounding does not
  add up.
- C-F2: the proximal centre ``c_i`` is the client's own ``w_i`` (``centre="own"``, the method that the theory covers);
  ``centre="global"`` takes ``w``, as the authors' program does. The fixed points are the same.
- C-F3: ``w_i`` and ``π_i`` change once a round, whatever the number H of epochs.
- C-F8: the conditions of the convergence theorems are not enforced; the paper's own settings violate them.
- The paper's ρ is .1 for 10 clients and .02 for 50 with λ = 1, and .03 for 100 with λ = 3: in each ρ = λ/m, which is
  therefore what ρ is unless given.
- Its tables were made with ``lr=0.01, batch_size=100, local_epochs=1, momentum=0.5, weight_decay=0.01,
  centre="global"`` over 100 rounds (the momentum and weight decay are in the authors' program only). The defaults here
  do as much local work a round as the other methods', with the paper's λ = 1; with a λ of .1 to .3 or the global centre
  the models need fewer rounds.
- ``dual=False`` holds ``π_i`` at zero. With ``centre="global"`` and everybody taking part the method is then pFedMe
  with one local round and the step ``α_i/(λ α_i + ρ)`` (C-F6).

Added to the paper, which speaks of neither

- ``newcomers="global"``: a client that comes when others have trained begins at ``θ_i = w_i = w`` with ``π_i = 0``, as
  everybody does at ``w⁰`` before the first round, so that Lemma 3 holds. ``"initial"`` leaves it at ``w⁰``.
- ``newcomers="averaged"`` lets it begin there too, and then do the local work of K = 5 rounds in the one: with the
  centre ``w``, which nobody moves meanwhile, K times the H epochs of Eq. 11, each from where the last one ended, at
  ``θ^1, …, θ^K``; then ``θ_i = (1/K) Σ_k θ^k``, and Equations 12 and 13 once, by which Lemma 3 holds. What it looks for
  is ``θ* = argmin f_i(θ) + (λ/2) |θ − w|²``, its part of the problem while the constraint ``w_i = w`` holds. From a
  mean of personal models, which ``w`` is with ρ = λ/m and uniform weights (then ``u_i = θ_i``), one round does not
  come there; and with minibatches the ``θ^k`` scatter around it, which their mean does less.
- ``returning="consensus"``: so does a client i that was away. With ``k_i`` the round in which it last replied, 0 if it
  never did, that is one with ``k_i < max_j k_j``. Its last message stays in the mean until it replies. ``"own"`` is the
  method as printed; where everybody takes part in every round the two are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from coterie.algorithms.base import Ask, ClientContext, Cohort, Message, Round, Start, State, Task
from coterie.algorithms.last_models import HEARD, attended
from coterie.algorithms.local_training import (
    ANEW,
    PASSES,
    AveragedTraining,
    LocalTraining,
    ProximalTraining,
    refuse_unstable,
)
from coterie.rows import Rows, put_rows, take_rows, total

EXACT_EVERY = 100
"""Rounds after which the server's sum of messages is taken anew."""


@dataclass(frozen=True, kw_only=True)
class PersonalTraining(ProximalTraining):
    """Epochs that train the client's own ``θ`` towards a centre in the space that clients share.

    The client's state holds ``theta``; the message holds ``w``, the shared model.

    Parameters
    ----------
    own_centre
        Hold ``θ`` to the client's own ``w`` instead of the message's.
    """

    references: ClassVar[Mapping[str, str | None]] = {"u": "w"}

    own_centre: bool = False

    def image(self, theta: Tensor) -> Tensor:
        """Return the image of a personal model in the space that clients share, which is the model itself."""
        return theta

    def start(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Continue from the client's own ``θ``."""
        theta = state["theta"].clone(memory_format=torch.contiguous_format)  # steps are taken in place
        shared = message["w"]
        centre = state["w"] if self.own_centre else shared
        return {"w": theta, "centre": centre, "shared": shared, **self.optimiser.init(context, theta)}


@dataclass(frozen=True, kw_only=True)
class AdmmTraining(PersonalTraining):
    """The client's half: ``θ_i`` by epochs, then ``w_i``, ``π_i`` and the message ``u_i`` in closed form.

    The client's state holds ``theta``, ``w``, ``pi`` and its weights ``alpha`` and ``rho``.

    Parameters
    ----------
    dual
        Update the dual; otherwise it stays as it was.
    """

    per_row: ClassVar[tuple[str, ...]] = ("prox",)
    outside_steps: ClassVar[tuple[str, ...]] = ("from_own", "reply", "data.epochs", "own_centre", "dual")

    dual: bool

    def start(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Continue from the client's own ``θ`` and dual, or ``anew`` from the shared model with a dual of zero."""
        if ANEW in message:
            anew, w, own = message[ANEW] > 0, message["w"], dict(state.items())
            begun = {"theta": w, "w": w, "pi": torch.zeros_like(w)}
            state = own | {name: torch.where(anew, value, own[name]) for name, value in begun.items()}
        return super().start(context, state, message) | {name: state[name] for name in ("pi", "alpha", "rho")}

    def finish(self, context: ClientContext, work: Rows) -> tuple[Rows, Rows]:
        """Apply Equations 12 and 13, and send the message."""
        theta, w, pi, rho = work["w"], work["shared"], work["pi"], work["rho"]
        pull = self.prox * work["alpha"]
        own = (pull * self.image(theta) + rho * w - pi) / (pull + rho)
        if self.dual:
            pi = pi + rho * (own - w)
        return {"theta": theta, "w": own, "pi": pi}, {"u": own + pi / rho}


@dataclass(frozen=True, kw_only=True)
class JoiningTraining(AveragedTraining, AdmmTraining):
    """A newcomer's first round: ``θ_i`` is the mean of what several rounds' local work ends at, ``w`` being held."""

    outside_steps: ClassVar[tuple[str, ...]] = AdmmTraining.outside_steps


class Consensus(LocalTraining):
    """What FLAME and the methods in a subspace share: the server's ``w`` is the mean of every client's last message."""

    lam: float = Field(1.0, ge=0, description="weight λ of the proximal term that holds a personal model to the shared")

    @model_validator(mode="after")
    def _stable(self) -> Consensus:
        refuse_unstable(self.lr, self.lam, self.optimiser, "lam")
        return self

    def opening(self, start: Start) -> Tensor:
        """Return the shared model before the first round, which is also every client's first message."""
        return start.row

    def init(self, start: Start) -> tuple[State, Rows]:
        """Start with the same message from every client."""
        opening = self.opening(start)
        u = start.rows(opening)
        counted = torch.ones(start.clients, dtype=torch.bool, device=u.device)
        if start.members is not None:
            counted = torch.zeros_like(counted).index_fill(0, start.members, True)
        return {"u": u, "sum": counted.sum() * opening.double(), "counted": counted}, {"theta": start.rows()}

    def mean(self, server: State) -> Tensor:
        """Return the mean of the last messages of all that take part."""
        return (server["sum"] / server["counted"].sum()).to(server["u"].dtype)

    def round(self, server: State, cohort: Cohort) -> Round:
        """Broadcast the mean, and keep the messages that come back."""
        return self.played(server, cohort, Message(shared={"w": self.mean(server)}))

    def played(self, server: State, cohort: Cohort, message: Message, task: str = "train") -> Round:
        """Send a message, and keep the messages that come back."""
        replies = yield Ask(task, message)
        clients = replies.clients
        u = put_rows(server["u"], clients, replies["u"])
        # A newcomer's first message joins the mean; until then it did not count.
        counted = server["counted"].index_fill(0, clients, True)
        if cohort.round % EXACT_EVERY == 0:
            summed = total(u, counted)
        else:
            summed = server["sum"] + take_rows(u, clients).sum(0, dtype=torch.float64)
            summed -= total(take_rows(server["u"], clients), server["counted"][clients])
        new = {"u": u, "sum": summed, "counted": counted}
        return new | attended(server, clients, cohort.round), {}

    def personal(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Return ``θ_i``."""
        return {"w": state["theta"]}


class AlternatingDirections(Consensus):
    """What FLAME has in common with its form in a subspace: a dual for each client."""

    rho: float | None = Field(None, gt=0, description="penalty ρ of the constraint w_i = w; lam/clients if not given")
    alpha: Literal["uniform", "size"] = Field("uniform", description="weights of clients: equal, or by their samples")
    centre: Literal["own", "global"] = Field("own", description="what a personal model is held to while it trains")
    dual: bool = Field(True, description="update the duals; otherwise they stay zero")

    @model_validator(mode="after")
    def _penalised(self) -> AlternatingDirections:
        if self.rho is None and self.lam == 0:
            raise ValueError("rho is lam/clients unless given: give it with lam=0")
        return self

    def init(self, start: Start) -> tuple[State, Rows]:
        """Start every client at the common model, with a dual of zero."""
        server, clients = super().init(start)
        opening = self.opening(start)
        members = slice(None) if start.members is None else start.members
        sizes = start.sizes.double() if self.alpha == "size" else torch.ones_like(start.sizes, dtype=torch.float64)
        alpha = (sizes / sizes[members].sum()).to(start.row).unsqueeze(1)
        rho = torch.full_like(alpha, self.lam / len(sizes[members]) if self.rho is None else self.rho)
        w, pi = start.rows(opening), start.rows(torch.zeros_like(opening))
        return server, clients | {"w": w, "pi": pi, "alpha": alpha, "rho": rho}


class FLAME(AlternatingDirections):
    """Personal models held to a consensus that duals drive to agreement, and the consensus itself."""

    name: ClassVar[str] = "flame"
    title: ClassVar[str] = "FLAME"
    citation: ClassVar[str] = "Zhu et al., 2024"
    has_global: ClassVar[bool] = True
    has_hybrid: ClassVar[bool] = True

    newcomers: Literal["initial", "global", "averaged"] = Field(
        "averaged",
        description="where a client begins that comes when others have trained: at the initial model (as in the "
        "paper), at the consensus, or there with the work of five rounds in its first, averaged",
    )
    returning: Literal["own", "consensus"] = Field(
        "own",
        description="what a client that was away goes on from: its own model and dual (as in the paper), or the "
        "consensus and a dual of zero",
    )

    def init(self, start: Start) -> tuple[State, Rows]:
        """Keep, if it counts, who replied when."""
        server, clients = super().init(start)
        heard = torch.zeros(start.clients, dtype=torch.int64, device=start.row.device)
        return server | ({} if self.returning == "own" else {HEARD: heard}), clients

    def round(self, server: State, cohort: Cohort) -> Round:
        """Broadcast the mean, say who is to begin anew, and keep the messages that come back."""
        if self.returning == "own":
            return super().round(server, cohort)
        heard = server[HEARD]
        return self.begun(server, cohort, heard[cohort.clients] < heard.max())

    def welcome(self, server: State, cohort: Cohort) -> Round:
        """Play the first round of newcomers, as ``newcomers`` says."""
        if self.newcomers == "initial":
            return self.round(server, cohort)
        task = "join" if self.newcomers == "averaged" else "train"
        return self.begun(server, cohort, torch.ones_like(cohort.clients, dtype=torch.bool), task)

    @property
    def settles(self) -> bool:
        """Whether newcomers begin elsewhere than clients before the first round."""
        return self.newcomers != "initial"

    def admit(self, server: State, welcomed: State, clients: Tensor) -> State:
        """Let the newcomers' messages count in the mean."""
        sent = take_rows(welcomed["u"], clients)
        kept = total(take_rows(server["u"], clients), server["counted"][clients])
        new = {
            "u": put_rows(server["u"], clients, sent),
            "sum": server["sum"] + sent.sum(0, dtype=torch.float64) - kept,
            "counted": server["counted"].index_fill(0, clients, True),
        }
        heard = (
            {HEARD: put_rows(server[HEARD], clients, take_rows(welcomed[HEARD], clients))} if HEARD in server else {}
        )
        return server | new | heard

    def begun(self, server: State, cohort: Cohort, anew: Tensor, task: str = "train") -> Round:
        """Play a round in which some clients begin anew."""
        w = self.mean(server)
        message = Message(shared={"w": w}, each={ANEW: anew.to(w.dtype).unsqueeze(1)})
        return self.played(server, cohort, message, task)

    def tasks(self) -> dict[str, Task]:
        """Return the client's half, and that of a newcomer's first round."""
        own = self.centre == "own"
        train = AdmmTraining(self.stepper, self.minibatches, prox=self.lam, own_centre=own, dual=self.dual)
        if self.newcomers != "averaged":
            return {"train": train}
        join = JoiningTraining(
            self.stepper, self.minibatches, prox=self.lam, own_centre=own, dual=self.dual, passes=PASSES
        )
        return {"train": train, "join": join}

    def global_model(self, server: State) -> Rows | None:
        """Return ``w`` after the last aggregation."""
        return {"w": self.mean(server)}
