"""Certificates and keys for a try-out; in production they come from whoever runs your certificate authority."""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_PEM = serialization.Encoding.PEM


def write_secret(path: Path, content: bytes) -> None:
    """Write a new file that only its owner may read."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def make_authority(folder: Path, days: int = 365) -> None:
    """Make a certificate authority: ``ca.crt`` and ``ca.key``."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = _named("Coterie try-out authority")
    constraints = x509.BasicConstraints(ca=True, path_length=0)
    built = _builder(name, name, key.public_key(), days).add_extension(constraints, critical=True)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    built = built.add_extension(identifier, critical=False).add_extension(_usage(signs=True), critical=True)
    (folder / "ca.crt").write_bytes(built.sign(key, hashes.SHA384()).public_bytes(_PEM))
    write_secret(folder / "ca.key", _private(key, serialization.PrivateFormat.PKCS8))


def make_server_certificate(folder: Path, authority: Path, hosts: list[str], days: int = 365) -> None:
    """Make a certificate for names and addresses of a server: ``server.crt`` and ``server.key``."""
    ca = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes())
    signer = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), password=None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP384R1())
    alternatives = x509.SubjectAlternativeName(
        [_host(host) for host in dict.fromkeys([*hosts, "localhost", "127.0.0.1"])]
    )
    built = (
        _builder(_named(hosts[0]), ca.subject, key.public_key(), days)
        .add_extension(alternatives, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    (folder / "server.crt").write_bytes(built.sign(signer, hashes.SHA384()).public_bytes(_PEM))
    write_secret(folder / "server.key", _private(key, serialization.PrivateFormat.PKCS8))


def make_node_key(folder: Path, comment: str) -> str:
    """Make a node's key pair, ``node.key`` and ``node.key.pub``; give the public key as OpenSSH writes it."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_secret(folder / "node.key", _private(key, serialization.PrivateFormat.OpenSSH))
    text = f"{public.decode()} {comment}"
    (folder / "node.key.pub").write_text(text + "\n", encoding="utf-8")
    return text


def to_openssh(key: bytes) -> str:
    """Give a public key, stored as a SuperLink does, in OpenSSH's form; empty if it is none."""
    if not key:
        return ""
    try:
        loaded = serialization.load_pem_public_key(key)
        form = serialization.PublicFormat.OpenSSH
        return loaded.public_bytes(serialization.Encoding.OpenSSH, form).decode()
    except (ValueError, UnsupportedAlgorithm):
        return ""


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(_PEM, form, serialization.NoEncryption())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=days))
    )
