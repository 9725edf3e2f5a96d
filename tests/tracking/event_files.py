"""What TensorBoard's own reader finds in event files."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def events(folder: Path) -> EventAccumulator:
    """Read event files with TensorBoard's own reader, keeping everything."""
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "images": 0, "tensors": 0})
    found.Reload()
    return found


def series(found: EventAccumulator, name: str) -> dict[int, float]:
    """Give a scalar by step, of which there may be none twice."""
    points = [(point.step, point.value) for point in found.Scalars(name)]
    assert len(dict(points)) == len(points), f"{name} has a step twice: {points}"
    return dict(points)
