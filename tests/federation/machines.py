"""Machines that are network namespaces: each has its own addresses and ports, and a cable to a switch between them."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.debian import find_programs

PROGRAMS = {"ip": "iproute2", "ssh-keygen": "openssh-client"}
WHY = "these tests make machines of network namespaces, as root, with `ip` and `ssh-keygen`"
HOSTS = Path("/etc/netns")  # of what lies here under a namespace's name, `ip netns exec` makes that namespace's /etc


def need_machines() -> None:
    """Find what machines are made with, and skip where they may not be made."""
    if os.geteuid() != 0:
        pytest.skip(f"{WHY}: run them as root, where namespaces may be made")
    find_programs(PROGRAMS, WHY)


class Switch:
    """A switch, and the machines that are plugged in."""

    def __init__(self) -> None:
        self._mark = f"coterie-{os.getpid()}-{secrets.token_hex(2)}"
        self._made: list[str] = []
        self.address: dict[str, str] = {}
        self._add("switch")
        self._ip("-n", self.space("switch"), "link", "add", "bridge", "type", "bridge")
        self._ip("-n", self.space("switch"), "link", "set", "bridge", "up")

    def space(self, machine: str) -> str:
        return f"{self._mark}-{machine}"

    def plug_in(self, machine: str, names: dict[str, str]) -> str:
        """Add a machine that knows some names; give its address."""
        self._add(machine)
        number = len(self.address) + 1
        address, port, switch = f"10.77.0.{number}", f"port{number}", self.space("switch")
        cable = ("type", "veth", "peer", "name", "eth0", "netns", self.space(machine))
        self._ip("-n", switch, "link", "add", port, *cable)
        self._ip("-n", switch, "link", "set", port, "master", "bridge", "up")
        self._ip("-n", self.space(machine), "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            self._ip("-n", self.space(machine), "link", "set", device, "up")
        folder = HOSTS / self.space(machine)
        folder.mkdir(parents=True)
        lines = ["127.0.0.1 localhost", *(f"{each} {name}" for name, each in names.items())]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        self.address[machine] = address
        return address

    def at(self, machine: str, command: Sequence[str]) -> list[str]:
        """Give the command line that runs a command on a machine."""
        return ["ip", "netns", "exec", self.space(machine), *command]

    def close(self) -> None:
        for machine in self._made:  # with a namespace its end of the cable goes, and so the other end
            subprocess.run(["ip", "netns", "delete", self.space(machine)], check=False, capture_output=True)
            shutil.rmtree(HOSTS / self.space(machine), ignore_errors=True)

    def _add(self, machine: str) -> None:
        done = subprocess.run(["ip", "netns", "add", self.space(machine)], check=False, capture_output=True, text=True)
        if done.returncode:
            self.close()
            pytest.skip(f"{WHY}, where these may be made ({' '.join(done.stderr.split())})")
        self._made.append(machine)

    def _ip(self, *arguments: str) -> None:
        done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
        if done.returncode:
            self.close()
            pytest.skip(f"{WHY}, where these may be made ({' '.join(done.stderr.split())})")


SCAN = """
import errno, socket, sys
found = {}
for port in range(1, 65536):
    with socket.socket() as probe:
        probe.settimeout(5)
        code = probe.connect_ex((sys.argv[1], port))
    if code != errno.ECONNREFUSED:
        found[port] = code
print(found)
"""
"""Says of every port of a machine that does not refuse a connection what it does instead; 0 for being open."""
