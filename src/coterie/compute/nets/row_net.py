"""Models applied to rows: one module for many parameter rows.

There are several ways to compute the same outputs:

- :class:`ModuleNet` calls the plain module for one row after another. It is the oracle of the tests and the net of the
  ``loop`` engine.
- :class:`VmapNet` vectorises the module with ``torch.func.vmap``. It takes any module.
- :class:`~coterie.compute.nets.stacked.StackedNet` walks the module's graph with the weights of every layer stacked
  over rows. It is the fastest.
- :class:`~coterie.compute.nets.folded.FoldedNet` calls a module that has no graph once for all rows, with the layers
  that are trained stacked over rows.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from coterie import kernels, randomness
from coterie.algorithms.base import Batch
from coterie.errors import ModelError
from coterie.models.batch_norm import (
    COUNT,
    MEAN,
    VARIANCE,
    NormPass,
    RunningStatistics,
    norms_of,
    statistics_layout,
    statistics_row,
)
from coterie.models.calls import call_with
from coterie.models.dropout import FunctionCalls, StreamDropout
from coterie.models.own_buffers import OwnBuffer, moving_buffers, own_buffers, set_mode
from coterie.models.recurrent import written_out
from coterie.rows import Columns, Layout, Rows, matrix_units


def layout_of(module: nn.Module) -> Layout:
    """Lay out a module's parameters in a row, with a part for each of its children."""
    # A part of a model may hold nothing to train: the body of a linear model only flattens.
    if not any(value.requires_grad for value in module.parameters()):
        return Layout((), (), (0,))
    return Layout.of(module, {name: (name,) for name, _ in module.named_children()})


