"""The server app that a submitted run names: ``coterie.federation.flower.server_app:app``."""

from __future__ import annotations

import contextlib
from pathlib import Path

from coterie import options
from coterie.errors import Interrupted
from coterie.federation import agreement
from coterie.federation.flower.apps import Settings, server_app
from coterie.federation.plan import Plan
from coterie.federation.server import serve
from coterie.federation.transport import Transport
from coterie.runs.storage.atomic_files import write_text
from coterie.yaml_file import read_yaml


def _serve(transport: Transport, settings: Settings) -> None:
    plan_file, out = Path(str(settings["plan"])), Path(str(settings["out"]))
    try:
        plan = options.make(Plan, read_yaml(plan_file), "plan")
        agreed = agreement.read(Path(str(settings["federation"])))
        names = {number: member.name for number, member in enumerate(agreed.members)}
        serve(agreed, transport, plan, out, listener=lambda event: print(event.told(names)), watch=_tell)
    except Interrupted:  # whoever stopped the run knows
        raise
    except Exception as error:
        # Flower writes an app's errors to its own log; `coterie federate run` waits for this file and shows it.
        with contextlib.suppress(OSError):  # for which a full disk has no room: then it says to look at the log
            write_text(plan_file.with_suffix(".error"), " ".join(_words(error).split()) + "\n")
        raise


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:  # a full disk, or a folder without permission
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _tell(round_number: int, mean: float | None) -> None:
    print(f"round {round_number} done" + ("" if mean is None else f", mean {mean:.4f}"), flush=True)


app = server_app(_serve)
