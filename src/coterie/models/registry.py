"""The models by name, and the user's own by import path."""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from coterie import user_code
from coterie.errors import ConfigError, CoterieError, ModelError, UnknownName
from coterie.memory import free_memory
from coterie.models.hugging_face_spec import PREFIX, spec_of
from coterie.user_code import IMPORT, OBJECT

if TYPE_CHECKING:
    from torch import nn

    from coterie.models.network import Network


@dataclass(frozen=True)
class ModelDescription:
    """A model in words.

    Parameters
    ----------
    name
        Its name.
    layers
        Its layers, from input to output.
    input_shape
        Shape of one sample where it was first used.
    outputs
        How many outputs it had there.
    parameters
        How many parameters it has with that input and those outputs.
    source
        Where it comes from.
    options
        Its options with their defaults, as they may be written after the name.
    """

    name: str
    layers: str
    input_shape: tuple[int, ...]
    outputs: int
    parameters: int
    source: str
    options: Mapping[str, object]


@dataclass(frozen=True)
class _ModelEntry:
    module: str
    name: str
    layers: str
    input_shape: tuple[int, ...]
    outputs: int
    source: str

    @property
    def builder(self) -> Callable[..., Network]:
        """The function of the model's name, imported when the model is first wanted."""
        builder: Callable[..., Network] = getattr(importlib.import_module(f"coterie.models.{self.module}"), self.name)
        return builder

    @property
    def options(self) -> dict[str, object]:
        parameters = inspect.signature(self.builder).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


_GREY, _COLOUR = (1, 28, 28), (3, 32, 32)
_ENTRIES = {
    entry.name: entry
    for entry in (
        _ModelEntry("dense", "linear", "784-10", _GREY, 10, "FLAME, conference version"),
        _ModelEntry(
            "dense", "mlp", "784-200-10 ReLU; widths by hidden=", _GREY, 10, "McMahan et al. 2017, one hidden layer"
        ),
        _ModelEntry("dense", "mlp2", "784-128-64-10 ReLU", _GREY, 10, "FLAME, MNIST and Fashion-MNIST"),
        _ModelEntry("dense", "mlp_fedpg", "784-200-200-10 ReLU", _GREY, 10, "FedPG, Fashion-MNIST"),
        _ModelEntry(
            "convolutional",
            "cnn_cifar_flame",
            "conv 3x3 16, pool 2, conv 3x3 32, pool 2, fc 128, fc 10",
            _COLOUR,
            10,
            "FLAME, CIFAR-10",
        ),
        _ModelEntry(
            "convolutional",
            "cnn_mmnist",
            "conv 3x3 32, pool 2, conv 3x3 16, pool 2, dropout 0.2, fc 64, fc 6",
            (3, 64, 64),
            6,
            "FLAME, Medical MNIST",
        ),
        _ModelEntry(
            "convolutional",
            "cnn_femnist",
            "conv 7x7 32, pool 2, conv 3x3 64, pool 2, fc 62",
            _GREY,
            62,
            "FLAME, FEMNIST (head=62 with its ten digits)",
        ),
        _ModelEntry(
            "convolutional",
            "cnn_mcmahan",
            "conv 5x5 32, pool 2, conv 5x5 64, pool 2, fc 512, fc 10",
            _GREY,
            10,
            "McMahan et al. 2017; FedAMP, MNIST-like data",
        ),
        _ModelEntry(
            "convolutional",
            "cnn_cifar_fedpg",
            "conv 5x5 64, pool 2, conv 5x5 64, pool 2, fc 384, dropout 0.2, fc 192, dropout 0.5, fc 10",
            _COLOUR,
            10,
            "FedPG, CIFAR-10",
        ),
        _ModelEntry(
            "convolutional", "cnn_small", "conv 3x3 16, conv 3x3 32, pool 2, fc 64, fc 10", (1, 8, 8), 10, "8x8 digits"
        ),
        _ModelEntry(
            "convolutional",
            "cnn_pfl",
            "conv 3x3 32, conv 3x3 64, pool 2, dropout 0.25, fc 128, dropout 0.5, fc 10",
            _COLOUR,
            10,
            "pfl-research, CIFAR-10 benchmark",
        ),
        _ModelEntry(
            "convolutional",
            "cnn_pfllib",
            "conv 5x5 32, pool 2, conv 5x5 64, pool 2, fc 512, fc 10",
            _GREY,
            10,
            "PFLlib, Fashion-MNIST",
        ),
        _ModelEntry(
            "residual",
            "nfresnet18_fedpg",
            "scaled standardised conv 3x3 64, pool 3/2, 2 blocks each of 16, 32, 64, mean, fc 100",
            _COLOUR,
            100,
            "FedPG, CIFAR-100",
        ),
        _ModelEntry(
            "residual",
            "nfresnet18_full",
            "scaled standardised conv 3x3 64, pool 3/2, 2 blocks each of 64, 128, 256, 512, mean, fc 100",
            _COLOUR,
            100,
            "Brock et al. 2021, with FedPG's stem",
        ),
        _ModelEntry(
            "residual",
            "resnet18_gn",
            "conv 7x7/2 64, pool 3/2 (or conv 3x3 64), 2 blocks each of 64, 128, 256, 512, mean, fc 100; GroupNorm 32",
            _COLOUR,
            100,
            "FedAMP, CIFAR-100, with group normalisation",
        ),
    )
}


