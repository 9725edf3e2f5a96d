"""The accuracy matrix: every personal model on every client's test samples.

``A[i, k]`` is personal model ``i`` on client ``k``'s samples. It costs clients² evaluations, so it is made only when
asked for, and in blocks of models by samples: what is in memory at once depends neither on how many clients there are
nor on how many samples. Every client's test samples count, all of them, however many: a column is an accuracy of its
own, and columns weigh the same in what is read off the matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.compute.engine import Engine, Predict, take
from coterie.data.partitions import Ragged
from coterie.errors import PartitionError
from coterie.evaluation import metrics as metric_table
from coterie.rows import Rows
from coterie.simulation.simulation import Simulation

_MODELS = 64  # rows at once; more would not be faster
_BLOCK_ELEMENTS = 2**22  # of the inputs of one block, repeated for each of its models


def cross(engine: Engine, predict: Predict, rows: Rows, index: Ragged, metric: str) -> Tensor:
    """Measure every model on every client's samples: a float64 matrix ``[models, clients]``."""
    models, offsets = len(next(iter(rows.values()))), index.offsets.cpu()
    sample = max(1, engine.samples.x[0].numel())
    at_once = max(1, min(_MODELS, models, _BLOCK_ELEMENTS // sample))
    room = max(1, _BLOCK_ELEMENTS // (at_once * sample))  # samples in one block
    out = torch.empty(models, len(index), dtype=torch.float64, device=engine.device)
    with torch.no_grad(), engine.rounding():
        for begin, end in _runs(offsets.tolist(), room):
            mine = index.flat[int(offsets[begin]) : int(offsets[end])]
            ends = offsets[begin + 1 : end + 1] - offsets[begin]
            for first in range(0, models, at_once):
                block = take(rows, slice(first, first + at_once))
                outputs, targets = _outputs(engine, predict, block, mine, room)
                count = len(outputs)
                each = torch.arange(count)[:, None] * len(mine) + ends  # models one after the other, as below
                bounds = torch.cat([offsets.new_zeros(1), each.reshape(-1)]).to(engine.device)
                wanted = targets.repeat(count, *[1] * (targets.dim() - 1))
                found = metric_table.per_client(metric, outputs.flatten(0, 1), wanted, bounds)
                out[first : first + count, begin:end] = found.view(count, end - begin)
    return out


def _runs(offsets: list[int], room: int) -> Iterator[tuple[int, int]]:
    """Cut clients into runs of at most ``room`` samples; one client that has more is a run by itself."""
    begin = 0
    for client in range(1, len(offsets)):
        if client == len(offsets) - 1 or offsets[client + 1] - offsets[begin] > room:
            yield begin, client
            begin = client


def _outputs(engine: Engine, predict: Predict, block: Rows, index: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """Give outputs ``[models, samples, ...]`` of some models for the same samples, and the samples' targets."""
    count = len(next(iter(block.values())))
    nobody = index.new_zeros(1)  # whose samples they are matters only for noise that is redrawn in training
    outputs, targets = [], []
    for piece in index.split(room):
        x, y = engine.samples.gather(piece.unsqueeze(0), nobody)
        outputs.append(predict(engine.net, block, x.expand(count, *x.shape[1:])))
        targets.append(y[0])
    return torch.cat(outputs, 1), torch.cat(targets)


@dataclass(frozen=True)
class Matrix:
    """An accuracy matrix as it was measured after a round.

    Parameters
    ----------
    metric
        What was measured: accuracy, or RMSE where the task is regression.
    clients
        The clients, in increasing order, that its rows and columns stand for.
    values
        ``[clients, clients]``: row ``i`` is the personal model of client ``i``, column ``k`` the samples of ``k``.
    global_values
        The global model on each client's samples, where the method has one.
    samples
        Test samples of all these clients together.
    """

    metric: str
    clients: Tensor
    values: Tensor
    global_values: Tensor | None
    samples: int


class AccuracyMatrixScorer:
    """Measures the accuracy matrix of a simulation.

    Parameters
    ----------
    simulation
        The simulation.
    trainers
        The clients that train, in increasing order: personal models are made for all of them at once, as for every
        other evaluation.
    clients
        Those among them whose models and samples to use (the honest ones), in increasing order.

    Raises
    ------
    PartitionError
        If one of them has no test sample.
    """

    def __init__(self, simulation: Simulation, trainers: Tensor, clients: Tensor) -> None:
        self.simulation, self.trainers, self.clients = simulation, trainers, clients
        samples = simulation.engine.samples
        sizes = samples.sizes("test")[clients]
        if not bool((sizes > 0).all()):
            nobody = int(clients[int((sizes == 0).nonzero()[0])])
            raise PartitionError(f"client {nobody} has no test sample, so the accuracy matrix has no column for it")
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        self._index = Ragged(samples.flat_index(clients, "test"), offsets)
        self.metric = metric_table.usual(simulation.engine.problem.metrics[0])

    def measure(self, round_number: int) -> Matrix:
        """Measure every personal model on every client's samples, leaving everything as it was."""
        simulation, algorithm = self.simulation, self.simulation.algorithm
        processes = simulation.processes
        personal = simulation.personal(self.trainers, round_number)
        personal = take(personal, torch.isin(processes.mine(self.trainers), self.clients))
        found = processes.together(lambda: self._columns(personal))
        values = processes.gathered(found, self.clients).T.contiguous()
        shared, on_shared = algorithm.global_model(simulation.server), None
        if shared is not None and simulation.shares_all:  # with parts that stay, it is another one on each client
            one = {name: value.unsqueeze(0) for name, value in shared.items()}
            on_shared = cross(simulation.engine, algorithm.predict, one, self._index, self.metric)[0]
        return Matrix(self.metric, self.clients, values, on_shared, len(self._index.flat))

    def _columns(self, personal: Rows) -> Tensor:
        """Measure some models; a column for each."""
        simulation = self.simulation
        if not len(simulation.processes.mine(self.clients)):
            return torch.empty(len(self.clients), 0, dtype=torch.float64, device=simulation.engine.device)
        return cross(simulation.engine, simulation.algorithm.predict, personal, self._index, self.metric).T
