"""Linear and dense models, for inputs of any shape."""

from __future__ import annotations

from coterie.errors import ConfigError
from coterie.models.network import Network, Stack


def linear(input_shape: tuple[int, ...], outputs: int) -> Network:
    """Softmax or linear regression."""
    return Stack("linear", input_shape).flatten().split_here().network(outputs)


def mlp(input_shape: tuple[int, ...], outputs: int, *, hidden: int | str = "200") -> Network:
    """Dense layers with ReLU."""
    parts = str(hidden).split("-")
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"hidden={hidden!r} of model 'mlp' must be positive widths joined by '-', such as 128-64")
    return _dense("mlp", input_shape, outputs, tuple(int(part) for part in parts))


def mlp2(input_shape: tuple[int, ...], outputs: int) -> Network:
    """Two hidden layers of 128 and 64, as FLAME's code runs them."""
    return _dense("mlp2", input_shape, outputs, (128, 64))


def mlp_fedpg(input_shape: tuple[int, ...], outputs: int) -> Network:
    """Two hidden layers of 200, as FedPG has them."""
    return _dense("mlp_fedpg", input_shape, outputs, (200, 200))


def _dense(name: str, input_shape: tuple[int, ...], outputs: int, widths: tuple[int, ...]) -> Network:
    stack = Stack(name, input_shape).flatten()
    client_layers = (len(widths) + 1) // 2
    for depth, width in enumerate(widths, start=1):
        stack.dense(width)
        if depth == client_layers:
            stack.split_here()
    return stack.network(outputs)
