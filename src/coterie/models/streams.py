"""Layers of a model that draw random numbers, or that PyTorch computes in one piece, in a form that rows can take."""

from __future__ import annotations

from torch import nn

from coterie.models.attention import StreamAttention, StreamEncoder, StreamEncoderLayer
from coterie.models.dropout import StreamDropout
from coterie.models.recurrent import StreamGRU, StreamLSTM, StreamRNN

FORMS: dict[type[nn.Module], type[nn.Module]] = {
    nn.LSTM: StreamLSTM,
    nn.GRU: StreamGRU,
    nn.RNN: StreamRNN,
    nn.MultiheadAttention: StreamAttention,
    nn.TransformerEncoderLayer: StreamEncoderLayer,
    nn.TransformerEncoder: StreamEncoder,
}
"""The form that takes the place of a layer of exactly this type."""


def use_streams(module: nn.Module) -> None:
    """Change a module in place so that all its dropout comes from streams; parameters and their names stay."""
    number = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Dropout:
                setattr(parent, name, StreamDropout(child.p, number))
                number += 1
    for layer in list(module.modules()):
        form = FORMS.get(type(layer))
        if form is not None:
            # Its class rather than a new layer: parameters, hooks and whatever else was set on it stay as they are.
            layer.__class__ = form
            number = _draw_inside(layer, number)


def _draw_inside(layer: nn.Module, number: int) -> int:
    """Give a layer that drops elements inside of it the layers that do so."""
    if isinstance(layer, StreamLSTM | StreamGRU | StreamRNN) and layer.dropout > 0 and layer.num_layers > 1:
        drops = [StreamDropout(layer.dropout, number + level) for level in range(layer.num_layers - 1)]
        layer.between = nn.ModuleList(drops)
        return number + len(drops)
    if isinstance(layer, StreamAttention):
        layer.stream = StreamDropout(layer.dropout, number)
        return number + 1
    return number
