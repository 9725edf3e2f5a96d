"""Flower's private parts with which a SuperLink is governed; see :mod:`coterie.federation.flower._internals`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import httpx
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import HEARTBEAT_PATIENCE, Status
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.constant import NodeStatus
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext


class KnownNode(NamedTuple):
    """A node that a SuperLink knows."""

    node_id: int
    public_key: bytes
    status: str
    is_unregistered: bool
    last_seen: float | None = None


class SuperLinkControl:
    """The calls with which Flower's own command line governs a SuperLink."""

    def __init__(self, address: str, ca: bytes, headers: Mapping[str, str]) -> None:
        interceptors = (RuntimeVersionHttpInterceptor("flwr CLI"), _Headers(headers))
        self._client = ControlHttpClient.from_server_address(address, False, ca, interceptors)

    def nodes(self) -> list[KnownNode]:
        """List the nodes, with those that were unregistered."""
        return [
            KnownNode(
                node.node_id, node.public_key, node.status, node.status == NodeStatus.UNREGISTERED, _last_seen(node)
            )
            for node in self._client.ListNodes(ListNodesRequest()).nodes_info
        ]

    def register(self, public_key: bytes, name: str) -> None:
        self._client.RegisterNode(RegisterNodeRequest(public_key=public_key, name=name))

    def unregister(self, node_id: int) -> None:
        self._client.UnregisterNode(UnregisterNodeRequest(node_id=node_id))

    def start_run(self, app: Path, settings: Mapping[str, str]) -> int:
        """Submit the app in a folder with settings that stand over its own; give Flower's number of the run."""
        built = build_fab_from_disk(app)
        fab = fab_to_proto(Fab(hashlib.sha256(built).hexdigest(), built, {}))
        request = StartRunRequest(fab=fab, override_config=user_config_to_proto(dict(settings)))
        return int(self._client.StartRun(request).run_id)

    def is_finished(self, run: int) -> bool:
        """Say whether a run is over, however it ended."""
        return not self._unfinished(ListRunsRequest(run_id=run))

    def unfinished_runs(self, among: int) -> list[int]:
        """List the runs that are not over among so many of the last."""
        return self._unfinished(ListRunsRequest(limit=among))

    def stop_run(self, run: int) -> None:
        self._client.StopRun(StopRunRequest(run_id=run))

    def close(self) -> None:
        self._client.close()

    def _unfinished(self, request: ListRunsRequest) -> list[int]:
        found = self._client.ListRuns(request).run_dict
        return [run for run, each in found.items() if each.status.status != Status.FINISHED]


class _Headers:
    """Puts headers on every call of a client."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = headers

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        context.request.headers.update(self._headers)
        return call_next(context)


def _last_seen(node: NodeInfo) -> float | None:
    """Give the time of the last heartbeat of a node that is there; of another, until when it counted as there."""
    if not node.online_until:
        return None
    ahead = HEARTBEAT_PATIENCE * node.heartbeat_interval if node.status == NodeStatus.ONLINE else 0.0
    return float(node.online_until - ahead)
