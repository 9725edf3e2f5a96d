"""The papers' models with exactly their shapes, and any ``nn.Module`` of the user's.

Every model of ours is a :class:`Network`: a ``body`` and a ``head``. None keeps batch statistics, none branches on
data, so each can be traced and evaluated for many rows of parameters at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coterie import lazy

if TYPE_CHECKING:
    from coterie.models.checks import check
    from coterie.models.network import Network
    from coterie.models.registry import ModelDescription, build, describe, names
    from coterie.models.residual import ScaledStandardisedConv2d
else:
    __getattr__ = lazy.exports(
        __name__,
        checks="check",
        network="Network",
        registry="ModelDescription build describe names",
        residual="ScaledStandardisedConv2d",
    )

__all__ = ["ModelDescription", "Network", "ScaledStandardisedConv2d", "build", "check", "describe", "names"]
