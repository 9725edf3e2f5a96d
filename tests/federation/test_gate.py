"""The gate: what is not signed by a member, or is larger than a message, never reaches the SuperLink."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import MutableMapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")

import httpx
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.federation.flower import certificates, key_claims
from coterie.federation.flower._internals import PULL_PATH
from coterie.federation.flower.bells import Bell
from coterie.federation.flower.gate import Gate
from coterie.federation.flower.held_calls import HeldCalls
from coterie.federation.flower.pushed_bytes import PushedBytes

LIMIT = 1000
MEMBER, STRANGER = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())


def openssh(key: ec.EllipticCurvePrivateKey) -> str:
    form = (serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return key.public_key().public_bytes(*form).decode()


def signed(
    key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey | None = None, age: float = 0.0
) -> list[tuple[bytes, bytes]]:
    """Give the headers of a SuperNode's call: its key, the time, and the time as signed."""
    form = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    now = (datetime.now(UTC) - timedelta(seconds=age)).isoformat().encode()
    signature = (signer or key).sign(now, ec.ECDSA(hashes.SHA256()))
    public = key.public_key().public_bytes(*form)
    return [
        (b"flwr-public-key", base64.b64encode(public)),
        (b"flwr-timestamp", now),
        (b"flwr-signature", base64.b64encode(signature)),
    ]


class Called:
    """A gate before a SuperLink that notes what reaches it."""

    def __init__(self, folder: Path) -> None:
        certificates.make_authority(folder)
        self.gate = Gate(
            "https://127.0.0.1:1", str(folder / "ca.crt"), [f"{openssh(MEMBER)} a comment"], LIMIT, {"pass": "ours"}
        )
        self.reached: list[int] = []
        self.passes: list[list[str]] = []
        self.read, self.status = 0, 200

        async def superlink(request: httpx.Request) -> httpx.Response:
            self.reached.append(len(await request.aread()))
            self.passes.append(request.headers.get_list("pass"))
            return httpx.Response(self.status, stream=httpx.ByteStream(b"fine"))

        self.gate._client = httpx.AsyncClient(transport=httpx.MockTransport(superlink))

    def post(self, headers: list[tuple[bytes, bytes]], pieces: list[bytes], path: str = "/v1/fleet/push-object") -> int:
        sent: list[MutableMapping[str, Any]] = []
        waiting = list(pieces)

        async def receive() -> dict[str, Any]:
            self.read += 1
            return {"type": "http.request", "body": waiting.pop(0), "more_body": bool(waiting)}

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        asyncio.run(self.gate(scope, receive, send))
        return int(sent[0]["status"])


def test_a_members_call_goes_through(tmp_path: Path) -> None:
    called = Called(tmp_path)
    assert called.post(signed(MEMBER), [b"x" * 400, b"x" * 600]) == 200
    assert called.reached == [LIMIT]


def test_the_superlink_knows_the_gate_by_a_header_that_is_not_a_nodes(tmp_path: Path) -> None:
    called = Called(tmp_path)
    assert called.post([*signed(MEMBER), (b"pass", b"theirs")], [b"x"]) == 200
    assert called.passes == [["ours"]]


@pytest.mark.parametrize(
    "headers",
    [
        [],
        signed(STRANGER),
        signed(MEMBER, signer=STRANGER),
        signed(MEMBER, age=3600),
        signed(MEMBER)[:2],
        [(name, b"\xff" + value[1:]) for name, value in signed(MEMBER)],
        [(b"flwr-public-key", b"eA=="), *signed(MEMBER)[1:]],
    ],
    ids=["none", "stranger", "anothers key", "old", "unsigned", "bytes", "no key"],
)
def test_a_strangers_call_is_not_even_read(tmp_path: Path, headers: list[tuple[bytes, bytes]]) -> None:
    called = Called(tmp_path)
    assert called.post(headers, [b"x"] * 3) == 401
    assert (called.read, called.reached) == (0, [])


