"""Plain convolutional models, as the papers and the simulators they are compared on have them."""

from __future__ import annotations

from coterie.errors import ConfigError
from coterie.models.network import Network, Stack


def cnn_cifar_flame(input_shape: tuple[int, ...], outputs: int) -> Network:
    """Two padded 3x3 convolutions and a dense layer of 128: FLAME's model for CIFAR-10."""
    stack = Stack("cnn_cifar_flame", input_shape).images()
    stack.conv(16, 3, padding=1).pool(2).split_here()
    return stack.conv(32, 3, padding=1).pool(2).flatten().dense(128).network(outputs)


def cnn_mmnist(input_shape: tuple[int, ...], outputs: int) -> Network:
    """Two 3x3 convolutions, dropout and a dense layer of 64: FLAME's model for Medical MNIST."""
    stack = Stack("cnn_mmnist", input_shape).images().conv(32, 3).pool(2).split_here()
    return stack.conv(16, 3).pool(2).flatten().dropout(0.2).dense(64).network(outputs)


def cnn_femnist(input_shape: tuple[int, ...], outputs: int, *, head: int | None = None) -> Network:
    """Two padded convolutions, 7x7 and 3x3: FLAME's model for FEMNIST."""
    if head is not None and head < outputs:
        raise ConfigError(f"head={head} of model 'cnn_femnist' must be at least the task's {outputs} outputs")
    stack = Stack("cnn_femnist", input_shape).images().conv(32, 7, padding=3).pool(2).split_here()
    return stack.conv(64, 3, padding=1).pool(2).flatten().network(outputs if head is None else head)


def cnn_mcmahan(input_shape: tuple[int, ...], outputs: int) -> Network:
    """Two padded 5x5 convolutions and a dense layer of 512: the model of McMahan et al. for MNIST."""
    stack = Stack("cnn_mcmahan", input_shape).images().conv(32, 5, padding=2).pool(2).split_here()
    return stack.conv(64, 5, padding=2).pool(2).flatten().dense(512).network(outputs)


def cnn_cifar_fedpg(input_shape: tuple[int, ...], outputs: int) -> Network:
    """Two 5x5 convolutions and dense layers of 384 and 192 with dropout: FedPG's model for CIFAR-10."""
    stack = Stack("cnn_cifar_fedpg", input_shape).images().conv(64, 5).pool(2).conv(64, 5).pool(2).split_here()
    return stack.flatten().dense(384).dropout(0.2).dense(192).dropout(0.5).network(outputs)


def cnn_pfl(input_shape: tuple[int, ...], outputs: int) -> Network:
    """Two 3x3 convolutions, one pooling, a dense layer of 128, dropout: the benchmark model of pfl-research."""
    stack = Stack("cnn_pfl", input_shape).images().conv(32, 3).split_here()
    return stack.conv(64, 3).pool(2).dropout(0.25).flatten().dense(128).dropout(0.5).network(outputs)


def cnn_pfllib(input_shape: tuple[int, ...], outputs: int) -> Network:
    """Two 5x5 convolutions without padding and a dense layer of 512: the benchmark model of PFLlib."""
    stack = Stack("cnn_pfllib", input_shape).images().conv(32, 5).pool(2).split_here()
    return stack.conv(64, 5).pool(2).flatten().dense(512).network(outputs)


def cnn_small(input_shape: tuple[int, ...], outputs: int) -> Network:
    """Two padded 3x3 convolutions and a dense layer of 64, for images as small as 8x8."""
    stack = Stack("cnn_small", input_shape).images().conv(16, 3, padding=1).split_here()
    return stack.conv(32, 3, padding=1).pool(2).flatten().dense(64).network(outputs)
