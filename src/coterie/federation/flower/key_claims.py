"""One node at a time for a member's key.

Two nodes with one key share what is sent to it, in Flower's eyes one node that calls twice as often: of a node
whose folder was copied, each copy would see half of the messages, and neither would have the state that the server
counts on. So a node claims its key at the gate before it takes messages, and again and again while it runs. A claim
that is not renewed lapses; a node that was killed and starts again in the same folder takes over its own at once.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import json
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import httpx
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.errors import ConfigError
from coterie.federation.flower._internals import NODES_PATH, node_headers

PATH = NODES_PATH + "claim-node"
"""Where the gate takes claims; nothing of Flower's."""
LIMIT = 1024
"""Bytes that a claim may have."""

_HOLDS, _RENEW = 45.0, 15.0  # seconds that a claim holds, and between two
_PAUSE, _LONGEST_PAUSE = 1.0, 20.0  # seconds between attempts


class KeyClaims:
    """The claims at the gate."""

    def __init__(self) -> None:
        self._held: dict[bytes, tuple[str, float]] = {}

    def take(self, key: bytes, body: bytes) -> bool:
        """Claim a key, or let go of it, as a node says; tell whether it is not somebody else's.

        A ``ValueError`` is what a node does not say.
        """
        said = json.loads(body)
        holder = said.get("holder") if isinstance(said, dict) else None
        if not isinstance(holder, str) or not holder:
            raise ValueError("a claim names its holder")
        other, since = self._held.get(key, (holder, 0.0))
        if other != holder and time.monotonic() - since < _HOLDS:
            return False
        if said.get("release") is True:
            self._held.pop(key, None)
        else:
            self._held[key] = holder, time.monotonic()
        return True


class ClaimOutcome(enum.Enum):
    """What became of a claim."""

    GRANTED = enum.auto()
    TAKEN = enum.auto()
    REFUSED = enum.auto()
    NOT_ANSWERED = enum.auto()
    UNTRUSTED = enum.auto()


class _ClaimAnswer(NamedTuple):
    outcome: ClaimOutcome
    reason: str = ""


class KeyClaim:
    """A node's claim to its key.

    Parameters
    ----------
    address
        The gate's, as ``host:port``.
    ca
        File with the certificate of the authority that signed the server's; read anew for every call.
    key
        The node's private key.
    folder
        The node's folder, which is who holds the claim.
    say
        Told what the node waits for, and that it need not wait any longer.
    """

    def __init__(
        self, address: str, ca: Path, key: ec.EllipticCurvePrivateKey, folder: Path, say: Callable[[str], None]
    ) -> None:
        self._address, self._ca, self._key, self._say = address, ca, key, say
        self._holder = holder_of(folder)
        self._was_granted = False
        self._told = ""
        self.lost = ""
        self.server_certificate_ends: datetime | None = None

    def wait(self) -> None:
        """Wait until the server grants the claim; a refusal that stands is a :class:`~coterie.errors.ConfigError`."""
        pause, until = _PAUSE, time.monotonic() + _HOLDS + _RENEW
        while True:
            answer = self._ask()
            if answer.outcome is ClaimOutcome.GRANTED:
                self._tell("")
                return
            if answer.outcome is ClaimOutcome.REFUSED or (
                answer.outcome is ClaimOutcome.UNTRUSTED and not self._was_granted
            ):
                raise ConfigError(answer.reason)
            if answer.outcome is not ClaimOutcome.TAKEN:
                until = time.monotonic() + _HOLDS + _RENEW
            elif time.monotonic() > until:
                raise ConfigError(f"{answer.reason}: stop one of them; of a folder there must be one copy that runs")
            self._tell(answer.reason)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    @contextlib.contextmanager
    def renewed(self) -> Iterator[None]:
        """Renew the claim while the context is open, then let go of it; ``lost`` says why where it is lost."""
        done = threading.Event()
        thread = threading.Thread(target=self._renew, args=(done,), name="claim", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self._ask(release=True)

    def _renew(self, done: threading.Event) -> None:
        while not done.wait(_RENEW) and not self.lost:
            answer = self._ask()
            if answer.outcome in (ClaimOutcome.TAKEN, ClaimOutcome.REFUSED):
                self.lost = answer.reason
            else:
                self._tell(answer.reason)

    def _tell(self, reason: str) -> None:
        """Say what there is to wait for, once, and once that it is over."""
        if reason and reason != self._told:
            self._say(f"{reason}; trying again")
        elif self._told and not reason:
            self._say(f"the server at {self._address} lets the node in")
        self._told = reason

    def _ask(self, release: bool = False) -> _ClaimAnswer:
        where = f"the server at {self._address}"
        try:
            # Only this authority: not those that the system trusts, of which one may be anybody's.
            context = ssl.create_default_context(cafile=str(self._ca))
        except (OSError, ssl.SSLError) as error:
            return _ClaimAnswer(ClaimOutcome.REFUSED, f"{self._ca} cannot be read as a certificate: {error.strerror}")
        body = json.dumps({"holder": self._holder, "release": release})
        try:
            with httpx.Client(verify=context, timeout=30.0) as client:
                response = client.post(f"https://{self._address}{PATH}", content=body, headers=node_headers(self._key))
                self._note_certificate(response)
        except httpx.HTTPError as error:
            return _not_reached(where, error)
        except httpx.InvalidURL:
            return _ClaimAnswer(ClaimOutcome.REFUSED, f"{self._address!r} is not an address: write host:port")
        if response.status_code == httpx.codes.UNAUTHORIZED:
            return _ClaimAnswer(
                ClaimOutcome.REFUSED,
                f"{where} does not let this node in: its key is not in the roster there, or one of the two clocks is "
                "minutes off",
            )
        if response.status_code == httpx.codes.CONFLICT:
            return _ClaimAnswer(ClaimOutcome.TAKEN, f"another node runs with the key of this one, as {where} sees it")
        if response.status_code >= 500:
            return _ClaimAnswer(ClaimOutcome.NOT_ANSWERED, f"{where} answers with an error ({response.status_code})")
        self._was_granted = True  # a server without such claims answers with another of the 400s
        return _ClaimAnswer(ClaimOutcome.GRANTED)

    def _note_certificate(self, response: httpx.Response) -> None:
        stream = response.extensions.get("network_stream")
        channel = None if stream is None else stream.get_extra_info("ssl_object")
        found = (channel.getpeercert() or {}).get("notAfter") if channel is not None else None
        if found:
            self.server_certificate_ends = datetime.fromtimestamp(ssl.cert_time_to_seconds(found), UTC)


def holder_of(folder: Path) -> str:
    """Name a folder, so that no copy of it has the same name; it has another after the machine was started anew."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text() if boot.exists() else str(uuid.getnode())
    place = folder.stat()
    return hashlib.blake2b(f"{machine} {place.st_dev} {place.st_ino}".encode(), digest_size=16).hexdigest()


def _not_reached(where: str, error: httpx.HTTPError) -> _ClaimAnswer:
    said = " ".join(str(error).split())
    if "CERTIFICATE_VERIFY_FAILED" not in said:
        return _ClaimAnswer(ClaimOutcome.NOT_ANSWERED, f"{where} does not answer")
    if "expired" in said or "not yet valid" in said:
        return _ClaimAnswer(ClaimOutcome.NOT_ANSWERED, f"{where} does not have a valid certificate ({said})")
    return _ClaimAnswer(ClaimOutcome.UNTRUSTED, f"{where} is not the one that the node's ca.crt vouches for ({said})")
