"""Certificates that end: said in time, renewed without a gap, taken up by a server that runs."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")

from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.errors import ConfigError
from coterie.federation.flower import certificates, expiry, processes, renewal
from coterie.federation.flower.gate_server import GateServer

HOST = "fed.example.org"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("server", "authority", "nodes/a"):
        (tmp_path / name).mkdir(parents=True)
    certificates.make_authority(tmp_path / "authority", days=100)
    for name in ("server", "nodes/a"):
        (tmp_path / name / "ca.crt").write_bytes((tmp_path / "authority" / "ca.crt").read_bytes())
    certificates.make_server_certificate(tmp_path / "server", tmp_path / "authority", [HOST], days=20)
    return tmp_path


def days_left(path: Path) -> float:
    return (expiry.read_certificate(path).not_valid_after_utc - datetime.now(UTC)) / timedelta(days=1)


def test_a_certificate_is_warned_of_thirty_days_ahead(tmp_path: Path) -> None:
    for days, words in ((31, None), (29, "ends in 28 days"), (2, "ends in 1 day,"), (0, "ended 0 days ago")):
        folder = tmp_path / str(days)
        folder.mkdir()
        certificates.make_authority(folder, days=days)
        found = expiry.warnings_of({"ca.crt": folder / "ca.crt"})
        assert (found == []) if words is None else (len(found) == 1 and f"ca.crt {words}" in found[0]), found
    end = datetime.now(UTC) + timedelta(days=3.5)
    (said,) = expiry.warnings_of({}, {"the server": end, "another": None})
    assert said.startswith(f"the certificate of the server ends in 3 days, on {end:%Y-%m-%d}: renew it with")


@pytest.mark.parametrize("content", [None, b"", b"not a certificate"])
def test_what_is_no_certificate_is_said_to_be_none(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "ca.crt").write_bytes(content)
    with pytest.raises(ConfigError, match=r"ca.crt (cannot be read: No such file|is not a certificate in PEM's form)"):
        expiry.warnings_of({"ca.crt": tmp_path / "ca.crt"})


def test_a_renewed_certificate_is_for_the_same_key_and_names(project: Path) -> None:
    server = project / "server"
    key, before = (server / "server.key").read_bytes(), (server / "server.crt").read_bytes()
    done = CliRunner().invoke(app, ["federate", "renew", str(project), "--days", "60"], catch_exceptions=False)
    assert "server.crt holds until" in done.output
    assert 59 < days_left(server / "server.crt") <= 60
    assert (server / "server.key").read_bytes() == key
    (copy,) = server.glob("server.crt.*")
    assert copy.read_bytes() == before
    old, new = expiry.read_certificate(copy), expiry.read_certificate(server / "server.crt")
    assert renewal._names(new) == renewal._names(old) and new.subject == old.subject
    assert new.public_key() == old.public_key() and new.serial_number != old.serial_number
    new.verify_directly_issued_by(expiry.read_certificate(project / "nodes" / "a" / "ca.crt"))
    renewal.check_pair(server)


def test_the_key_is_renewed_if_asked_for_and_stays_secret(project: Path) -> None:
    server = project / "server"
    before = (server / "server.key").read_bytes()
    renewal.renew(project, 60, new_key=True, authority_too=False)
    assert (server / "server.key").read_bytes() != before
    (copy,) = server.glob("server.key.*")
    assert copy.read_bytes() == before
    assert {path.stat().st_mode & 0o077 for path in (copy, server / "server.key")} == {0}
    renewal.check_pair(server)


def test_a_renewal_that_was_cut_short_between_key_and_certificate_is_mended_by_the_next(project: Path) -> None:
    server = project / "server"
    (server / "server.key").write_bytes(certificates.as_pem(certificates.new_key()))
    with pytest.raises(ConfigError, match=r"server.key is not the key of .*server.crt: run `coterie federate renew`"):
        renewal.check_pair(server)
    renewal.renew(project, 60, new_key=False, authority_too=False)
    renewal.check_pair(server)


def test_no_certificate_outlives_its_authority_which_can_be_renewed_too(project: Path) -> None:
    (told, _) = renewal.renew(project, 365, new_key=False, authority_too=False)
    assert told.startswith("the authority's own certificate ends in 99 days")
    assert 98 < days_left(project / "server" / "server.crt") <= 99
    old = expiry.read_certificate(project / "authority" / "ca.crt")
    (told, _) = renewal.renew(project, 365, new_key=False, authority_too=True)
    assert "give every silo the new" in told
    for name in ("authority", "server", "nodes/a"):
        assert 364 < days_left(project / name / "ca.crt") <= 365
    made = expiry.read_certificate(project / "server" / "server.crt")
    made.verify_directly_issued_by(old)  # silos that still have the old one
    made.verify_directly_issued_by(expiry.read_certificate(project / "nodes" / "a" / "ca.crt"))


def test_what_stands_in_the_way_of_a_renewal_is_said(project: Path, tmp_path: Path) -> None:
    os.rename(project / "authority" / "ca.key", project / "ca.key")
    with pytest.raises(ConfigError, match=r"ca.key cannot be read \(No such file.*bring it back"):
        renewal.renew(project, 60, new_key=False, authority_too=False)
    os.rename(project / "ca.key", project / "authority" / "ca.key")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    certificates.make_authority(foreign)
    for name in ("server.crt", "server.key"):
        (project / "server" / name).unlink()
    certificates.make_server_certificate(project / "server", foreign, [HOST])
    with pytest.raises(ConfigError, match=r"server.crt is not from the federation's own authority"):
        renewal.renew(project, 60, new_key=False, authority_too=False)


def test_a_server_that_runs_takes_up_the_new_certificate(project: Path) -> None:
    server, port, said = project / "server", processes.free_port(), [""]
    certificates.make_inside(processes.internal_certificates(server))
    gate = GateServer(server, ("127.0.0.1", port), 1, [], 1000, said.append)
    ready, seen, over = threading.Event(), list[float](), threading.Event()

    def visit() -> None:
        try:
            assert ready.wait(60)
            seen.append(days_offered(port, server / "ca.crt"))
            renewal.renew(project, 60, new_key=True, authority_too=False)
            until = time.monotonic() + 60
            while not any(line.startswith("took up") for line in said) and time.monotonic() < until:
                time.sleep(0.05)
            seen.append(days_offered(port, server / "ca.crt"))
        finally:
            over.set()

    visitor = threading.Thread(target=visit)
    visitor.start()
    gate.run(ready.set, over.is_set)
    visitor.join()
    assert 19 < seen[0] <= 20 < 59 < seen[1] <= 60
    assert any("server.crt ends in 19 days" in line for line in said)


def days_offered(port: int, ca: Path) -> float:
    context = ssl.create_default_context(cafile=str(ca))
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as raw,
        context.wrap_socket(raw, server_hostname=HOST) as tls,
    ):
        found = tls.getpeercert()
    assert found is not None
    return (ssl.cert_time_to_seconds(str(found["notAfter"])) - time.time()) / 86400


@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN OPENSSH PRIVATE KEY-----\n", "ed25519", "secp256k1"])
def test_a_nodes_key_that_flower_cannot_use_is_one_sentence(tmp_path: Path, content: bytes | str | None) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    path = tmp_path / "node.key"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "ed25519":
        form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        path.write_bytes(ed25519.Ed25519PrivateKey.generate().private_bytes(*form))
    elif content is not None:
        path.write_bytes(certificates.as_pem(ec.generate_private_key(ec.SECP256K1())))
    with pytest.raises(ConfigError, match=r"node.key .*: make one with ssh-keygen -t ecdsa -b 384 -f node.key -N ''"):
        certificates.read_node_key(path)


def test_what_processes_of_one_machine_know_each_other_by_is_for_their_user_alone(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    certificates.make_inside(inside)
    first = (inside / "secret").read_bytes()
    certificates.make_inside(inside)
    assert (inside / "secret").read_bytes() != first and len(first) == 32
    assert inside.stat().st_mode & 0o077 == 0
    assert not (inside / "ca.key").exists()
