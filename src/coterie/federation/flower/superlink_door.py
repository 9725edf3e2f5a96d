"""The door of a SuperLink: whoever calls must know the server's secret.

A SuperLink listens on its own machine alone, but there everybody can reach it, and Flower asks for no login where code
is submitted, nodes are let in and runs are listed. The secret is in a file that only the server's user can read. The
process of a run, which is Flower's own program, names the token of its task instead, and Flower asks for that itself.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from coterie.federation.flower._internals import RUN_PATHS

HEADER = "coterie-pass"
"""Under which a call tells that it knows the secret."""

Asgi = Callable[
    [
        MutableMapping[str, Any],
        Callable[[], Awaitable[MutableMapping[str, Any]]],
        Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ],
    Awaitable[None],
]


def pass_of(secret: bytes) -> str:
    """Give what a call tells: not the secret itself, by which Flower knows who may claim a run."""
    return hashlib.blake2b(secret, digest_size=32, person=b"coterie pass").hexdigest()


class Door:
    """An ASGI app that lets those into another one who know a secret.

    Parameters
    ----------
    app
        What is behind it.
    secret
        The secret.
    """

    def __init__(self, app: Asgi, secret: bytes) -> None:
        self._app, self._pass = app, pass_of(secret).encode()

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ) -> None:
        """Pass a call on, or refuse it before any of it is read."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and self._may_enter(scope)):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            text = b"this SuperLink is Coterie's: use `coterie federate`"
            headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(text)).encode())]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": text})

    def _may_enter(self, scope: MutableMapping[str, Any]) -> bool:
        told = [value for name, value in scope["headers"] if name == HEADER.encode()]
        return scope["path"] in RUN_PATHS or (len(told) == 1 and hmac.compare_digest(told[0], self._pass))
