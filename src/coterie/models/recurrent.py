"""Recurrent layers written out as products, for one client or for many at once, with dropout from streams.

The gates are those of PyTorch's documentation of ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from coterie.errors import ModelError
from coterie.models.dropout import StreamDropout
from coterie.rows import Rows

Drop = Callable[[StreamDropout, Tensor], Tensor]
"""Drops elements of ``[rows × samples, ...]`` by a layer's masks."""

State = Tensor | tuple[Tensor, Tensor] | None
"""The hidden state ``[layers × directions, samples, hidden]``, with an LSTM's cells beside it."""

_written_out: ContextVar[bool] = ContextVar("written_out", default=False)


@contextlib.contextmanager
def written_out() -> Iterator[None]:
    """Have recurrent layers computed as products, where PyTorch's own functions cannot run: under ``vmap``."""
    _say_nothing_of_slow_layers()
    token = _written_out.set(True)
    try:
        yield
    finally:
        _written_out.reset(token)


@functools.cache
def _say_nothing_of_slow_layers() -> None:
    """Stop PyTorch from asking people to file an issue for each layer that ``vmap`` runs row by row."""
    switch = getattr(torch._C._functorch, "_set_vmap_fallback_warning_enabled", None)
    if switch is not None:
        switch(False)


class AffineMaps:
    """How the products of a recurrent layer with its weights are computed; this one leaves gradients to autograd."""

    def apply(self, weights: Rows, x: Tensor) -> Tensor:
        """Map ``[rows, places, inputs]`` to ``[rows, places, outputs]``."""
        out = x @ weights["weight"].transpose(1, 2)
        return out + weights["bias"].unsqueeze(1) if "bias" in weights else out

    def watch(self, base: Tensor) -> Tensor:
        """Take note of a sum to which products with recurrent weights will be added."""
        return base

    def entered(self, weights: Rows, hidden: list[Tensor], base: Tensor) -> None:
        """Take note of what was multiplied with the recurrent weights and added to ``base``, step after step."""


def recur(
    layer: nn.RNNBase, weights: Rows, rows: int, x: Tensor | PackedSequence, state: State, drop: Drop, maps: AffineMaps
) -> tuple[Tensor, Any]:
    """Apply a recurrent layer with stacked weights ``[rows, ...]`` to folded inputs, and give what the layer gives."""
    if isinstance(x, PackedSequence):
        raise ModelError("a recurrent layer on a packed sequence cannot run for several clients: use --engine loop")
    given = x if layer.batch_first else x.transpose(0, 1)
    samples, times = given.shape[0] // rows, given.shape[1]
    start = state if isinstance(state, tuple) else (state,)
    inputs = given.reshape(rows, samples * times, -1)
    ends: list[tuple[Tensor, ...]] = []
    directions = 2 if layer.bidirectional else 1
    for level in range(layer.num_layers):
        if level and layer.dropout > 0:
            between: Any = layer.get_submodule(f"between.{level - 1}")
            inputs = drop(between, inputs.reshape(rows * samples, times, -1)).reshape(rows, samples * times, -1)
        outputs = []
        for direction in range(directions):
            at, suffix = level * directions + direction, f"l{level}" + ("_reverse" if direction else "")
            first = [None if each is None else each[at].reshape(rows, samples, -1) for each in start]
            hidden, last = _direction(layer, weights, suffix, inputs, (samples, times), first, direction == 1, maps)
            outputs.append(hidden)
            ends.append(last)
        inputs = (outputs[0] if directions == 1 else torch.cat(outputs, -1)).flatten(1, 2)
    out = inputs.reshape(rows * samples, times, -1)
    final = tuple(torch.stack([end[i] for end in ends]).flatten(1, 2) for i in range(len(ends[0])))
    return out if layer.batch_first else out.transpose(0, 1), final if len(final) > 1 else final[0]


