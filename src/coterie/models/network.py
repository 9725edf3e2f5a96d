"""What every model of Coterie looks like: a body and a head.

Head and body are declared once, by the names of two children. Methods that treat them apart (FedRep, FedROD, SplitGP)
and :class:`coterie.rows.Layout` read them off the prefixes ``body.`` and ``head.`` of the parameters' names.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from coterie.errors import ModelError


class Network(nn.Module):
    """A model as ``head(body(x))``.

    Parameters
    ----------
    body
        Every layer but the last, in order.
    head
        The last layer.
    split
        How many layers of ``body`` a client holds when the model is split between client and server.

    Raises
    ------
    ModelError
        If ``split`` is not a number of layers of ``body``.

    Examples
    --------
    >>> net = Network(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU()), nn.Linear(3, 2), split=3)
    >>> [name for name, _ in net.named_parameters()]
    ['body.1.weight', 'body.1.bias', 'head.weight', 'head.bias']
    """

    def __init__(self, body: nn.Sequential, head: nn.Linear, split: int) -> None:
        super().__init__()
        if not 0 <= split <= len(body):
            raise ModelError(f"split={split} must be between 0 and the body's {len(body)} layers")
        self.body = body
        self.head = head
        self.split = split

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for a batch.

        Parameters
        ----------
        x
            Inputs, the first axis the sample.

        Returns
        -------
        Tensor
            Outputs ``[samples, outputs]``, before any softmax.
        """
        out: Tensor = self.head(self.body(x))
        return out


class Stack:
    """Layers in order, and the shape of one sample as it leaves the last of them.

    It lets a model be written as its paper writes it, without working out how many features reach the first dense
    layer, and refuses an input that does not fit before anything is trained.

    Parameters
    ----------
    model
        The model's name, for messages.
    input_shape
        Shape of one sample.

    Raises
    ------
    ModelError
        If an axis is empty.
    """

    def __init__(self, model: str, input_shape: tuple[int, ...]) -> None:
        if not input_shape or any(side < 1 for side in input_shape):
            raise ModelError(
                f"model {model!r} cannot take inputs of shape {input_shape}: every axis must be at least 1"
            )
        self._model = model
        self._input_shape = input_shape
        self._layers: list[nn.Module] = []
        self._split = 0
        self.shape = input_shape

    def images(self) -> Stack:
        """Insist on images.

        Returns
        -------
        Stack
            Itself.

        Raises
        ------
        ModelError
            If a sample is not ``(channels, height, width)``.
        """
        if len(self._input_shape) != 3:
            raise ModelError(
                f"model {self._model!r} takes images of shape (channels, height, width), not inputs of shape "
                f"{self._input_shape}"
            )
        return self

    def add(self, layer: nn.Module, shape: tuple[int, ...] | None = None) -> Stack:
        """Append a layer.

        Parameters
        ----------
        layer
            The layer.
        shape
            Shape of a sample after it, if it changes.

        Returns
        -------
        Stack
            Itself.
        """
        self._layers.append(layer)
        self.shape = self.shape if shape is None else shape
        return self

    def after(self, what: str, channels: int, kernel: int, stride: int = 1, padding: int = 0) -> tuple[int, int, int]:
        """Return the shape that a sliding window leaves.

        Parameters
        ----------
        what
            The layer in words, for messages.
        channels
            Channels that leave it.
        kernel
            Side of the window.
        stride
            Step of the window.
        padding
            Rows and columns added on each side.

        Returns
        -------
        tuple of int
            Channels, height and width.

        Raises
        ------
        ModelError
            If nothing would be left.
        """
        height, width = ((side + 2 * padding - kernel) // stride + 1 for side in self.shape[1:])
        if height < 1 or width < 1:
            raise ModelError(
                f"model {self._model!r} cannot take inputs of shape {self._input_shape}: its {kernel}x{kernel} {what} "
                f"meets a map of only {self.shape[1]}x{self.shape[2]}; use larger images or another model"
            )
        return channels, height, width

    def conv(self, channels: int, kernel: int, padding: int = 0) -> Stack:
        """Append a convolution of stride 1 and its ReLU.

        Parameters
        ----------
        channels
            Channels that leave it.
        kernel
            Side of the window.
        padding
            Rows and columns of zeros added on each side.

        Returns
        -------
        Stack
            Itself.
        """
        shape = self.after("convolution", channels, kernel, 1, padding)
        self.add(nn.Conv2d(self.shape[0], channels, kernel, padding=padding), shape)
        return self.add(nn.ReLU())

    def pool(self, size: int) -> Stack:
        """Append a maximum over windows that do not overlap.

        Parameters
        ----------
        size
            Side of the window.

        Returns
        -------
        Stack
            Itself.
        """
        return self.add(nn.MaxPool2d(size), self.after("pooling", self.shape[0], size, size))

    def flatten(self) -> Stack:
        """Make a sample a vector.

        Returns
        -------
        Stack
            Itself.
        """
        return self.add(nn.Flatten(), (math.prod(self.shape),))

    def dense(self, width: int) -> Stack:
        """Append a dense layer and its ReLU.

        Parameters
        ----------
        width
            Features that leave it.

        Returns
        -------
        Stack
            Itself.
        """
        return self.add(nn.Linear(self.shape[0], width), (width,)).add(nn.ReLU())

    def dropout(self, rate: float) -> Stack:
        """Append dropout.

        Parameters
        ----------
        rate
            Probability that a feature is dropped in training.

        Returns
        -------
        Stack
            Itself.
        """
        return self.add(nn.Dropout(rate))

    def split_here(self) -> Stack:
        """End the client's part of a split model at this layer.

        Returns
        -------
        Stack
            Itself.
        """
        self._split = len(self._layers)
        return self

    def network(self, outputs: int) -> Network:
        """Close the stack with a head.

        Parameters
        ----------
        outputs
            How many outputs.

        Returns
        -------
        Network
            The model.

        Raises
        ------
        ModelError
            If there is no output.
        """
        if outputs < 1:
            raise ModelError(f"model {self._model!r} needs at least one output, not {outputs}")
        return Network(nn.Sequential(*self._layers), nn.Linear(self.shape[0], outputs), self._split)
