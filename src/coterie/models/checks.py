"""Whether a module can be trained as rows: a pure function of its parameters, its inputs and our random numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.spectral_norm import SpectralNorm

from coterie.errors import ModelError
from coterie.models.batch_norm import PLAIN, RowBatchNorm, use_running_statistics
from coterie.models.dropout import FunctionCalls, StreamDropout
from coterie.models.own_buffers import find_own_buffers, own_buffers, set_mode
from coterie.models.streams import FORMS
from coterie.rows.matrix_units import tf32

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

    BatchNorm layers are tried in evaluation: in training they are meant to look at the whole batch. So is a module that
    changes buffers of its own in training, which it may; in evaluation it may not. Layers that are known to keep
    statistics in another way, or to draw random numbers of their own are found by type. What hides in a ``forward`` of
    the user's is found by running it, if inputs are given: it may change neither its parameters nor its inputs; two
    passes over the same inputs may not differ (with dropout, which is ours to draw, switched off); and what it gives
    for a sample may not depend on the other samples of the batch.

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
    taken = type(layer) in PLAIN or isinstance(layer, RowBatchNorm)
    if isinstance(layer, _BatchNorm) and not taken:
        yield "keeps batch statistics in a way of its own; use nn.BatchNorm1d, nn.BatchNorm2d or nn.BatchNorm3d"
    if taken and not getattr(layer, "track_running_stats", False):
        yield (
            "keeps no running statistics, so that in evaluation what it gives for a sample depends on the other "
            "samples of the batch; set track_running_stats=True"
        )
    if not isinstance(layer, _BatchNorm) and getattr(layer, "track_running_stats", False):
        yield "keeps running statistics; set track_running_stats=False"
    if isinstance(layer, _RANDOM_LAYERS):
        yield f"draws random numbers of its own; {_DROPOUT}"
    if isinstance(layer, nn.RReLU):
        yield "draws random slopes of its own; use nn.LeakyReLU"
    if isinstance(layer, (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)):
        yield "draws random windows of its own; use nn.MaxPool2d or nn.MaxPool3d"
    streamed = type(layer) in (nn.LSTM, nn.GRU, nn.RNN, nn.MultiheadAttention) or type(layer) in FORMS.values()
    if isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)) and layer.dropout > 0 and not streamed:
        yield f"draws random numbers of its own (dropout={layer.dropout}); set dropout=0 inside it and {_DROPOUT}"
    if isinstance(layer, nn.RNNBase) and layer.proj_size:
        yield f"projects its hidden state (proj_size={layer.proj_size}); set proj_size=0 and use a layer nn.Linear"
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None:
        yield "rescales its weights in forward (max_norm); set max_norm=None"
    hooked = any(isinstance(hook, SpectralNorm) for hook in layer._forward_pre_hooks.values())
    if hooked or type(layer).__name__ == "_SpectralNorm":
        yield "keeps a power iteration that changes in forward; use plain weights instead of spectral normalisation"


def _run(module: nn.Module, sample: Tensor) -> None:
    # A copy, so that a forward that changes its buffers cannot change the caller's. What is frozen may be large, and is
    # not copied: whether it changes is told by its version.
    frozen = {name: value for name, value in module.named_parameters() if not value.requires_grad}
    versions = {name: value._version for name, value in frozen.items()}
    trial = copy.deepcopy(module, {id(value): value for value in frozen.values()}).train()
    use_running_statistics(trial)
    for layer in trial.modules():
        if isinstance(layer, nn.Dropout | StreamDropout):
            layer.p = 0.0
        elif isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            layer.dropout = 0.0
    find_own_buffers(trial, sample.clone())
    weights = {name: value.clone() for name, value in trial.named_parameters() if name not in frozen}
    given = sample.clone()
    devices = [sample.device] if sample.is_cuda else []
    # In TF32, batches of two sizes differ by more than sums in another order.
    with torch.random.fork_rng(devices=devices), torch.no_grad(), FunctionCalls(None), tf32(False):
        for training in (True, False) if own_buffers(trial) else (False,):
            set_mode(trial, training)
            first = _twice(trial, given, sample, training, lambda: _refuse_changes(trial, weights, versions))
        _refuse_wrong_shape(first, sample)
        if len(sample) > 1:
            half = len(sample) // 2
            if not _same(first[:half], trial(given[:half].clone())):
                raise ModelError(
                    "what forward gives for a sample depends on the other samples of the batch; compute each sample by "
                    "itself (dim 0 is the sample: no mean, sort or softmax over it)"
                )


def _twice(
    trial: nn.Module, given: Tensor, sample: Tensor, training: bool, refuse_changes: Callable[[], None]
) -> Tensor:
    """Run a module twice on the same inputs, from the same buffers; give its first outputs."""
    before = {name: value.clone() for name, value in trial.named_buffers()}
    passes: list[Tensor] = []
    for _ in range(2):
        passes.append(trial(given))
        if not torch.equal(given, sample):
            raise ModelError("forward changes its inputs in place; work on a new tensor (x = x + 1, not x += 1)")
        refuse_changes()
        _refuse_changed_buffers(trial, before, training)
        for each in own_buffers(trial):
            setattr(each.owner, each.short, before[each.name].clone())
    if not isinstance(passes[0], Tensor):
        raise ModelError(f"forward gives a {type(passes[0]).__name__}; it must give one tensor of outputs")
    if not _same(*passes):
        raise ModelError(
            f"two passes over the same inputs differ, so forward draws random numbers of its own; {_DROPOUT}"
        )
    return passes[0]


def _refuse_changed_buffers(trial: nn.Module, before: dict[str, Tensor], training: bool) -> None:
    moving = {each.name for each in own_buffers(trial)}
    for name, value in trial.named_buffers():
        if name in before and torch.equal(before[name], value):
            continue
        if name not in moving:
            raise ModelError(
                f"buffer {name!r} changes in forward to what is no number of the same shape and type, so that it is no "
                f"row; {_NORMALISERS}, or keep its shape"
            )
        if not training:
            raise ModelError(
                f"buffer {name!r} changes in forward where the model is only evaluated; change it in training alone "
                "(if self.training: ...)"
            )


def _refuse_changes(trial: nn.Module, weights: dict[str, Tensor], versions: dict[str, int]) -> None:
    for name, value in trial.named_parameters():
        same = value._version == versions[name] if name in versions else _equal(weights.get(name), value)
        if not same:
            raise ModelError(
                f"parameter {name!r} changes in forward, but only training may change it; compute a new tensor from it"
            )


def _equal(before: Tensor | None, value: Tensor) -> bool:
    return before is not None and torch.equal(before, value)


def _refuse_wrong_shape(outputs: Tensor, sample: Tensor) -> None:
    if outputs.shape[:1] != sample.shape[:1]:
        raise ModelError(
            f"forward gives outputs of shape {tuple(outputs.shape)} for {sample.shape[0]} samples; the first axis must "
            "be the sample"
        )


def _same(one: Tensor, two: Tensor) -> bool:
    # To single precision: kernels for other sizes of batches add up in another order.
    return one.shape == two.shape and torch.allclose(one, two, rtol=1e-4, atol=1e-6, equal_nan=True)
