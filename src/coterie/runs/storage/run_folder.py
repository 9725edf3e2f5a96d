"""A run's folder: everything that a run leaves behind, and all that is needed to go on with it.

::

    RUN/
      run.json            the folder's format; the versions of Coterie, PyTorch and Python that began it, and when
      code/               the user's own method, model, loss and loader, with a manifest, where there are any
      config.yaml         the configuration, complete; also what makes the folder a run's folder
      metrics.parquet     what was measured (metrics/ with part files while the run goes on)
      timings.jsonl       seconds of every round
      weights/            collaboration weights, where the method has them
      matrix/             accuracy matrices, where they were asked for
      shares.parquet      what each client holds, its name where it has one, and its role
      clients.json        of a federation's server, which has no shares: the members' names
      inputs.json         what the models are fed with: columns, categories, scaling, what fills gaps, classes
      answers.parquet     how each test sample was answered after the last round
      validation_answers.parquet  the same of each validation sample
      ends/               both, of rounds that were the last ones before the run was made longer
      models.safetensors  models of the last round that no checkpoint has: fine-tuned ones, newcomers'
      checkpoint/         the last two checkpoints
      choices.json        what the engine chose by measuring, reused on resume
      summary.json        the result in short, written last: a run that has it is finished

One process writes to it at a time, under a lock that the operating system releases when that process ends, however it
ends. Readers need no lock: every file is replaced in one step.

What is recorded goes to the disk before the checkpoint that closes its rounds, so whichever checkpoint is found after
a kill, everything up to its round is there, and :meth:`RunFolder.rewind` drops what came later.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pandas as pd
from torch import Tensor

from coterie.errors import RunFolderError
from coterie.runs.storage.answers import Answers, keep_answers, write_answers
from coterie.runs.storage.atomic_files import (
    is_draft,
    json_bytes,
    read_json,
    remove_drafts,
    replace_all,
    write_json,
    write_text,
)
from coterie.runs.storage.checkpoints import Checkpoints
from coterie.runs.storage.code_folder import CODE, checksum_of, write_code
from coterie.runs.storage.lock import LOCK_FILE, lock_folder
from coterie.runs.storage.matrix_log import MatrixLog
from coterie.runs.storage.metrics_log import MetricsLog
from coterie.runs.storage.run_files import (
    ABOUT,
    BEGUN_WITH,
    CLIENT_NAMES,
    CONFIG,
    SHARES,
    SUMMARY,
    accuracy_matrix_log,
    collaboration_weights_log,
    read_about,
    read_beginning,
    read_config,
    read_summary,
    shares_file,
    write_about,
)
from coterie.runs.storage.timings_log import TimingsLog
from coterie.user_code import Copies
from coterie.yaml_file import yaml_text

CHOICES = "choices.json"
"""The file that says what the engine chose by measuring."""


class RunFolder:
    """A run's folder, open for writing: use :meth:`create` or :meth:`open`, and close it (or use ``with``).

    Parameters
    ----------
    path
        The folder.
    lock
        The open lock file, which belongs to this object from now on; ``None`` if another process writes.
    config
        The run's configuration.

    Attributes
    ----------
    path
        The folder.
    metrics
        What was measured.
    timings
        Seconds of every round.
    collaboration_weights
        How much each client took from every other.
    accuracy_matrices
        Each personal model on each client's samples.
    checkpoints
        The checkpoints.
    """

    path: Path
    metrics: MetricsLog
    timings: TimingsLog
    collaboration_weights: MatrixLog
    accuracy_matrices: MatrixLog
    checkpoints: Checkpoints

    def __init__(self, path: Path, lock: int | None, config: dict[str, Any]) -> None:
        self.path = path
        self.metrics = MetricsLog(path)
        self.timings = TimingsLog(path / "timings.jsonl")
        self.collaboration_weights = collaboration_weights_log(path)
        self.accuracy_matrices = accuracy_matrix_log(path)
        self._answers: tuple[int, Mapping[str, Answers]] | None = None
        self._use(config)
        self._release = (lambda: None) if lock is None else weakref.finalize(self, os.close, lock)

    @classmethod
    def create(cls, path: str | os.PathLike[str], config: Mapping[str, Any], code: Copies | None = None) -> Self:
        """Make the folder of a new run, with its configuration (of plain YAML types) and the user's own code.

        A folder that is there already must be empty; whatever is wrong with it is a ``RunFolderError``.
        """
        copies = code or Copies({}, [])
        folder = Path(path)
        with _reported(folder):
            if folder.exists() and not folder.is_dir():
                raise RunFolderError(f"{folder} is a file: choose another --out")
            folder.mkdir(parents=True, exist_ok=True)
            _refuse_unless_empty(folder)
            with contextlib.ExitStack() as on_failure:
                new = cls(folder, lock_folder(folder), {})
                on_failure.callback(new.close)
                _refuse_unless_empty(folder)  # another process may have begun between the look and the lock
                # The configuration last: before it, the folder is not a run's and may be begun anew.
                write_about(folder, checksum_of(copies))
                write_code(folder / CODE, copies)
                new.write_config(config)
                on_failure.pop_all()
        return new

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open the folder of a run that was begun, to go on with it.

        A folder that is not a run's, or to which another process is writing, is refused with a ``RunFolderError``.
        """
        folder = Path(path)
        config = read_config(folder)
        with _reported(folder):
            found = cls(folder, lock_folder(folder), config)
            remove_drafts(*(folder / name for name in ("", "metrics", "weights", "matrix", CODE)))
            found.checkpoints.remove_draft()
        return found

    @classmethod
    def written_elsewhere(cls, path: Path, config: Mapping[str, Any]) -> Self:
        """Give the folder of a run that another process writes, which may not be there yet: only to be read."""
        return cls(path, None, dict(config))

    @property
    def config(self) -> dict[str, Any]:
        """The run's configuration, as it was when the folder was opened; the caller may keep and change it."""
        return copy.deepcopy(self._config)

    @property
    def run_id(self) -> str:
        """What names the run: a digest of its configuration, the same for two runs that must give the same result.

        A run that was made longer keeps the name that it began with.
        """
        text = json.dumps({**self._config, **self._begun_with}, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=8, person=b"coterie run").hexdigest()

    @property
    def choices(self) -> dict[str, Any]:
        """What the engine chose by measuring (kernel, chunk, threads), empty if it has not yet."""
        return read_json(self.path / CHOICES) if (self.path / CHOICES).exists() else {}

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Set the run's configuration, of plain YAML types; once there are checkpoints it can no longer change."""
        if self.checkpoints.rounds():
            raise RunFolderError(f"{self.path} has checkpoints: its configuration can no longer change")
        with _reported(self.path):
            write_text(self.path / CONFIG, yaml_text(config))
        self._use(read_config(self.path))  # as a resumed run will find it

    def lengthen(self, rounds: int) -> None:
        """Let a run go on to a later round than the last of its configuration; one that is as long stays as it is.

        It stays the same run: no round depends on how many there will be. Killed within, it is lengthened again.
        """
        with _reported(self.path):
            if self._config["rounds"] < rounds:
                keep_answers(self.path, self._config["rounds"])
                begun_with = {"rounds": self._config["rounds"], **self._begun_with}
                write_json(self.path / ABOUT, {**read_about(self.path), BEGUN_WITH: begun_with})
                write_text(self.path / CONFIG, yaml_text({**self._config, "rounds": rounds}))
                self._use(read_config(self.path))
            summary = self.summary()
            if summary is not None and summary["rounds"] < self._config["rounds"]:
                (self.path / SUMMARY).unlink()

    def write_beginning(self, shares: bytes, facts: Mapping[str, Mapping[str, Any]]) -> None:
        """Write what each client holds (:func:`~coterie.runs.storage.run_files.shares_file`), and files of facts.

        ``facts`` are by file, of plain JSON types. The folder is forced to the disk once for all of them.
        """
        files = ((name, json_bytes(value)) for name, value in facts.items())
        with _reported(self.path):
            replace_all(self.path, [(SHARES, shares), *files])

    def write_choices(self, choices: Mapping[str, Any]) -> None:
        """Write what the engine chose by measuring, of plain JSON types."""
        self.write_facts(CHOICES, choices)

    def write_facts(self, file: str, facts: Mapping[str, Any]) -> None:
        """Write a file of facts, of plain JSON types."""
        with _reported(self.path):
            write_json(self.path / file, facts, sealed=True)

    def write_shares(self, shares: pd.DataFrame) -> None:
        """Write what each client holds, a row for each."""
        self.write_beginning(shares_file(shares), {})

    def write_client_names(self, names: Sequence[str]) -> None:
        """Write the clients' names, in the order of their numbers, where there are no shares that have them."""
        self.write_facts(CLIENT_NAMES, {"names": list(names)})

    def record_answers(self, round_number: int, found: Mapping[str, Answers]) -> None:
        """Record how each sample of some splits was answered after a round that is the last one."""
        self._answers = (round_number, found) if found else None

    def flush(self) -> None:
        """Put everything recorded so far on the disk."""
        with _reported(self.path):
            if self._answers is not None:
                write_answers(self.path, *self._answers)
                self._answers = None
            self.metrics.flush()
            self.collaboration_weights.flush()
            self.accuracy_matrices.flush()
            self.timings.flush()

    def checkpoint(
        self,
        round_number: int,
        server: Mapping[str, Tensor],
        clients: Mapping[str, Tensor],
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Put everything recorded so far on the disk, then write a checkpoint of a round; ``extra`` is JSON."""
        self.flush()
        with _reported(self.path):
            self.checkpoints.save(round_number, server, clients, extra)

    def rewind(self, round_number: int) -> None:
        """Drop everything recorded after a round (-1: all), and the summary: the run goes on from there."""
        with _reported(self.path):
            (self.path / SUMMARY).unlink(missing_ok=True)
            self._answers = None
            self.metrics.cut(round_number)
            self.collaboration_weights.cut(round_number)
            self.accuracy_matrices.cut(round_number)
            self.timings.cut(round_number)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Merge the metrics, then write the summary, which says that the run is finished."""
        self.flush()
        with _reported(self.path):
            self.metrics.merge()
        self.write_summary(summary)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        with _reported(self.path):
            write_json(self.path / SUMMARY, summary, sealed=True)

    def summary(self) -> dict[str, Any] | None:
        """Read the result in short; ``None`` if the run is not finished."""
        return read_summary(self.path)

    def close(self) -> None:
        """Release the lock; what was not flushed is not kept."""
        self._release()

    def _use(self, config: dict[str, Any]) -> None:
        self._config = config
        self._begun_with = read_beginning(self.path)
        self.checkpoints = Checkpoints(self.path / "checkpoint", self.run_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _refuse_unless_empty(folder: Path) -> None:
    # A lock, drafts and what is written before the configuration are left by a run that was killed before it began.
    leftovers = {LOCK_FILE, *((ABOUT, CODE) if _is_about_a_run(folder / ABOUT) else ())}
    inside = sorted(path.name for path in folder.iterdir() if path.name not in leftovers and not is_draft(path))
    if CONFIG in inside:
        raise RunFolderError(f"{folder} holds a run already: choose another --out, or `coterie resume {folder}`")
    if inside:
        raise RunFolderError(f"{folder} is not empty (it holds {inside[0]!r}): choose another --out")


def _is_about_a_run(file: Path) -> bool:
    try:
        return {"format", "coterie", "code"} <= read_json(file).keys()
    except (RunFolderError, OSError):
        return False


@contextlib.contextmanager
def _reported(folder: Path) -> Iterator[None]:
    """Turn the operating system's refusals (no space, no permission) into the sentence that the user reads."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be written ({error.strerror or error})") from error
