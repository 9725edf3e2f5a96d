"""Attention written out as products, for one client or for many at once, with dropout from streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from coterie.models.dropout import StreamDropout, attention_weights
from coterie.rows import Rows

Affine = Callable[[Rows, Tensor], Tensor]
"""From stacked weights and folded activations to their product."""

Attended = tuple[Tensor, Tensor | None]


def attend(
    layer: nn.MultiheadAttention,
    weights: Rows,
    rows: int,
    affine: Affine,
    drop: Callable[[Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Attended:
    """Apply multi-head attention with stacked weights ``[rows, ...]`` to folded inputs; give what the layer gives."""
    given = (query, key, value)
    batched = query.dim() == 3
    if not batched:
        given = tuple(each.unsqueeze(0) for each in given)  # type: ignore[assignment]
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    elif not layer.batch_first:
        same = {id(each): each.transpose(0, 1) for each in given}
        given = tuple(same[id(each)] for each in given)  # type: ignore[assignment]
    heads = layer.num_heads
    q, k, v = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in _projected(layer, weights, affine, given))
    if layer.bias_k is not None:
        extra = (weights["bias_k"], weights["bias_v"])
        k, v = (torch.cat([each, _one_more(own, each, rows)], 2) for each, own in zip((k, v), extra, strict=True))
    if layer.add_zero_attn:
        k, v = (torch.cat([each, each.new_zeros(*each.shape[:2], 1, each.shape[3])], 2) for each in (k, v))
    mask = _mask(attn_mask, key_padding_mask, q, given[1].shape[1], k.shape[2])
    shares = drop(attention_weights(q, k, mask))
    mixed = (shares @ v).transpose(1, 2).flatten(2)
    own = {name.removeprefix("out_proj."): each for name, each in weights.items() if name.startswith("out_proj.")}
    out = affine(own, mixed)
    told = None
    if need_weights:
        told = shares.mean(1) if average_attn_weights else shares
    if not batched:
        return out[0], None if told is None else told[0]
    return out if layer.batch_first else out.transpose(0, 1), told


def _projected(
    layer: nn.MultiheadAttention, weights: Rows, affine: Affine, given: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    biases = weights["in_proj_bias"].chunk(3, 1) if "in_proj_bias" in weights else None
    if layer._qkv_same_embed_dim:
        if given[0] is given[1] is given[2]:
            own = {"weight": weights["in_proj_weight"]} | ({} if biases is None else {"bias": weights["in_proj_bias"]})
            return affine(own, given[0]).chunk(3, -1)
        parts = weights["in_proj_weight"].chunk(3, 1)
    else:
        parts = tuple(weights[f"{name}_proj_weight"] for name in "qkv")
    return tuple(
        affine({"weight": parts[i]} | ({} if biases is None else {"bias": biases[i]}), each)
        for i, each in enumerate(given)
    )


def _one_more(own: Tensor, like: Tensor, rows: int) -> Tensor:
    """Bring each row's additional key or value ``[rows, 1, 1, width]`` to all samples of the row."""
    samples, heads, _, width = like.shape
    each = own.reshape(rows, 1, heads, 1, width).expand(-1, samples // rows, -1, -1, -1)
    return each.reshape(samples, heads, 1, width)


def _mask(places: Tensor | None, padding: Tensor | None, q: Tensor, keys: int, longest: int) -> Tensor | None:
    """Join the masks to one that is added to the scores; more keys than were given may always be attended to."""
    mask = None
    if places is not None:
        places = _added(places, q)
        mask = places if places.dim() == 2 else places.unflatten(0, (-1, q.shape[1]))
    if padding is not None:
        spread = _added(padding, q)[:, None, None, :]
        mask = spread if mask is None else mask + spread
    if mask is None or longest == keys:
        return mask
    return torch.nn.functional.pad(mask, (0, longest - keys))


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """Turn a mask that is true where nothing may be seen into numbers to add."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))


def affine_map(weights: Rows, x: Tensor) -> Tensor:
    """Multiply the activations ``[rows × samples, ...]`` with each row's own weights."""
    rows = len(weights["weight"])
    batch = x.reshape(rows, -1, x.shape[-1])
    out = batch @ weights["weight"].transpose(1, 2)
    out = out + weights["bias"].unsqueeze(1) if "bias" in weights else out
    return out.reshape(*x.shape[:-1], -1)


class StreamAttention(nn.MultiheadAttention):
    """An ``nn.MultiheadAttention`` whose dropout comes from the client's stream."""

    stream: StreamDropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Attended:
        """Apply the layer as ``nn.MultiheadAttention`` does."""
        weights = {name: each.unsqueeze(0) for name, each in self.named_parameters()}
        return attend(self, weights, 1, affine_map, self.stream, query, key, value, *args, **kwargs)


class StreamEncoderLayer(nn.TransformerEncoderLayer):
    """An ``nn.TransformerEncoderLayer`` that can be traced: it computes in one way, with samples first."""

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Apply the layer as ``nn.TransformerEncoderLayer`` does."""
        # Masks of dropout belong to samples, so that the samples have to be first where they are drawn.
        x = src if self.self_attn.batch_first else src.transpose(0, 1)
        if self.norm_first:
            x = x + self._attended(self.norm1(x), src_mask, src_key_padding_mask)
            x = x + self._mapped(self.norm2(x))
        else:
            x = self.norm1(x + self._attended(x, src_mask, src_key_padding_mask))
            x = self.norm2(x + self._mapped(x))
        return x if self.self_attn.batch_first else x.transpose(0, 1)

    def _attended(self, x: Tensor, mask: Tensor | None, padding: Tensor | None) -> Tensor:
        turned = x if self.self_attn.batch_first else x.transpose(0, 1)
        out: Tensor = self.self_attn(
            turned, turned, turned, attn_mask=mask, key_padding_mask=padding, need_weights=False
        )[0]
        dropped: Tensor = self.dropout1(out if self.self_attn.batch_first else out.transpose(0, 1))
        return dropped

    def _mapped(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))
        return out


class StreamEncoder(nn.TransformerEncoder):
    """An ``nn.TransformerEncoder`` that can be traced."""

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Apply the layers as ``nn.TransformerEncoder`` does."""
        out = src
        for layer in self.layers:
            out = layer(out, src_mask=mask, src_key_padding_mask=src_key_padding_mask)
        if self.norm is None:
            return out
        turned = not self.layers[0].self_attn.batch_first
        normed: Tensor = self.norm(out.transpose(0, 1) if turned else out)
        return normed.transpose(0, 1) if turned else normed
