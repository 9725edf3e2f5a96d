"""A node that takes its own place again after it was killed.

Flower counts a SuperNode as running until it has missed its heartbeats for a minute, and meanwhile refuses another with
the same key. Whoever holds that key may sign the dead one off.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.fleet_pb2 import DeactivateNodeRequest
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

_NUMBER = re.compile(r"SuperNode ID: (\d+)")


def sign_off(address: str, ca: Path, key: Path, log: Path) -> None:
    """Sign off the SuperNode that wrote a log; nothing happens where there is none, or it has signed off itself.

    Parameters
    ----------
    address
        Where the server's gate is, as ``host:port``.
    ca
        The certificate of the authority that signed the server's.
    key
        The node's private key.
    log
        What the SuperNode wrote. It must not be running any more.
    """
    found = _NUMBER.findall(log.read_text(encoding="utf-8", errors="replace")) if log.exists() else []
    if not found or not key.exists():
        return
    private = serialization.load_ssh_private_key(key.read_bytes(), password=None)
    if not isinstance(private, ec.EllipticCurvePrivateKey):  # the SuperNode will say that it cannot use it
        return
    interceptors = (RuntimeVersionHttpInterceptor("SuperNode"), NodeAuthHttpInterceptor(private, private.public_key()))
    # A server that is not there, or does not know the node any more, has nothing to be told.
    with (
        contextlib.suppress(httpx.HTTPError),
        FleetHttpClient.from_server_address(address, False, ca.read_bytes(), interceptors) as client,
    ):
        client.DeactivateNode(DeactivateNodeRequest(node_id=int(found[-1])))