def test_a_call_larger_than_a_message_is_cut_off(tmp_path: Path) -> None:
    called = Called(tmp_path)
    assert called.post([*signed(MEMBER), (b"content-length", b"1001")], [b"x" * 1001]) == 413
    assert called.read == 0
    # One that does not say how long it is, or says less, is read no further than the limit.
    assert called.post(signed(MEMBER), [b"x" * 600] * 100) == 413
    assert (called.read, called.reached) == (2, [])


def test_a_member_cannot_send_a_reply_of_parts_without_end(tmp_path: Path) -> None:
    called, bell = Called(tmp_path), Bell(tmp_path / "bell")
    bell.ring()
    called.gate._pushed = PushedBytes(bell, 3 * LIMIT)
    part, others = [bytes(LIMIT)], "/v1/fleet/pull-object"
    for _ in range(2):
        assert [called.post(signed(MEMBER), part) for _ in range(5)] == [200, 200, 200, 413, 413]
        assert called.post(signed(MEMBER), part, others) == 200  # it may ask for as much as it likes
        bell.ring()  # there is a message to answer
    assert sum(called.reached) == 8 * LIMIT


def test_a_500_of_the_superlink_is_one_that_nodes_try_again_after(tmp_path: Path) -> None:
    """Of these statuses Flower's own client retries 502, 503 and 504, and takes a 500 for the end."""
    called = Called(tmp_path)
    for status, told in ((500, 503), (502, 502), (412, 412)):
        called.status = status
        assert called.post(signed(MEMBER), [b"x"]) == told


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"holder": 3}', b'{"holder": ""}', b"\xff", b"[" * 900, b"{" + b" " * 2000 + b"}"]
)
def test_what_is_no_claim_is_said_to_be_none(tmp_path: Path, body: bytes) -> None:
    called = Called(tmp_path)
    assert called.post(signed(MEMBER), [body], key_claims.PATH) == 400
    assert called.post(signed(STRANGER), [body], key_claims.PATH) == 401
    assert called.reached == []


@pytest.mark.parametrize("goes", [False, True])
@pytest.mark.parametrize("pieces", [[b"x"], [b"x", b"y", b"z"]])
def test_a_held_call_of_a_node_that_went_away_is_not_passed_on(tmp_path: Path, goes: bool, pieces: list[bytes]) -> None:
    """A SuperLink gives a message once: to a call that nobody waits for, it would be lost."""
    called = Called(tmp_path)
    held = HeldCalls(Bell(tmp_path / "sent"), Bell(tmp_path / "replied"), seconds=0.05)
    called.gate._held = held
    sent: list[MutableMapping[str, Any]] = []

    async def call() -> None:
        waiting, gone = list(pieces), asyncio.Event()

        async def receive() -> dict[str, Any]:
            if waiting:
                return {"type": "http.request", "body": waiting.pop(0), "more_body": bool(waiting)}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": PULL_PATH, "query_string": b"", "headers": signed(MEMBER)}
        if goes:
            asyncio.get_running_loop().call_later(0.01, gone.set)
        await called.gate(scope, receive, send)

    async def both() -> None:
        await call()
        await call()

    asyncio.run(both())
    # The first is not held, and the second is; in pieces, which no node sends, that it went away is not seen.
    assert called.reached == [sum(map(len, pieces))] * (1 if goes and len(pieces) == 1 else 2)
    assert bool(held._asked) == (len(called.reached) == 2)


def test_other_paths_are_closed_to_members_too(tmp_path: Path) -> None:
    called = Called(tmp_path)
    assert called.post(signed(MEMBER), [b""], path="/v1/control/start-run") == 403
    assert called.reached == []


def test_a_stranger_that_asks_to_join_is_answered_by_the_superlink_if_it_is_brief(tmp_path: Path) -> None:
    called, join = Called(tmp_path), "/v1/fleet/activate-node"
    assert called.post(signed(STRANGER), [b"x"] * 3, join) == 200 and called.reached == [3]
    assert called.post(signed(STRANGER), [b"x" * 2**13] * 3, join) == 413
    length = [*signed(STRANGER), (b"content-length", str(2**14 + 1).encode())]
    assert called.post(length, [b"x"], join) == 413 and called.reached == [3]
