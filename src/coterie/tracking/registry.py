"""The trackers there are, by name."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from coterie.errors import ConfigError, UnknownName
from coterie.tracking.base import Tracker
from coterie.tracking.mlflow import MLflow
from coterie.tracking.tensorboard import TensorBoard
from coterie.tracking.wandb import WandB

Track = str | Tracker
"""A tracker by name, such as ``"tensorboard"`` or ``"mlflow:http://127.0.0.1:5000"``, or one of the caller's own."""


@dataclass(frozen=True)
class TrackerInfo:
    """A tracker by name.

    Parameters
    ----------
    make
        Makes it, from what follows its name after a colon, or ``None``.
    summary
        What it is, in one line.
    option
        What may follow its name.
    package
        What it imports.
    extra
        The extra that installs it; ``None`` for what is always there.
    """

    make: Callable[[str | None], Tracker]
    summary: str
    option: str
    package: str
    extra: str | None = None


TRACKERS: dict[str, TrackerInfo] = {
    "tensorboard": TrackerInfo(TensorBoard, "event files, by default in the run's folder", "FOLDER", "tensorboardX"),
    "mlflow": TrackerInfo(MLflow, "a run at an MLflow tracking server, or in a database", "URI", "mlflow", "mlflow"),
    "wandb": TrackerInfo(WandB, "a run at Weights & Biases", "PROJECT", "wandb", "wandb"),
}
"""The trackers by name."""


def make(text: str) -> Tracker:
    """Make a tracker.

    Parameters
    ----------
    text
        Its name, with its option after a colon.

    Returns
    -------
    Tracker
        The tracker, which has not begun yet.

    Raises
    ------
    UnknownName
        If there is none of that name.
    ConfigError
        If its package is not installed, or its option cannot be used.
    """
    name, colon, option = (part.strip() for part in text.partition(":"))
    if name not in TRACKERS:
        raise UnknownName("tracker", name, TRACKERS)
    known = TRACKERS[name]
    if colon and not option:
        raise ConfigError(f"track is {text!r}, but a {known.option} must follow the colon")
    try:
        importlib.import_module(known.package)
    except ImportError as error:
        extra = f"coterie[{known.extra}]" if known.extra else "coterie"
        raise ConfigError(f"track is {text!r}, but {known.package} is not installed: install {extra}") from error
    return known.make(option or None)


def make_all(wanted: Track | Sequence[Track], new: str | os.PathLike[str] | None = None) -> list[Tracker]:
    """Make all trackers of a run, so that mistakes are found before the run begins.

    Parameters
    ----------
    wanted
        The trackers, or the one.
    new
        The folder of a run that is about to begin; ``None`` for one that goes on.

    Returns
    -------
    list of Tracker
        The trackers.

    Raises
    ------
    ConfigError
        If one is given twice, or is no tracker.
    """
    made: list[Tracker] = []
    for each in [wanted] if isinstance(wanted, str | Tracker) else wanted:
        if isinstance(each, str):
            tracker = make(each)
            if any(type(other) is type(tracker) for other in made):
                raise ConfigError(f"track has {each!r}, but {each.partition(':')[0]} is given twice")
        elif isinstance(each, Tracker):
            tracker = each
        else:
            raise ConfigError(f"track has {each!r}, but each must be a name ({', '.join(TRACKERS)}) or a Tracker")
        if new is not None and isinstance(tracker, TensorBoard):
            tracker.refuse_taken(Path(new))
        made.append(tracker)
    return made
