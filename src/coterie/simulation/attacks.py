"""Attacks: what malicious clients do to the federation, through one place and for every method.

A message attack acts on the replies that cross the wire, after honest local training, whatever the method puts into
them; label poisoning acts on the attackers' training labels, once, before the first round. With ``p`` drawn once for
each attacker and round (FLAME, section V-D):

- same value: every entry of the reply is ``p``, ``p ~ N(0, variance)``;
- sign flip: the reply ``u`` becomes ``-|p| u``, ``p ~ N(0, variance)``;
- Gaussian: every entry is drawn anew from ``N(0, variance)``;
- label poisoning: every training label is drawn anew, uniformly from all classes.

Departures from FLAME's code: no attacker at fraction 0, where it makes one; the paper's variance of 0.1 and not the
code's standard deviations (``preset=code`` for those); the attacker's own reply is corrupted and not the global
vector; poisoned labels are drawn once, on the training split alone, over all classes.
"""

from __future__ import annotations

import math
import zlib
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from coterie.errors import ConfigError, UnknownName
from coterie.randomness import fold_in, keys, normal, stream, uniform
from coterie.rows import Rows, put_rows
from coterie.simulation.attack_registry import ATTACKS

_BLOCK_ELEMENTS = 2**22


class Attack(BaseModel):
    """What all attacks have in common.

    Parameters
    ----------
    fraction
        The fraction of clients that attack.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: ClassVar[str]
    summary: ClassVar[str]
    fraction: float = Field(ge=0, lt=1, allow_inf_nan=False)


class MessageAttack(Attack):
    """An attack on what attackers send.

    Parameters
    ----------
    fraction
        The fraction of clients that attack.
    variance
        Variance of what is drawn.
    """

    variance: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    code_std: ClassVar[float]

    def apply(
        self, rows: Rows, clients: Tensor, attackers: Tensor, *, seed: int, round_number: int, exchange: int = 0
    ) -> Rows:
        """Corrupt the attackers' replies.

        Parameters
        ----------
        rows
            The replies as they cross the wire, one row a client; left as they are.
        clients
            The client's number for each row.
        attackers
            Booleans, one a row: whose reply to corrupt.
        seed
            The experiment's seed.
        round_number
            The round.
        exchange
            Which exchange of the round, for methods that have several.

        Returns
        -------
        Rows
            New replies. Tensors without fractions, and the rows of honest clients, are equal bit for bit; an
            attacker's row does not depend on which other rows are there.
        """
        place = attackers.to(clients.device, torch.bool).nonzero().flatten()
        if not len(place):
            return dict(rows)
        key = keys(seed, f"attack/{self.kind}/{exchange}", round_number, clients[place])
        out = dict(rows)
        for name, value in rows.items():
            if value.is_floating_point():
                there = place.to(value.device)
                out[name] = put_rows(value, there, self.corrupt(value[there], name, key.to(value.device)))
        return out

    @abstractmethod
    def corrupt(self, values: Tensor, name: str, key: Tensor) -> Tensor:
        """Make what attackers send of one tensor of their replies.

        Parameters
        ----------
        values
            The tensor as they would send it honestly, a row for each attacker; left as it is.
        name
            The tensor's name in the reply.
        key
            A key of its own for each attacker and exchange.

        Returns
        -------
        Tensor
            What is sent, of the same shape.
        """

    def _draw(self, values: Tensor, key: Tensor) -> Tensor:
        """One number for each client, the same for all tensors of its reply, shaped to broadcast over this one."""
        drawn = math.sqrt(self.variance) * normal(key, 1)
        return drawn.to(values.dtype).reshape(-1, *[1] * (values.dim() - 1))


class SameValue(MessageAttack):
    """Every entry of an attacker's reply is one and the same number.

    Parameters
    ----------
    fraction
        The fraction of clients that attack.
    variance
        Variance of that number, drawn anew each round.
    """

    kind: ClassVar[str] = "same_value"
    summary: ClassVar[str] = "every entry of the reply is p, p ~ N(0, variance)"
    code_std: ClassVar[float] = 0.01

    def corrupt(self, values: Tensor, name: str, key: Tensor) -> Tensor:
        return self._draw(values, key).expand_as(values)


class SignFlip(MessageAttack):
    """An attacker's reply is turned round and rescaled.

    Parameters
    ----------
    fraction
        The fraction of clients that attack.
    variance
        Variance of the factor, drawn anew each round.
    """

    kind: ClassVar[str] = "sign_flip"
    summary: ClassVar[str] = "the reply u becomes -|p| u, p ~ N(0, variance)"
    code_std: ClassVar[float] = 1.0

    def corrupt(self, values: Tensor, name: str, key: Tensor) -> Tensor:
        return -self._draw(values, key).abs() * values


class Gaussian(MessageAttack):
    """An attacker's reply is noise.

    Parameters
    ----------
    fraction
        The fraction of clients that attack.
    variance
        Variance of the noise, drawn anew each round.
    """

    kind: ClassVar[str] = "gaussian"
    summary: ClassVar[str] = "every entry of the reply is drawn from N(0, variance)"
    code_std: ClassVar[float] = 1.0

    def corrupt(self, values: Tensor, name: str, key: Tensor) -> Tensor:
        count = values[0].numel()
        own = fold_in(key, zlib.crc32(name.encode()))
        # The generator works in float64 with several temporaries: a few clients at a time keep them small.
        blocks = [
            (math.sqrt(self.variance) * normal(block, count)).to(values.dtype)
            for block in torch.split(own, max(1, _BLOCK_ELEMENTS // max(1, count)))
        ]
        return torch.cat(blocks).reshape(values.shape)


class LabelPoisoning(Attack):
    """Attackers train on random labels.

    Parameters
    ----------
    fraction
        The fraction of clients that attack.
    """

    kind: ClassVar[str] = "label_poisoning"
    summary: ClassVar[str] = "every training label is drawn uniformly from all classes, once"

    @staticmethod
    def draw(indices: Tensor, classes: int, seed: int) -> Tensor:
        """Draw the poisoned labels of some samples.

        Parameters
        ----------
        indices
            The samples' numbers.
        classes
            How many classes there are.
        seed
            The experiment's seed.

        Returns
        -------
        Tensor
            A label for each; a sample's label depends on its number and the seed alone.

        Raises
        ------
        ConfigError
            If there are fewer than two classes.
        """
        if classes < 2:
            raise ConfigError(f"label poisoning needs a task with at least two classes, not {classes}")
        return (uniform(keys(seed, "attack/label_poisoning", 0, indices), 1)[..., 0] * classes).long()

    @overload
    def poison(self, labels: Tensor, train_indices: Tensor, classes: int, seed: int) -> Tensor: ...
    @overload
    def poison(
        self, labels: NDArray[np.int64], train_indices: NDArray[np.int64], classes: int, seed: int
    ) -> NDArray[np.int64]: ...
    def poison(
        self,
        labels: Tensor | NDArray[np.int64],
        train_indices: Tensor | NDArray[np.int64],
        classes: int,
        seed: int,
    ) -> Tensor | NDArray[np.int64]:
        """Give the labels with the attackers' training labels redrawn.

        Parameters
        ----------
        labels
            The labels of all samples; left as they are.
        train_indices
            The attackers' training samples.
        classes
            How many classes there are.
        seed
            The experiment's seed.

        Returns
        -------
        Tensor or numpy.ndarray
            New labels, of the kind that was given.
        """
        if isinstance(labels, np.ndarray):
            out = labels.copy()
            out[train_indices] = self.draw(torch.as_tensor(train_indices, device="cpu"), classes, seed).numpy()
            return out
        index = torch.as_tensor(train_indices, device=labels.device)
        poisoned = labels.clone()
        poisoned[index] = self.draw(index, classes, seed).to(labels.dtype)
        return poisoned


@dataclass(frozen=True)
class Description:
    """An attack in words.

    Parameters
    ----------
    name
        Its name.
    summary
        What attackers do.
    options
        Its options with their defaults.
    """

    name: str
    summary: str
    options: dict[str, object]


def names() -> tuple[str, ...]:
    """Give the names of all attacks."""
    return tuple(ATTACKS)


def describe() -> tuple[Description, ...]:
    """Describe all attacks."""
    return tuple(
        Description(
            name,
            attack.summary,
            {key: field.default for key, field in attack.model_fields.items() if not field.is_required()},
        )
        for name, attack in ATTACKS.items()
    )


def parse(text: str) -> Attack:
    """Read an attack as it is written on the command line.

    Parameters
    ----------
    text
        ``kind:fraction``, then options as ``,key=value``: ``gaussian:0.2``, ``sign_flip:0.5,variance=1``, or
        ``same_value:0.2,preset=code`` for the strength that FLAME's code has in the place of its paper's.

    Returns
    -------
    Attack
        The attack.

    Raises
    ------
    UnknownName
        If there is no such attack.
    ConfigError
        If the fraction or an option is missing, malformed or out of range.

    Examples
    --------
    >>> parse("gaussian:0.2,variance=1")
    Gaussian(fraction=0.2, variance=1.0)
    """
    kind, _, rest = text.partition(":")
    if kind not in ATTACKS:
        raise UnknownName("attack", kind, ATTACKS)
    attack = ATTACKS[kind]
    fraction, *pairs = rest.split(",")
    if not fraction.strip():
        raise ConfigError(f"attack {text!r} does not say which fraction of the clients attacks: write {kind}:0.2")
    settings = {"fraction": fraction.strip()}
    for pair in pairs:
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or key in settings:
            raise ConfigError(
                f"attack {text!r}: {pair!r} must be key=value, each key once, as in gaussian:0.2,variance=1"
            )
        settings[key] = value
    if "preset" in settings and issubclass(attack, MessageAttack):
        preset = settings.pop("preset")
        if preset not in ("paper", "code") or "variance" in settings:
            raise ConfigError(f"attack {text!r}: preset must be paper or code, and stands in the place of variance")
        if preset == "code":
            settings["variance"] = repr(attack.code_std**2)
    try:
        return attack.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise ConfigError(f"attack {text!r}: {field}={settings.get(field)!r}: {first['msg'].lower()}") from None


def choose_attackers(clients: int, fraction: float, seed: int) -> tuple[int, ...]:
    """Draw which clients attack.

    Parameters
    ----------
    clients
        How many clients there are.
    fraction
        The fraction of them that attack, rounded to whole clients.
    seed
        The experiment's seed.

    Returns
    -------
    tuple of int
        Their numbers, rising; none at fraction 0. The attackers of a smaller fraction are among those of a larger one.

    Raises
    ------
    ConfigError
        If the fraction is out of range, or leaves no attacker or no honest client where it should not.
    """
    if not 0 <= fraction < 1:
        raise ConfigError(f"the fraction of attackers must be at least 0 and below 1, not {fraction}")
    count = round(fraction * clients)
    if fraction > 0 and not 0 < count < clients:
        raise ConfigError(
            f"a fraction of {fraction} of {clients} clients is {count} attackers; there must be an attacker and an "
            "honest client"
        )
    drawn = stream(seed, "attackers").permutation(clients)[:count]
    return tuple(sorted(int(client) for client in drawn))
