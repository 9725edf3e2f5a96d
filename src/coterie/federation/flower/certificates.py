"""Certificates and keys for a try-out; in production they come from whoever runs your certificate authority."""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
import shutil
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from coterie.errors import ConfigError

_PEM = serialization.Encoding.PEM
_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)


def write_secret(path: Path, content: bytes) -> None:
    """Write a new file that only its owner may read."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def as_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return _private(key, serialization.PrivateFormat.PKCS8)


def authority_certificate(key: ec.EllipticCurvePrivateKey, days: int) -> bytes:
    """Make the certificate of an authority with this key."""
    name = _named("Coterie try-out authority")
    constraints = x509.BasicConstraints(ca=True, path_length=0)
    built = _builder(name, name, key.public_key(), days).add_extension(constraints, critical=True)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    built = built.add_extension(identifier, critical=False).add_extension(_usage(signs=True), critical=True)
    return built.sign(key, hashes.SHA384()).public_bytes(_PEM)


def server_certificate(
    key: ec.EllipticCurvePublicKey,
    authority: x509.Certificate,
    signer: ec.EllipticCurvePrivateKey,
    names: x509.SubjectAlternativeName,
    subject: x509.Name,
    days: int,
) -> bytes:
    """Make a server's certificate for a key and names, signed by an authority."""
    built = (
        _builder(subject, authority.subject, key, days)
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    return built.sign(signer, hashes.SHA384()).public_bytes(_PEM)


def make_authority(folder: Path, days: int = 365) -> None:
    """Make a certificate authority: ``ca.crt`` and ``ca.key``."""
    key = new_key()
    (folder / "ca.crt").write_bytes(authority_certificate(key, days))
    write_secret(folder / "ca.key", as_pem(key))


def make_server_certificate(folder: Path, authority: Path, hosts: list[str], days: int = 365) -> None:
    """Make a certificate for names and addresses of a server: ``server.crt`` and ``server.key``."""
    ca = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes())
    signer = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), password=None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = new_key()
    names = x509.SubjectAlternativeName([_host(host) for host in dict.fromkeys([*hosts, "localhost", "127.0.0.1"])])
    made = server_certificate(key.public_key(), ca, signer, names, _named(hosts[0]), days)
    (folder / "server.crt").write_bytes(made)
    write_secret(folder / "server.key", as_pem(key))


def make_inside(folder: Path) -> None:
    """Make anew what the processes of one machine know each other by: a certificate for it and a shared secret.

    Other users of the machine reach the same ports, and may have taken them first: without the certificate a process
    could be talking to one of these, and without the secret it could be listening to one.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    make_authority(folder, days=3650)
    make_server_certificate(folder, folder, ["127.0.0.1"], days=3650)
    (folder / "ca.key").unlink()  # it has signed its one certificate, and must sign no other
    write_secret(folder / "secret", secrets.token_bytes(32))


def make_node_key(folder: Path, comment: str) -> str:
    """Make a node's key pair, ``node.key`` and ``node.key.pub``; give the public key as OpenSSH writes it."""
    key = new_key()
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_secret(folder / "node.key", _private(key, serialization.PrivateFormat.OpenSSH))
    text = f"{public.decode()} {comment}"
    (folder / "node.key.pub").write_text(text + "\n", encoding="utf-8")
    return text


def read_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a node's private key; what is not one that Flower takes is a :class:`~coterie.errors.ConfigError`."""
    how = f"make one with ssh-keygen -t ecdsa -b 384 -f {path.name} -N ''"
    try:
        found = serialization.load_ssh_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise ConfigError(f"the node's key {path} cannot be read ({error.strerror}): {how}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is not a private key of OpenSSH's without a passphrase: {how}") from error
    if not isinstance(found, ec.EllipticCurvePrivateKey) or not isinstance(found.curve, _CURVES):
        raise ConfigError(f"{path} is not a key of a NIST curve, as Flower wants it: {how}")
    return found


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
