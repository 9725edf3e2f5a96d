"""The command line: ``coterie``."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

from coterie.errors import CoterieError, CoterieWarning, Interrupted, RankError
from coterie.memory import keep_freed_memory

__all__ = ["main"]


def main() -> None:
    """Run the command line; an error that we raise on purpose is one sentence and exit code 2, never a traceback."""
    # Threads that spin while they wait make a round tens of times as long on a machine that does other work as well.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Looking for plugins of pydantic reads the metadata of every package that is installed.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    keep_freed_memory()
    # Models and losses of the user's may lie in the current folder; behind all else, so that they hide nothing.
    sys.path.append(os.getcwd())
    warnings.formatwarning = _in_one_line(warnings.formatwarning)
    try:
        sys.exit(_run())
    except Interrupted as stop:
        _say(stop)
        sys.exit(128 + stop.signal_number)
    except RankError as error:  # of which the ranks do not agree: each may know something else
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except CoterieError as error:
        _say(f"error: {error}", *getattr(error, "__notes__", ()))
        sys.exit(2)
    except KeyboardInterrupt:
        _say(Interrupted(None))
        sys.exit(130)
    except OSError as error:  # a full disk or a folder without permission, wherever it was met
        if not error.strerror:
            raise
        where = f"{error.filename}: " if error.filename else ""
        _say(f"error: {where}{error.strerror}")
        sys.exit(2)


def _run() -> int:
    """Run the command that the arguments name, and give its exit code."""
    from coterie.cli.app import app
    from coterie.cli.usage import UsageError, usage_sentence

    try:
        code = app(prog_name="coterie", standalone_mode=False)
    except UsageError as error:
        if sentence := usage_sentence(error):
            _say(f"error: {sentence}")
        return 2
    return code if isinstance(code, int) else 0


def _in_one_line(others: Callable[..., str]) -> Callable[..., str]:
    def text(message: Warning | str, category: type[Warning], *where: Any) -> str:
        return f"warning: {message}\n" if issubclass(category, CoterieWarning) else others(message, category, *where)

    return text


def _say(*lines: object) -> None:
    # What several processes of one run have to say, the first says.
    if os.environ.get("RANK", "0") == "0" or "TORCHELASTIC_RUN_ID" not in os.environ:
        print(*lines, sep="\n", file=sys.stderr)
