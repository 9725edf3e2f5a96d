"""Several runs in one computation: their clients are the clients of one large federation, their rows one matrix."""

from __future__ import annotations

from coterie.compute.joint.asks import OutputsAsk, PredictAsk, TaskAnswer, TaskAsk
from coterie.compute.joint.engine import JointEngine, fit, same_net
from coterie.compute.joint.guest import GuestEngine
from coterie.compute.joint.samples import SampleStore, join_samples
from coterie.compute.joint.tasks import signature

__all__ = [
    "GuestEngine",
    "JointEngine",
    "OutputsAsk",
    "PredictAsk",
    "SampleStore",
    "TaskAnswer",
    "TaskAsk",
    "fit",
    "join_samples",
    "same_net",
    "signature",
]
