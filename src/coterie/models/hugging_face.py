"""Models of Hugging Face's by their folder or name: what is checked, found and said before they are loaded."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from coterie import user_code
from coterie.errors import ConfigError, CoterieError, ModelError
from coterie.models.hugging_face_network import HuggingFaceModel, heads_of, load_network
from coterie.models.hugging_face_spec import HuggingFaceSpec

PACKAGES = ("transformers", "peft")

_PROJECTIONS = {
    "q": ("q", "query", "q_proj", "q_lin"),
    "k": ("k", "key", "k_proj", "k_lin"),
    "v": ("v", "value", "v_proj", "v_lin"),
    "o": ("o", "o_proj", "out_proj", "out_lin"),
}
"""What the projections of attention are called in one model and another."""


def build_hugging_face(spec: HuggingFaceSpec, outputs: int) -> HuggingFaceModel:
    """Load a model and give it a head and adapters, drawn from PyTorch's current generator."""
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"model {spec.text()!r} needs {package}, which is not installed: install coterie[hf]")
    _refuse_without_folder(spec)
    try:
        with _quiet():
            return load_network(str(Path(spec.folder).expanduser()), outputs, **_given(spec))
    except CoterieError:
        raise
    except Exception as error:  # whatever is wrong with the files, or with how they fit together
        where = "" if Path(spec.folder).expanduser().is_dir() else f"there is no folder {spec.folder}, and "
        raise ModelError(f"model {spec.text()!r}: {where}it cannot be loaded ({user_code.explain(error)})") from error


def _refuse_without_folder(spec: HuggingFaceSpec) -> None:
    folder, text = Path(spec.folder).expanduser(), spec.text()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(f"model {text!r}: the folder {folder} has no config.json, so holds no saved model")
    if not folder.is_dir() and (folder.is_absolute() or spec.folder.startswith(".")):
        raise ConfigError(f"model {text!r}: there is no folder {folder}")


def _given(spec: HuggingFaceSpec) -> dict[str, Any]:
    """Give what :func:`load_network` is called with, without defaults."""
    given: dict[str, Any] = {"trust_remote_code": False}
    given |= {"local_files_only": True} if Path(spec.folder).expanduser().is_dir() else {}
    given |= {} if spec.revision is None else {"revision": spec.revision}
    given |= {} if spec.pad is None else {"pad": spec.pad}
    given |= {} if spec.base is None else {"frozen": spec.base}
    given |= {"head_alone": True} if spec.train == "head" else {}
    return given | ({"lora": partial(_adapters, spec)} if spec.lora else {})


def _adapters(spec: HuggingFaceSpec, model: Any) -> dict[str, Any]:
    """Give the parameters of PEFT's ``LoraConfig`` for a model."""
    from transformers.pytorch_utils import Conv1D

    targets = _targets(model, spec)
    return {
        "r": spec.lora,
        "lora_alpha": 2 * spec.lora if spec.alpha is None else spec.alpha,
        "lora_dropout": spec.dropout,
        "target_modules": targets,
        "fan_in_fan_out": any(isinstance(layer, Conv1D) for name, layer in _layers(model) if _last(name) in targets),
    }


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    from transformers.pytorch_utils import Conv1D

    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear | Conv1D)]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _targets(model: Any, spec: HuggingFaceSpec) -> list[str]:
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    heads = heads_of(model)
    known = sorted({_last(name) for name, _ in _layers(model) if name.split(".")[0] not in heads})
    wanted = spec.targets or tuple(TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(model.config.model_type, ()))
    found: list[str] = []
    for target in wanted or ("q", "v"):
        names = [name for name in _PROJECTIONS.get(target, (target,)) if name in known]
        if not names:
            have = ", ".join(known)
            raise ConfigError(f"model {spec.text()!r}: no layer is called {target!r}: its layers are {have}")
        found += names
    return found


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
