"""The accuracy matrix: every personal model on every client's test samples.

``A[i, k]`` is personal model ``i`` on client ``k``'s samples. It costs clients² evaluations, so it is made only when
asked for, and in blocks of models by samples: what is in memory at once depends neither on how many clients there are
nor on how many samples. Every client's test samples are cut to the same number, drawn once, so that every column says
equally much.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.compute.engine import Engine, Predict, take
from coterie.evaluation import equal_subsamples
from coterie.evaluation import metrics as metric_table
from coterie.rows import Rows
from coterie.simulation.simulation import Simulation

_MODELS = 64  # rows at once; more would not be faster
_BLOCK_ELEMENTS = 2**22  # of the inputs of one block, repeated for each of its models


def cross(engine: Engine, predict: Predict, rows: Rows, index: Tensor, metric: str) -> Tensor:
    """Measure every model on every client's samples ``[clients, samples]``: a float64 matrix ``[models, clients]``."""
    models = len(next(iter(rows.values())))
    clients, size = index.shape
    sample = max(1, engine.samples.x[0].numel())
    at_once = max(1, min(_MODELS, models, _BLOCK_ELEMENTS // sample))
    room = max(1, _BLOCK_ELEMENTS // (at_once * sample))  # samples in one block
    out = torch.empty(models, clients, dtype=torch.float64, device=engine.device)
    with torch.no_grad(), engine.rounding():
        for begin in range(0, clients, max(1, room // size)):
            mine = index[begin : begin + max(1, room // size)]
            for first in range(0, models, at_once):
                block = take(rows, slice(first, first + at_once))
                outputs, targets = _outputs(engine, predict, block, mine.reshape(-1), room)
                count = len(outputs)
                offsets = torch.arange(count * len(mine) + 1, device=engine.device) * size
                found = metric_table.per_client(metric, outputs.flatten(0, 1), targets.repeat(count), offsets)
                out[first : first + count, begin : begin + len(mine)] = found.view(count, len(mine))
    return out


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
        Test samples of each client.
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
        Those among them whose models and samples to use (the honest ones), in increasing order. One without test
        samples is refused with a ``PartitionError``.
    """

    def __init__(self, simulation: Simulation, trainers: Tensor, clients: Tensor) -> None:
        self.simulation, self.trainers, self.clients = simulation, trainers, clients
        test = simulation.engine.samples.splits["test"]
        sizes = test.sizes[clients]
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        places = equal_subsamples(offsets, simulation.engine.seed)
        self._index = test.flat[places - offsets[:-1, None] + test.offsets[clients][:, None]]
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
        if shared is not None and simulation.part is None:  # with parts that stay, it is another one on each client
            one = {name: value.unsqueeze(0) for name, value in shared.items()}
            on_shared = cross(simulation.engine, algorithm.predict, one, self._index, self.metric)[0]
        return Matrix(self.metric, self.clients, values, on_shared, self._index.shape[1])

    def _columns(self, personal: Rows) -> Tensor:
        """Measure some models; a column for each."""
        simulation = self.simulation
        if not len(simulation.processes.mine(self.clients)):
            return torch.empty(len(self.clients), 0, dtype=torch.float64, device=simulation.engine.device)
        return cross(simulation.engine, simulation.algorithm.predict, personal, self._index, self.metric).T
