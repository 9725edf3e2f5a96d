"""On the server's own machine a SuperLink answers to the server's user alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")

import httpx
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.middleware import Middleware

from coterie.errors import ConfigError
from coterie.federation import project
from coterie.federation.flower import _internals, _superlink_internals, certificates, processes
from coterie.federation.flower.control import Control
from coterie.federation.flower.superlink_door import HEADER, Door, pass_of
from tests.federation.running import flwr


def entered(path: str, headers: list[tuple[bytes, bytes]]) -> bool:
    reached, sent = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("nothing of the call is read")

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    asyncio.run(Door(app, b"secret")({"type": "http", "path": path, "headers": headers}, receive, send))
    assert bool(reached) != bool(sent and sent[0]["status"] == 403)
    return bool(reached)


def test_who_knows_the_secret_comes_in_and_nobody_else() -> None:
    name, right = HEADER.encode(), pass_of(b"secret").encode()
    for path in ("/v1/control/start-run", "/v1/fleet/push-object", "/docs", "/v1/runtime/responses"):
        assert entered(path, [(b"x", b"y"), (name, right)])
        for headers in ([], [(name, b"")], [(name, b"secret")], [(name, right[:-1])], [(name, right)] * 2):
            assert not entered(path, headers)
    assert entered("/v1/runtime/pull-messages", [])  # where Flower asks for the token of a task
    assert not entered("/v1/runtime/pull-messages/", [])
    assert not entered("/v1/runtime/../control/start-run", [])


def test_a_signature_is_checked_once_and_a_wrong_one_never_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    names = _superlink_internals.authenticate_node.__globals__
    for name in ("bytes_to_public_key", "verify_signature"):
        monkeypatch.setitem(names, name, names[name])  # put back at the end
    checked: list[bytes] = []
    real = _superlink_internals.verify_signature

    def verify(key: Any, message: bytes, signature: bytes) -> bool:
        checked.append(message)
        return real(key, message, signature)

    monkeypatch.setattr(_superlink_internals, "verify_signature", verify)
    _superlink_internals.check_signatures_once()
    first, second = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))

    def passes(key: ec.EllipticCurvePrivateKey, message: bytes, signature: bytes) -> bool:
        public = names["bytes_to_public_key"](_internals.stored_key(key.public_key()))
        return bool(names["verify_signature"](public, message, signature))

    signature = first.sign(b"now", ec.ECDSA(hashes.SHA256()))
    assert passes(first, b"now", signature) and passes(first, b"now", signature)
    assert checked == [b"now"]
    assert not passes(second, b"now", signature)
    assert not passes(first, b"later", signature)
    assert not passes(first, b"now", second.sign(b"now", ec.ECDSA(hashes.SHA256())))
    with pytest.raises(ValueError):
        names["verify_signature"](names["bytes_to_public_key"](b"no key"), b"now", signature)


@pytest.mark.parametrize("idle", [[], ["RuntimeTracingMiddleware", "FleetEventLogMiddleware"]], ids=["none", "some"])
def test_idle_layers_are_passed_by_where_flower_has_them(monkeypatch: pytest.MonkeyPatch, idle: list[str]) -> None:
    class Needed:
        def __init__(self, app: Any) -> None: ...

    layers = [Middleware(type(name, (Needed,), {})) for name in idle] + [Middleware(Needed)]
    names = _superlink_internals.create_app.__globals__
    monkeypatch.setitem(names, "_get_middleware", lambda: layers)
    _superlink_internals.shorten_calls()
    assert [layer.cls for layer in names["_get_middleware"]()] == [Needed]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """Run a SuperLink in a project's folder."""
    folder, port = tmp_path_factory.mktemp("superlink") / "demo", processes.free_port()
    project.init(folder, ["north"])
    own = (folder / "server").absolute()
    certificates.make_inside(processes.internal_certificates(own))
    process = processes.start(
        processes.superlink(port, own), processes.environment(own / "flower"), own / "superlink.log", private=True
    )
    try:
        processes.wait_for_port(port, process, "SuperLink", own / "superlink.log")
        yield folder, port
    finally:
        processes.stop(process)


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # of what Flower packs an app with
def test_another_account_of_the_servers_machine_can_neither_submit_nor_look(
    running: tuple[Path, int], tmp_path: Path
) -> None:
    folder, port = running
    control, ca = Control(folder / "server", port), folder / "server" / "inside" / "ca.crt"
    assert control.statuses() == {}
    # Even with the certificate, which it could not read: Flower's own command line has all that it needs.
    for command in (["run", str(folder / "app")], ["list"]):
        assert not flwr(tmp_path, f"127.0.0.1:{port}", ca, *command)["success"]
    assert not control.is_over(control.submit(folder / "app", {"federation": "", "plan": "", "out": ""}))
    trusted = ssl.create_default_context(cafile=str(ca))
    with httpx.Client(verify=trusted, base_url=f"https://127.0.0.1:{port}", trust_env=False) as stranger:
        paths = ["/v1/control/start-run", "/v1/control/register-node", "/v1/fleet/pull-messages", "/docs", "/health"]
        assert [stranger.post(path).status_code for path in paths] == [403] * len(paths)
        claim = stranger.post("/v1/runtime/acquire-task", headers={"content-type": "application/protobuf"})
        pull = stranger.post("/v1/runtime/pull-messages", headers={"content-type": "application/protobuf"})
        assert claim.status_code >= 400 and pull.status_code >= 400
    runs = _internals.runs_of(f"127.0.0.1:{port}", ca.read_bytes(), b"guessed")
    with contextlib.closing(runs), pytest.raises(httpx.HTTPStatusError, match="401 Unauthorized"):
        runs.claim()
    assert (folder / "server" / "inside" / "secret").stat().st_mode & 0o077 == 0


def test_who_may_not_read_the_secret_is_told_whose_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, os.strerror(13), str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=r"inside is for the server's user alone: run this as that user"):
        Control(tmp_path, 1).statuses()
