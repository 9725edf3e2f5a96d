"""A model of Hugging Face's as a module that gives outputs for samples, in terms of PyTorch and their packages alone.

The source of this file goes into exported folders as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class HuggingFaceModel(nn.Module):
    """A model of Hugging Face's that is given samples alone and gives outputs alone.

    Numbers of words ``[samples, length]`` are attended to where they are not the padding word.

    Parameters
    ----------
    model
        The model, with its head, and with adapters in its layers where it has any.
    pad
        The padding word; without one all words count.
    frozen_dtype
        The type in which frozen parameters are kept; without one it is that of the others.
    adapted
        PEFT's own view of the model, where it has adapters.
    """

    def __init__(
        self,
        model: nn.Module,
        pad: int | None = None,
        frozen_dtype: torch.dtype | None = None,
        adapted: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.pad, self.frozen_dtype = pad, frozen_dtype
        self.adapted = (adapted,)  # in a tuple, so that parameters have one name each
        self.made_with: dict[str, Any] = {}  # the arguments of load_network

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for a batch.

        Parameters
        ----------
        x
            Numbers of words ``[samples, length]``, or images ``[samples, channels, height, width]``.

        Returns
        -------
        Tensor
            Outputs ``[samples, outputs]``.
        """
        if x.is_floating_point():
            out: Tensor = self.model(pixel_values=x if self.frozen_dtype is None else x.to(self.frozen_dtype)).logits
        else:
            mask = None if self.pad is None else (x != self.pad).to(torch.int64)
            out = self.model(input_ids=x, attention_mask=mask).logits
        return out

    def to(self, *args: Any, **kwargs: Any) -> HuggingFaceModel:
        """Move and cast the model as ``nn.Module.to`` does; frozen parameters keep the type that was asked for them.

        Parameters
        ----------
        *args
            As for ``nn.Module.to``.
        **kwargs
            As for ``nn.Module.to``.

        Returns
        -------
        HuggingFaceModel
            Itself.
        """
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if self.frozen_dtype is None or dtype is None:
            return super().to(*args, **kwargs)
        super().to(device=device, non_blocking=non_blocking)
        for value in (*self.parameters(), *self.buffers()):
            if value.is_floating_point():
                frozen = isinstance(value, nn.Parameter) and not value.requires_grad
                value.data = value.data.to(self.frozen_dtype if frozen else dtype)
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load parameters as ``nn.Module.load_state_dict`` does; those that are frozen may be left out.

        Parameters
        ----------
        state_dict
            The parameters.
        strict
            Refuse names that there are not, and the lack of any that is trained.
        assign
            As for ``nn.Module.load_state_dict``.

        Returns
        -------
        Any
            Names that were missing, and those that were not expected.

        Raises
        ------
        KeyError
            If ``strict`` and the names are not those of this model.
        """
        found = super().load_state_dict(state_dict, strict=False, assign=assign)
        missing = sorted(self.trained().keys() & set(found.missing_keys))
        if strict and (missing or found.unexpected_keys):
            raise KeyError(f"parameters of another model: missing {missing}, unknown {found.unexpected_keys}")
        return found

    def trained(self) -> dict[str, Tensor]:
        """Give what is trained, by its names.

        Returns
        -------
        dict
            Adapters and head, or whatever else is not frozen.
        """
        return {name: value for name, value in self.named_parameters() if value.requires_grad}

    def save_adapters(self, folder: Path) -> bool:
        """Write adapters and head as PEFT does, for ``PeftModel.from_pretrained``.

        Parameters
        ----------
        folder
            Where; it is made.

        Returns
        -------
        bool
            Whether the model has any.
        """
        adapted: Any = self.adapted[0]
        if adapted is not None:
            adapted.save_pretrained(str(folder), save_embedding_layers=False)
        return adapted is not None


def load_network(
    folder: str,
    outputs: int,
    *,
    pad: int | None = None,
    lora: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] | None = None,
    frozen: str | None = None,
    head_alone: bool = False,
    **given: Any,
) -> HuggingFaceModel:
    """Load a saved model and give it a head, and adapters where ``lora`` has the parameters of PEFT's ``LoraConfig``.

    These may depend on the model. Head and adapters are drawn from PyTorch's current generator. ``frozen`` is the type
    of what is not trained, ``given`` is for the functions that load.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    # Attention is written out as products: PyTorch's fused kernels look whether a mask is needed, and draw masks of
    # their own. Nothing is generated, so that no cache is kept.
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=outputs, attn_implementation="eager", **given)
    config.use_cache, config.return_dict = False, True
    if type(config) in modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        auto: Any = transformers.AutoModelForSequenceClassification
    elif type(config) in modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        auto = transformers.AutoModelForImageClassification
    else:
        raise TypeError(f"a {config.model_type} has no head for classes of texts or images")
    # Safetensors alone: other files of weights could run code.
    model = auto.from_pretrained(
        folder, config=config, use_safetensors=True, ignore_mismatched_sizes=True, dtype=torch.float32, **given
    )
    heads = heads_of(model)
    pad = getattr(config, "pad_token_id", None) if pad is None else pad
    model.config.pad_token_id = pad
    adapted, settled = None, lora(model) if callable(lora) else lora
    if settled is not None:
        import peft

        task = "SEQ_CLS" if model.main_input_name == "input_ids" else None
        adapted = peft.get_peft_model(model, peft.LoraConfig(task_type=task, modules_to_save=list(heads), **settled))
    elif head_alone:
        for name, value in model.named_parameters():
            value.requires_grad_(name.split(".")[0] in heads)
    if frozen is not None:
        for name in heads:
            model.get_submodule(name).register_forward_pre_hook(in_own_type)
    made = HuggingFaceModel(model, pad, None if frozen is None else getattr(torch, frozen), adapted)
    own = {"pad": pad, "lora": settled, "frozen": frozen, "head_alone": head_alone}
    made.made_with = {"folder": folder, "outputs": outputs, **own, **given}
    return made.to(dtype=torch.get_default_dtype())


def heads_of(model: Any) -> list[str]:
    """Name the children that a model has beyond its body."""
    body = model.base_model_prefix
    return [name for name, child in model.named_children() if name != body and any(True for _ in child.parameters())]


def in_own_type(layer: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Bring what enters a layer to the type of the layer's trained parameters."""
    # Not by what is trained: whoever calls the model with parameters of a client has none that require a gradient.
    own: Any = getattr(layer, "modules_to_save", layer)
    dtype = next(value.dtype for value in own.parameters())
    return tuple(
        value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value for value in given
    )
