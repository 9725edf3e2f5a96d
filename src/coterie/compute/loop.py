"""The oracle: one client at a time, plain modules and autograd, as obvious as possible."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from coterie import randomness
from coterie.algorithms.base import Batch, ClientContext, Fold, Minibatches, Net, Task
from coterie.algorithms.contract import check_rows, checked_step
from coterie.compute.engine import Call, Engine, Predict, finished, join, take, widest_batch
from coterie.compute.nets.row_net import ModuleNet
from coterie.compute.samples import Samples, Split
from coterie.models.problem import Problem
from coterie.rows import Rows


class LoopEngine(Engine):
    """Runs one client after another.

    Parameters
    ----------
    problem
        What is learnt.
    samples
        The federation's samples.
    seed
        The experiment's seed.
    """

    name = "loop"

    def __init__(self, problem: Problem, samples: Samples, seed: int) -> None:
        super().__init__(problem, samples, seed)
        self._net = ModuleNet(problem.module, problem.layout, padded=False)

    @property
    def net(self) -> Net:
        """The model."""
        return self._net

    def run(self, task: Task, clients: Tensor, state: Rows, message: Rows, call: Call) -> tuple[Rows, Rows]:
        """Run a task."""
        pairs = []
        for row, samples in enumerate(self.host_sizes["train"][clients.cpu()].tolist()):
            one = slice(row, row + 1)
            with self.threads(widest_batch(task, samples)):
                pairs.append(self._run_one(task, clients[one], take(state, one), take(message, one), call))
        return join([change for change, _ in pairs]), join([reply for _, reply in pairs])

    def _run_one(self, task: Task, client: Tensor, state: Rows, message: Rows, call: Call) -> tuple[Rows, Rows]:
        context = self.client_context(client, call)
        work = task.start(context, state, message)
        check_rows("what start gives", work, 1)
        for number, fold in enumerate(task.folds()):
            step = checked_step(fold.step)
            for batches in self._batches(fold, context, call, number):
                self.before_step()
                work = step(work, *batches)
            if fold.then is not None:
                work = fold.then(context, work)
                check_rows("what then gives", work, 1)
        return finished(task, context, work)

    def _batches(self, fold: Fold, context: ClientContext, call: Call, number: int) -> Iterator[list[Batch]]:
        over = fold.over
        if isinstance(over, Minibatches):
            yield from self._minibatches(over, context, call, number)
            return
        mine = self.samples.splits[over.split][int(context.clients)]
        for index in mine.split(over.size):
            if len(index):
                yield [self._batch(index, context, len(index) / len(mine), None, over.split)]

    def _minibatches(self, over: Minibatches, context: ClientContext, call: Call, number: int) -> Iterator[list[Batch]]:
        mine = self.samples.splits["train"][int(context.clients)]
        size = over.size or len(mine)
        per_epoch = -(-len(mine) // size)
        steps = over.steps
        if steps is None or self.most_passes is not None:
            steps = int(self.epochs(over, context.clients, call, number)) * per_epoch
        shuffle = self.key("batches", context.clients, call, number)
        dropout = self.key("dropout", context.clients, call, number)
        orders: list[Tensor] = []
        for step in range(steps):
            epoch, place = divmod(step, per_epoch)
            if place == 0:
                drawn = [randomness.fold_in(randomness.fold_in(shuffle, draw), epoch) for draw in range(over.draws)]
                orders = [mine[randomness.permutations(key, context.sizes, len(mine))[0]] for key in drawn]
            batches = []
            for draw, order in enumerate(orders):
                index = order[place * size : (place + 1) * size]
                step_key = randomness.fold_in(dropout, step * over.draws + draw)
                batches.append(self._batch(index, context, len(index) / len(mine), step_key, "train"))
            yield batches

    def _batch(self, index: Tensor, context: ClientContext, share: float, key: Tensor | None, split: Split) -> Batch:
        x, y = self.samples.gather(index.unsqueeze(0), context.clients, key)
        weight = torch.full(y.shape, 1 / len(index), dtype=self.samples.dtype, device=y.device)
        shares = torch.full((1,), share, dtype=self.samples.dtype, device=y.device)
        if self.samples.class_weights is not None:
            weight, shares = self.samples.class_weights.apply(context.clients, y, weight, shares, split)
        return Batch(self._net, self.problem.loss, x, y, weight, shares, key)

    def predict(self, predict: Predict, rows: Rows, clients: Tensor, split: Split, shared: bool = False) -> Tensor:
        """Apply each client's model to its own samples."""
        outputs = []
        for row, client in enumerate(clients.tolist()):
            model = {name: value.unsqueeze(0) for name, value in rows.items()} if shared else None
            model = model or take(rows, slice(row, row + 1))
            index = self.samples.splits[split][client].unsqueeze(0)
            with torch.no_grad(), self.threads(index.shape[1]):
                x, _ = self.samples.gather(index, clients[row : row + 1])
                outputs.append(predict(self._net, model, x)[0])
        return torch.cat(outputs)
