"""Running statistics of BatchNorm layers, for any method.

A method's rows hold parameters and nothing else: what it mixes, measures distances between and keeps duals for has no
column for statistics. Those lie beside the rows, and a client's passes move them.

- :class:`MeasuredNet` is the model as the method knows it: it hands each pass the running statistics, and keeps the new
  ones of a pass that trains.
- :class:`MeasuredTask` is the method's task, with running statistics among its working rows.
- :class:`WithStatistics` is the method. Its messages carry the server's running statistics to every task that looks at
  samples, and the replies of those that train bring the client's; the server takes their mean by samples. What stays
  with the client is in neither.

Which passes move them, in every method and on every engine:

- a pass over a minibatch does, for the model that is kept; one over another model (:meth:`Batch.measuring`) does not,
  or moves statistics that this model has of its own;
- a pass over all training samples normalises by batches too, in pieces of :attr:`FullPass.size` and in their order, and
  moves the statistics where a gradient is taken, not where only a loss is;
- a pass over validation samples, and everything that evaluates, normalises by the running statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from coterie.algorithms.base import (
    Algorithm,
    Ask,
    Batch,
    ClientContext,
    Cohort,
    Fold,
    FullPass,
    Message,
    Minibatches,
    Net,
    Personalise,
    Replies,
    Round,
    Start,
    State,
    Task,
    facts,
)
from coterie.errors import AlgorithmError
from coterie.models.batch_norm import COUNT, VARIANCE, RunningStatistics
from coterie.rows import Columns, Layout, Rows

STATISTICS = "running_statistics"
"""Their name in states, messages, replies and models."""


class StatisticsNet(Net, Protocol):
    """A model whose passes take running statistics."""

    statistics: Layout

    def outputs(
        self, params: Tensor, x: Tensor, key: Tensor | None = None, statistics: RunningStatistics | None = None
    ) -> Tensor: ...

    def sub(self, *path: str | slice) -> StatisticsNet: ...

    def statistic_columns(self, *path: str | slice) -> Columns: ...


class KeptStatistics:
    """The running statistics that the passes of one step begin with, and what they make of them.

    Parameters
    ----------
    rows
        Running statistics ``[rows, columns]`` by the name of the model that has them, ``""`` for the one that is kept.
    weight
        Weight of each sample in its batch's mean; ``None`` where passes evaluate.
    always
        Whether every pass moves the statistics, or only those through which a gradient is taken.
    """

    def __init__(self, rows: Rows, weight: Tensor | None = None, always: bool = True) -> None:
        self.rows, self.weight, self.always = rows, weight, always


class MeasuredNet:
    """A model applied to rows of parameters, with running statistics beside them.

    Parameters
    ----------
    net
        The model.
    kept
        The running statistics.
    model
        Whose are used and moved; ``None`` uses those of the model that is kept, and moves none.
    columns
        Which columns are those of this part of the model.
    """

    def __init__(self, net: Net, kept: KeptStatistics, model: str | None = "", columns: Columns | None = None) -> None:
        self.net, self.kept, self.model = cast(StatisticsNet, net), kept, model
        self.layout = net.layout
        self._columns = columns

    def outputs(self, params: Tensor, x: Tensor, key: Tensor | None = None) -> Tensor:
        known = self._known()
        out = self.net.outputs(params, x, key, known)
        if self.kept.always or out.requires_grad:
            self._keep(known)
        return out

    @property
    def descend_(self) -> Callable[..., None] | None:
        """The net's own way to take a step, if it has one."""
        fused: Any = getattr(self.net, "descend_", None)
        if fused is None:
            return None

        def step(params: Tensor, rate: Tensor, batch: Batch, losses: Callable[[Tensor], Tensor]) -> None:
            known = self._known()
            fused(params, rate, batch, losses, known)
            self._keep(known)

        return step

    def _known(self) -> RunningStatistics | None:
        if not self.net.statistics.size:  # a part of the model without BatchNorm layers
            return None
        rows = self.kept.rows.get(self.model or "")
        if rows is None:
            raise AlgorithmError(f"own_statistics must be {self.model!r}, for which a batch is asked to measure")
        return RunningStatistics(rows if self._columns is None else self._columns.take(rows), self.kept.weight)

    def _keep(self, known: RunningStatistics | None) -> None:
        if known is None or known.new is None or self.model is None:
            return
        whole = self.kept.rows[self.model]
        self.kept.rows[self.model] = known.new if self._columns is None else self._columns.put(whole, known.new)

    def measuring(self, model: str | None) -> MeasuredNet:
        """Give the same model, with other running statistics."""
        return MeasuredNet(self.net, self.kept, model, self._columns)

    def sub(self, *path: str | slice) -> MeasuredNet:
        columns = self.net.statistic_columns(*path)
        if self._columns is not None:
            columns = columns.within(self._columns)
        return MeasuredNet(self.net.sub(*path), self.kept, self.model, columns)

    def columns(self, *path: str | slice) -> Columns:
        return self.net.columns(*path)

    @property
    def split(self) -> int:
        return self.net.split


