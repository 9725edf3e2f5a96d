"""Dirichlet draws: of every class over the clients, of the clients' sizes, and half and half."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from coterie.data.partitions.label_skew import q_label
from coterie.data.partitions.scheme import Assignment, Indices, SamplePool, Scheme, apportion, cut, shuffled_classes
from coterie.errors import PartitionError
from coterie.randomness import stream

_TRIES = 10_000
_SILOS = "Li, Diao, Chen, He, Federated learning on non-IID data silos: an experimental study, ICDE 2022"


class Dirichlet(Scheme):
    """Split every class over the clients by shares drawn from Dir(beta): small beta, strong skew."""

    name: ClassVar[str] = "dirichlet"
    by_label: ClassVar[bool] = True
    positional: ClassVar[str | None] = "beta"
    citation: ClassVar[str] = (
        "Hsu, Qi, Brown, Measuring the effects of non-identical data distribution for federated visual "
        "classification, arXiv:1909.06335, 2019"
    )

    beta: float = Field(0.5, gt=0, description="concentration of the draw")
    balanced: bool = Field(False, description="a client that has its equal share of all samples gets no more")
    min_samples: int | None = Field(
        None,
        ge=2,
        description="draw again until every client has so many; auto: 10 (balanced: the number of classes), or a "
        "quarter of an equal share if less, and the best of many draws if none has them",
    )
    overlap: bool = Field(False, description="every client draws from the whole data, so clients may share samples")

    def assign(self, pool: SamplePool, clients: int, seed: int) -> Assignment:
        """Draw shares until every client has enough, then deal every class by them."""
        draw = stream(seed, "partition: dirichlet")
        counts = self._counts(pool, clients, draw)
        members = shuffled_classes(pool.labels, pool.classes, draw)
        if self.overlap:
            dealt = [
                [draw.choice(samples, size, replace=False) for size in row]
                for samples, row in zip(members, counts, strict=True)
            ]
        else:
            dealt = [cut(samples, row) for samples, row in zip(members, counts, strict=True)]
        return Assignment([np.concatenate(mine) for mine in zip(*dealt, strict=True)], overlap=self.overlap)

    def _counts(self, pool: SamplePool, clients: int, draw: np.random.Generator) -> Indices:
        totals = np.bincount(pool.labels, minlength=pool.classes)
        asked = pool.min_samples if self.min_samples is None else self.min_samples
        wish = min(pool.classes if self.balanced else 10, len(pool) // (4 * clients)) if asked is None else asked
        need = 2 if asked is None else asked
        if need * clients > len(pool):
            raise PartitionError(
                self.cannot(
                    f"{clients} clients cannot have {need} of {len(pool)} samples each",
                    "use fewer clients or a smaller min_samples",
                )
            )
        best = self._draw(totals, clients, draw)
        tries = _TRIES if asked is not None else _TRIES // 5
        for _ in range(tries):
            if best.sum(0).min() >= max(wish, need):
                break
            other = self._draw(totals, clients, draw)
            best = other if other.sum(0).min() > best.sum(0).min() else best
        sizes = best.sum(0)
        if sizes.min() < need:
            raise PartitionError(
                self.cannot(
                    f"in {tries:,} draws for {clients} clients there was always one with fewer than {need} samples "
                    f"(in the best, client {sizes.argmin()} had {sizes.min()})",
                    "use a larger beta, fewer clients, "
                    + ("" if asked is None else "a smaller min_samples, ")
                    + ("or other data" if self.balanced else "or balanced=true"),
                )
            )
        return best

    def _draw(self, totals: Indices, clients: int, draw: np.random.Generator) -> Indices:
        shares = draw.dirichlet(np.full(clients, self.beta), len(totals))
        return self._balance(shares, totals) if self.balanced else apportion(shares, totals)

    def _balance(self, shares: npt.NDArray[np.float64], totals: Indices) -> Indices:
        clients = shares.shape[1]
        full = totals.sum() / clients
        held = np.zeros(clients, dtype=np.int64)
        counts = np.empty(shares.shape, dtype=np.int64)
        for label, total in enumerate(totals):
            room = held < full
            open_shares = np.where(room, shares[label], 0.0)
            if not open_shares.sum() > 0:  # the shares of all that have room have underflown, or nobody has any
                open_shares = room.astype(float) if room.any() else np.ones(clients)
            counts[label] = apportion(open_shares / open_shares.sum(), total)
            held += counts[label]
        return counts


class Quantity(Scheme):
    """Random parts whose sizes are drawn from Dir(beta): the same law everywhere, different amounts."""

    name: ClassVar[str] = "quantity"
    by_label: ClassVar[bool] = False
    positional: ClassVar[str | None] = "beta"
    citation: ClassVar[str] = _SILOS

    beta: float = Field(0.5, gt=0, description="concentration of the draw")
    min_samples: int | None = Field(
        None,
        ge=2,
        description="fewest samples of a client; auto: 100, or a tenth of an equal share that is below 200",
    )
    overlap: bool = Field(False, description="every client draws from the whole data, so clients may share samples")

    def assign(self, pool: SamplePool, clients: int, seed: int) -> Assignment:
        """Draw sizes and deal random parts of them."""
        draw = stream(seed, "partition: quantity")
        asked = pool.min_samples if self.min_samples is None else self.min_samples
        least = _least(len(pool), clients) if asked is None else asked
        if least * clients > len(pool):
            raise PartitionError(
                self.cannot(
                    f"{clients} clients cannot have {least} of {len(pool)} samples each",
                    "use fewer clients or min_samples",
                )
            )
        sizes = quantities(len(pool), clients, self.beta, least, draw)
        if self.overlap:
            return Assignment([draw.choice(len(pool), size, replace=False) for size in sizes], overlap=True)
        return Assignment(cut(draw.permutation(len(pool)), sizes))


class HybridSkew(Scheme):
    """Half of the clients hold few classes (q_label), the other half different amounts (quantity)."""

    name: ClassVar[str] = "hybrid"
    by_label: ClassVar[bool] = True
    citation: ClassVar[str] = (
        "Zhu et al., On ADMM in heterogeneous federated learning: personalization, robustness, and fairness, "
        "arXiv:2407.16397, 2024"
    )

    q: int = Field(2, ge=1, description="pieces of classes of each client of the first half")
    beta: float = Field(0.5, gt=0, description="concentration of the sizes of the second half")

    def assign(self, pool: SamplePool, clients: int, seed: int) -> Assignment:
        """Reserve a random half of every class for each half of the clients, and deal each its way."""
        if clients < 2:
            raise PartitionError(self.cannot("one client cannot be two halves", "use at least 2 clients"))
        draw = stream(seed, "partition: hybrid")
        halves = [np.array_split(samples, 2) for samples in shuffled_classes(pool.labels, pool.classes, draw)]
        first = -(-clients // 2)
        by_label = q_label([half[0] for half in halves], first, self.q, draw)
        rest = draw.permutation(np.concatenate([half[1] for half in halves]))
        count = clients - first
        least = _least(len(rest), count)
        if least * count > len(rest):
            raise PartitionError(self.cannot(f"{count} clients cannot share {len(rest)} samples", "use fewer clients"))
        return Assignment([*by_label, *cut(rest, quantities(len(rest), count, self.beta, least, draw))])


def _least(total: int, clients: int) -> int:
    return 100 if total >= 200 * clients else max(2, total // (10 * clients))


def quantities(total: int, clients: int, beta: float, least: int, draw: np.random.Generator) -> Indices:
    """Draw sizes in proportion to Dir(beta), none below ``least``, that sum to the total.

    Clients whose share is too small get ``least``; the others share the rest in proportion.
    """
    shares = draw.dirichlet(np.full(clients, beta))
    poor = np.zeros(clients, dtype=bool)
    while True:
        # Every pass can only add to the poor, so this ends after at most `clients` passes.
        weights = np.where(poor, 0.0, shares)
        rest = total - least * int(poor.sum())
        if poor.all() or not weights.sum() > 0:
            return least + apportion(np.full(clients, 1 / clients), total - least * clients)
        fair = rest * weights / weights.sum()
        newly = ~poor & (fair < least)
        if not newly.any():
            break
        poor |= newly
    rich = ~poor
    sizes = np.full(clients, least, dtype=np.int64)
    # Rounding happens above the floor, so that it cannot push a client below it.
    spare = np.where(rich, fair - least, 0.0)
    extra = total - least * clients
    if extra:
        sizes += apportion(spare / spare.sum(), extra)
    return sizes
