"""Telling others how a run goes: TensorBoard, MLflow, Weights & Biases, and trackers of the user's own."""

from __future__ import annotations

from coterie.tracking.base import Measured, TrackedRun, Tracker, TrackerWarning
from coterie.tracking.catalogue import TRACKERS, Track, make, make_all
from coterie.tracking.telling import Telling

__all__ = [
    "TRACKERS",
    "Measured",
    "Telling",
    "Track",
    "TrackedRun",
    "Tracker",
    "TrackerWarning",
    "make",
    "make_all",
]
