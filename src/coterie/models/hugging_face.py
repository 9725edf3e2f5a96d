"""Models of Hugging Face's, whole or frozen under LoRA's adapters, as modules that give outputs for samples."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coterie import user_code
from coterie.errors import ConfigError, ModelError
from coterie.models.hugging_face_spec import HuggingFaceSpec

PACKAGES = ("transformers", "peft")

_PROJECTIONS = {
    "q": ("q", "query", "q_proj", "q_lin"),
    "k": ("k", "key", "k_proj", "k_lin"),
    "v": ("v", "value", "v_proj", "v_lin"),
    "o": ("o", "o_proj", "out_proj", "out_lin"),
}
"""What the projections of attention are called in one model and another."""


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


def build_hugging_face(spec: HuggingFaceSpec, outputs: int) -> HuggingFaceModel:
    """Load a model and give it a head and adapters, drawn from PyTorch's current generator."""
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"model {spec.text()!r} needs {package}, which is not installed: install coterie[hf]")
    try:
        with _quiet():
            model = _loaded(spec, outputs)
            heads = _heads(model)
            pad = spec.pad if spec.pad is not None else getattr(model.config, "pad_token_id", None)
            model.config.pad_token_id = pad
            adapted = _adapted(model, spec, heads) if spec.lora else None
    except (ConfigError, ModelError):
        raise
    except Exception as error:  # whatever is wrong with the files, or with how they fit together
        where = "" if Path(spec.folder).expanduser().is_dir() else f"there is no folder {spec.folder}, and "
        raise ModelError(f"model {spec.text()!r}: {where}it cannot be loaded ({user_code.explain(error)})") from error
    if spec.train == "head":
        for name, value in model.named_parameters():
            value.requires_grad_(name.split(".")[0] in heads)
    made = HuggingFaceModel(model, pad, None if spec.base is None else getattr(torch, spec.base), adapted)
    if spec.base is not None:
        for name in heads:
            model.get_submodule(name).register_forward_pre_hook(_in_own_type)
    return made.to(dtype=torch.get_default_dtype())


def _loaded(spec: HuggingFaceSpec, outputs: int) -> Any:
    import transformers
    from transformers.models.auto import modeling_auto

    folder, text = Path(spec.folder).expanduser(), spec.text()
    where = str(folder)
    given: dict[str, Any] = {"trust_remote_code": False}
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model {text!r}: the folder {where} has no config.json, so holds no saved model")
        given["local_files_only"] = True
    elif folder.is_absolute() or where.startswith("."):
        raise ConfigError(f"model {text!r}: there is no folder {where}")
    if spec.revision is not None:
        given["revision"] = spec.revision
    # Attention is written out as products: PyTorch's fused kernels look whether a mask is needed, and draw masks of
    # their own. Nothing is generated, so that no cache is kept.
    config = transformers.AutoConfig.from_pretrained(where, num_labels=outputs, attn_implementation="eager", **given)
    config.use_cache, config.return_dict = False, True
    if type(config) in modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        auto: Any = transformers.AutoModelForSequenceClassification
    elif type(config) in modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        auto = transformers.AutoModelForImageClassification
    else:
        raise ModelError(f"model {text!r} is a {config.model_type}, which has no head for classes of texts or images")
    # Safetensors alone: other files of weights could run code.
    return auto.from_pretrained(
        where, config=config, use_safetensors=True, ignore_mismatched_sizes=True, dtype=torch.float32, **given
    )


def _heads(model: Any) -> list[str]:
    """Name the children that the model has beyond its body."""
    body = model.base_model_prefix
    return [name for name, child in model.named_children() if name != body and any(True for _ in child.parameters())]


def _adapted(model: Any, spec: HuggingFaceSpec, heads: list[str]) -> nn.Module:
    import peft
    from transformers.pytorch_utils import Conv1D

    targets = _targets(model, spec)
    transposed = any(isinstance(layer, Conv1D) and name.split(".")[-1] in targets for name, layer in _layers(model))
    config = peft.LoraConfig(
        task_type="SEQ_CLS" if model.main_input_name == "input_ids" else None,
        r=spec.lora,
        lora_alpha=2 * spec.lora if spec.alpha is None else spec.alpha,
        lora_dropout=spec.dropout,
        target_modules=targets,
        modules_to_save=list(heads),  # which PEFT adds to
        fan_in_fan_out=transposed,
    )
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    from transformers.pytorch_utils import Conv1D

    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear | Conv1D)]


def _targets(model: Any, spec: HuggingFaceSpec) -> list[str]:
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    known = sorted({name.split(".")[-1] for name, _ in _layers(model) if name.split(".")[0] not in _heads(model)})
    wanted = spec.targets or tuple(TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(model.config.model_type, ()))
    if not wanted:
        wanted = ("q", "v")
    found: list[str] = []
    for target in wanted:
        names = [name for name in _PROJECTIONS.get(target, (target,)) if name in known]
        if not names:
            raise ConfigError(
                f"model {spec.text()!r}: no layer is called {target!r}: its layers are {', '.join(known)}"
            )
        found += names
    return found


def _in_own_type(layer: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Bring what enters a layer to the type of the layer's trained parameters."""
    # Not by what is trained: whoever calls the model with parameters of a client has none that require a gradient.
    own = getattr(layer, "modules_to_save", layer)
    dtype = next(value.dtype for value in own.parameters())
    return tuple(
        value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value for value in given
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the libraries from reporting what they load: that a head is new is what was asked for."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
