"""Clipping and noise on what a client sends, and the privacy loss that they bound.

All tensors of a reply together are one vector. With the reference ``r`` (what the server sent, and 0 for a tensor that
is a gradient or a difference already; see :attr:`coterie.algorithms.base.Task.references`)::

    u    = reply − r
    u'   = u · min(1, C / |u|)                        C = clip
    sent = r + u' + z,    z ~ N(0, (noise · C)² I)

The reference is known to the server, so what it learns of the client from the reply is a Gaussian mechanism applied to
``u'``. Whatever samples the client holds, ``|u'| ≤ C``; for two sets of samples the two vectors differ by 2C at most.
So a reply is a Gaussian mechanism whose noise is ``noise / 2`` times its sensitivity, with Rényi divergence ``2α /
noise²`` of order α. Replies of one client compose, each chosen after seeing those before: the divergences add up.

The guarantee is of the client, towards the server and whoever sees what it sees: for any two sets of samples that the
client might hold, what the server receives in ``k`` replies differs in probability by at most a factor ``e^ε`` but for
``δ``. It assumes nothing of the server. Nothing is claimed from clients being drawn at random, nor from replies being
averaged: the server sees each reply and who sent it.

The privacy loss is computed by Google's ``dp-accounting``.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import zlib
from collections.abc import Callable, Mapping
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor

from coterie.errors import AlgorithmError, ConfigError
from coterie.options import Spec
from coterie.randomness import fold_in, keys, normal
from coterie.rows import Rows

Draw = Callable[[str, slice, int], Tensor]
"""From a tensor's name, some rows and a number of columns to standard normal numbers in float64."""

_LEAST_NOISE, _MOST_NOISE = 1e-6, 1e6  # beyond, the loss is no number that means anything
_BLOCK_ELEMENTS = 2**22  # computed in float64, with a few temporaries of that size


class Privacy(Spec):
    """What is done to every reply, and at which δ the privacy loss is stated."""

    kind: ClassVar[str] = "privacy"
    name: ClassVar[str] = "privacy"
    citation: ClassVar[str] = "Mironov, CSF 2017"

    clip: float = Field(gt=0, description="largest L2 norm C of what a reply tells, all its tensors together")
    noise: float = Field(ge=0, description="standard deviation of the noise over clip; 0 for clipping alone")
    delta: float = Field(1e-5, gt=0, lt=1, description="probability δ with which the privacy loss may be larger")

    @field_validator("noise")
    @classmethod
    def _accountable(cls, noise: float) -> float:
        if noise and not _LEAST_NOISE <= noise <= _MOST_NOISE:
            raise ValueError(f"noise is {noise:g}, but must be 0, or between {_LEAST_NOISE:g} and {_MOST_NOISE:g}")
        return noise

    def written(self) -> str:
        """Write the text that :func:`parse` reads.

        Returns
        -------
        str
            ``clip=...,noise=...,delta=...``
        """
        return f"clip={self.clip!r},noise={self.noise!r},delta={self.delta!r}"

    def epsilon(self, replies: int) -> float:
        """Give the privacy loss of a client's replies.

        Parameters
        ----------
        replies
            How many it has sent.

        Returns
        -------
        float
            ε at :attr:`delta`; infinite without noise.
        """
        return spent({self.noise: replies}, self.delta)


def parse(text: str) -> Privacy:
    """Read what ``--privacy`` is given.

    Parameters
    ----------
    text
        ``clip=1.0,noise=0.8,delta=1e-5``.

    Returns
    -------
    Privacy
        The validated parameters.

    Raises
    ------
    ConfigError
        If a parameter is missing or has a value that is not allowed, or the accountant is not installed.
    """
    found = Privacy.parse(text)
    if found.noise and importlib.util.find_spec("dp_accounting") is None:
        raise ConfigError("privacy needs dp-accounting, which is not installed: install coterie[privacy]")
    return found


def spent(replies: Mapping[float, int], delta: float) -> float:
    """Give the privacy loss of replies with different amounts of noise.

    Parameters
    ----------
    replies
        For each ``noise``, how many replies were sent with it.
    delta
        The probability with which the loss may be larger.

    Returns
    -------
    float
        ε, by Rényi composition at the order that is best for these replies.
    """
    return _spent(tuple(sorted((noise, count) for noise, count in replies.items() if count)), delta)


