"""Models that a Python program hands over: a module with its weights, or what makes one."""

from __future__ import annotations

import copy
import inspect
from typing import Any

from torch import nn

from coterie import user_code
from coterie.errors import ConfigError, CoterieError, ModelError
from coterie.models.checks import check
from coterie.user_code import HeldObject
from coterie.user_code.digests import digest_of


def hand_over(model: Any) -> HeldObject:
    """Hold a module, or a class or function that makes one, under its digest."""
    if isinstance(model, str):
        raise ConfigError(f"model is the name {model!r}, but an nn.Module, or a function that makes one, belongs here")
    if not isinstance(model, nn.Module) and not callable(model):
        raise ConfigError(
            f"model is a {type(model).__name__}, but must be a name, an nn.Module, or a function that makes one"
        )
    made = isinstance(model, nn.Module)
    label = type(model).__name__ if made else getattr(model, "__name__", type(model).__name__)
    if made:
        try:
            check(model)
        except ModelError as error:
            raise ModelError(f"model {label!r}: {error}") from error
    return user_code.hold(label, digest_of(model), copy.deepcopy(model) if made else model, keep=True)


def build_handed_over(text: str, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Give a module with the weights that it was handed over with, or make one anew."""
    model, shown = user_code.find("model", text), f"model {user_code.as_given(text)!r}"
    if isinstance(model, nn.Module):
        return copy.deepcopy(model)
    arguments, named = _arguments(model, shown, input_shape, outputs)
    try:
        made = model(*arguments, **named)
    except CoterieError:
        raise
    except Exception as error:
        raise ModelError(f"{shown} cannot be made: {user_code.explain(error)}{user_code.place(error)}") from error
    if not isinstance(made, nn.Module):
        raise ModelError(f"{shown} made a {type(made).__name__}, not an nn.Module")
    return made


def _arguments(
    maker: Any, shown: str, input_shape: tuple[int, ...], outputs: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give a maker what it names, nothing where it needs nothing, and both in order where it needs two things."""
    parameters = list(inspect.signature(maker).parameters.values())
    offered = {"input_shape": input_shape, "outputs": outputs}
    named = {p.name: offered[p.name] for p in parameters if p.name in offered}
    needed = [
        p
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in named
    ]
    if not needed:
        return (), named
    if not named and len(needed) == 2 and all(p.kind is not p.KEYWORD_ONLY for p in needed):
        return (input_shape, outputs), {}
    wanted = ", ".join(p.name for p in needed)
    raise ModelError(
        f"{shown} needs {wanted}, but is called with nothing, or with the shape of a sample and the number of outputs: "
        "give a function of these, or a module"
    )
