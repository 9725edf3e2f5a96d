"""Whether a module can be trained as rows: a pure function of its parameters, its inputs and our random numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.spectral_norm import SpectralNorm

from coterie.errors import ModelError

_RANDOM_LAYERS: tuple[type[nn.Module], ...] = (
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
_NORMALISERS = "use nn.GroupNorm or nn.LayerNorm, or one of the models resnet18_gn, nfresnet18_fedpg, nfresnet18_full"
_DROPOUT = "use nn.Dropout, whose masks come from the experiment's own random numbers"


def check(module: nn.Module, sample: Tensor | None = None) -> None:
    """Refuse a module that cannot be trained as rows.

    Layers that are known to keep statistics or to draw random numbers of their own are found by type. What hides in a
    ``forward`` of the user's is found by running it, if inputs are given: neither may a buffer change, nor two passes
    over the same inputs differ (with ``nn.Dropout``, which is ours to draw, switched off).

    Parameters
    ----------
    module
        The module; it is left as it is.
    sample
        A small batch of inputs on the module's device.

    Raises
    ------
    ModelError
        With what was found, where, and what to use instead.
    """
    for name, layer in module.named_modules():
        for problem in _problems(layer):
            where = f"layer {name!r}" if name else "the model itself"
            raise ModelError(f"{where} ({type(layer).__name__}) {problem}")
    if sample is not None:
        _run(module, sample)


def _problems(layer: nn.Module) -> Iterator[str]:
    if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
        yield "has parameters without a shape yet; give its sizes, or run it once on a batch before handing it over"
    if isinstance(layer, _BatchNorm):
        yield f"keeps batch statistics, which are not trained and not one client's own; {_NORMALISERS}"
    if getattr(layer, "track_running_stats", False):
        yield "keeps running statistics; set track_running_stats=False"
    if isinstance(layer, _RANDOM_LAYERS):
        yield f"draws random numbers of its own; {_DROPOUT}"
    if isinstance(layer, nn.RReLU):
        yield "draws random slopes of its own; use nn.LeakyReLU"
    if isinstance(layer, (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)):
        yield "draws random windows of its own; use nn.MaxPool2d or nn.MaxPool3d"
    if isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)) and layer.dropout > 0:
        yield f"draws random numbers of its own (dropout={layer.dropout}); set dropout=0 inside it and {_DROPOUT}"
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None:
        yield "rescales its weights in forward (max_norm); set max_norm=None"
    hooked = any(isinstance(hook, SpectralNorm) for hook in layer._forward_pre_hooks.values())
    if hooked or type(layer).__name__ == "_SpectralNorm":
        yield "keeps a power iteration that changes in forward; use plain weights instead of spectral normalisation"


def _run(module: nn.Module, sample: Tensor) -> None:
    # A copy, so that a forward that changes its buffers cannot change the caller's.
    trial = copy.deepcopy(module).train()
    for layer in trial.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    before = {name: value.clone() for name, value in trial.named_buffers()}
    devices = [sample.device] if sample.is_cuda else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        first, second = trial(sample), trial(sample)
    for name, value in trial.named_buffers():
        if name not in before or not torch.equal(before[name], value):
            raise ModelError(
                f"buffer {name!r} changes in forward, so the model is not a function of its parameters; "
                f"{_NORMALISERS}, or make it a parameter"
            )
    if not isinstance(first, Tensor):
        raise ModelError(f"forward gives a {type(first).__name__}; it must give one tensor of outputs")
    if first.shape[:1] != sample.shape[:1]:
        raise ModelError(
            f"forward gives outputs of shape {tuple(first.shape)} for {sample.shape[0]} samples; the first axis must "
            "be the sample"
        )
    if not torch.allclose(first, second, rtol=1e-4, atol=1e-6, equal_nan=True):
        raise ModelError(
            f"two passes over the same inputs differ, so forward draws random numbers of its own; {_DROPOUT}"
        )
