"""Parameters that stay with their client, for any method.

A method's rows hold the shared parameters and nothing else: what it mixes, measures distances between, keeps duals for
and sends has no column for what stays. The others are each client's local part, a row of its state that no method sees.

- :class:`JoinedNet` is the model as the method knows it: it puts the local part beside the method's rows before the
  model is applied.
- :class:`JoinedTask` is the method's task. With each step of the method's the local part takes one too, along its own
  gradient of the same loss at the same models, with the method's optimiser. For methods that step by plain gradients,
  such as FedAvg, shared and local parameters are so trained together, as one row would be.

Where a step takes several gradients, the local part goes along the last: in APFL that of the mixture, in Per-FedAvg
that at the adapted model (with ``variant=hf`` the last of the finite difference), in pFedMe that of the last inner
step. Where a method takes one gradient over all samples, it takes one step at the end of the pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from coterie.algorithms.base import (
    Algorithm,
    Batch,
    ClientContext,
    Cohort,
    Fold,
    FullPass,
    Net,
    Personalise,
    Round,
    Start,
    State,
    Task,
    facts,
)
from coterie.algorithms.local_training import LocalTraining, Optimiser
from coterie.errors import ConfigError, ModelError
from coterie.rows import Columns, Layout, Rows

LOCAL_PART = "local_part"
"""The name of the local part in a client's state."""
_GRADIENT, _TAKEN, _PREFIX = f"{LOCAL_PART} gradient", f"{LOCAL_PART} taken", f"{LOCAL_PART} "


