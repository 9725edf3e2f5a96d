"""The attacks by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coterie.lazy import Registry

if TYPE_CHECKING:
    from coterie.simulation.attacks import Attack

ATTACKS: Registry[type[Attack]] = Registry(
    {
        "same_value": "coterie.simulation.attacks:SameValue",
        "sign_flip": "coterie.simulation.attacks:SignFlip",
        "gaussian": "coterie.simulation.attacks:Gaussian",
        "label_poisoning": "coterie.simulation.attacks:LabelPoisoning",
    }
)
