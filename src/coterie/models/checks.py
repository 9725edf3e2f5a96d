"""Whether a module can be trained as rows: a pure function of its parameters, its inputs and our random numbers."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._python_dispatch import TorchDispatchMode

from coterie import randomness
from coterie.errors import ModelError
from coterie.models.batch_norm import PLAIN, RowBatchNorm, use_running_statistics
from coterie.models.calls import call_with
from coterie.models.dropout import FunctionCalls, StreamDropout, refuse_dropout_in_evaluation
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
_PASSES = 20
_DROPOUT = "use nn.Dropout, whose masks come from the experiment's own random numbers"


def check(module: nn.Module, sample: Tensor | None = None) -> None:
    """Refuse a module that cannot be trained as rows.

    BatchNorm layers are tried in evaluation: in training they are meant to look at the whole batch. So is a module that
    changes buffers of its own in training, which it may; in evaluation it may not. Layers that are known to keep
    statistics in another way, or to draw random numbers of their own are found by type. What hides in a ``forward`` of
    the user's is found by running it, if inputs are given: it may change neither its parameters nor its inputs; it may
    draw nothing (dropout, which is ours to draw, is switched off), and two passes over the same inputs may not differ;
    what it gives for a sample may not depend on the other samples of the batch, nor may the sample's masks of dropout;
    BatchNorm must meet a sample's values side by side; and it must have a gradient, taken at the parameters that it is
    called with.

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
    if any(value.is_meta for value in (*layer.parameters(recurse=False), *layer.buffers(recurse=False))):
        yield "has parameters without values (on the device meta); make it on the CPU"
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
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse:
        yield "has sparse gradients, but rows are dense; set sparse=False"
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.scale_grad_by_freq:
        yield "scales gradients by how often a word is in the batch, padding included; set scale_grad_by_freq=False"
    if isinstance(layer, torch.jit.ScriptModule):
        yield "is compiled by TorchScript; use the module that it was made from"
    if type(layer).__name__ == "OptimizedModule":
        yield "is compiled by torch.compile; use the module that it was made from, and --compile"
    if any(isinstance(hook, WeightNorm) for hook in layer._forward_pre_hooks.values()):
        yield "keeps weights that are computed by a hook; use torch.nn.utils.parametrizations.weight_norm"
    hooked = any(isinstance(hook, SpectralNorm) for hook in layer._forward_pre_hooks.values())
    if hooked or type(layer).__name__ == "_SpectralNorm":
        yield "keeps a power iteration that changes in forward; use plain weights instead of spectral normalisation"


def _run(module: nn.Module, sample: Tensor) -> None:
    # A copy: a forward may change its buffers, but not the caller's. What is frozen may be large, and is not copied.
    frozen = {id(value): value for value in module.parameters() if not value.requires_grad}
    trial = copy.deepcopy(module, frozen).train()
    use_running_statistics(trial)
    dropouts = _without_dropout(trial)
    find_own_buffers(trial, sample.clone())
    given, calls = sample.clone(), FunctionCalls(None)
    # In TF32, batches of two sizes differ by more than sums in another order.
    with randomness.generators_kept(sample.device), torch.no_grad(), calls, tf32(False), _unsaid():
        for training in (True, False) if own_buffers(trial) else (False,):
            set_mode(trial, training)
            first = _twice(trial, given, training)
        _refuse_wrong_outputs(first, sample)
        _refuse_neighbours(trial, given, first)
        _refuse_unsteady_dropout(trial, given, dropouts)
        _refuse_scattered_samples(trial, given)
        _refuse_other_gradients(trial, given)
        if calls.drew:
            refuse_dropout_in_evaluation(trial, given)


@contextlib.contextmanager
def _unsaid() -> Iterator[None]:
    """Leave out what PyTorch warns of where models that are refused here are tried without gradients."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        yield


def _without_dropout(trial: nn.Module) -> dict[StreamDropout, float]:
    """Switch off what a module drops; give the layers that draw from streams, with how much they drop."""
    found = {layer: layer.p for layer in trial.modules() if isinstance(layer, StreamDropout)}
    for layer in trial.modules():
        if isinstance(layer, nn.Dropout | StreamDropout):
            layer.p = 0.0
        elif isinstance(layer, nn.RNNBase | nn.MultiheadAttention) and type(layer) not in FORMS.values():
            layer.dropout = 0.0
    return found


class _NotesWrites:
    """What :class:`_Writes` does; beside it, since PyTorch loads its compiler for a mode that defines this itself."""

    places: set[int]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | (kwargs or {})
        for each in func._schema.arguments:
            if each.alias_info is not None and each.alias_info.is_write:
                value = given.get(each.name)
                tensors = value if isinstance(value, list | tuple) else [value]
                self.places |= {one.untyped_storage().data_ptr() for one in tensors if isinstance(one, Tensor)}
        return func(*args, **(kwargs or {}))


class _Writes(_NotesWrites, TorchDispatchMode):
    """While it is entered, notes which memory is written to in place, through ``.data`` and views too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places = set()

    def wrote(self, value: Tensor) -> bool:
        """Return whether a tensor that is still there was written to."""
        return value.untyped_storage().data_ptr() in self.places


