"""A plain JAX program on the CPU: a round is one compiled function.

Clients are a ``vmap`` of a ``scan`` over their steps, or, which may be faster on few cores, a ``scan`` over clients.
The package comes from a folder that is given; nothing else here needs it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rivals import Federation, InProcess
from rivals.padded import batches


def find(folder: Path | None) -> str | None:
    """Make the package importable from a folder, and say why not if it is not."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if folder is not None and str(folder) not in sys.path:
        sys.path.append(str(folder))  # last: what is installed here stays what is used
    try:
        importlib.import_module("jax")
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    return None


def _forward(module: nn.Module) -> Callable[[list[Any], Any, Any], Any]:
    """Say in JAX what a module of layers computes for one batch; a dropout draws from its key."""
    import jax
    from jax import lax

    layers = [layer for layer in module.modules() if not list(layer.children())]

    def forward(parameters: list[Any], x: Any, key: Any) -> Any:
        left = list(parameters)
        for place, layer in enumerate(layers):
            if isinstance(layer, nn.Linear):
                weight, bias = left.pop(0), left.pop(0)
                x = x @ weight.T + bias
            elif isinstance(layer, nn.Conv2d):
                weight, bias = left.pop(0), left.pop(0)
                pads = [(size, size) for size in layer.padding]
                x = lax.conv_general_dilated(x, weight, layer.stride, pads, dimension_numbers=("NCHW", "OIHW", "NCHW"))
                x = x + bias[:, None, None]
            elif isinstance(layer, nn.ReLU):
                x = jax.nn.relu(x)
            elif isinstance(layer, nn.MaxPool2d):
                window = (1, 1, layer.kernel_size, layer.kernel_size)
                x = lax.reduce_window(x, -np.inf, lax.max, window, window, "VALID")
            elif isinstance(layer, nn.Dropout):
                kept = jax.random.bernoulli(jax.random.fold_in(key, place), 1 - layer.p, x.shape)
                x = x * kept / (1 - layer.p)
            elif isinstance(layer, nn.Flatten):
                x = x.reshape(len(x), -1)
            else:
                raise TypeError(f"{type(layer).__name__} is not written in JAX here")
        return x

    return forward


class JaxProgram(InProcess):
    """Federated averaging in JAX."""

    def __init__(self, federation: Federation, in_turn: bool = False) -> None:
        import jax
        import jax.numpy as jnp
        from jax import lax

        self.federation, self.number = federation, 0
        module = federation.module()
        self.current = [jnp.asarray(value.detach().cpu().numpy()) for value in module.parameters()]
        self.held = [jnp.asarray(part.cpu().numpy()) for part in batches(federation)]
        forward, lr = _forward(module), federation.work.lr

        def loss(parameters: list[Any], x: Any, y: Any, weights: Any, key: Any) -> Any:
            chosen = jax.nn.log_softmax(forward(parameters, x, key))[jnp.arange(len(y)), y]
            return -(chosen * weights).sum() / jnp.maximum(weights.sum(), 1)

        def trained(parameters: list[Any], x: Any, y: Any, weights: Any, key: Any) -> list[Any]:
            def step(current: list[Any], batch: Any) -> tuple[list[Any], None]:
                gradients = jax.grad(loss)(current, *batch)
                return [value - lr * slope for value, slope in zip(current, gradients, strict=True)], None

            ended, _ = lax.scan(step, parameters, (x, y, weights, jax.random.split(key, len(x))))
            return ended

        def played(parameters: list[Any], held: list[Any], cohort: Any, key: Any) -> list[Any]:
            x, y, weights = (part[cohort] for part in held)
            shares = weights.sum((1, 2)) / weights.sum()
            keys = jax.random.split(key, len(cohort))
            if not in_turn:
                rows = jax.vmap(trained, in_axes=(None, 0, 0, 0, 0))(parameters, x, y, weights, keys)
                return [jnp.tensordot(shares, value, 1) for value in rows]

            def add(sums: list[Any], client: Any) -> tuple[list[Any], None]:
                share, *mine = client
                ended = trained(parameters, *mine)
                return [total + share * value for total, value in zip(sums, ended, strict=True)], None

            sums, _ = lax.scan(add, [jnp.zeros_like(value) for value in parameters], (shares, x, y, weights, keys))
            return sums

        self._played = jax.jit(played)
        self._key = jax.random.key(1)

    def play(self) -> None:
        """Play one round."""
        import jax

        self.number += 1
        cohort = np.asarray(self.federation.cohort(self.number))
        key = jax.random.fold_in(self._key, self.number)
        self.current = jax.block_until_ready(self._played(self.current, self.held, cohort, key))

    def parameters(self) -> Tensor:
        """Give the global model."""
        return torch.cat([torch.from_numpy(np.array(value)).reshape(-1) for value in self.current])
