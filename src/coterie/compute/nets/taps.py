"""Where the fused step reads gradients from the backward pass, and what it updates with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from coterie import kernels
from coterie.compute import cpu_threads
from coterie.compute.nets import products
from coterie.compute.nets.layers import STACKED, few_samples
from coterie.models.recurrent import AffineMaps
from coterie.rows import Rows


@dataclass(frozen=True)
class GradientTap:
    """Where :meth:`StackedNet.descend_` reads a gradient from the backward pass, and what it updates with it.

    Parameters
    ----------
    weights
        The parameters that will change, stacked views of the rows.
    entered
        The input of a linear layer, or ``None`` if ``watched`` is the parameter itself.
    watched
        Where the gradient is taken: at the layer's output, or at the parameter.
    """

    weights: Rows
    entered: Tensor | None
    watched: Tensor | GradientEdge

    def update_(self, gradient: Tensor, rate: Tensor) -> None:
        """Take the step ``weights − rate · gradient`` in place."""
        rows = len(rate)
        if self.entered is None:
            (weight,) = self.weights.values()
            weight.addcmul_(gradient, rate.view(rows, *(1,) * (weight.dim() - 1)), value=-1)
            return
        weight, entered = self.weights["weight"], self.entered.reshape(rows, -1, self.entered.shape[-1])
        gradient = gradient.reshape(rows, -1, weight.shape[1])  # of a single output it may have been taken transposed
        # With few samples the time goes into reading the weights. With 50 the arithmetic counts: rounded to TF32 the
        # library's product is faster (0.135 against 0.146 ms), in float32 the kernel is (0.22 against 0.28).
        most = 64 if kernels.precision() == "tf32x3" else 16
        if few_samples(entered, most) and kernels.usable(entered, weight):
            from coterie.kernels.linear import descend_

            descend_(weight, self.weights.get("bias"), entered, gradient, rate, kernels.precision())
            return
        by_rows = products.goes_by_rows(gradient.transpose(1, 2), entered.transpose(1, 2))
        if rows == 1 and not (by_rows or weight.is_cuda or torch.compiler.is_compiling()):
            # The rate is a factor of the product: a sequence's gradient may be larger than the weights by far.
            weight[0].addmm_(gradient[0].T, entered[0], alpha=-float(rate))
            if "bias" in self.weights:
                self.weights["bias"].sub_(gradient.sum(1) * rate)
            return
        step = gradient * -rate.unsqueeze(-1)
        if by_rows:
            weight.add_(products.linear(step.transpose(1, 2), entered.transpose(1, 2)))
        elif not weight.is_cuda and weight[0].numel() < 2**16 and cpu_threads.available() > 1:
            # In place, PyTorch updates the rows of a matrix with gaps between them one after another on a CPU. For
            # small weights a product of its own, whose rows are shared among the threads, and a sum are faster.
            weight.add_(torch.bmm(step.transpose(1, 2), entered))
        else:
            weight.baddbmm_(step.transpose(1, 2), entered)
        if "bias" in self.weights:
            self.weights["bias"].add_(step.sum(1))


def descend_along(taps: list[GradientTap], total: Tensor, rate: Tensor) -> None:
    """Take the step ``weights − rate · gradient of total`` in place, at all taps."""
    places: Any = [tap.watched for tap in taps]
    gradients = torch.autograd.grad(total, places, allow_unused=True)
    for tap, gradient in zip(taps, gradients, strict=True):
        if gradient is not None:
            tap.update_(gradient, rate)


_LINEAR = nn.Linear(1, 1)  # its stacked form looks at nothing but the weights it is given


def affine(weights: Rows, x: Tensor, taps: list[GradientTap] | None) -> Tensor:
    """Multiply activations ``[rows × samples, ...]`` with each row's weights; tapped if there are taps."""
    out = STACKED[nn.Linear](_LINEAR, weights, x, len(weights["weight"]), "auto")
    return out if taps is None else tapped(out, weights, x, taps)


def tapped(out: Tensor, weights: Rows, x: Tensor, taps: list[GradientTap]) -> Tensor:
    """Take note of a linear layer's input and output."""
    # The edge of what was computed rather than the tensor: the model may go on to change that in place, as
    # nn.ReLU(inplace=True) does, and the tensor then stands for what came of it. A view's own edge would be lost, but
    # for one of memory that autograd knows nothing of, as a function of our own gives.
    viewed = out._base is not None and out._base.requires_grad == out.requires_grad
    whole, shape = out._base if out._base is not None and viewed else out, out.shape
    if not whole.requires_grad:  # nothing before this layer is trained, so that autograd has to begin with it
        begin: Any = _Begin.apply
        whole = begin(whole, whole.new_zeros(()).requires_grad_())
        out = whole.view(shape)
    taps.append(GradientTap(weights, x.detach(), get_gradient_edge(whole)))
    return out


class _Begin(torch.autograd.Function):
    """Makes autograd begin with a tensor that the model may still change in place, which it could not with a leaf."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, leaf: Tensor) -> Tensor:
        ctx.mark_dirty(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def leaves(weights: Rows, taps: list[GradientTap] | None) -> Rows:
    """Return weights whose gradients are taken by themselves."""
    if taps is None:
        return weights
    own = {name: value.detach().requires_grad_() for name, value in weights.items()}
    taps += [GradientTap({name: weights[name]}, None, leaf) for name, leaf in own.items()]
    return own


class TappedMaps(AffineMaps):
    """The products of a recurrent layer in the fused step.

    The gradient of the recurrent weights is the sum over time of products of two small matrices. Here it is one product
    of two larger ones, as with a linear layer: all hidden states, and the gradient of all that was added to the gates.
    """

    def __init__(self, taps: list[GradientTap] | None) -> None:
        self._taps = taps

    def apply(self, weights: Rows, x: Tensor) -> Tensor:
        """Map ``[rows, places, inputs]`` to ``[rows, places, outputs]``."""
        return affine(weights, x.flatten(0, 1), self._taps).view(*x.shape[:2], -1)

    def watch(self, base: Tensor) -> Tensor:
        """Make sure that there will be a gradient of the sum."""
        if self._taps is None or base.requires_grad:
            return base
        return base.clone().requires_grad_()

    def entered(self, weights: Rows, hidden: list[Tensor], base: Tensor) -> None:
        """Take note of the hidden states that were multiplied with the recurrent weights."""
        if self._taps is not None:
            before = torch.stack([each.detach() for each in hidden], 2)
            self._taps.append(GradientTap(weights, before, base))