def _twice(trial: nn.Module, given: Tensor, training: bool) -> Tensor:
    """Run a module twice on the same inputs, from the same buffers; give its first outputs."""
    before = {name: value.clone() for name, value in trial.named_buffers()}
    parameters = {name: (value, value.data_ptr()) for name, value in trial.named_parameters()}
    drawn = randomness.generator_states(given.device)
    passes: list[Any] = []
    for _ in range(2):
        with _Writes() as writes:
            passes.append(trial(given))
        if writes.wrote(given):
            raise ModelError("forward changes its inputs in place; work on a new tensor (x = x + 1, not x += 1)")
        _refuse_changes(trial, parameters, writes)
        _refuse_changed_buffers(trial, before, training)
        for each in own_buffers(trial):
            setattr(each.owner, each.short, before[each.name].clone())
    if not isinstance(passes[0], Tensor):
        raise ModelError(f"forward gives a {type(passes[0]).__name__}; it must give one tensor, or have it as .logits")
    # Not by the outputs alone: what is drawn may seldom change them, as with a layer that is now and then left out.
    if randomness.generator_states(given.device) != drawn and _draws(trial, given):
        raise ModelError(f"forward draws random numbers of its own; {_DROPOUT}")
    if not _same(*passes):
        raise ModelError(
            "two passes over the same inputs differ; forward must be a function of inputs and parameters: keep nothing "
            "from one pass for the next, and draw no random numbers"
        )
    if bool(passes[0].isnan().any()):
        raise ModelError("forward gives NaN for samples of the data; look for a division by 0, or a logarithm of it")
    first: Tensor = passes[0]
    return first


class _NotesDraws:
    """What :class:`_Seeded` does, as with :class:`_NotesWrites`."""

    called = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called = self.called or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class _Seeded(_NotesDraws, TorchDispatchMode):
    """While it is entered, notes whether this thread calls an operation that may draw."""


def _draws(trial: nn.Module, given: Tensor) -> bool:
    """Return whether generators move on in each of several passes: in some of them another thread may have drawn."""
    kept = {each.name: getattr(each.owner, each.short).clone() for each in own_buffers(trial)}
    seeded = _Seeded()  # type: ignore[no-untyped-call]
    torchs = others = True
    for _ in range(_PASSES):
        before = randomness.generator_states(given.device)
        with seeded:
            trial(given)
        for each in own_buffers(trial):
            setattr(each.owner, each.short, kept[each.name].clone())
        after = randomness.generator_states(given.device)
        torchs, others = torchs and seeded.called and after[0] != before[0], others and after[1] != before[1]
        if not (torchs or others):
            return False
    return True


