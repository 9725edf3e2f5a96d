"""Methods whose server keeps every client's last model and that have no global model of their own.

Their papers speak neither of clients that come when others have trained, nor of those that were away. Both are added
here, for all of them; ``newcomers="initial"`` and ``returning="own"`` are the papers' methods.

**Newcomers.** A client ``n`` that no round has asked before is welcomed, with ``w̄ = Σ_j φ_j w_j / Σ_j φ_j`` the mean of
the members' last models (``φ_j = 1`` unless absence counts, see below)::

    "initial"   one round as any other, in which it has the initial model
    "mean"      w_n ← the method's local training, starting from w̄, and held to w̄ where the method holds models
    "mixture"   the same exchange, after which w_n says whom it resembles; then one round of the method, in which it
                listens to the members and to itself (with φ_n = 1), and nobody listens to it
    "averaged"  as "mixture", with the local work of K = 5 rounds in either exchange, each from where the last one
                ended: w_n is the mean of these K ends, which scatters less about what it looks for than one of them

**Absent clients.** With ``returning="mixture"`` the server keeps ``k_j``, the round in which client j last replied (0
if it never did). With ``k* = max_j k_j`` and a number γ (``freshness``) in [0, 1]::

    φ_j = γ^(k* − k_j),  but 0 for who never replied while others did             how fresh j's last model is
    a_ij ← a_ij φ_j / Σ_l a_il φ_l                                                for the method's weights a_ij
    client i with k_i < k*:   starts from its mixture u_i = Σ_j a_ij w_j

so that what a client knew when it was last there counts as little, for itself too, as it is old. A client that never
replied while others did gets ``a_nj = φ_j / Σ_l φ_l``, the mean, unless ``newcomers="initial"``.

Limits: where everybody replies in every round, all ``k_j`` are equal, ``φ_j = 1``, nobody was away, and every bit is
the paper's. γ = 1 weighs all who ever replied alike; γ = 0 hears those alone who replied last.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from coterie.algorithms.base import Ask, Cohort, Message, Round, Start, State, Task
from coterie.algorithms.local_training import ANEW, PASSES, AveragedTraining, LocalTraining, ProximalTraining
from coterie.rows import mix, put_rows, take_rows
from coterie.rows.host_copies import on_device, on_host

HEARD = "heard"
"""The name, in the server's state, of the rounds in which clients last replied."""
_HALF = 0.5


@dataclass(frozen=True)
class Attendance:
    """How long ago each client was heard.

    Parameters
    ----------
    freshness
        ``φ_j`` of every client of the federation, in float64.
    away
        Of each client of the cohort, whether others have been heard since.
    unknown
        Of each client of the cohort, whether it was never heard while others were.
    speaks
        Of every client of the federation, whether it was heard, or nobody was.
    """

    freshness: Tensor
    away: Tensor
    unknown: Tensor
    speaks: Tensor


def attendance(heard: Tensor, clients: Tensor, factor: float) -> Attendance:
    """Say how long ago clients were heard.

    Parameters
    ----------
    heard
        The round in which each client of the federation last replied, 0 if it never did.
    clients
        The cohort.
    factor
        What a model's freshness is multiplied by for every round of age, γ.

    Returns
    -------
    Attendance
        Freshness of all clients, and who of the cohort was away.
    """
    age = heard.max() - heard
    never = (heard == 0) & (age > 0)
    freshness = torch.where(never, 0.0, torch.tensor(factor, dtype=torch.float64, device=heard.device) ** age)
    return Attendance(freshness, age[clients] > 0, never[clients], ~never)


def attended(server: State, clients: Tensor, round_number: int) -> State:
    """Note that clients replied in a round, where the server keeps that; what changes in its state."""
    return {HEARD: server[HEARD].index_fill(0, clients, round_number)} if HEARD in server else {}


def reweighed(weights: Tensor, factors: Tensor) -> Tensor:
    """Multiply the weights of models by a factor for each, and let rows sum to one again.

    Parameters
    ----------
    weights
        A matrix ``[rows, models]`` whose rows sum to one, not negative.
    factors
        Of each model, in [0, 1].

    Returns
    -------
    Tensor
        The matrix. A row stays as it was, bit for bit, where all that it weighs have the factor 1, and where nothing
        would be left of it.
    """
    left = weights * factors
    total = left.sum(1, keepdim=True)
    changes = (left != weights).any(1, keepdim=True) & (total > 0)
    return torch.where(changes, left / torch.where(changes, total, 1.0), weights)


def heard_by_themselves(factors: Tensor, newcomers: Tensor) -> Tensor:
    """Let nobody but themselves listen to newcomers: the columns of a matrix of factors, but for its diagonal."""
    alone = factors.index_fill(1, newcomers, 0.0)
    alone[newcomers, newcomers] = factors[newcomers, newcomers]
    return alone


