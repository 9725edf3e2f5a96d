"""The calls that only the server's own machine can make: which nodes are let in, and which runs there are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.errors import ConfigError
from coterie.federation.flower import processes
from coterie.federation.flower._control_internals import SuperLinkControl
from coterie.federation.flower._internals import is_usable_key, stored_key
from coterie.federation.flower.certificates import to_openssh
from coterie.federation.flower.superlink_door import HEADER, pass_of
from coterie.federation.status import LastSeen

_RUNS = 1000  # how many of the last runs to look at; those that a server left unfinished are among them


class Control:
    """A SuperLink, called from its own machine; a call that fails is a :class:`~coterie.errors.ConfigError`.

    Parameters
    ----------
    folder
        The server's folder, with its certificates.
    port
        The SuperLink's port.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self._address, self._inside = f"127.0.0.1:{port}", processes.internal_certificates(folder)

    def enrol(self, keys: Mapping[str, str]) -> None:
        """Let in the nodes with these OpenSSH public keys, by the members' names, and no others."""
        wanted = {_stored(name, key): name for name, key in keys.items()}
        with self._connected() as superlink:
            # It remembers those of an earlier start, and members may have left or changed their keys since.
            nodes = {node.public_key: node for node in superlink.nodes()}
            for key, node in nodes.items():
                if node.is_unregistered and key in wanted:  # which a SuperLink never registers again
                    raise ConfigError(
                        f"the key of {wanted[key]!r} was taken out of the roster before: give the member a new one, "
                        "or start the server anew"
                    )
                if not node.is_unregistered and key not in wanted:
                    superlink.unregister(node.node_id)
            for key in wanted.keys() - nodes.keys():
                superlink.register(key, wanted[key])

    def statuses(self) -> dict[str, str]:
        """Give the status of each node that is let in, by its public key in OpenSSH's form.

        It is ``registered`` for a node that never came, otherwise ``online`` or ``offline``.
        """
        with self._connected() as superlink:
            return {to_openssh(node.public_key): node.status for node in superlink.nodes() if not node.is_unregistered}

    def seen(self) -> dict[str, LastSeen]:
        """Give the status of each node that is let in and when it was last heard of, by its key in OpenSSH's form."""
        with self._connected() as superlink:
            return {
                to_openssh(node.public_key): LastSeen(node.status, node.last_seen)
                for node in superlink.nodes()
                if not node.is_unregistered
            }

    def submit(self, app: Path, settings: Mapping[str, str]) -> int:
        """Submit the app in a folder with settings that stand over its own; give Flower's number of the run."""
        with self._connected() as superlink:
            return superlink.start_run(app, settings)

    def is_over(self, run: int) -> bool:
        """Say whether a run is over, however it ended."""
        with self._connected() as superlink:
            return superlink.is_finished(run)

    def stop_unfinished(self) -> None:
        """Stop the runs that an earlier server left: their processes are gone, but nodes would wait for them."""
        with self._connected() as superlink:
            for run in superlink.unfinished_runs(among=_RUNS):
                superlink.stop_run(run)

    def stop(self, run: int) -> None:
        with self._connected() as superlink:
            superlink.stop_run(run)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[SuperLinkControl]:
        processes.avoid_proxies()
        try:
            ca, secret = ((self._inside / name).read_bytes() for name in ("ca.crt", "secret"))
        except FileNotFoundError as error:  # they are made when a server starts
            raise ConfigError(f"the SuperLink at {self._address} does not answer: is the server running?") from error
        except PermissionError as error:
            raise ConfigError(f"{self._inside} is for the server's user alone: run this as that user") from error
        superlink = SuperLinkControl(self._address, ca, {HEADER: pass_of(secret)})
        try:
            yield superlink
        except httpx.HTTPStatusError as error:
            said = " ".join(error.response.text.split())[:300]
            raise ConfigError(f"the SuperLink at {self._address} refused a call: {said}") from error
        except httpx.HTTPError as error:
            raise ConfigError(f"the SuperLink at {self._address} does not answer: is the server running?") from error
        finally:
            superlink.close()


def _stored(name: str, key: str) -> bytes:
    """Give a member's key as the SuperLink stores it."""
    how = "make one with ssh-keygen -t ecdsa -b 384"
    try:
        loaded = serialization.load_ssh_public_key(key.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"the key of {name!r} is not a public key of OpenSSH's: {how}") from error
    if not isinstance(loaded, ec.EllipticCurvePublicKey) or not is_usable_key(loaded):
        raise ConfigError(f"the key of {name!r} is not one of a NIST curve, as Flower wants it: {how}")
    return stored_key(loaded)
