"""Every error that Coterie raises on purpose, as one tree.

::

    CoterieError
    ├── ConfigError         a setting has the wrong name, type or range, or contradicts another
    │   └── UnknownName     a registry has no entry of that name (the message suggests the nearest)
    ├── DataError           a data set is missing, damaged, or not what it says it is
    ├── PartitionError      the samples cannot be distributed among the clients as asked
    ├── ModelError          a model cannot be trained as rows
    ├── RunFolderError      a run folder exists already, is missing, or is in use
    ├── CheckpointError     a checkpoint is damaged, or belongs to another run
    ├── AlgorithmError      an algorithm broke its contract with the engine
    ├── RankError           a rank of a sharded run is gone, or no longer has what the others have
    ├── Diverged            a model became NaN or infinite
    └── Interrupted         the user stopped the run, which can be resumed

Each message is one sentence that names the field, the value and what is allowed. The command line prints it and exits
with code 2 (130 if interrupted). A traceback is always a bug of Coterie.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Iterable, Mapping

_WORD, _SHOWN = re.compile(r"\S{500,}"), 200  # letters of a word that is cut, and what is left of it


class CoterieError(Exception):
    """Base of all errors raised on purpose."""

    def __str__(self) -> str:
        """Give the sentence; a value of thousands of letters in it is cut."""
        return _WORD.sub(lambda found: f"{found[0][:_SHOWN]}…", super().__str__())


class CoterieWarning(UserWarning):
    """Base of all warnings: something beside the run failed, and the run goes on."""


class ConfigError(CoterieError):
    """A setting has the wrong name, type or range, or contradicts another."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Ask whether a similar name was meant.

    Parameters
    ----------
    name
        The name that was not found.
    known
        The names there are.

    Returns
    -------
    str
        A question with a space after it, or nothing if no name is similar.
    """
    spelt = {each.casefold(): each for each in known}
    near = difflib.get_close_matches(name.casefold(), list(spelt), n=1, cutoff=0.5)
    return f"did you mean {spelt[near[0]]!r}? " if near else ""


class UnknownName(ConfigError):
    """A registry has no entry of that name.

    Parameters
    ----------
    kind
        What was looked up, for instance ``"algorithm"``.
    name
        The name that was not found.
    known
        The names there are.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        super().__init__(f"there is no {kind} {name!r}: {nearest(name, names)}known are {', '.join(names)}")
        self.kind, self.name, self.known = kind, name, names


class DataError(CoterieError):
    """A data set is missing, damaged, or not what it says it is."""


class PartitionError(CoterieError):
    """The samples cannot be distributed among the clients as asked."""


class ModelError(CoterieError):
    """A model cannot be trained as rows."""


class RunFolderError(CoterieError):
    """A run folder exists already, is missing, or is in use."""


class CheckpointError(CoterieError):
    """A checkpoint is damaged, or belongs to another run."""


class AlgorithmError(CoterieError):
    """An algorithm broke its contract with the engine."""


class RankError(CoterieError):
    """A rank of a sharded run is gone, or no longer has what the others have."""


class RunsFailed(ConfigError):
    """Some runs of a comparison failed, and all others have ended.

    Parameters
    ----------
    sentence
        What is said of it.
    runs
        What each of them failed with, by its name.
    """

    def __init__(self, sentence: str, runs: Mapping[str, str]) -> None:
        self.runs = dict(runs)
        super().__init__(sentence)

    def __reduce__(self) -> tuple[type[RunsFailed], tuple[str, dict[str, str]]]:
        return type(self), (str(self), self.runs)


class Diverged(CoterieError):
    """A model became NaN or infinite.

    Parameters
    ----------
    round_number
        The round in which it was seen, counted from 1.
    clients
        The clients whose models are not finite; none if it is the server's own state.
    what
        What of theirs it is.
    """

    def __init__(self, round_number: int, clients: Iterable[int], what: str = "model") -> None:
        self.round_number, self.clients = round_number, sorted(clients)
        shown = ", ".join(map(str, self.clients[:10])) + (" …" if len(self.clients) > 10 else "")
        many = f"the models of {len(self.clients)} clients are"
        if what != "model":
            many = f"the {what} of {len(self.clients)} clients is"
        whose = {0: "the server's state is", 1: f"the {what} of client {shown} is"}.get(len(self.clients), many)
        which = f" ({shown})" if len(self.clients) > 1 else ""
        super().__init__(
            f"round {round_number}: {whose} no longer finite{which}; try a smaller --lr; everything recorded so far is "
            "kept"
        )


class Interrupted(CoterieError):
    """The run was stopped by the user; it can be resumed.

    Parameters
    ----------
    path
        The run's folder, ``None`` if none was made yet.
    round_number
        The last round that is kept.
    signal_number
        The signal that stopped it, by default Ctrl-C's.
    """

    def __init__(self, path: str | os.PathLike[str] | None, round_number: int = 0, signal_number: int = 2) -> None:
        self.path, self.round_number, self.signal_number = path, round_number, signal_number
        if path is None:
            super().__init__("interrupted before a round was played: what was there is as it was")
        else:
            again = f"coterie resume {shlex.quote(os.fspath(path))}"
            super().__init__(f"interrupted; everything up to round {round_number} is kept, go on with: {again}")
