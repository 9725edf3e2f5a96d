"""The client app that a submitted run must name; Coterie's nodes never run it."""

from __future__ import annotations

from coterie.federation.flower.apps import client_app

app = client_app("this is Flower's own SuperNode: start the node with `coterie federate node`")
