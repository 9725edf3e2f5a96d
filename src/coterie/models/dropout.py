"""Dropout from the clients' streams: as a layer, and where a model calls PyTorch's functions itself."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from coterie import kernels, randomness
from coterie.errors import ModelError


class StreamDropout(nn.Module):
    """Dropout whose masks are a function of the client's stream and the step, equal on every engine and device.

    The engine passes the key as a buffer; without one (``key`` is 0, as in evaluation) the layer does nothing.

    Parameters
    ----------
    p
        Probability that an element is dropped.
    number
        The layer's place among the model's dropout layers, so that no two layers share a mask.
    """

    key: Tensor
    axis = 0
    """The axis of the samples in what enters the layer; 1 where a model has times first."""

    def __init__(self, p: float, number: int) -> None:
        super().__init__()
        self.p, self.number = p, number
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, input: Tensor) -> Tensor:  # called so as PyTorch's, for models that give it by name
        """Drop elements of one client's batch.

        Parameters
        ----------
        input
            Activations ``[samples, ...]``.

        Returns
        -------
        Tensor
            Activations with elements dropped and the others scaled by ``1 / (1 - p)``.
        """
        if self.p == 0:
            return input
        return input * self.factors(self.key, input.movedim(self.axis, 0)).movedim(0, self.axis)

    def factors(self, key: Tensor, x: Tensor) -> Tensor:
        """Give 0 where an element is dropped and ``1 / (1 - p)`` elsewhere, or 1 everywhere if ``key`` is 0.

        Parameters
        ----------
        key
            Keys, of any shape.
        x
            Activations of one client, or of as many clients as there are keys, shape ``[*key.shape, samples, ...]``.

        Returns
        -------
        Tensor
            Of the shape of ``x``.
        """
        count = x.shape[key.dim() :].numel()
        drawn = randomness.lanes(randomness.fold_in(key, self.number), count)
        kept = (drawn >= self._threshold).view(x.shape).to(x.dtype) * self._scale
        idle = (key == 0).view(*key.shape, *(1,) * (x.dim() - key.dim()))
        return torch.where(idle, torch.ones_like(kept), kept)

    def dropped(self, key: Tensor, x: Tensor) -> Tensor:
        """Drop elements of many clients' batches.

        Parameters
        ----------
        key
            Keys, one a client.
        x
            Activations of all of them, client after client.

        Returns
        -------
        Tensor
            As :meth:`forward` gives them, for each client with its own key.
        """
        if self.p == 0:
            return x
        if self.axis:
            first = x.movedim(self.axis, 0).contiguous()
            return self._dropped(key, first).movedim(0, self.axis)
        return self._dropped(key, x)

    def _dropped(self, key: Tensor, x: Tensor) -> Tensor:
        if not kernels.usable(x):
            return x * self.factors(key, x.unflatten(0, (len(key), -1))).flatten(0, 1)
        from coterie.kernels.dropout import DropoutRule, drop

        constants = (randomness.GOLDEN, randomness.MIX_1, randomness.MIX_2)
        draw = DropoutRule(self._threshold, self._scale, constants)
        return drop(x, randomness.fold_in(key, self.number), key, draw)

    @property
    def _threshold(self) -> int:
        return round(self.p * 2**16) - 2**15

    @property
    def _scale(self) -> float:
        return 1.0 / (1.0 - self.p) if self.p < 1 else 0.0  # as torch has it: p = 1 drops everything

    def extra_repr(self) -> str:
        """Show the probability, as ``nn.Dropout`` does.

        Returns
        -------
        str
            The layer's settings.
        """
        return f"p={self.p}"


def find_sample_axes(module: nn.Module, layers: list[StreamDropout], sample: Tensor) -> None:
    """Tell dropout layers which axis is the sample: the one that is as long as the batch, in batches of two sizes.

    A model that fails on the sample has no such layers: what is wrong with it is said when it meets real ones.
    """
    shapes: dict[StreamDropout, list[torch.Size]] = {layer: [] for layer in layers}
    hooks = [layer.register_forward_hook(lambda layer, _, out: shapes[layer].append(out.shape)) for layer in layers]
    sizes = (len(sample), len(sample) - 1)
    try:
        with torch.no_grad(), FunctionCalls(None), contextlib.suppress(Exception):
            for size in sizes:
                module(sample[:size].clone())
    finally:
        for hook in hooks:
            hook.remove()
    for layer, seen in shapes.items():
        calls = len(seen) // 2
        pairs = list(zip(seen[:calls], seen[calls:], strict=False))
        axes = {tuple(i for i, pair in enumerate(zip(*each, strict=False)) if pair == sizes) for each in pairs}
        if axes == {(1,)}:
            layer.axis = 1


@functools.lru_cache(maxsize=256)
def _layer(p: float, number: int) -> StreamDropout:
    return StreamDropout(p, number)


_FIRST_CALL = 2**20  # dropout layers are numbered from 0 on, calls of functions from here on
_DROPOUTS: tuple[Any, ...] = (F.dropout, torch.dropout)


class FunctionCalls(TorchFunctionMode):
    """While it is entered, functional dropout draws from a client's stream, and attention is written out as products.

    The fused attention kernels of a GPU take neither rows (``vmap``) nor every stride, and draw masks of their own.

    Parameters
    ----------
    key
        The key of one client, or those of many clients whose samples lie one after another; ``None`` in evaluation,
        where nothing is dropped.
    """

    def __init__(self, key: Tensor | None) -> None:
        super().__init__()
        self._key = key
        self.calls = 0
        self.met = False
        self.drew = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute a function of PyTorch, in our way if it is one of those."""
        return self.call(func, args, kwargs or {}) if self.replaces(func) else func(*args, **(kwargs or {}))

    @staticmethod
    def replaces(function: Any) -> bool:
        """Return whether this is one of the functions."""
        return function in _DROPOUTS or function in (F.scaled_dot_product_attention, F.embedding, torch.tensor)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Compute one of the functions."""
        if function is F.embedding:
            return self._embedding(*args, **kwargs)
        self.met = True
        if function is torch.tensor:
            return number_on_device(*args, **kwargs)
        if function is F.scaled_dot_product_attention:
            return attention(*args, **kwargs, drop=self._drop)
        return self._dropout(*args, **kwargs)

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
    ) -> Tensor:
        if not (training and train):
            return input
        dropped = self._drop(input, p)
        return input.copy_(dropped) if inplace else dropped

    def _embedding(
        self, input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        found = F.embedding(input, weight, None, *args, **kwargs)
        if padding_idx is None:
            return found
        self.met = True  # under vmap PyTorch forgets for every row but the first that this entry is not trained
        return torch.where((input == padding_idx % len(weight)).unsqueeze(-1), found.detach(), found)

    def _drop(self, x: Tensor, p: float) -> Tensor:
        if p == 0:
            return x
        number = _FIRST_CALL + self.calls
        self.calls, self.drew = self.calls + 1, True
        if self._key is None:
            return x
        layer = _layer(p, number)
        return layer.dropped(self._key, x) if self._key.dim() else x * layer.factors(self._key, x)


def refuse_dropout_in_evaluation(trial: nn.Module, given: Tensor) -> None:
    """See that functional dropout is told whether the model trains: we leave it out in evaluation, PyTorch does not."""
    with FunctionCalls(None) as calls:
        trial.eval()(given)
    if calls.drew:
        raise ModelError(
            "forward drops in evaluation too: neither F.dropout nor attention's dropout_p knows by itself whether the "
            "model trains; write F.dropout(x, p, self.training), or use a layer nn.Dropout"
        )


def number_on_device(data: Any, **kwargs: Any) -> Tensor:
    """Make a tensor as ``torch.tensor`` does, one number without a copy from the host, which nothing can record."""
    if isinstance(data, (bool, int, float)):
        return torch.full((), data, **kwargs)
    return torch.tensor(data, **kwargs)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    drop: Callable[[Tensor, float], Tensor],
) -> Tensor:
    """Compute what ``F.scaled_dot_product_attention`` does, as two products and a softmax; ``drop`` draws the masks."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    weights = attention_weights(query, key, attn_mask, is_causal, scale)
    return drop(weights, dropout_p) @ value


def attention_weights(
    query: Tensor, key: Tensor, mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Compute how much each place attends to each other; a place that may attend to none gets zeros."""
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    blocked = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(blocked, 0.0).softmax(-1).masked_fill(blocked, 0.0)