class LastModels(LocalTraining):
    """What methods share whose server holds ``w``, the last model of every client, and the ``members`` that train."""

    newcomers: Literal["initial", "mean", "mixture", "averaged"] = Field(
        "averaged",  # by newcomers' validation samples, see docs/newcomers.md
        description="where a client begins that comes when others have trained: at the initial model (as in the "
        "paper), at the mean of all, or there and then, in the same round, with its own mixture; averaged: so, with "
        "five times the work in each",
    )
    returning: Literal["own", "mixture"] = Field(
        "own",
        description="what a client that was away goes on from: as in the paper, or from its mixture over the last "
        "models of all who replied, the fresher the more",
    )
    freshness: float = Field(
        _HALF, ge=0, le=1, description="factor on a model's weight for every round of age, with returning=mixture"
    )

    @model_validator(mode="after")
    def _freshness_has_a_use(self) -> LastModels:
        if self.returning == "own" and self.freshness != _HALF:
            raise ValueError(f"freshness={self.freshness:g} has no effect with returning=own")
        return self

    @property
    def settles(self) -> bool:
        """Whether newcomers are treated otherwise than clients before the first round."""
        return self.newcomers != "initial"

    def attending(self, start: Start) -> State:
        """Return what the server keeps of who replied when: nothing, unless ``returning`` needs it."""
        if self.returning == "own":
            return {}
        return {HEARD: torch.zeros(start.clients, dtype=torch.int64, device=start.row.device)}

    def attendance(self, server: State, clients: Tensor) -> Attendance | None:
        """Return who was away; ``None`` if that does not count."""
        return attendance(server[HEARD], clients, self.freshness) if HEARD in server else None

    def outsiders(self, server: State, clients: Tensor) -> Tensor | None:
        """Return who of some clients is no member; ``None`` if nobody is, or if newcomers are treated as all others."""
        members = server["members"]
        if not self.settles or len(members) == len(server["w"]):
            return None
        outside = ~torch.isin(on_host(clients), on_host(members))  # where no GPU has to be waited for
        return on_device(outside, clients.device) if bool(outside.any()) else None

    def shares(self, server: State, known: Attendance | None) -> Tensor:
        """Return each member's share in their mean, by freshness where that counts; 0 for all others."""
        members, count = server["members"], len(server["w"])
        fresh = torch.zeros(count, dtype=torch.float64, device=members.device)
        fresh[members] = 1.0 if known is None else known.freshness[members]
        if not bool(fresh.any()):
            fresh[members] = 1.0  # no member was heard yet, only newcomers
        return fresh / fresh.sum()

    def trainings(self, prox: float = 0.0, from_own: bool = False) -> dict[str, Task]:
        """Return the clients' training, and that of newcomers who do more of it."""
        train = ProximalTraining(self.stepper, self.minibatches, prox=prox, from_own=from_own)
        if self.newcomers != "averaged":
            return {"train": train}
        join = AveragedTraining(self.stepper, self.minibatches, prox=prox, from_own=from_own, passes=PASSES)
        return {"train": train, "join": join}

    @abc.abstractmethod
    def played(self, server: State, cohort: Cohort, task: str) -> Round:
        """Play a round of the method with one of its trainings."""

    def round(self, server: State, cohort: Cohort) -> Round:
        """Play a round of the method."""
        return self.played(server, cohort, "train")

    def welcome(self, server: State, cohort: Cohort) -> Round:
        """Play the first round of newcomers, as ``newcomers`` says."""
        return self._welcomed(server, cohort) if self.settles else self.round(server, cohort)

    def admit(self, server: State, welcomed: State, clients: Tensor) -> State:
        """Keep the newcomers' models, and let the others listen to them from the next round on."""
        names = [name for name in ("w", HEARD) if name in server]
        own = {name: put_rows(server[name], clients, take_rows(welcomed[name], clients)) for name in names}
        return server | own | {"members": torch.cat([server["members"], clients]).unique()}

    def _welcomed(self, server: State, cohort: Cohort) -> Round:
        mean = mix(self.shares(server, self.attendance(server, cohort.clients)), server["w"])
        task = "join" if self.newcomers == "averaged" else "train"
        replies = yield Ask(task, Message(shared={"w": mean, ANEW: mean.new_ones(1)}))
        server = server | {"w": put_rows(server["w"], replies.clients, replies["w"])}
        if self.newcomers == "mean":
            return server | attended(server, replies.clients, cohort.round), {}
        # As fresh as the freshest: theirs is no later round.
        server |= attended(server, replies.clients, int(server[HEARD].max()) if HEARD in server else 0)
        return (yield from self.played(server, cohort, task))
