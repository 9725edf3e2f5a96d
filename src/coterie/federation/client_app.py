"""What the submitted app names for nodes: ``coterie.federation.client_app:app``, which nodes of ours do not run."""

from __future__ import annotations

from coterie.engines.flower.apps import client_app

app = client_app("this SuperNode runs Flower's own executor: start the node with `coterie federate node`")
