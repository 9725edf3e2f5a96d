"""Models measured on their clients' own samples: of one run, or of several that play together at once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.algorithms.base import Algorithm
from coterie.algorithms.contract import checked_predict
from coterie.compute.engine import Engine
from coterie.compute.samples import Split
from coterie.errors import AlgorithmError
from coterie.evaluation import metrics as metric_table
from coterie.rows import Rows


@dataclass(frozen=True)
class Targets:
    """What models should give for the samples of a group of clients: the same in every round, so collected once.

    Parameters
    ----------
    splits
        Splits of which any client of the group has samples.
    here
        Those of which a client has some that is computed in this process.
    clients
        The clients that are computed in this process.
    values
        The targets of all their samples, split after split and client after client.
    offsets
        Where each client's samples of each split begin, and the last one's end.
    """

    splits: tuple[Split, ...]
    here: tuple[Split, ...]
    clients: Tensor
    values: Tensor
    offsets: Tensor


@dataclass(frozen=True)
class Measurement:
    """Models that are to be measured.

    Parameters
    ----------
    algorithm
        The method, which applies them.
    rows
        A model for each client, or one without a client axis.
    targets
        What they should give.
    shared
        Whether it is one.
    answering
        Whether the answer to every validation and test sample is wanted too.
    """

    algorithm: Algorithm
    rows: Rows
    targets: Targets
    shared: bool
    answering: bool

    @property
    def alike(self) -> Hashable:
        """What measurements must have in common for their models to be applied in one call."""
        shapes = tuple((name, tuple(value.shape[0 if self.shared else 1 :])) for name, value in self.rows.items())
        return self.shared, self.targets.here, shapes, _application(self.algorithm)

    def outputs(self, engine: Engine) -> Tensor:
        """Apply the models: outputs for all samples, split after split and client after client."""
        predict, targets = checked_predict(self.algorithm.predict), self.targets
        return torch.cat(engine.predict_all(predict, self.rows, targets.clients, targets.here, self.shared))


def _application(algorithm: Algorithm) -> Hashable:
    # How most methods apply a model depends on none of their parameters.
    function = getattr(algorithm.predict, "__func__", algorithm.predict)
    return function if function is Algorithm.predict else (function, algorithm.title, repr(algorithm.settings()))


ANSWERED: tuple[Split, ...] = ("validation", "test")
"""Splits whose samples' answers can be asked for."""

Measured = tuple[Tensor, dict[Split, Tensor]]
"""The loss and every metric of each split ``[values, clients]``, and the answers by split where they were asked for."""


def measured(
    engine: Engine,
    wanted: Sequence[Measurement],
    outputs: Sequence[Tensor],
    end_to_end: tuple[Tensor, Tensor] | None = None,
) -> list[Measured]:
    """Measure what models gave, for several measurements as if their clients were one's.

    A caller who has them gives all targets :func:`targets_end_to_end`.
    """
    for one, found in zip(wanted, outputs, strict=True):
        if found.shape != (fitting := (len(one.targets.values), *engine.output_shape)):
            raise AlgorithmError(
                f"it must give outputs of shape {tuple(fitting)} for these samples, but gives {tuple(found.shape)}"
            )
    # All splits at once, as if a client's samples of one were another client's.
    together = outputs[0] if len(wanted) == 1 else torch.cat(list(outputs))
    values, offsets = end_to_end or targets_end_to_end([one.targets for one in wanted])
    losses = engine.problem.loss(together, values).double()
    rows = [metric_table.segment_mean(losses, offsets)]
    rows += [metric_table.per_client(name, together, values, offsets).double() for name in engine.problem.metrics]
    each = torch.stack(rows).split([len(one.targets.offsets) - 1 for one in wanted], dim=1)
    return [_of_one(one, mine, found) for one, mine, found in zip(wanted, each, outputs, strict=True)]


def targets_end_to_end(targets: Sequence[Targets]) -> tuple[Tensor, Tensor]:
    """Give the targets' values one after the other, and the offsets that go with these."""
    if len(targets) == 1:
        return targets[0].values, targets[0].offsets
    offsets, end = [targets[0].offsets[:1]], 0
    for one in targets:
        offsets.append(one.offsets[1:] + end)
        end += len(one.values)
    return torch.cat([one.values for one in targets]), torch.cat(offsets)


def _of_one(wanted: Measurement, found: Tensor, outputs: Tensor) -> Measured:
    targets, answers = wanted.targets, dict[Split, Tensor]()
    out = found.unflatten(1, (len(targets.here), -1)).transpose(0, 1)
    if targets.here != targets.splits:  # of the others another process has all samples
        which = [targets.splits.index(split) for split in targets.here]
        everywhere = found.new_full((len(targets.splits), len(found), len(targets.clients)), torch.nan)
        everywhere[which] = out
        out = everywhere
    for split in (each for each in ANSWERED if wanted.answering and each in targets.here):
        first = targets.here.index(split) * len(targets.clients)
        own = slice(*targets.offsets[[first, first + len(targets.clients)]].tolist())
        answers[split] = metric_table.answers(outputs[own], targets.values[own])
    return out.flatten(0, 1), answers