class RowNet(abc.ABC):
    """A model applied to rows; the interface is :class:`coterie.algorithms.base.Net`.

    Parameters
    ----------
    module
        The model.
    layout
        Where its parameters lie in a row; taken from the module if not given.
    """

    def __init__(self, module: nn.Module, layout: Layout | None = None) -> None:
        self.module = module
        self.layout = layout or layout_of(module)
        self.statistics = statistics_layout(module)
        self._norms = list(norms_of(module))
        self._moving, self._own_buffers = moving_buffers(module), own_buffers(module)
        self._dropouts = keyed(module)
        # Whether the model calls functions that we compute in our own way, and draws in them; known after a first pass.
        self._calls_functions: bool | None = None
        self._draws_in_functions = False
        self._subs: dict[tuple[str, ...], RowNet] = {}
        self._columns: dict[tuple[str, ...], Columns] = {}

    @property
    def reads_channels_once(self) -> bool:
        """Whether channels of samples that are one in memory may stay so."""
        return False

    @abc.abstractmethod
    def outputs(
        self, params: Tensor, x: Tensor, key: Tensor | None = None, statistics: RunningStatistics | None = None
    ) -> Tensor:
        """Apply the model to samples ``[rows, samples, ...]``.

        Without running statistics, BatchNorm layers evaluate with those that the module was built with.
        """

    def of_part(self, part: nn.Module) -> RowNet:
        """Make a net of the same kind for a part of the model."""
        return type(self)(part)

    @property
    def uses_dropout(self) -> bool:
        """Whether the model draws random numbers while it trains."""
        return bool(self._dropouts) or self._draws_in_functions

    def sub(self, *path: str | slice) -> RowNet:
        """Return the net of a part of the model; made once."""
        place = tuple(map(str, path))
        if place not in self._subs:
            part: Any = self.module
            for step in path:
                if isinstance(step, str):
                    if step not in dict(part.named_children()):
                        have = ", ".join(name for name, _ in part.named_children()) or "none"
                        raise ModelError(
                            f"the model has no part {step!r} (it has: {have}), and this method needs to know them: "
                            "call the last layer head and the rest body, so that forward is head(body(x))"
                        )
                    part = getattr(part, step)
                elif isinstance(part, nn.Sequential):
                    part = part[step]
                else:
                    raise ModelError(f"{type(part).__name__} cannot be cut into layers: use an nn.Sequential")
            self._subs[place] = self.of_part(part)
        return self._subs[place]

    def columns(self, *path: str | slice) -> Columns:
        """Return the columns of the rows that hold a part's parameters."""
        place = tuple(map(str, path))
        if place not in self._columns:
            of_part = set(self.sub(*path).module.parameters())  # a tensor's hash is its identity
            parameters = dict(self.module.named_parameters())
            names = [name for name in self.layout.names if parameters[name] in of_part]
            self._columns[place] = self.layout.columns_of(names)
        return self._columns[place]

    def statistic_columns(self, *path: str | slice) -> Columns:
        """Return the columns of rows of running statistics that hold a part's."""
        of_part = {id(layer) for _, layer in norms_of(self.sub(*path).module)}
        names = [
            prefix + name for prefix, layer in self._norms if id(layer) in of_part for name in (MEAN, VARIANCE, COUNT)
        ]
        held = {(id(each.owner), each.short) for each in moving_buffers(self.sub(*path).module)}
        names += [each.name for each in self._moving if (id(each.owner), each.short) in held]
        return self.statistics.columns_of(names)

    @property
    def split(self) -> int:
        """The number of layers of the body that a client holds in a split model."""
        declared = getattr(self.module, "split", None)
        if not isinstance(declared, int):
            raise ModelError(
                f"{type(self.module).__name__} does not say where it is split between client and server; this method "
                "needs an attribute `split`, a number of layers of its body"
            )
        return declared

    def call(self, module: nn.Module, named: Rows, args: tuple[Any, ...], key: Tensor | None) -> Any:
        """Call a module for one client, with its parameters, its dropout keys, and the key of functional dropout."""
        if self._calls_functions is False:
            return call_with(module, named, args)
        with FunctionCalls(key) as calls:
            out = call_with(module, named, args)
        self.note(calls)
        return out

    def note(self, calls: FunctionCalls) -> None:
        """Remember what the model called."""
        self._calls_functions = bool(self._calls_functions) or calls.met
        self._draws_in_functions = self._draws_in_functions or calls.drew

    def arguments(self, params: Tensor, key: Tensor | None, statistics: RunningStatistics | None = None) -> Rows:
        """Return views of the rows under the names of the module's parameters and buffers, with dropout's keys."""
        named = self.layout.views(params)
        if statistics is not None:
            named |= self.statistics.views(statistics.rows)
            # A count is rounded, which a mean of several need not be. What a pass changes in place is its own.
            named |= {each.name: _typed(named[each.name], each.value.dtype) for each in self._moving}
            held = [each for each in self._own_buffers if each.frozen]
            named |= {each.name: each.value.expand(len(params), *each.value.shape).clone() for each in held}
        if key is not None:
            named |= {f"{name}.key" if name else "key": key for name in self._dropouts}
        return named

    def train(self, named: Rows, x: Tensor, key: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """Call the module for one client in a pass that trains; gives its new running statistics too."""
        with NormPass(weight) as now:
            out = self.call(self.module, named, (x,), key)  # which leaves the buffers that it has changed in `named`
        return out, joined_statistics(self._norms, now, named, self._moving)


def _typed(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.clone() if dtype.is_floating_point else rows.round().to(dtype)


def joined_statistics(
    norms: Sequence[tuple[str, nn.Module]], now: NormPass, named: Rows, moving: Sequence[OwnBuffer] = ()
) -> Tensor:
    """Return one client's running statistics after a pass as a row; a layer that was not called keeps its own."""
    each = [
        now.noted.get(layer) or (named[prefix + MEAN], named[prefix + VARIANCE], named[prefix + COUNT])
        for prefix, layer in norms
    ]
    values = [value for moments in each for value in moments] + [named[buffer.name].detach() for buffer in moving]
    return torch.cat([value.reshape(-1) for value in values])


class CalledNet(RowNet):
    """A model that is called as its author wrote it, so that it may change buffers of its own in training."""

    @abc.abstractmethod
    def apply(self, params: Tensor, x: Tensor, key: Tensor | None, statistics: RunningStatistics | None) -> Tensor:
        """Apply the model to samples, none of which is padding if the module changes buffers of its own."""

    def outputs(
        self, params: Tensor, x: Tensor, key: Tensor | None = None, statistics: RunningStatistics | None = None
    ) -> Tensor:
        """Apply the model to samples ``[rows, samples, ...]``."""
        if not self._own_buffers:
            return self.apply(params, x, key, statistics)
        if statistics is None or statistics.weight is None:
            set_mode(self.module, training=False)
            return self.apply(params, x, key, statistics)
        # What the module does with its batch is its own affair: it is given the samples that are there, no padding.
        counts = (statistics.weight > 0).sum(1)
        places, pieces, new = [], [], statistics.rows
        for count in counts.unique().tolist():
            mine = (counts == count).nonzero().squeeze(1)
            known = RunningStatistics(statistics.rows[mine], statistics.weight[mine, :count] if count else None)
            drawn = None if key is None else key[mine]
            set_mode(self.module, training=count > 0)
            try:
                out = self.apply(params[mine], x[mine, : count or None], drawn, known)
            finally:
                set_mode(self.module, training=False)
            padding = out.new_zeros(len(mine), x.shape[1] - out.shape[1], *out.shape[2:])
            places.append(mine)
            pieces.append(torch.cat([out, padding], 1))
            new = new if known.new is None else new.index_copy(0, mine, known.new.to(new.dtype))
        statistics.new = new
        return torch.cat(pieces)[torch.argsort(torch.cat(places))]


class ModuleNet(CalledNet):
    """Calls the plain module for one row after another.

    Parameters
    ----------
    module
        The model.
    layout
        Where its parameters lie in a row; taken from the module if not given.
    padded
        Whether batches may hold samples that do not count.
    """

    def __init__(self, module: nn.Module, layout: Layout | None = None, padded: bool = True) -> None:
        super().__init__(module, layout)
        self._padded = padded

    def of_part(self, part: nn.Module) -> RowNet:
        """Make a net of the same kind for a part of the model."""
        return ModuleNet(part, padded=self._padded)

    def apply(self, params: Tensor, x: Tensor, key: Tensor | None, statistics: RunningStatistics | None) -> Tensor:
        """Apply the model to samples."""
        named = self.arguments(params, key, statistics)
        rows, new = [], []
        for row in range(len(x)):
            own, drawn = {name: value[row] for name, value in named.items()}, None if key is None else key[row]
            if statistics is None or statistics.weight is None:
                rows.append(self.call(self.module, own, (x[row],), drawn))
                continue
            out, after = self.train(own, x[row], drawn, statistics.weight[row] if self._padded else None)
            rows.append(out)
            new.append(after)
        if statistics is not None and new:
            statistics.new = torch.stack(new)
        return torch.stack(rows)


class VmapNet(CalledNet):
    """Vectorises the module over rows with ``torch.func.vmap``."""

    def apply(self, params: Tensor, x: Tensor, key: Tensor | None, statistics: RunningStatistics | None) -> Tensor:
        """Apply the model to samples."""
        named, keyed = self.arguments(params, key, statistics), None if key is None else 0
        out: Tensor
        with written_out():
            if statistics is not None and statistics.weight is not None:
                over = torch.func.vmap(self.train, in_dims=(0, 0, keyed, 0))
                out, statistics.new = over(named, x, key, statistics.weight)
                return out
            out = torch.func.vmap(lambda p, s, k: self.call(self.module, p, (s,), k), in_dims=(0, 0, keyed))(
                named, x, key
            )
        return out


def keyed(module: nn.Module) -> list[str]:
    """Name the dropout layers of a module that drop anything."""
    return [name for name, child in module.named_modules() if isinstance(child, StreamDropout) and child.p > 0]


def branches_on_values(module: nn.Module, x: Tensor) -> bool:
    """Return whether a module looks at numbers to decide what it computes: it is run on samples that have none.

    Such a model cannot be called once for the samples of several clients, and cannot be recorded on a GPU.
    """
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as fake, FunctionCalls(None):
        try:
            module(fake.from_tensor(x))
        except Exception:  # whatever it does with what it looks at
            return True
    return False


def agrees(
    net: RowNet, reference: RowNet, x: Tensor, tolerance: float, training: bool = False, raising: bool = False
) -> bool:
    """Return whether two nets give the same outputs on some samples, up to a relative difference.

    With ``training``, their gradients and what they drop are compared too. What the first one cannot do is a
    difference, or is raised if ``raising``.
    """
    row = reference.layout.row_of(dict(reference.module.named_parameters()))
    # Every row gets other parameters, so that a net that mixes rows is found out too.
    spread = torch.arange(1, len(x) + 1, dtype=row.dtype, device=row.device).unsqueeze(1)
    params = row * (1 + 0.1 * spread) + 0.01 * torch.sin(spread * torch.arange(len(row), device=row.device))
    with torch.set_grad_enabled(training), matrix_units.tf32(False):
        # TF32's three digits would hide a wrong net, or refuse a right one.
        try:
            if x.is_cuda and not raising:
                with kernels.rehearsal():
                    net.outputs(params, x)
            alike = _near(net.outputs(params, x), reference.outputs(params, x), tolerance)
            alike = alike and (not training or _trains_alike(net, reference, params, x, tolerance))
            _train(net, params.detach().requires_grad_(training), x)
        except (RuntimeError, ValueError, TypeError, IndexError):
            if raising:
                raise
            return False
    return alike


def _near(got: Tensor, wanted: Tensor, tolerance: float, least: float = 1.0) -> bool:
    if got.shape != wanted.shape:
        return False
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    return bool((got - wanted).masked_fill(same, 0.0).norm() <= tolerance * (least + wanted.nan_to_num().norm()))


def _trains_alike(net: RowNet, reference: RowNet, params: Tensor, x: Tensor, tolerance: float) -> bool:
    """Compare outputs with dropout, and gradients: those of autograd, and those of a net's own step."""
    key = randomness.keys(1, "trial of a net", 0, torch.arange(len(x), device=x.device))
    pull: Tensor = torch.zeros(())

    def losses(outputs: Tensor) -> Tensor:
        return (outputs * pull).flatten(1).sum(1)

    found = []
    for each in (net, reference):
        leaf = params.detach().requires_grad_()
        outputs = each.outputs(leaf, x, key)
        pull = torch.arange(1.0, outputs.numel() + 1, device=x.device).cos().to(outputs).view(outputs.shape)
        found.append((outputs.detach(), torch.autograd.grad(losses(outputs).sum(), leaf)[0]))
    (got, gradient), (wanted, right) = found
    if not _near(got, wanted, tolerance):
        return False
    gradients = [gradient]
    if (fused := getattr(net, "descend_", None)) is not None:
        moved, still = params.clone(), torch.ones(len(x), x.shape[1], dtype=params.dtype, device=x.device)
        batch = Batch(net, lambda outputs, _: losses(outputs), x, still, still, still[:, 0], key)
        fused(moved, params.new_ones(len(x), 1), batch, losses)
        gradients.append(params - moved)
    # Each parameter by itself: one that one net trains and the other does not may be small beside the rest.
    least = 1e-2 * float(right.nan_to_num().norm())
    wide = 100 * tolerance  # a rounding error may bring a value to the other side of a kink
    rights = reference.layout.views(right)
    return all(
        _near(value, rights[name], wide, least)
        for each in gradients
        for name, value in reference.layout.views(each).items()
    )


def _train(net: RowNet, params: Tensor, x: Tensor) -> None:
    """Run a net with BatchNorm layers as in training, so that what it cannot do is raised.

    The outputs are not compared: of the few values of a probe, in single precision, normalisation may make anything.
    """
    if not net.statistics.size:
        return
    weight = torch.full(x.shape[:2], 1 / x.shape[1], dtype=params.dtype, device=x.device)
    known = RunningStatistics(statistics_row(net.module, params).expand(len(x), -1), weight)
    out = net.outputs(params, x, None, known)
    if params.requires_grad:
        out.sum().backward()
