"""The folder of a comparison: which plan it holds, and how far another one may go on with what is there."""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from coterie.errors import CoterieError, CoterieWarning, Interrupted, RunFolderError
from coterie.results.report.sources import STANDINGS
from coterie.runs.storage import lock_folder
from coterie.runs.storage.atomic_files import read_json, write_json, write_text
from coterie.runs.storage.lock import LOCK_FILE
from coterie.runs.storage.run_files import SUMMARY
from coterie.yaml_file import read_plain_text, read_yaml, yaml_text

RUNS = "runs"
"""The folder of all runs."""

DIVERGED, FAILED = "diverged.json", "failed.json"
"""Runs that became NaN or infinite, and those that failed, each with the sentence that says so."""

_PLAN, _ASIDE = "plan.yaml", "set_aside"


def begun(folder: Path) -> bool:
    """Say whether any run of a plan has been begun."""
    return any((folder / RUNS).glob("*/config.yaml"))


def sentences(path: Path) -> dict[str, str]:
    """Read what is said of runs, by their names; nothing if the file is not there."""
    found: dict[str, str] = read_json(path) if path.exists() else {}
    return found


@contextlib.contextmanager
def locked(plan: Mapping[str, Any], folder: Path, may_grow: bool = False) -> Iterator[None]:
    """Write a plan, of plain YAML types, to its folder, and let no other process run it at the same time.

    Parameters
    ----------
    plan
        The plan.
    folder
        Its folder.
    may_grow
        Whether it may differ from the folder's own where nothing that was played is lost by that: it may have more
        runs, and other settings for those that have not been begun. What diverged or failed may be changed or left
        out, and is set aside then, with a warning.

    Yields
    ------
    None
        While the folder is locked.

    Raises
    ------
    RunFolderError
        If the folder holds another plan, or something else, cannot be written, or is another process's at the moment.
    CoterieError
        What is raised while it is locked. A new plan of which no run has begun is removed then, and its new folder.
    """
    text = yaml_text(plan)
    plain = read_plain_text(text)
    _refuse_another(plain, folder, may_grow)
    new, made = not (folder / _PLAN).exists(), not folder.exists()
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.callback(os.close, lock_folder(folder))
            _refuse_another(plain, folder, may_grow)  # another process may have begun between the look and the lock
            if not (folder / _PLAN).exists() or not begun(folder):
                for said in (DIVERGED, FAILED):
                    (folder / said).unlink(missing_ok=True)
                write_text(folder / _PLAN, text)
            elif may_grow and _difference(old := _kept(folder), plain):
                gone = _over(folder) - plain["runs"].keys()
                _set_aside(folder, [*_changed(old, plain), *sorted(gone)])
                (folder / STANDINGS).unlink(missing_ok=True)  # it is not at its end any more
                write_text(folder / _PLAN, text)
        except OSError as error:
            raise RunFolderError(f"{folder} cannot be written ({error.strerror or error})") from error
        try:
            yield
        except CoterieError as error:
            if new and not begun(folder) and not isinstance(error, Interrupted):
                _leave_nothing(folder, made)
            raise


def _leave_nothing(folder: Path, made: bool) -> None:
    """Remove what was written for a plan of which every run was refused, and the folder if it was made for it.

    Where there is more, as of a choice, all of it stays, and the plan may be mended.
    """
    if {each.name for each in folder.iterdir()} - {_PLAN, DIVERGED, FAILED, RUNS, LOCK_FILE}:
        return
    for name in (_PLAN, DIVERGED, FAILED, *([LOCK_FILE] if made else [])):
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # somebody else has put something there
        if (folder / RUNS).exists():
            (folder / RUNS).rmdir()
        if made:
            folder.rmdir()


def _kept(folder: Path) -> dict[str, Any]:
    """Read a folder's plan, which a program wrote; what somebody made of it is complained of as of any file."""
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        found = read_plain_text((folder / _PLAN).read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return read_yaml(folder / _PLAN)


def _set_aside(folder: Path, names: list[str]) -> None:
    """Move what runs left that diverged or failed, and forget that they did."""
    for name in names:
        if (folder / RUNS / name).exists():
            tried = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
            place = next(place for place in (folder / _ASIDE / each for each in tried) if not place.exists())
            place.parent.mkdir(exist_ok=True)
            (folder / RUNS / name).rename(place)
            warnings.warn(
                f"{name} is no longer as it was planned: what it left is in {place}",
                CoterieWarning,
                stacklevel=2,
            )
        for file in (folder / DIVERGED, folder / FAILED):
            said = sentences(file)
            if said.pop(name, None) is not None:
                write_json(file, said)


def _refuse_another(plain: Mapping[str, Any], folder: Path, may_grow: bool) -> None:
    if (folder / _PLAN).exists() and not begun(folder):
        return  # nothing came of it: whoever mended a mistake in it need not look for another folder
    if (folder / _PLAN).exists():
        old = _kept(folder)
        difference = _difference(old, plain)
        if difference and not (may_grow and _goes_on(folder, old, plain)):
            more = ", which may have more methods, seeds and values" if may_grow else ""
            raise RunFolderError(
                f"{folder} holds a comparison with another plan ({difference}): give its plan to go on with it{more}, "
                "or choose another --out"
            )
    elif folder.exists() and (not folder.is_dir() or any(not each.name.startswith(".") for each in folder.iterdir())):
        raise RunFolderError(f"{folder} is there already and holds no comparison: choose another --out")


def _goes_on(folder: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Say whether all that was played is in a new plan as it was, but for what diverged or failed."""
    if old.get("budget") != new.get("budget"):
        return False
    played = {path.parent.name for path in (folder / RUNS).glob("*/config.yaml")} - _over(folder)
    return played <= new["runs"].keys() and not played & set(_changed(old, new))


def _over(folder: Path) -> set[str]:
    """Name the runs that diverged or failed; one that has come to its end since has not."""
    failed = {name for name in sentences(folder / FAILED) if not (folder / RUNS / name / SUMMARY).exists()}
    return {*sentences(folder / DIVERGED), *failed}


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Name the runs that both plans have, each with another configuration or for another method."""
    runs, called = old.get("runs") or {}, old.get("called") or {}
    return [
        name
        for name, config in new["runs"].items()
        if name in runs and (runs[name] != config or called.get(name) != new["called"][name])
    ]


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    for name in ("methods", "seeds", "grid", "tune", *(name for name in ("budget",) if name in old or name in new)):
        if old.get(name) != new.get(name):
            return f"{name}: {old.get(name)} there, {new.get(name)} here"
    runs: Mapping[str, Mapping[str, Any]] = old.get("runs") or {}
    for run, config in new["runs"].items():
        for name, value in config.items():
            before = runs.get(run, {}).get(name)
            if before != value:
                return f"{name} of {run}: {before} there, {value} here"
    return "" if list(runs) == list(new["runs"]) else "its runs are others"