def names() -> tuple[str, ...]:
    """Return the names of all models.

    Returns
    -------
    tuple of str
        The names, in order of the catalogue.
    """
    return tuple(_ENTRIES)


def describe() -> tuple[ModelDescription, ...]:
    """Describe all models.

    Returns
    -------
    tuple of Description
        One for each name; parameters are counted on the model itself, which is built without storage.
    """
    import torch

    out = []
    for entry in _ENTRIES.values():
        with torch.device("meta"):
            network = entry.builder(entry.input_shape, entry.outputs)
        count = sum(value.numel() for value in network.parameters())
        out.append(
            ModelDescription(
                entry.name, entry.layers, entry.input_shape, entry.outputs, count, entry.source, entry.options
            )
        )
    return tuple(out)


def build(name: str, input_shape: tuple[int, ...], outputs: int, **options: object) -> Network | nn.Module:
    """Build a model, initialised from PyTorch's current generator.

    A model or option that does not exist is an :class:`~coterie.errors.UnknownName`, a malformed option a
    :class:`~coterie.errors.ConfigError`, an input that does not fit a :class:`~coterie.errors.ModelError`.

    Parameters
    ----------
    name
        A registered name, ``import:package.module:Class`` for a module of the user's, or either with options after
        another colon, as in ``mlp:hidden=128-64``. The user's class (or function) is called with those of
        ``input_shape`` and ``outputs`` that it names as parameters, and with the options.
    input_shape
        Shape of one sample, for images ``(channels, height, width)``.
    outputs
        How many outputs the task has.
    **options
        Options of the model, as if written after the name; these win.

    Returns
    -------
    Network or nn.Module
        The model.

    Examples
    --------
    >>> sum(p.numel() for p in build("mlp:hidden=128-64", (1, 28, 28), 10).parameters())
    109386
    """
    shape = tuple(int(side) for side in input_shape)
    kind, _, rest = name.partition(":")
    if name.startswith(IMPORT):
        module, target, given = _parts(name)
        return _imported(module, target, shape, outputs, {**given, **options})
    if name.startswith(OBJECT):
        from coterie.models.handed_over import build_handed_over

        return build_handed_over(name, shape, outputs)
    check_name(name)
    if (spec := spec_of(name)) is not None:
        from coterie.models.hugging_face import build_hugging_face

        return build_hugging_face(spec, outputs)
    entry = _ENTRIES[kind]
    given = _validated(entry, {**_options(name, rest), **options})
    _check_size(name, lambda: entry.builder(shape, outputs, **given))
    return entry.builder(shape, outputs, **given)


def _check_size(name: str, make: Callable[[], Network]) -> None:
    """Refuse a model that the memory there is cannot hold, before any of it is taken: it would end the process."""
    import torch

    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            parameters: float = sum(each.numel() for each in make().parameters())
    except (TypeError, RuntimeError, OverflowError):  # a width beyond what can be counted
        parameters = math.inf
    room = free_memory()
    if 4 * parameters > room:
        count = "more parameters than can be counted" if math.isinf(parameters) else f"{parameters} parameters"
        raise ModelError(f"model {name!r} has {count}, but there are {room // 2**20} MB of memory: make it smaller")