@functools.lru_cache(maxsize=4096)
def _spent(replies: tuple[tuple[float, int], ...], delta: float) -> float:
    if not replies:
        return 0.0
    if any(noise == 0 for noise, _ in replies):
        return math.inf
    from dp_accounting import GaussianDpEvent
    from dp_accounting.rdp import RdpAccountant

    # The divergence is `slope` times the order. The best order is near the one that minimises slope·α + log(1/δ)/(α−1);
    # orders are dense around it, so that no more than 1e-6 of ε is lost to the choice among them.
    slope = sum(2 * count / noise**2 for noise, count in replies)
    about = math.sqrt(math.log(1 / delta) / slope)
    accountant = RdpAccountant((1 + about * np.geomspace(0.25, 4, 4001)).tolist())
    for noise, count in replies:
        accountant.compose(GaussianDpEvent(noise / 2), count)
    return float(accountant.get_epsilon(delta))


def protect(reply: Rows, message: Rows, references: Mapping[str, str | None], privacy: Privacy, draw: Draw) -> Rows:
    """Clip replies and add noise to them.

    Parameters
    ----------
    reply
        What clients would send, a row each; left as it is.
    message
        What they were sent, a row each.
    references
        The task's :attr:`~coterie.algorithms.base.Task.references`.
    privacy
        How much of either.
    draw
        Gives the noise.

    Returns
    -------
    Rows
        What they send. Without noise, a row that need not be clipped is what it was, bit for bit.
    """
    bases = {name: _reference(name, value, message, references) for name, value in reply.items()}
    rows = len(next(iter(reply.values()))) if reply else 0
    width = max((value[0].numel() for value in reply.values() if len(value)), default=1)
    out = {name: torch.empty_like(value, memory_format=torch.contiguous_format) for name, value in reply.items()}
    for begin in range(0, rows, max(1, _BLOCK_ELEMENTS // max(1, width))):
        some = slice(begin, min(rows, begin + max(1, _BLOCK_ELEMENTS // max(1, width))))
        flat = {name: value[some].reshape(some.stop - begin, -1) for name, value in reply.items()}
        base = {
            name: torch.zeros_like(flat[name], dtype=torch.float64)
            if value is None
            else value[some].reshape(some.stop - begin, -1).double()
            for name, value in bases.items()
        }
        update = {name: value.double() - base[name] for name, value in flat.items()}
        norm = torch.stack([value.square().sum(1) for value in update.values()]).sum(0).sqrt()
        factor = (privacy.clip / norm.clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(1.0).unsqueeze(1)
        for name, value in flat.items():
            kept = torch.where(factor < 1, base[name] + factor * update[name], value.double())
            if privacy.noise:
                kept = kept + privacy.noise * privacy.clip * draw(name, some, value.shape[1]).to(kept.device)
            out[name][some] = kept.to(value.dtype).reshape(out[name][some].shape)
    return out


def _reference(name: str, value: Tensor, message: Rows, references: Mapping[str, str | None]) -> Tensor | None:
    if not value.is_floating_point():
        raise AlgorithmError(f"the reply {name!r} holds {value.dtype}, to which privacy cannot add noise")
    source = references.get(name, name)
    if source is None:
        return None
    base = message.get(source)
    if base is None or base.shape[1:] != value.shape[1:]:
        raise AlgorithmError(
            f"the reply {name!r} is not a changed copy of a tensor of the message: for privacy, its task must say in "
            "`references` what it is relative to, or None for a gradient or a difference"
        )
    return base


class Protection:
    """Protects the replies of a simulation's clients, and counts them.

    Parameters
    ----------
    privacy
        How much of clipping and noise.
    seed
        The experiment's seed: noise that can be repeated protects nobody who does not keep it secret.
    clients
        Clients in the federation.
    """

    def __init__(self, privacy: Privacy, seed: int, clients: int) -> None:
        self.privacy, self._seed = privacy, seed
        self.replies = torch.zeros(clients, dtype=torch.int64)  # that each has sent so far

    def __call__(
        self, reply: Rows, message: Rows, references: Mapping[str, str | None], clients: Tensor, when: tuple[str, int]
    ) -> Rows:
        """Give what clients send.

        Parameters
        ----------
        reply
            What they would send, a row each.
        message
            What they were sent, a row each.
        references
            The task's.
        clients
            Who they are.
        when
            What the exchange is part of with its number in the round, and the round.

        Returns
        -------
        Rows
            Their replies with clipping and noise.
        """
        if not reply:
            return reply
        key = keys(self._seed, f"privacy {when[0]}", when[1], clients)

        def draw(name: str, rows: slice, count: int) -> Tensor:
            return normal(fold_in(key[rows], zlib.crc32(name.encode())), count)

        self.replies[clients.cpu()] += 1
        return protect(reply, message, references, self.privacy, draw)

    def epsilon(self, clients: Tensor) -> float:
        """Give the privacy loss of whichever of some clients has replied most often.

        Parameters
        ----------
        clients
            The clients.

        Returns
        -------
        float
            ε.
        """
        return self.privacy.epsilon(int(self.replies[clients.cpu()].max()))
