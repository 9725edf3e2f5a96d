"""Words that a model has no entry for, found before a GPU meets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class CheckedLookups(TorchFunctionMode):
    """While it is entered, a word that an embedding has no entry for is an ``IndexError`` on every device.

    A CPU raises one by itself. A GPU ends in an assertion instead, which says nothing of words, and after which the
    process cannot use it any more.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute a function of PyTorch, once its words are known to be there."""
        if func in (F.embedding, F.embedding_bag):
            _refuse_unknown(*args[:2], **{name: value for name, value in (kwargs or {}).items() if name in _NAMES})
        return func(*args, **(kwargs or {}))


_NAMES = ("input", "weight")


def _refuse_unknown(input: Tensor, weight: Tensor) -> None:
    if not input.numel() or input.is_floating_point():  # PyTorch itself refuses what is no word
        return
    try:
        low, high = (int(value) for value in input.aminmax())
    except RuntimeError:  # rows under vmap cannot be read; the same words were looked up without it before
        return
    if low < 0 or high >= len(weight):
        raise IndexError(f"an embedding of {len(weight)} entries is asked for entry {low if low < 0 else high}")