def import_call(name: str, input_shape: tuple[int, ...], outputs: int) -> tuple[str, str, dict[str, object]]:
    """Say how a module of the user's is made: the Python module, what is called in it, and with which arguments."""
    module, target, given = _parts(name)
    maker = getattr(importlib.import_module(module), target)
    return module, target, _arguments(maker, input_shape, outputs, given)


def _parts(name: str) -> tuple[str, str, dict[str, object]]:
    module, _, rest = name.removeprefix(IMPORT).partition(":")
    target, _, text = rest.partition(":")
    return module, target, {key: _literal(value) for key, value in _options(name, text).items()}


def _arguments(
    maker: Callable[..., object], shape: tuple[int, ...], outputs: int, options: Mapping[str, object]
) -> dict[str, object]:
    offered = {"input_shape": shape, "outputs": outputs}
    parameters = inspect.signature(maker).parameters.values()
    named = {p.name for p in parameters if p.kind not in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    return {key: value for key, value in offered.items() if key in named} | dict(options)


def check_name(name: str) -> None:
    """Refuse a name that no model has, before anything is imported; options after a colon may follow it."""
    kind = name.partition(":")[0]
    if not name.startswith((IMPORT, OBJECT)) and spec_of(name) is None and kind not in _ENTRIES:
        raise UnknownName("model", kind, [*_ENTRIES, f"{IMPORT}package.module:Class", f"{PREFIX}FOLDER"])


def _options(name: str, text: str) -> dict[str, str]:
    out: dict[str, str] = {}
    for part in text.split(",") if text else ():
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or key.strip() in out:
            raise ConfigError(f"model {name!r}: {part!r} must be key=value, each key once, as in mlp:hidden=128-64")
        out[key.strip()] = value.strip()
    return out


def _validated(entry: _ModelEntry, given: Mapping[str, object]) -> dict[str, object]:
    hints = typing.get_type_hints(entry.builder)
    out: dict[str, object] = {}
    for key, value in given.items():
        if key not in entry.options:
            if not entry.options:
                raise ConfigError(f"model {entry.name!r} takes no options, so not {key}={value!r}")
            raise UnknownName(f"option of model {entry.name!r} called", key, entry.options)
        try:
            out[key] = TypeAdapter(hints[key]).validate_python(value)
        except ValidationError as error:
            wanted = error.errors()[0]["msg"]
            raise ConfigError(f"{key}={value!r} of model {entry.name!r}: {wanted[:1].lower()}{wanted[1:]}") from None
    return out


def _literal(text: str) -> object:
    words: dict[str, object] = {"true": True, "false": False, "none": None}  # as everywhere else on the command line
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _imported(
    module: str, target: str, shape: tuple[int, ...], outputs: int, options: Mapping[str, object]
) -> nn.Module:
    from torch import nn

    where = f"{IMPORT}{module}:{target}"
    maker = user_code.load(
        "model",
        where,
        form="package.module:Class",
        must_be="a class or function that makes an nn.Module",
        error=ModelError,
        accepts=lambda found: callable(found) and not isinstance(found, nn.Module),
    )
    shown = f"model {user_code.as_given(where)!r}"
    arguments = _arguments(maker, shape, outputs, options)
    try:
        inspect.signature(maker).bind(**arguments)
    except TypeError as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items()) or "no arguments"
        raise ModelError(f"{shown} cannot be called with {given}: {error}") from None
    try:
        made = maker(**arguments)
    except CoterieError:
        raise
    except Exception as error:
        of = f" for samples of shape {shape}" if "input_shape" in arguments else ""
        place = user_code.place(error)
        raise ModelError(f"{shown} cannot be made{of}: {user_code.explain(error)}{place}") from error
    if not isinstance(made, nn.Module):
        raise ModelError(f"{shown} made a {type(made).__name__}, not an nn.Module")
    return made
