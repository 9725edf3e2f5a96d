"""Running experiments from Python."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.algorithms.base import Algorithm
from coterie.config import ExperimentConfig, from_mapping
from coterie.errors import ConfigError, CoterieError, Interrupted, UnknownName
from coterie.results import Result
from coterie.rows.distributed import first
from coterie.runs import launch
from coterie.runs.experiment import Experiment, Watcher
from coterie.runs.handed_over import BESIDE_DATA, as_text, hand_over_again
from coterie.runs.progress import progress_bar
from coterie.runs.storage import RunFolder
from coterie.simulation.processes import OneProcess
from coterie.tracking import Track, Tracker, TrackerObserver, make_all

_OBJECTS = ("algorithm", "data", "loss", "model", *BESIDE_DATA)


def run(
    algorithm: str | type[Algorithm] | Algorithm,
    *,
    out: str | os.PathLike[str] | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
    track: Track | Sequence[Track] = (),
    **settings: Any,
) -> Result:
    """Run an experiment.

    Parameters
    ----------
    algorithm
        The method's name, the path of a Python file that defines one, a class that is one, or an object of such a
        class with settings of its own.
    out
        Folder for the run; by default a new one under ``runs/``.
    data_dir
        Where data sets lie; by default ``COTERIE_DATA`` or a per-user cache folder.
    progress
        Show a progress bar.
    track
        Trackers that are told how it goes: names such as ``"tensorboard"``, ``"mlflow:URI"`` or ``"wandb:PROJECT"``, or
        objects with the methods of :class:`coterie.tracking.Tracker`.
    **settings
        Fields of :class:`coterie.config.ExperimentConfig`, and ``lr``, ``local_epochs`` and ``batch_size``; the
        method's other parameters as a dictionary named ``settings``.

        ``data`` may be an object: a DataFrame (with ``label=``, and ``client=`` where a column says whose a row is), a
        map-style Dataset of PyTorch, one of Hugging Face's, a pair ``(x, y)``, or one of these for each client in a
        dictionary. ``owners=`` says whose each sample is, ``test=`` are samples to test on, and what else may be said
        are the options of ``object`` in the catalogue (``task=``, ``norm=``, ``drop=``, …). ``model`` may be a module,
        whose weights are the start, or a function of nothing or of the shape of a sample and the number of outputs
        that makes one. ``loss`` may be a function of outputs and targets that gives a loss for each sample.

    Returns
    -------
    Result
        The run.

    Examples
    --------
    >>> import coterie
    >>> result = coterie.run("fedacs", clients=10, rounds=5, settings={"p": 0.5})  # doctest: +SKIP
    >>> result.summary["personal"]["final"]["mean"]  # doctest: +SKIP
    """
    values, held = as_text({"algorithm": algorithm, **settings})
    result = run_config(from_mapping(values), out=out, data_dir=data_dir, progress=progress, track=track)
    del held  # which were found by their digests for as long
    return result


def run_config(
    config: ExperimentConfig,
    *,
    out: str | os.PathLike[str] | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    progress: bool | Watcher = True,
    track: Track | Sequence[Track] = (),
) -> Result:
    """Run an experiment with a given configuration.

    Parameters
    ----------
    config
        The configuration.
    out
        Folder for the run; by default a new one under ``runs/``.
    data_dir
        Where data sets lie.
    progress
        Show a progress bar; or a function of the caller's, told after each round instead.
    track
        Trackers that are told how it goes; see :func:`run`.

    Returns
    -------
    Result
        The run.
    """
    return play_config(config, None, out=out, data_dir=data_dir, progress=progress, track=track)


def play_config(
    config: ExperimentConfig,
    processes: OneProcess | None,
    *,
    out: str | os.PathLike[str] | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    progress: bool | Watcher = True,
    track: Track | Sequence[Track] = (),
) -> Result:
    """Do what :func:`run_config` does, in given processes."""
    _check_paths(out=out, data_dir=data_dir)
    launch.refuse_shards_of_one(config.engine)
    processes = processes or launch.processes_for(config.engine)
    with contextlib.ExitStack() as on_failure:
        path = processes.told(lambda: Path(out) if out is not None else _new_folder(config))
        if out is None and processes.leads:
            on_failure.callback(_remove_if_empty, path)
        trackers = processes.together(lambda: make_all(track, new=path) if processes.leads else [])
        experiment = launch.begin(config, path, _folder(data_dir), processes)
        on_failure.pop_all()
    return _finish(experiment, progress, trackers)


def resume(
    path: str | os.PathLike[str],
    *,
    data_dir: str | os.PathLike[str] | None = None,
    progress: bool | Watcher = True,
    track: Track | Sequence[Track] = (),
    **objects: Any,
) -> Result:
    """Go on with a run that was stopped; it ends as if it had never been.

    Parameters
    ----------
    path
        The run's folder.
    data_dir
        Where data sets lie.
    progress
        Show a progress bar; or a function of the caller's, told after each round instead.
    track
        Trackers that are told how it goes; see :func:`run`.
    **objects
        What was handed over to :func:`run` as an object, and has to be again: ``data``, ``test``, ``owners``,
        ``model``, ``loss`` and ``algorithm``. Each must be what it was; what was said of the data is known.

    Returns
    -------
    Result
        The run; one that is finished is given back as it is.

    Raises
    ------
    UnknownName
        If something else is handed over.
    """
    for name in objects:
        if name not in _OBJECTS:
            raise UnknownName("object of a run called", name, _OBJECTS)
    return play_on(path, None, data_dir=data_dir, progress=progress, track=track, objects=objects)


def play_on(
    path: str | os.PathLike[str],
    processes: OneProcess | None,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    progress: bool | Watcher = True,
    track: Track | Sequence[Track] = (),
    objects: Mapping[str, Any] | None = None,
    rounds: int | None = None,
) -> Result:
    """Do what :func:`resume` does, in given processes; to a later round than the run was begun for, if one is given."""
    objects = objects or {}
    _check_paths(path=path, data_dir=data_dir)
    if rounds is not None:
        with RunFolder.open(path) as folder:
            folder.lengthen(rounds)
    if Result(path).finished:
        return Result(path)
    held = hand_over_again(Result(path).config, objects, os.fspath(path)) if objects else []
    trackers = make_all(track) if first() else []
    result = _finish(launch.resume(Path(path), _folder(data_dir), processes), progress, trackers)
    del held
    return result


def load(path: str | os.PathLike[str]) -> Result:
    """Read a run from its folder.

    Parameters
    ----------
    path
        The run's folder.

    Returns
    -------
    Result
        The run, finished or not.
    """
    _check_paths(path=path)
    return Result(path)


def _check_paths(**paths: object) -> None:
    for name, path in paths.items():
        if path is not None and not isinstance(path, str | os.PathLike):
            raise ConfigError(
                f"{name} is {path!r}, of type {type(path).__name__}, but must be a path: a text or a Path"
            )


def _folder(path: str | os.PathLike[str] | None) -> Path | None:
    return None if path is None else Path(path)


def _new_folder(config: ExperimentConfig) -> Path:
    """Make a folder under ``runs/`` that no other process has."""
    stem = "-".join([Path(config.algorithm).stem, config.data.split(":")[0], f"seed{config.seed}"])
    for number in itertools.count(1):
        path = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise AssertionError("unreachable: the count has no end")


def _remove_if_empty(path: Path) -> None:
    """Remove a run's folder in which nothing is, and ``runs/`` if there is no other."""
    with contextlib.suppress(OSError):
        path.rmdir()
        path.parent.rmdir()


