"""What a SuperNode runs: ``coterie.federation.client_app:app``; passes blocks on to the node that stays."""

from __future__ import annotations

from coterie.engines.flower.apps import Settings, client_app
from coterie.federation.resident import ask


def _handle(block: bytes, settings: Settings) -> bytes:
    return ask(str(settings["socket"]), block)


app = client_app(_handle)
