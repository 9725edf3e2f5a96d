"""The gate in front of a SuperLink: lets the nodes' calls through and nothing else.

On one port, Flower serves the nodes' calls, the calls that submit code and list runs, and the calls of its own
processes, and it asks for no login on the second kind. So the SuperLink listens on this machine alone, and the port
that nodes reach is the gate's. It forwards the nodes' paths only, and of these only calls that are signed with the key
of a member and not larger than a message may be. Flower authenticates each of these calls too, but reads all of it
first: what a stranger posted stayed in its memory.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, MutableMapping
from typing import Any

import httpx

from coterie.federation.flower import key_claims
from coterie.federation.flower._internals import NODES_PATH, PULL_PATH, NodeSignatures
from coterie.federation.flower.callers import Callers
from coterie.federation.flower.held_calls import HeldCalls
from coterie.federation.flower.pushed_bytes import PushedBytes

_NODES = re.compile(re.escape(NODES_PATH) + "[a-z-]+")
_JOINING = re.compile(re.escape(NODES_PATH) + "(register|activate)-node")
_JOINING_LIMIT = 2**14  # bytes; such a call names a key and no more
_NOT_FORWARDED = {b"host", b"connection", b"transfer-encoding", b"keep-alive", b"upgrade", b"te", b"trailer"}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Gate:
    """An ASGI app that forwards the nodes' calls to a SuperLink.

    Parameters
    ----------
    superlink
        The SuperLink's address, as ``https://127.0.0.1:9093``.
    ca
        File with the certificate of the authority that signed the SuperLink's.
    keys
        The public keys of the members in OpenSSH's form.
    limit
        Bytes that a call may have.
    headers
        What the SuperLink knows the gate by.
    held
        Holds calls for messages until there may be one; ``None`` to pass them on at once.
    pushed
        Counts what members send; ``None`` to count nothing.
    callers
        Told on which connections members' calls come.
    """

    def __init__(
        self,
        superlink: str,
        ca: str,
        keys: Collection[str],
        limit: int,
        headers: Mapping[str, str],
        held: HeldCalls | None = None,
        pushed: PushedBytes | None = None,
        callers: Callers | None = None,
    ) -> None:
        self._superlink, self._limit = superlink, limit
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._held, self._pushed, self._callers = held, pushed, callers
        self._signatures, self._claims = NodeSignatures(keys), key_claims.KeyClaims()
        self._context = ssl.create_default_context(cafile=ca)
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def loop(self) -> asyncio.AbstractEventLoop:
        """Give the event loop that it runs in."""
        assert self._loop is not None
        return self._loop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a node's call, refuse any other."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            # The whole path must be one of the nodes': nothing that a proxy and a server might read differently.
            if scope["method"] != "POST" or not _NODES.fullmatch(scope["path"]) or scope["query_string"]:
                await _answer(send, 403, b"only nodes may call here")
            elif (member := self._signatures.signer(dict(scope["headers"]))) is not None:
                if self._callers is not None:
                    self._callers.is_member(scope.get("client"), member)
                if scope["path"] == key_claims.PATH:
                    await self._claim(member, receive, send)
                else:
                    waiting = await self._hold(member, scope["path"], receive)
                    if waiting is not None:
                        await self._forward(scope, waiting, send, self._limit, member)
            elif _JOINING.fullmatch(scope["path"]):
                # Refused by the SuperLink, in words by which a node's program ends and says why: to our 401 it ends as
                # if all were well.
                await self._forward(scope, receive, send, _JOINING_LIMIT)
            else:
                await _answer(send, 401, b"Invalid SuperNode authentication")

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self._loop, limits = asyncio.get_running_loop(), httpx.Limits(keepalive_expiry=60.0)
                self._client = httpx.AsyncClient(verify=self._context, timeout=300.0, limits=limits, trust_env=False)
                await send({"type": "lifespan.startup.complete"})
            else:
                if self._client is not None:
                    await self._client.aclose()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _hold(self, member: bytes, path: str, receive: Receive) -> Receive | None:
        """Hold a call that would be in vain; give what receives the rest of it, or ``None`` if its node went away."""
        if self._held is None:
            return receive
        if path != PULL_PATH:
            await self._held.hold(member, path)
            return receive
        first = await receive()
        more = asyncio.ensure_future(receive())
        await self._held.hold(member, path)
        if more.done() and more.result()["type"] == "http.disconnect":
            # Not passed on: the SuperLink would give the next message to nobody.
            self._held.forget(member)
            return None
        pieces = [first]
        if first.get("more_body", False):
            pieces.append(await more)
        else:
            more.cancel()

        async def rest() -> MutableMapping[str, Any]:
            return pieces.pop(0) if pieces else await receive()

        return rest

    async def _claim(self, member: bytes, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more and len(body) <= key_claims.LIMIT:
            message = await receive()
            body += message.get("body", b"")
            more = message["type"] == "http.request" and message.get("more_body", False)
        try:
            if len(body) > key_claims.LIMIT:
                raise ValueError("a claim is brief")
            granted = self._claims.take(member, body)
            await _answer(send, 200 if granted else 409, b"yours" if granted else b"another node has this key")
        except (ValueError, RecursionError):
            await _answer(send, 400, b"this is no claim")

    async def _forward(self, scope: Scope, receive: Receive, send: Send, limit: int, member: bytes = b"") -> None:
        if _length(scope["headers"]) > limit:
            await _answer(send, 413, b"the call is larger than a message may be")
            return

        async def body() -> AsyncIterator[bytes]:
            more, seen = True, 0
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise httpx.ReadError("the node went away")
                piece = message.get("body", b"")
                seen += len(piece)
                if seen > limit:  # of a call that does not say how long it is, or says less
                    raise _TooLarge
                if self._pushed is not None and not self._pushed.take(member, scope["path"], len(piece)):
                    raise _TooLarge
                yield piece
                more = message.get("more_body", False)

        assert self._client is not None
        own = {name for name, _ in self._headers}
        headers = [(name, value) for name, value in scope["headers"] if name not in _NOT_FORWARDED | own]
        headers += self._headers
        request = self._client.build_request("POST", self._superlink + scope["path"], headers=headers, content=body())
        try:
            response = await self._client.send(request, stream=True)
        except _TooLarge:
            await _answer(send, 413, b"the call is larger than a message may be")
            return
        except httpx.HTTPError:
            await _answer(send, 502, b"the SuperLink does not answer")
            return
        try:
            passed = [(name.lower(), value) for name, value in response.headers.raw]
            passed = [(name, value) for name, value in passed if name not in _NOT_FORWARDED]
            # Flower's own SuperNode takes a 500 for the end of everything, and a 503 for a reason to try again.
            status = 503 if response.status_code == 500 else response.status_code
            await send({"type": "http.response.start", "status": status, "headers": passed})
            async for piece in response.aiter_raw():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await response.aclose()


class _TooLarge(Exception):
    """A call goes on beyond what it may have."""


def _length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """Give the bytes that a call says it has; 0 where it does not say, which is found out on the way."""
    found = [value for name, value in headers if name == b"content-length"]
    return int(found[0]) if found and found[0].isdigit() else 0


async def _answer(send: Send, status: int, text: bytes) -> None:
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})
