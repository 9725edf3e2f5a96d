"""Whether a model is the same one when it is made again: all that is drawn for it has to be in what is kept of it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from coterie import randomness
from coterie.errors import ModelError
from coterie.memory import free_memory
from coterie.models.own_buffers import probe_inputs
from coterie.models.problem import logits_alone


def refuse_hidden_numbers(
    module: nn.Module, again: Callable[[], nn.Module], shape: tuple[int, ...], words: bool
) -> None:
    """Refuse a model that draws numbers when it is made which are neither parameters nor buffers.

    A run that goes on in another process, and an exported model, make it again, and give it the parameters and buffers
    that were kept: with other numbers beside them it would be another model, and nobody would notice.

    Parameters
    ----------
    module
        The model as it was made; it is left as it is.
    again
        Makes it again, with other random numbers.
    shape
        Shape of a sample.
    words
        Whether samples are numbers of words.

    Raises
    ------
    ModelError
        If what was made again gives other outputs, with the same parameters and buffers.
    """
    size = sum(value.numel() * value.element_size() for value in (*module.parameters(), *module.buffers()))
    if 2 * size > free_memory():
        return  # another one, and a copy of what is trained, would be too much
    other = again()
    dtype = next((value.dtype for value in module.parameters() if value.is_floating_point()), torch.float32)
    samples = probe_inputs(module, shape, words, dtype)
    frozen = {id(value): value for value in module.parameters() if not value.requires_grad}
    try:
        other.load_state_dict(module.state_dict())
        both = [copy.deepcopy(module, frozen), other]
        passes = [[_outputs(each.train(training), samples) for each in both] for training in (True, False)]
    except Exception:
        return  # what is wrong with it is found, and said, where real samples pass through it or it is exported
    if any(isinstance(one, Tensor) and isinstance(two, Tensor) and not _same(one, two) for one, two in passes):
        raise ModelError(
            "with the same parameters and buffers it is another model when it is made again, as it is to go on with a "
            "run and in an export: keep what is drawn for it by register_buffer (persistent), layers of a list in an "
            "nn.ModuleList, or draw it from a generator with a seed of its own"
        )


def _outputs(module: nn.Module, samples: Tensor) -> Tensor:
    """Run a module with its parameters a little moved: a layer of zeros would hide what is before it."""
    with randomness.torch_stream(0, "pass"), torch.no_grad():  # what is drawn in forward is spoken of elsewhere
        for value in module.parameters():
            if value.requires_grad:
                value.add_(0.1 * torch.randn_like(value))
        outputs: Tensor = logits_alone(module, (), module(samples.clone()))
    return outputs


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)