class LocalPart:
    """Which columns of a model's rows stay with the client.

    Parameters
    ----------
    layout
        Where all parameters lie in a row of the model.
    names
        Those that stay.
    """

    def __init__(self, layout: Layout, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        shared = [name for name in layout.names if name not in self.names]
        self.whole, self.layout = layout, layout.only(shared)
        self.local, self.shared = layout.columns_of(self.names), layout.columns_of(shared)
        self._subs: dict[tuple[str, ...], tuple[LocalPart, Columns, Columns]] = {}

    def join(self, shared: Tensor, local: Tensor) -> Tensor:
        """Put shared and local columns together; where one of them is a single row, it is repeated."""
        count = max(len(shared), len(local))
        shared, local = shared.expand(count, -1), local.expand(count, -1)
        pieces: list[tuple[int, Tensor]] = []
        for columns, rows in ((self.shared, shared), (self.local, local)):
            used = 0
            for begin, end in columns.spans:
                pieces.append((begin, rows[:, used : used + end - begin]))
                used += end - begin
        in_order = [piece for _, piece in sorted(pieces, key=lambda placed: placed[0])]
        return torch.cat(in_order, 1) if in_order else shared  # a part of a model may have no parameters at all

    def complete(self, models: Rows, local: Tensor) -> Rows:
        """Give models of shared columns with each client's local part: as whole rows, where a model is one row."""
        if models.keys() == {"w"} and models["w"].shape[-1] == self.layout.size:
            return {"w": self.join(models["w"], local)}
        return models | {LOCAL_PART: local.expand(len(next(iter(models.values()))), -1)}

    def within(self, net: Net, path: tuple[str | slice, ...]) -> tuple[LocalPart, Columns, Columns]:
        """Give the local part of a part of the model, and which shared and which local columns belong to that."""
        place = tuple(map(str, path))
        if place not in self._subs:
            layout, here = net.sub(*path).layout, torch.zeros(self.whole.size, dtype=torch.bool)
            for begin, end in net.columns(*path).spans:
                here[begin:end] = True
            stays = self.local.mask(self.whole.size, torch.zeros(())).bool()
            of_part = stays[here]
            names = [
                name
                for name, (begin, end) in zip(layout.names, pairwise(layout.offsets), strict=True)
                if bool(of_part[begin:end].any())
            ]
            self._subs[place] = LocalPart(layout, names), _columns(here[~stays]), _columns(here[stays])
        return self._subs[place]


def _columns(chosen: Tensor) -> Columns:
    """Give the columns at which a mask is true."""
    edges = torch.nn.functional.pad(chosen.to(torch.int8), (1, 1)).diff()
    begins, ends = ((edges == turn).nonzero().squeeze(1).tolist() for turn in (1, -1))
    return Columns(tuple(zip(begins, ends, strict=True)))


class JoinedNet:
    """A model applied to rows of its shared parameters, with the local ones beside them.

    Parameters
    ----------
    net
        The whole model.
    part
        What stays with the client.
    local
        The local columns of each row, or of one that all rows share.
    """

    def __init__(self, net: Net, part: LocalPart, local: Tensor) -> None:
        self.net, self.part, self.local = net, part, local
        self.layout = part.layout

    def outputs(self, params: Tensor, x: Tensor, key: Tensor | None = None) -> Tensor:
        return self.net.outputs(self.part.join(params, self.local), x, key)

    def sub(self, *path: str | slice) -> Net:
        part, _, local = self.part.within(self.net, path)
        return JoinedNet(self.net.sub(*path), part, local.take(self.local))

    def columns(self, *path: str | slice) -> Columns:
        return self.part.within(self.net, path)[1]

    @property
    def split(self) -> int:
        return self.net.split

    def measuring(self, model: str | None) -> JoinedNet:
        """Give the same model, with other running statistics if it has any."""
        other = getattr(self.net, "measuring", None)
        return self if other is None else JoinedNet(other(model), self.part, self.local)

    @contextlib.contextmanager
    def holding(self, local: Tensor) -> Iterator[None]:
        """Use other local columns for a while."""
        before, self.local = self.local, local
        try:
            yield
        finally:
            self.local = before


@dataclass(frozen=True)
class JoinedBatch(Batch):
    """A batch whose gradients are taken with respect to the local part too; those are kept in ``taken``."""

    taken: list[Tensor] = field(default_factory=list)

    def loss_and_grad(self, params: Tensor) -> tuple[Tensor, Tensor]:
        return self.loss(params), self.grad(params)

    def grad_of(self, losses: Callable[..., Tensor], *params: Tensor) -> tuple[Tensor, ...]:
        net = self.net
        assert isinstance(net, JoinedNet)
        if torch.compiler.is_compiling():  # which traces torch.func, but not autograd.grad

            def total(local: Tensor, *rows: Tensor) -> Tensor:
                with net.holding(local):
                    return losses(*rows).sum()

            own, *gradients = torch.func.grad(total, argnums=tuple(range(1 + len(params))))(net.local, *params)
        else:
            with torch.enable_grad():
                local, *leaves = (value.detach().requires_grad_() for value in (net.local, *params))
                with net.holding(local):
                    value = losses(*leaves).sum()
                own, *gradients = torch.autograd.grad(
                    value, (local, *leaves), allow_unused=True, materialize_grads=True
                )
        self.taken.append(own)
        return tuple(gradients)


class JoinedTask(Task):
    """A method's task on rows of shared parameters, and with its steps those of the local part.

    Parameters
    ----------
    task
        The method's.
    part
        What stays with the client.
    optimiser
        How the local part steps.
    """

    def __init__(self, task: Task, part: LocalPart, optimiser: Optimiser) -> None:
        self.task, self.part, self.optimiser = task, part, optimiser

    @property
    def references(self) -> Mapping[str, str | None]:  # type: ignore[override]
        """Those of the method's task."""
        return self.task.references

    @property
    def moves_statistics(self) -> bool:  # type: ignore[override]
        """As the method's task."""
        return self.task.moves_statistics

    def start(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        local = state[LOCAL_PART]
        work = self.task.start(with_local(context, self.part, local), state, message)
        none = {_GRADIENT: torch.zeros_like(local), _TAKEN: local.new_zeros(len(local), 1)}
        return work | {LOCAL_PART: local, **none, **self.optimiser.init(context, local, _PREFIX)}

    def folds(self) -> tuple[Fold, ...]:
        return tuple(self._joined(fold) for fold in self.task.folds())

    def finish(self, context: ClientContext, work: Rows) -> tuple[Rows, Rows]:
        work, own = _apart(work)
        changes, reply = self.task.finish(with_local(context, self.part, own[LOCAL_PART]), work)
        return changes | {LOCAL_PART: own[LOCAL_PART]}, reply

    def _joined(self, fold: Fold) -> Fold:
        whole = isinstance(fold.over, FullPass)

        def step(work: Rows, *batches: Batch) -> Rows:
            work, own = _apart(work)
            net, taken = JoinedNet(batches[0].net, self.part, own[LOCAL_PART]), list[Tensor]()
            work = fold.step(work, *(_joined_batch(batch, net, taken) for batch in batches))
            if not taken:
                return work | own
            if not whole:
                return work | own | self.optimiser.update(own, LOCAL_PART, taken[-1], _PREFIX)
            summed = torch.addcmul(own[_GRADIENT], taken[-1], batches[0].share.unsqueeze(1))
            return work | own | {_GRADIENT: summed, _TAKEN: torch.ones_like(own[_TAKEN])}

        def then(context: ClientContext, work: Rows) -> Rows:
            work, own = _apart(work)
            if whole:
                moved = own | self.optimiser.update(own, LOCAL_PART, own[_GRADIENT], _PREFIX)
                own = {name: torch.where(own[_TAKEN] > 0, value, own[name]) for name, value in moved.items()}
                own |= {name: torch.zeros_like(own[name]) for name in (_GRADIENT, _TAKEN)}
            if fold.then is not None:
                work = fold.then(with_local(context, self.part, own[LOCAL_PART]), work)
            return work | own

        return Fold(fold.over, step, then if whole or fold.then is not None else None)


def with_local(context: ClientContext, part: LocalPart, local: Tensor) -> ClientContext:
    """Give clients the model as their method knows it."""
    return replace(context, net=JoinedNet(context.net, part, local))


def _joined_batch(batch: Batch, net: JoinedNet, taken: list[Tensor]) -> JoinedBatch:
    given = batch.x, batch.y, batch.weight, batch.share, batch.key, batch.alike
    return JoinedBatch(net, batch.per_sample, *given, taken)


def _apart(work: Rows) -> tuple[Rows, Rows]:
    """Give the method's working rows, and those of the local part."""
    own = {name: value for name, value in work.items() if name.startswith(LOCAL_PART)}
    return {name: value for name, value in work.items() if name not in own}, own


class PartlyLocal(Algorithm):
    """A method on the shared columns of rows whose other columns stay with their client."""

    method: Algorithm
    part: LocalPart

    def init(self, start: Start) -> tuple[State, Rows]:
        """Start the method with the shared columns, and every client with the same local ones."""
        part, local = self.part, self.part.local.take(start.row)
        shared = replace(
            start,
            row=part.shared.take(start.row).clone(),
            net=JoinedNet(start.net, part, local.unsqueeze(0)),
            fresh=lambda client: part.shared.take(start.fresh(client)).clone(),
        )
        server, clients = self.method.init(shared)
        return server, clients | {LOCAL_PART: start.rows(local.clone())}

    def tasks(self) -> dict[str, Task]:
        """Return the method's tasks, joined with the local part's steps."""
        optimiser = _optimiser(self.method)
        return {name: JoinedTask(task, self.part, optimiser) for name, task in self.method.tasks().items()}

    def round(self, server: State, cohort: Cohort) -> Round:
        """Play the method's round."""
        return self.method.round(server, replace(cohort, layout=self.part.layout))

    def welcome(self, server: State, cohort: Cohort) -> Round:
        """Welcome newcomers as the method does."""
        return self.method.welcome(server, replace(cohort, layout=self.part.layout))

    @property
    def settles(self) -> bool:
        """Whether the method treats newcomers otherwise than clients before the first round."""
        return self.method.settles

    def admit(self, server: State, welcomed: State, clients: Tensor) -> State:
        """Let newcomers be members as the method does."""
        return self.method.admit(server, welcomed, clients)

    def personalise(self, server: State, cohort: Cohort) -> Personalise:
        """Prepare personal models as the method does."""
        return self.method.personalise(server, replace(cohort, layout=self.part.layout))

    def personal(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Put each client's local part to the model that the method makes for it."""
        local = state[LOCAL_PART]
        return self.part.complete(self.method.personal(with_local(context, self.part, local), state, message), local)

    @property
    def evaluated_together(self) -> bool:
        """Whether the method makes all personal models at once."""
        return self.method.evaluated_together

    def global_model(self, server: State) -> Rows | None:
        """Return the shared columns of the global model: what it is short of lies with the clients."""
        return self.method.global_model(server)

    def other_models(self, server: State) -> dict[str, Rows]:
        """Return the shared columns of the method's other models."""
        return self.method.other_models(server)

    def predict(self, net: Net, rows: Rows, x: Tensor) -> Tensor:
        """Apply a model that has its local part."""
        if LOCAL_PART in rows:
            local, models = rows[LOCAL_PART], {name: value for name, value in rows.items() if name != LOCAL_PART}
        else:
            local, models = self.part.local.take(rows["w"]), {"w": self.part.shared.take(rows["w"])}
        return self.method.predict(JoinedNet(net, self.part, local), models, x)

    def joined_statistics(self, statistics: Tensor, shares: Tensor) -> Tensor:
        """Join running statistics as the method does."""
        return self.method.joined_statistics(statistics, shares)

    def check_clients(self, count: int) -> None:
        """Refuse what the method refuses."""
        self.method.check_clients(count)

    def settings(self) -> dict[str, object]:
        """Return the method's hyper-parameters."""
        return self.method.settings()


def partly_local(method: Algorithm, layout: Layout, names: Iterable[str]) -> PartlyLocal:
    """Make a method leave some parameters with their clients; it keeps its name and what it says of itself."""
    part = LocalPart(layout, names)
    if not part.layout.size:
        raise ModelError("every parameter of the model stays with its client: leave some to share, or run local")
    _optimiser(method)
    kind: type[PartlyLocal] = type("PartlyLocal", (PartlyLocal,), facts(method))
    return kind(method=method, part=part)


def _optimiser(method: Algorithm) -> Optimiser:
    """Give the method's optimiser, with which the local part steps too."""
    if isinstance(method, LocalTraining):
        return method.stepper
    if "lr" not in type(method).model_fields:
        raise ConfigError(f"{method.title} has no learning rate (a parameter lr), with which local parameters train")
    given = method.settings()
    return Optimiser(lr=float(given["lr"]), lr_decay=float(given.get("lr_decay", 1.0)))