def _refuse_neighbours(trial: nn.Module, given: Tensor, first: Tensor) -> None:
    """Compare with the outputs in a smaller batch, and in a larger one with other neighbours."""
    half = max(1, len(given) // 2)
    turned = torch.cat([given.roll(1, 0), given])
    if not _same(first[:half], trial(given[:half].clone())) or not _same(
        torch.cat([first.roll(1, 0), first]), trial(turned)
    ):
        raise ModelError(
            "what forward gives for a sample depends on the other samples of the batch; compute each sample by "
            "itself (dim 0 is the sample: no mean, sort or softmax over it)"
        )


def _refuse_unsteady_dropout(trial: nn.Module, given: Tensor, dropouts: dict[StreamDropout, float]) -> None:
    """See that a sample's masks do not depend on how many samples are behind it, which may be padding."""
    key = torch.ones((), dtype=torch.int64, device=given.device)
    try:
        for layer, p in dropouts.items():
            layer.p, layer.key = p, key
        with FunctionCalls(key):
            alone = trial(given)
        with FunctionCalls(key):
            followed = trial(torch.cat([given, given]))[: len(given)]
    finally:
        for layer in dropouts:
            layer.p, layer.key = 0.0, torch.zeros_like(key)
    if not _same(alone, followed):
        raise ModelError(
            "dropout meets a tensor whose first axis is not the sample, so that a sample's masks would depend on the "
            "other samples of the batch; drop before the axes change places, or use a layer nn.Dropout"
        )


def _refuse_scattered_samples(trial: nn.Module, given: Tensor) -> None:
    """See that BatchNorm meets the values of a sample side by side: those of padding must not count."""
    met: list[Tensor] = []
    layers = [layer for layer in trial.modules() if isinstance(layer, _BatchNorm)]

    def note(layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        met.extend((*args, *kwargs.values()))

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        trial(given)
        alone, met = met, []
        trial(torch.cat([given, given]))
    finally:
        for hook in hooks:
            hook.remove()
    if any(not _same(one, both[: len(one)]) for one, both in zip(alone, met, strict=True)):
        raise ModelError(
            "BatchNorm meets a tensor in which the values of a sample do not lie side by side along the first axis, so "
            "that those of padding would count; normalise before samples are put behind others, or use nn.GroupNorm"
        )


def _refuse_other_gradients(trial: nn.Module, given: Tensor) -> None:
    """See that a module computes with the parameters that it is called with, in its backward pass too."""
    own = {name: value for name, value in trial.named_parameters() if value.requires_grad}
    moved = {name: (value * 1.01 + 0.01).detach().requires_grad_() for name, value in own.items()}
    with torch.enable_grad():
        _refuse_checkpoints(trial, given)
        called = _gradients(call_with(trial, dict(moved), (given,)), moved)
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(moved[name])
        plain = _gradients(trial(given), own)
    if not all(_same(*pair) for pair in zip(called, plain, strict=True)):
        raise ModelError(
            "forward computes with other parameters than those it is called with, as torch.utils.checkpoint does in "
            "the backward pass; take parameters from the module itself, and leave checkpointing out"
        )


def _refuse_checkpoints(trial: nn.Module, given: Tensor) -> None:
    """Find what is computed anew in the backward pass by PyTorch's older function for it.

    It leaves out the parameters of what it computes, in PyTorch alone too, where samples have no gradient: so here they
    have one.
    """
    try:
        outputs = trial(given.clone().requires_grad_() if given.is_floating_point() else given)
    except RuntimeError:
        return  # what cannot be done to samples with a gradient (out=, numpy()) may be done to those without
    waiting, seen = [outputs.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if type(node).__name__ == "CheckpointFunctionBackward":
            raise ModelError(
                "forward uses torch.utils.checkpoint, which trains none of what it is given (use_reentrant=True); "
                "leave checkpointing out"
            )
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]


def _gradients(outputs: Tensor, own: Mapping[str, Tensor]) -> list[Tensor]:
    """Give outputs and their gradient; a parameter that changes nothing has zeros."""
    if not outputs.requires_grad:
        raise ModelError("no parameter that is trained changes what forward gives: is it computed under torch.no_grad?")
    weights = torch.arange(1.0, outputs.numel() + 1, device=outputs.device).cos().view(outputs.shape)
    try:
        found = torch.autograd.grad((outputs * weights).sum(), list(own.values()), allow_unused=True)
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        raise ModelError(
            "forward changes in place what its gradient needs; work on a new tensor (x = x * 2, not x.mul_(2))"
        ) from error
    zeros = (torch.zeros_like(value) for value in own.values())
    return [outputs, *(zero if each is None else each for each, zero in zip(found, zeros, strict=True))]


def _refuse_changed_buffers(trial: nn.Module, before: dict[str, Tensor], training: bool) -> None:
    moving = {each.name for each in own_buffers(trial)}
    for name, value in trial.named_buffers():
        if name in before and torch.equal(before[name], value):
            continue
        if name not in moving:
            raise ModelError(
                f"buffer {name!r} changes in forward, and is no row: it must keep its shape and its type, a float, "
                "int64 or int32; for statistics of a batch, use nn.BatchNorm1d, nn.BatchNorm2d or nn.BatchNorm3d"
            )
        if not training:
            raise ModelError(
                f"buffer {name!r} changes in forward where the model is only evaluated; change it in training alone "
                "(if self.training: ...)"
            )


def _refuse_changes(trial: nn.Module, before: dict[str, tuple[nn.Parameter, int]], writes: _Writes) -> None:
    for name, value in trial.named_parameters():
        known = before.get(name)
        if known is None or known[0] is not value or known[1] != value.data_ptr() or writes.wrote(value):
            raise ModelError(
                f"parameter {name!r} changes in forward, but only training may change it; compute a new tensor from it"
            )


def _refuse_wrong_outputs(outputs: Tensor, sample: Tensor) -> None:
    if outputs.shape[:1] != sample.shape[:1]:
        raise ModelError(
            f"forward gives outputs of shape {tuple(outputs.shape)} for {sample.shape[0]} samples; the first axis must "
            "be the sample"
        )
    if not outputs.is_floating_point():
        raise ModelError(
            f"forward gives outputs of type {str(outputs.dtype).removeprefix('torch.')}; give scores that are floats, "
            "of which a loss has a gradient"
        )


def _same(one: Tensor, two: Tensor) -> bool:
    # To single precision: kernels for other sizes of batches add up in another order.
    return one.shape == two.shape and torch.allclose(one, two, rtol=1e-4, atol=1e-6, equal_nan=True)
