"""New certificates for a server, from the federation's own authority."""

from __future__ import annotations

import os
import shutil
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.errors import ConfigError
from coterie.federation.flower import certificates
from coterie.federation.flower.expiry import read_certificate
from coterie.runs.storage.atomic_files import replacing, sync


def renew(project: Path, days: int, new_key: bool, authority_too: bool) -> list[str]:
    """Renew the server's certificate, for the same names; give sentences that say what was done and is to be done.

    ``new_key`` says whether the server gets a new private key too, ``authority_too`` whether the authority's own
    certificate is renewed first: its key stays, so that what it signed stays valid.
    """
    server, authority = project / "server", project / "authority"
    signer = _key(authority / "ca.key", "without it nothing can be signed: bring it back for the renewal")
    old, ca = read_certificate(server / "server.crt"), read_certificate(authority / "ca.crt")
    _check_is_signed_by(old, ca, server / "server.crt")
    done: list[str] = []
    if authority_too:
        made = certificates.authority_certificate(signer, days)
        before = (authority / "ca.crt").read_bytes()
        copies = [authority / "ca.crt", server / "ca.crt", *sorted(project.glob("nodes/*/ca.crt"))]
        for path in copies:
            if path.exists() and path.read_bytes() == before:
                _replace(path, made)
        ca = read_certificate(authority / "ca.crt")
        done.append(
            f"the authority's certificate holds until {ca.not_valid_after_utc:%Y-%m-%d}: give every silo the new "
            f"{server / 'ca.crt'} before {x509.load_pem_x509_certificate(before).not_valid_after_utc:%Y-%m-%d}"
        )
    left = (ca.not_valid_after_utc - datetime.now(UTC)).days
    if left < 1:
        raise ConfigError(
            f"the authority's own certificate {authority / 'ca.crt'} ended on {ca.not_valid_after_utc:%Y-%m-%d}: renew "
            "it too, with --authority"
        )
    if left < days - 1:
        done.append(f"the authority's own certificate ends in {left} days, and the server's with it (see --authority)")
    key = certificates.new_key() if new_key else _key(server / "server.key", "make a new one, with --new-key")
    made = certificates.server_certificate(key.public_key(), ca, signer, _names(old), old.subject, min(days, left))
    if new_key:
        _replace(server / "server.key", certificates.as_pem(key), secret=True)
    _replace(server / "server.crt", made)
    end = read_certificate(server / "server.crt").not_valid_after_utc
    done.append(f"{server / 'server.crt'} holds until {end:%Y-%m-%d}; a server that runs takes it up within a minute")
    return done


def check_pair(folder: Path) -> None:
    """Refuse a server's private key that does not belong to its certificate, as a renewal cut short leaves it."""
    certificate = read_certificate(folder / "server.crt")
    try:
        found = serialization.load_pem_private_key((folder / "server.key").read_bytes(), password=None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{folder / 'server.key'} cannot be read as a private key without a passphrase") from error
    form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    if found.public_key().public_bytes(*form) != certificate.public_key().public_bytes(*form):
        raise ConfigError(
            f"{folder / 'server.key'} is not the key of {folder / 'server.crt'}: run `coterie federate renew`, or put "
            "back the copy of it beside it"
        )


def _replace(path: Path, content: bytes, secret: bool = False) -> None:
    """Put a new file in the place of one, which stays beside it under its name and the time."""
    if path.exists():
        copy = path.with_name(f"{path.name}.{datetime.now(UTC):%Y%m%d-%H%M%S}")
        shutil.copy2(path, copy)
        sync(copy)
    with replacing(path) as draft:
        draft.unlink(missing_ok=True)
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
        with os.fdopen(handle, "wb") as file:
            file.write(content)


def _key(path: Path, otherwise: str) -> ec.EllipticCurvePrivateKey:
    try:
        found = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); {otherwise}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is not a private key without a passphrase; {otherwise}") from error
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path} is not a key of an elliptic curve; {otherwise}")
    return found


def _names(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def _check_is_signed_by(certificate: x509.Certificate, authority: x509.Certificate, path: Path) -> None:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise ConfigError(
            f"{path} is not from the federation's own authority: get another from whoever it is from"
        ) from error
