"""Which net a model is run by: the fastest of those that were seen to compute what the model itself does."""

from __future__ import annotations

from torch import Tensor, nn

from coterie import user_code
from coterie.compute.nets.folded import FoldedNet
from coterie.compute.nets.layers import Convolution
from coterie.compute.nets.row_net import ModuleNet, RowNet, VmapNet, agrees, branches_on_values
from coterie.compute.nets.stacked import Kernel, stacked_nets
from coterie.errors import ModelError
from coterie.rows import Layout

_TOLERANCE = 1e-4


def sound_net(module: nn.Module, layout: Layout, probe: Tensor, kernel: Kernel, convolution: Convolution) -> RowNet:
    """Give the first net that agrees with a module on a few samples: of stacked layers, else by ``vmap``.

    Parameters
    ----------
    module
        The model.
    layout
        Where its parameters lie in a row.
    probe
        Some samples of two clients.
    kernel
        The fastest kind that may be taken.
    convolution
        How convolutions are computed.

    Returns
    -------
    RowNet
        The net.

    Raises
    ------
    ModelError
        If the model cannot be run for several clients at once.
    """
    plain = ModuleNet(module, layout)
    if kernel == "module":
        agrees(plain, plain, probe, _TOLERANCE)  # so that it is known whether the model draws random numbers
        return plain
    for net in stacked_nets(module, layout, convolution) if kernel == "stacked" else ():
        if isinstance(net, FoldedNet) and branches_on_values(module, probe[0]):
            continue
        if agrees(net, plain, probe, _TOLERANCE, training=True):
            return net
    vectorised = VmapNet(module, layout)
    name = type(module).__name__
    try:
        sound = agrees(vectorised, plain, probe, _TOLERANCE, training=True, raising=True)
    except Exception as error:
        raise ModelError(
            f"{name} cannot be run for several clients at once ({user_code.explain(error)}): use --engine loop"
        ) from error
    if not sound:
        raise ModelError(f"{name} gives other outputs when it is run for several clients at once: use --engine loop")
    return vectorised
