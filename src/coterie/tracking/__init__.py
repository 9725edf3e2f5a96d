"""Trackers that follow a run: TensorBoard, MLflow, Weights & Biases, and the user's own."""

from __future__ import annotations

from coterie.tracking.base import Measured, TrackedRun, Tracker, TrackerWarning
from coterie.tracking.observer import TrackerObserver
from coterie.tracking.registry import TRACKERS, Track, make, make_all

__all__ = [
    "TRACKERS",
    "Measured",
    "Track",
    "TrackedRun",
    "Tracker",
    "TrackerObserver",
    "TrackerWarning",
    "make",
    "make_all",
]