def _direction(
    layer: nn.RNNBase,
    weights: Rows,
    suffix: str,
    inputs: Tensor,
    size: tuple[int, int],
    first: list[Tensor | None],
    backwards: bool,
    maps: AffineMaps,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run one layer in one direction: hidden states ``[rows, samples, times, hidden]``, and the last state."""
    rows, (samples, times) = len(inputs), size
    from_input, from_hidden = _affine(weights, "ih", suffix), _affine(weights, "hh", suffix)
    gates = maps.apply(from_input, inputs).view(rows, samples, times, -1)
    shift = from_hidden["bias"].view(rows, 1, 1, -1) if layer.bias else None
    if layer.mode == "GRU":  # whose reset gate multiplies what comes from the hidden state, with its bias
        base = torch.zeros_like(gates) if shift is None else shift.expand_as(gates)
    else:
        base = gates if shift is None else gates + shift
    base = maps.watch(base)
    # One unbind rather than a selection each: its backward pass joins all steps' gradients at once.
    added, steps = base.unbind(2), gates.unbind(2)
    product = from_hidden["weight"].transpose(1, 2)
    zeros = inputs.new_zeros(rows, samples, layer.hidden_size)
    hidden = zeros if first[0] is None else first[0]
    cells = zeros if len(first) < 2 or first[1] is None else first[1]
    before, after = [], []
    for time in reversed(range(times)) if backwards else range(times):
        before.append(hidden)
        summed = torch.baddbmm(added[time], hidden, product)
        if layer.mode == "LSTM":
            enter, forget, new, show = summed.chunk(4, -1)
            cells = forget.sigmoid() * cells + enter.sigmoid() * new.tanh()
            hidden = show.sigmoid() * cells.tanh()
        elif layer.mode == "GRU":
            (reset, update, new), (reset_h, update_h, new_h) = steps[time].chunk(3, -1), summed.chunk(3, -1)
            candidate = torch.tanh(new + torch.sigmoid(reset + reset_h) * new_h)
            hidden = candidate + torch.sigmoid(update + update_h) * (hidden - candidate)
        else:
            hidden = summed.tanh() if layer.mode == "RNN_TANH" else summed.relu()
        after.append(hidden)
    if backwards:
        before.reverse()
        after.reverse()
    maps.entered(from_hidden, before, base)
    return torch.stack(after, 2), (hidden, cells) if layer.mode == "LSTM" else (hidden,)


def _affine(weights: Rows, kind: str, suffix: str) -> Rows:
    names = {"weight": f"weight_{kind}_{suffix}", "bias": f"bias_{kind}_{suffix}"}
    return {own: weights[name] for own, name in names.items() if name in weights}


def _packed(layer: nn.RNNBase, given: PackedSequence, state: State) -> tuple[PackedSequence, Any]:
    """Run a layer with its own weights on a packed sequence, one level after another, with dropout between them."""
    run: Any = getattr(torch._VF, layer.mode.lower())
    start = state if isinstance(state, tuple) else (state,) * (2 if layer.mode == "LSTM" else 1)
    directions = 2 if layer.bidirectional else 1
    ends: list[tuple[Tensor, ...]] = []
    for level in range(layer.num_layers):
        if level:
            padded, lengths = pad_packed_sequence(given, batch_first=True)  # masks belong to samples
            between: Any = layer.get_submodule(f"between.{level - 1}")
            given = pack_padded_sequence(between(padded), lengths, batch_first=True, enforce_sorted=False)
        here = slice(level * directions, (level + 1) * directions)
        zeros = given.data.new_zeros(directions, int(given.batch_sizes[0]), layer.hidden_size)
        first = [zeros if each is None else _sorted(each[here], given.sorted_indices) for each in start]
        weights = [weight for each in layer.all_weights[here] for weight in each]
        options = (weights, layer.bias, 1, 0.0, layer.training, layer.bidirectional)
        data, *last = run(given.data, given.batch_sizes, first if len(first) > 1 else first[0], *options)
        ends.append(tuple(_sorted(each, given.unsorted_indices) for each in last))
        given = PackedSequence(data, given.batch_sizes, given.sorted_indices, given.unsorted_indices)
    final = tuple(torch.cat(each) for each in zip(*ends, strict=True))
    return given, final if len(final) > 1 else final[0]


def _sorted(state: Tensor, order: Tensor | None) -> Tensor:
    return state if order is None else state.index_select(1, order)


def _plain(layer: nn.RNNBase, x: Tensor | PackedSequence, state: State) -> tuple[Any, Any]:
    """Run a layer with its own weights for one client."""
    if isinstance(x, PackedSequence) and not _written_out.get():
        return _packed(layer, x, state)
    if isinstance(x, Tensor) and x.dim() == 2:  # a single sequence without an axis of samples
        axis = 0 if layer.batch_first else 1
        wide: State = tuple(each.unsqueeze(1) for each in state) if isinstance(state, tuple) else state  # type: ignore[assignment]
        wide = wide.unsqueeze(1) if isinstance(wide, Tensor) else wide
        out, final = _plain(layer, x.unsqueeze(axis), wide)
        narrow = tuple(each.squeeze(1) for each in final) if isinstance(final, tuple) else final.squeeze(1)
        return out.squeeze(axis), narrow
    weights = {name: value.unsqueeze(0) for name, value in layer.named_parameters(recurse=False)}
    return recur(layer, weights, 1, x, state, lambda between, each: between(each), AffineMaps())


def _by_pytorch(layer: nn.RNNBase) -> bool:
    return not _written_out.get() and not (layer.dropout > 0 and layer.num_layers > 1)


@contextlib.contextmanager
def _weights_apart() -> Iterator[None]:
    """Say nothing of weights that cuDNN copies together at every call: they are views of a client's row."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        yield


class StreamLSTM(nn.LSTM):
    """An ``nn.LSTM`` whose dropout between layers comes from the client's stream."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Apply the layer as ``nn.LSTM`` does."""
        if not _by_pytorch(self):
            return _plain(self, input, hx)
        with _weights_apart():
            return super().forward(input, hx)


class StreamGRU(nn.GRU):
    """An ``nn.GRU`` whose dropout between layers comes from the client's stream."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Apply the layer as ``nn.GRU`` does."""
        if not _by_pytorch(self):
            return _plain(self, input, hx)
        with _weights_apart():
            return super().forward(input, hx)


class StreamRNN(nn.RNN):
    """An ``nn.RNN`` whose dropout between layers comes from the client's stream."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Apply the layer as ``nn.RNN`` does."""
        if not _by_pytorch(self):
            return _plain(self, input, hx)
        with _weights_apart():
            return super().forward(input, hx)