class MeasuredTask(Task):
    """A method's task, with running statistics among its working rows.

    Parameters
    ----------
    task
        The method's.
    names
        For the model that is kept (``""``) and the method's other one, the name of its statistics in the client's
        state.
    shared
        The columns that are sent and averaged.
    """

    def __init__(self, task: Task, names: Mapping[str, str], shared: Columns) -> None:
        self.task, self.names, self.shared = task, names, shared
        passes = [fold.over for fold in task.folds()]
        trains = any(isinstance(over, Minibatches) or over.split == "train" for over in passes)
        self.trains = task.moves_statistics and trains
        self.looks = self.trains or any(isinstance(over, FullPass) and over.split != "train" for over in passes)

    @property
    def references(self) -> Mapping[str, str | None]:  # type: ignore[override]
        """Those of the method's task."""
        return self.task.references

    def start(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        own = {name: state[name] for name in self.names.values()}
        if STATISTICS in message:
            own[STATISTICS] = self.shared.put(own[STATISTICS], message[STATISTICS])
        inner = [{name: value for name, value in rows.items() if name not in own} for rows in (state, message)]
        return self.task.start(self._knowing(context, own), *inner) | own

    def folds(self) -> tuple[Fold, ...]:
        return tuple(self._measured(fold) for fold in self.task.folds())

    def finish(self, context: ClientContext, work: Rows) -> tuple[Rows, Rows]:
        work, own = self._apart(work)
        changes, reply = self.task.finish(self._knowing(context, own), work)
        if self.trains and self.shared.size:
            reply = reply | {STATISTICS: self.shared.take(own[STATISTICS])}
        return changes | (own if self.trains else {}), reply

    def _measured(self, fold: Fold) -> Fold:
        over = fold.over
        whole = isinstance(over, FullPass)
        evaluates = isinstance(over, FullPass) and over.split != "train"

        def step(work: Rows, *batches: Batch) -> Rows:
            work, own = self._apart(work)
            # The same for all draws of a step. Classes that count more in the loss do not in a batch's statistics.
            weight = None if evaluates else batches[0].weight if batches[0].alike is None else batches[0].alike
            kept = KeptStatistics({model: own[name] for model, name in self.names.items()}, weight, always=not whole)
            net = MeasuredNet(batches[0].net, kept)
            work = fold.step(work, *(replace(batch, net=net) for batch in batches))
            return work | {name: kept.rows[model].detach() for model, name in self.names.items()}

        def then(context: ClientContext, work: Rows) -> Rows:
            work, own = self._apart(work)
            assert fold.then is not None
            return fold.then(self._knowing(context, own), work) | own

        return Fold(fold.over, step, None if fold.then is None else then)

    def _apart(self, work: Rows) -> tuple[Rows, Rows]:
        """Give the method's working rows, and the running statistics."""
        own = {name: work[name] for name in self.names.values()}
        return {name: value for name, value in work.items() if name not in own}, own

    def _knowing(self, context: ClientContext, own: Rows) -> ClientContext:
        """Give clients the model with their running statistics."""
        rows = {model: own[name] for model, name in self.names.items()}
        return replace(context, net=MeasuredNet(context.net, KeptStatistics(rows)))


class WithStatistics(Algorithm):
    """A method whose model has running statistics."""

    method: Algorithm
    layout: Layout
    shared: Columns
    running: Tensor

    @property
    def sends_all(self) -> bool:
        """Whether every running statistic is averaged."""
        return self.shared.size == self.layout.size

    @property
    def names(self) -> dict[str, str]:
        """For each of a client's models that has running statistics of its own, their name in its state."""
        other = self.method.own_statistics
        return {"": STATISTICS} | ({} if other is None else {other: f"{STATISTICS} {other}"})

    def init(self, start: Start) -> tuple[State, Rows]:
        """Start the method, and all models with the same running statistics."""
        server, clients = self.method.init(start)
        own = {name: start.rows(self.running.clone()) for name in self.names.values()}
        return server | self._sent(self.shared.take(self.running).clone()), clients | own

    def tasks(self) -> dict[str, Task]:
        """Return the method's tasks, whose passes move running statistics."""
        return {name: MeasuredTask(task, self.names, self.shared) for name, task in self.method.tasks().items()}

    def round(self, server: State, cohort: Cohort) -> Round:
        """Play the method's round, and average the running statistics that come back."""
        return self._with_means(self.method.round, server, cohort)

    def welcome(self, server: State, cohort: Cohort) -> Round:
        """Welcome newcomers as the method does, with running statistics."""
        return self._with_means(self.method.welcome, server, cohort)

    @property
    def settles(self) -> bool:
        """Whether the method treats newcomers otherwise than clients before the first round."""
        return self.method.settles

    def admit(self, server: State, welcomed: State, clients: Tensor) -> State:
        """Let newcomers be members as the method does; running statistics are those of the others."""
        return server | self.method.admit(self._apart(server)[0], self._apart(welcomed)[0], clients)

    def _with_means(self, half: Callable[[State, Cohort], Round], server: State, cohort: Cohort) -> Round:
        inner, running = self._apart(server)
        both, running = yield from self._played(half(inner, cohort), running, cohort)
        return both[0] | self._sent(running), both[1]

    def personalise(self, server: State, cohort: Cohort) -> Personalise:
        """Prepare personal models as the method does; with a model of the server's go its running statistics."""
        inner, running = self._apart(server)
        message: Message
        message, _ = yield from self._played(self.method.personalise(inner, cohort), running, cohort)
        if self.method.own_statistics is not None or not (message.shared or message.each):
            return message
        return replace(message, shared=message.shared | self._sent(running))

    def _played(self, play: Any, running: Tensor, cohort: Cohort) -> Any:
        """Play a half of the method's: its asks bring running statistics to clients, and their replies bring theirs."""
        tasks, replies = self.tasks(), None
        while True:
            try:
                ask: Ask = play.send(replies)
            except StopIteration as end:
                return end.value, running
            task = tasks.get(ask.task)
            if not isinstance(task, MeasuredTask) or not task.looks or not self.shared.size:
                replies = yield ask
                continue
            message = replace(ask.message, shared=ask.message.shared | self._sent(running))
            found: Replies = yield replace(ask, message=message)
            rows = dict(found.rows)
            if task.trains:
                running = self._mean(rows.pop(STATISTICS), cohort.shares(found.clients))
            replies = Replies(found.clients, rows)

    def _mean(self, rows: Tensor, shares: Tensor) -> Tensor:
        mean = self.method.joined_statistics(rows, shares).to(rows.dtype)
        # Noise that protects a client, or an attack, may bring a variance or a count below zero.
        names = [name for name in self.layout.names if name.endswith((VARIANCE, COUNT))]
        bounded = self.shared.take(self.layout.columns_of(names).mask(self.layout.size, mean)) > 0
        return torch.where(bounded, mean.clamp_min(0), mean)

    def _sent(self, running: Tensor) -> Rows:
        return {STATISTICS: running} if self.shared.size else {}

    def _apart(self, server: State) -> tuple[State, Tensor]:
        inner = {name: value for name, value in server.items() if name != STATISTICS}
        return inner, server.get(STATISTICS, self.running.new_zeros(0))

    def personal(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Put running statistics to the model that the method makes: the client's, or those that came with it."""
        other = self.method.own_statistics
        running = state[self.names[other or ""]]
        if other is None and STATISTICS in message:
            running = self.shared.put(running, message[STATISTICS])
        knowing = replace(context, net=MeasuredNet(context.net, KeptStatistics({"": running, other or "": running})))
        inner = {name: value for name, value in message.items() if name != STATISTICS}
        return self.method.personal(knowing, state, inner) | {STATISTICS: running}

    @property
    def evaluated_together(self) -> bool:
        """Whether the method makes all personal models at once."""
        return self.method.evaluated_together

    def global_model(self, server: State) -> Rows | None:
        """Return the global model with the averaged running statistics; those that are local lie with the clients."""
        inner, running = self._apart(server)
        model = self.method.global_model(inner)
        return None if model is None else model | {STATISTICS: running}

    def other_models(self, server: State) -> dict[str, Rows]:
        """Return the method's other models, each with the averaged running statistics."""
        inner, running = self._apart(server)
        models = self.method.other_models(inner)
        return {
            name: model | {STATISTICS: running.expand(len(next(iter(model.values()))), -1)}
            for name, model in models.items()
        }

    def complete(self, models: Rows, local: Tensor) -> Rows:
        """Give a model of the server's the running statistics that lie with each client, of which these are all."""
        return models | {STATISTICS: self.shared.put(local, models[STATISTICS])}

    def predict(self, net: Net, rows: Rows, x: Tensor) -> Tensor:
        """Apply a model with its running statistics."""
        model = {name: value for name, value in rows.items() if name != STATISTICS}
        return self.method.predict(MeasuredNet(net, KeptStatistics({"": rows[STATISTICS]})), model, x)

    def check_clients(self, count: int) -> None:
        """Refuse what the method refuses."""
        self.method.check_clients(count)

    def settings(self) -> dict[str, object]:
        """Return the method's hyper-parameters."""
        return self.method.settings()


def with_statistics(method: Algorithm, layout: Layout, running: Tensor, local: tuple[str, ...]) -> WithStatistics:
    """Give a method a model with running statistics, some of which stay with their client; it keeps its name."""
    sent = [name for name in layout.names if name not in local] if method.federates else []
    kind: type[WithStatistics] = type("WithStatistics", (WithStatistics,), facts(method))
    return kind(method=method, layout=layout, shared=layout.columns_of(sent), running=running)
