"""Runs a node's SuperNode for as long as the node runs, and answers its messages.

Whatever the server goes through (an error, an expired certificate, a SuperLink that was killed), the SuperNode is
started again until it is back in touch. What waiting does not mend ends the node with a sentence.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from coterie.errors import ConfigError
from coterie.federation.flower import certificates, processes, supernode_program
from coterie.federation.flower.activation import deactivate_previous
from coterie.federation.flower.bells import of_node
from coterie.federation.flower.executor import Executor
from coterie.federation.flower.expiry import warnings_of
from coterie.federation.flower.key_claims import KeyClaim
from coterie.federation.flower.returned_memory import share_free_memory

_PAUSE = 1.0  # seconds between looks for a message where no bell rings
_DAY = 86400.0
_SHORT = 60.0  # a SuperNode that ends sooner than that has not been of use
_TRIES = 6  # short lives in a row; with their pauses, longer than Flower counts a dead SuperNode as running


@dataclass(frozen=True)
class NodePlace:
    """Where a node is.

    Parameters
    ----------
    folder
        The node's folder.
    server
        Where the server's gate is, as ``host:port``.
    ca
        File with the certificate of the authority that signed the server's.
    key
        File with the node's private key.
    port
        Port of this machine at which its SuperNode offers messages; 0 for a free one.
    """

    folder: Path
    server: str
    ca: Path
    key: Path
    port: int = 0

    @property
    def log(self) -> Path:
        return self.folder / "supernode.log"


def run_node(
    place: NodePlace, env: Mapping[str, str], handle: Callable[[bytes], bytes], say: Callable[[str], None]
) -> None:
    """Run a node until this process is interrupted; ``handle`` makes replies of messages, ``say`` is told what happens.

    What waiting does not mend is a :class:`~coterie.errors.ConfigError`.
    """
    share_free_memory()
    claim = KeyClaim(place.server, place.ca, certificates.read_node_key(place.key), place.folder, say)
    claim.wait()
    processes.avoid_proxies()
    with claim.renewed():
        short_lives = 0
        while True:
            began = time.monotonic()
            how = _live(place, env, handle, claim, say)
            if claim.lost:
                raise ConfigError(claim.lost)
            short_lives = short_lives + 1 if time.monotonic() - began < _SHORT else 0
            if short_lives > _TRIES:
                raise ConfigError(how)
            pause = min(2.0**short_lives, 32.0)
            say(f"{how}; starting it again in {pause:g} s")
            time.sleep(pause)
            claim.wait()


def _live(
    place: NodePlace,
    env: Mapping[str, str],
    handle: Callable[[bytes], bytes],
    claim: KeyClaim,
    say: Callable[[str], None],
) -> str:
    """Run one SuperNode until it ends, and say how."""
    inside = processes.internal_certificates(place.folder)
    certificates.make_inside(inside)
    # The claim is ours, so whoever counts as running with this key is dead.
    deactivate_previous(place.server, place.ca, place.key, place.folder / "supernode.id")
    begin = place.log.stat().st_size if place.log.exists() else 0
    port, warned = place.port or processes.free_port(), -_DAY
    command = processes.supernode(place.server, place.ca, place.key, port, place.folder)
    bell = of_node(place.folder)
    env = {**env, supernode_program.FOLDER: str(place.folder)}
    process = processes.start(command, env, place.log, private=True)
    try:
        with contextlib.suppress(ConfigError):  # it ended at once
            processes.wait_for_port(port, process, "SuperNode", place.log)
        ca, secret = (inside / "ca.crt").read_bytes(), (inside / "secret").read_bytes()
        with contextlib.closing(Executor(f"127.0.0.1:{port}", ca, secret, handle)) as executor:
            while process.poll() is None and not claim.lost:
                if time.monotonic() - warned >= _DAY:
                    warned = time.monotonic()
                    ends = {f"the server at {place.server}": claim.server_certificate_ends}
                    for warning in warnings_of({str(place.ca): place.ca}, ends):
                        say(warning)
                heard = bell.last()
                if not executor.once():
                    bell.wait(heard, _PAUSE)
    finally:
        processes.stop(process)
    return processes.how_it_ended("SuperNode", process, place.log, begin)
