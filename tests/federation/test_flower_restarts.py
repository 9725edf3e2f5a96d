"""A federation of real processes loses its SuperLink, then its certificate, and meets a copy of a node's folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")

from coterie.errors import ConfigError
from coterie.federation import project
from coterie.federation.flower import certificates, expiry, renewal
from coterie.federation.flower.control import Control
from tests.federation.running import PATIENCE, Federation, free_pair, wait_until

pytestmark = pytest.mark.processes


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    found = Federation(tmp_path / "demo")
    project.init(found.folder, ["north"], port=free_pair())
    try:
        found.serve()
        found.node("north")
        found.wait_for_nodes(1)
        yield found
    finally:
        found.abandon()


def superlink_of(federation: Federation) -> int:
    """Find the SuperLink that the server has started; 0 while there is none."""
    server = federation.started["server"].pid
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            facts = path.read_text(errors="replace").rpartition(")")[2].split()
            if int(facts[1]) == server and b"superlink_program" in path.with_name("cmdline").read_bytes():
                return int(path.parent.name)
    return 0


def is_online(federation: Federation) -> bool:
    control = Control(federation.folder / "server", project.read_server(federation.folder).superlink_port)
    with contextlib.suppress(ConfigError):  # the SuperLink is starting
        return list(control.statuses().values()) == ["online"]
    return False


def test_the_federation_goes_on_after_each_of_them(federation: Federation, tmp_path: Path) -> None:
    folder = federation.folder
    killed = superlink_of(federation)
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: "starting it again" in federation.said("server"), "the server notices")
    wait_until(lambda: superlink_of(federation) not in (0, killed), "there is another")
    superlink = superlink_of(federation)
    shutil.copytree(folder / "nodes" / "north", tmp_path / "copy")
    copy = federation.start("copy", "federate", "node", "copy")
    options = ("--rounds", "1", "--deadline", str(PATIENCE), "--wait", str(PATIENCE), "--minimum", "1")
    wait_until(lambda: is_online(federation), "the node is back")
    federation.run("first", "fedavg", *options)
    federation.end("first")
    assert copy.wait(timeout=PATIENCE) == 2
    federation.started.pop("copy")
    assert "error: another node runs with the key of this one" in federation.said("copy")
    assert superlink_of(federation) == superlink, "it was started once more, and no more"
    expire(folder)
    federation.stop("server")
    federation.serve()
    wait_until(lambda: "certificate has expired" in federation.said("north"), "the node says what is wrong")
    renewal.renew(folder, days=9, new_key=True, authority_too=False)
    wait_until(lambda: "took up the certificate" in federation.said("server"), "the server takes it up")
    wait_until(lambda: is_online(federation), "the node is back")
    assert federation.started["north"].poll() is None
    federation.run("second", "fedavg", *options)
    federation.end("second")


def expire(folder: Path) -> None:
    """Replace the server's certificate by one that ends now."""
    old, ca = expiry.read_certificate(folder / "server" / "server.crt"), folder / "authority"
    key, signer = renewal._key(folder / "server" / "server.key", ""), renewal._key(ca / "ca.key", "")
    made = certificates.server_certificate(
        key.public_key(), expiry.read_certificate(ca / "ca.crt"), signer, renewal._names(old), old.subject, days=0
    )
    (folder / "server" / "server.crt").write_bytes(made)
