"""Runs of a study that play together: each by itself, but for what it asks the engine."""

from __future__ import annotations

from coterie.studies.joint.meeting import PARTIES, Common, Meeting
from coterie.studies.joint.seat import Seat, SeatedProcess

__all__ = ["PARTIES", "Common", "Meeting", "Seat", "SeatedProcess"]
