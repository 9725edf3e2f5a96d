"""When certificates end, and the sentences that say so in time."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from coterie.errors import ConfigError

AHEAD = timedelta(days=30)
"""How long before a certificate's end one is warned of it."""


def read_certificate(path: Path) -> x509.Certificate:
    """Read the first certificate of a file; what is none is a :class:`~coterie.errors.ConfigError`."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"the certificate {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a certificate in PEM's form") from error


def warnings_of(files: Mapping[str, Path], ends: Mapping[str, datetime | None] | None = None) -> list[str]:
    """Say of each certificate whether it ends soon or has ended, in a sentence each.

    ``files`` are certificates by what they are; ``ends`` are the ends of others, ``None`` where one is not known.
    """
    known = {what: read_certificate(path).not_valid_after_utc for what, path in files.items()}
    known |= {f"the certificate of {where}": end for where, end in (ends or {}).items() if end is not None}
    now = datetime.now(UTC)
    return [_sentence(what, end, now) for what, end in known.items() if end - now < AHEAD]


def _sentence(what: str, end: datetime, now: datetime) -> str:
    days = abs(end - now) // timedelta(days=1)
    length = f"{days} day{'' if days == 1 else 's'}"
    when = f"ends in {length}, on" if end > now else f"ended {length} ago, on"
    return (
        f"{what} {when} {end:%Y-%m-%d}: renew it with `coterie federate renew` on the server, or get another from your "
        "certificate authority"
    )
