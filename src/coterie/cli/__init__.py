"""The command line: ``coterie``."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

from coterie.errors import CoterieError, Interrupted

__all__ = ["main"]


def _in_one_line(ours: type[Warning], others: Callable[..., str]) -> Callable[..., str]:
    def text(message: Warning | str, category: type[Warning], *where: Any) -> str:
        return f"warning: {message}\n" if issubclass(category, ours) else others(message, category, *where)

    return text


def main() -> None:
    """Run the command line; an error that we raise on purpose is one sentence and exit code 2, never a traceback."""
    # Threads that spin while they wait make a round tens of times as long on a machine that does other work as well.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Models and losses of the user's may lie in the current folder; behind all else, so that they hide nothing.
    sys.path.append(os.getcwd())
    try:
        from coterie.cli.app import app  # takes seconds, in which Ctrl-C should be answered as well
        from coterie.tracking import TrackerWarning

        warnings.formatwarning = _in_one_line(TrackerWarning, warnings.formatwarning)
        app(prog_name="coterie")
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        sys.exit(128 + stop.signal_number)
    except CoterieError as error:
        print(f"error: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(Interrupted(None), file=sys.stderr)
        sys.exit(130)
