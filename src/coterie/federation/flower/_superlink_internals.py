"""Flower's private parts that the process of a SuperLink alone uses.

Apart from :mod:`coterie.federation.flower._internals`, because importing them costs what starting a SuperLink does.
``tests/federation/test_flower_internals.py`` says of these too what Coterie relies on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from flwr.superlink.cli import flower_superlink
from flwr.superlink.main import create_app
from flwr.superlink.routers.control.middlewares import (
    ControlAuthenticationMiddleware,
    ControlLicenseMiddleware,
    ControlSensitiveResponseMiddleware,
)
from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware, authenticate_node
from starlette.middleware import Middleware

_ABOUT: dict[Any, str] = {
    ControlSensitiveResponseMiddleware: "/v1/control/",
    ControlAuthenticationMiddleware: "/v1/control/",
    ControlLicenseMiddleware: "/v1/control/",
    NodeAuthMiddleware: "/v1/fleet/",
}
"""What the paths begin with that each of Flower's layers around a call looks at."""

_UNUSED = frozenset({"ControlEventLogMiddleware", "FleetEventLogMiddleware", "RuntimeTracingMiddleware"})
"""Layers that do nothing here: there are no plugins for logs of events, and nothing is traced.

By name, because not every version of Flower has all of them: 1.42 traces nothing.
"""


def take_server(serve: Callable[..., None]) -> None:
    """Have a SuperLink of this process served by a function that stands in the place of ``uvicorn.run``."""
    flower_superlink.__globals__["uvicorn"] = SimpleNamespace(run=serve)


def shorten_calls() -> None:
    """Lead each call of a SuperLink of this process through those layers only that look at it.

    Nine layers stand around every call, each with a task and two queues of its own: more than half of its time.
    """
    all_layers: Callable[[], Sequence[Middleware]] = create_app.__globals__["_get_middleware"]

    def needed() -> list[Middleware]:
        return [_only_about(layer) for layer in all_layers() if _name_of(layer) not in _UNUSED]

    create_app.__globals__["_get_middleware"] = needed


def check_signatures_once() -> None:
    """Have a SuperLink of this process check a signature once that comes with several calls."""

    @functools.lru_cache(maxsize=4096)
    def verify(key: bytes, message: bytes, signature: bytes) -> bool:
        return verify_signature(bytes_to_public_key(key), message, signature)

    # What is asked for first is a key made of its bytes, then whether a signature is of that key.
    authenticate_node.__globals__["bytes_to_public_key"] = bytes
    authenticate_node.__globals__["verify_signature"] = verify


def _name_of(layer: Middleware) -> str:
    return str(getattr(layer.cls, "__name__", ""))


def _only_about(layer: Middleware) -> Middleware:
    prefix = _ABOUT.get(layer.cls)
    return layer if prefix is None else Middleware(_OnlyAbout, layer=layer, prefix=prefix)


class _OnlyAbout:
    """A layer that calls of other paths pass by."""

    def __init__(self, app: Any, layer: Middleware, prefix: str) -> None:
        self._app, self._prefix = app, prefix
        self._through = layer.cls(app, *layer.args, **layer.kwargs)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        concerned = scope["type"] == "http" and scope["path"].startswith(self._prefix)
        await (self._through if concerned else self._app)(scope, receive, send)