def _finish(experiment: Experiment, progress: bool | Watcher, trackers: Sequence[Tracker] = ()) -> Result:
    config, parts, done = experiment.config, experiment.parts, experiment.completed
    if not experiment.leads:  # another process tells and shows
        progress, trackers = False, ()
    with (
        _located(experiment),
        experiment.folder as folder,
        TrackerObserver(trackers, folder, done, parts.population.roles.honest, parts.scorer.primary) as observer,
    ):
        with (
            progress_bar(parts.simulation.algorithm.title, config.rounds, done, progress)
            if isinstance(progress, bool)
            else contextlib.nullcontext(progress)
        ) as watch:
            experiment.run(_both(observer.round, watch))
        experiment.finish(observer.end)
        return Result(folder.path)


def _both(first: Watcher, second: Watcher) -> Watcher:
    def watch(round_number: int, mean: float | None) -> None:
        first(round_number, mean)
        second(round_number, mean)

    return watch


@contextlib.contextmanager
def _located(experiment: Experiment) -> Iterator[None]:
    """Say with every error where the run lies that it stopped."""
    try:
        yield
    except KeyboardInterrupt:  # after the last round: everything but the summary is on the disk
        raise Interrupted(experiment.folder.path, experiment.completed) from None
    except CoterieError as error:
        if not isinstance(error, Interrupted):
            error.add_note(f"run: {experiment.folder.path}")
        raise
