"""The methods, one file each; :mod:`coterie.algorithms.base` is what they are written in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coterie import lazy

if TYPE_CHECKING:
    from coterie.algorithms.base import (
        Algorithm,
        Ask,
        Batch,
        ClientContext,
        Cohort,
        Fold,
        FullPass,
        Info,
        Message,
        Minibatches,
        Net,
        Personalise,
        Replies,
        Round,
        Start,
        State,
        Task,
        Weights,
    )
    from coterie.algorithms.local_training import LocalTraining, Optimiser, ProximalTraining
    from coterie.algorithms.registry import get, make, names, register
else:
    __getattr__ = lazy.exports(
        __name__,
        base="Algorithm Ask Batch ClientContext Cohort Fold FullPass Info Message Minibatches "
        "Net Personalise Replies Round Start State Task Weights",
        local_training="LocalTraining Optimiser ProximalTraining",
        registry="get make names register",
    )

__all__ = [
    "Algorithm",
    "Ask",
    "Batch",
    "ClientContext",
    "Cohort",
    "Fold",
    "FullPass",
    "Info",
    "LocalTraining",
    "Message",
    "Minibatches",
    "Net",
    "Optimiser",
    "Personalise",
    "ProximalTraining",
    "Replies",
    "Round",
    "Start",
    "State",
    "Task",
    "Weights",
    "get",
    "make",
    "names",
    "register",
]
