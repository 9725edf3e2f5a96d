"""The tutorial's part on three machines, followed: a server and three silos that share nothing but a network."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")

from coterie import randomness
from coterie.federation import project
from coterie.results import Result
from coterie.runs.storage import events
from tests.federation.conftest import TUTORIAL
from tests.federation.machines import SCAN, Switch, need_machines
from tests.federation.running import PATIENCE, Federation, coterie, wait_until

pytestmark = pytest.mark.processes

SILOS = ("north", "south", "west")
PORT, INNER = 9092, 9093
METHOD, ROUNDS = "fedavg", 2


def part(title: str = "Three machines") -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## )", TUTORIAL.read_text(encoding="utf-8"), re.M | re.S)
    assert found
    return found[1]


def command(begins: str, title: str = "Three machines") -> str:
    """Give the one command in a part of the tutorial's text that begins so."""
    text = re.sub(r"```.*?```", "", part(title), flags=re.S)
    found = {" ".join(each.split()) for each in re.findall(r"`([^`]+)`", text)}
    (line,) = [each for each in found if each.startswith(begins)]
    return line


class Machines:
    """The tutorial's three machines and the server's, each with a folder that stands for its disk."""

    def __init__(self, disks: Path) -> None:
        self.disks, self.switch = disks, Switch()
        self.host = command("coterie federate init").split()[-1]
        names = {self.host: "10.77.0.1"}
        for machine in ("server", *SILOS):
            (disks / machine).mkdir()
            address = self.switch.plug_in(machine, names)
            assert machine != "server" or address == names[self.host]
        self.federation = Federation(disks / "server" / "hospitals")

    def do(self, machine: str, line: str) -> str:
        """Run a command on a machine, to its end; give what it prints."""
        words = shlex.split(line)
        words = coterie(*words[1:]) if words[0] == "coterie" else words
        done = subprocess.run(
            self.switch.at(machine, words),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=self.disks / machine,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def start(self, machine: str, name: str, line: str) -> subprocess.Popen[bytes]:
        """Start a command of Coterie's that runs until it is stopped."""
        within = self.switch.at(machine, ())
        return self.federation.start(name, *shlex.split(line)[1:], within=within, cwd=self.disks / machine)

    def prepare(self) -> None:
        """Do what the tutorial says up to where everything is started."""
        server = self.disks / "server" / "hospitals"
        self.do("server", command("coterie federate init"))
        keys = {}
        for silo in SILOS:
            write_patients(self.disks / silo / "patients.csv", silo)
            self.do(silo, command("ssh-keygen"))
            keys[silo] = (self.disks / silo / "node.key.pub").read_text().strip()
        shutil.rmtree(server / "nodes")
        agreed = yaml.safe_load((server / "federation.yaml").read_text())
        agreed["members"] = [{"name": silo, "key": keys[silo]} for silo in SILOS]
        agreed |= yaml.safe_load(self.do("north", command("coterie federate describe", "Your own data")))
        agreed["algorithms"] = [METHOD]
        (server / "federation.yaml").write_text(yaml.safe_dump(agreed, sort_keys=False))
        shutil.move(server / "authority", self.disks / "elsewhere")
        (example,) = re.findall(r"```yaml\n(.*?)```", part(), re.S)
        for silo in SILOS:
            folder = self.disks / silo / "hospital"
            folder.mkdir()
            for file in (server / "federation.yaml", server / "server" / "ca.crt"):
                shutil.copy(file, folder)
            for own in ("node.key", "node.key.pub", "patients.csv"):
                shutil.move(self.disks / silo / own, folder)
            (folder / "node.yaml").write_text(textwrap.dedent(example).replace("north", silo))

    def close(self) -> None:
        self.federation.abandon()
        self.switch.close()


def write_patients(path: Path, silo: str) -> None:
    draw = randomness.stream(1, f"patients of {silo}")
    age, pressure = draw.integers(20, 90, 90), draw.normal(130, 15, 90).round(1)
    outcome = ["ill" if a + p > 190 else "well" for a, p in zip(age, pressure, strict=True)]
    lines = [f"{a},{p},{o}" for a, p, o in zip(age, pressure, outcome, strict=True)]
    path.write_text("\n".join(["age,pressure,outcome", *lines]) + "\n")


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    need_machines()
    found = Machines(tmp_path_factory.mktemp("disks"))
    try:
        found.prepare()
        node = command("coterie federate node").replace("FOLDER", "hospital")
        found.start("north", "north", node)  # it may start before the server
        server = found.start("server", "server", command("coterie federate server"))
        wait_until(lambda: "ready" in found.federation.said("server"), "the server is ready", server)
        for silo in SILOS[1:]:
            found.start(silo, silo, node)
        line = command("coterie federate run").replace("METHOD", METHOD)
        found.start("server", "run", f"{line} --rounds {ROUNDS} --minimum 3 --wait {PATIENCE}")
        found.federation.end("run")
        yield found
    finally:
        found.close()


def test_three_machines_train_together(machines: Machines) -> None:
    run = machines.disks / "server" / "hospitals" / "runs" / f"{METHOD}-1"
    result = Result(run)
    assert result.finished and result.summary["rounds"] == ROUNDS
    assert sorted(event.what for event in events.read(run)) == ["began", *["joined"] * 3]
    assert result.shares["member"].tolist() == list(SILOS)
    for silo in SILOS:
        ((path, facts),) = project.read_models(machines.disks / silo / "hospital")
        assert path.exists() and facts["algorithm"] == METHOD


def test_the_server_has_nothing_of_a_silo_but_its_public_key(machines: Machines) -> None:
    held = [path for path in (machines.disks / "server").rglob("*") if path.is_file()]
    assert not [path for path in held if path.name in ("node.key", "patients.csv", "node.yaml", "ca.key")]
    assert not (machines.disks / "server" / "hospitals" / "nodes").exists()
    record = (machines.disks / "north" / "hospital" / "patients.csv").read_bytes().splitlines()[1]
    assert not [path for path in held if record in path.read_bytes()]


def test_a_silo_reaches_the_gate_and_no_other_port(machines: Machines) -> None:
    def scan(at: str, of: str) -> object:
        words = shlex.join([sys.executable, "-c", SCAN, machines.switch.address[of]])
        return ast.literal_eval(machines.do(at, words))

    assert scan("north", "server") == {PORT: 0}
    assert scan("server", "north") == {}  # nodes only call out
    inside = shlex.join([sys.executable, "-c", SCAN, "127.0.0.1"])
    assert INNER in ast.literal_eval(machines.do("server", inside))  # there is something to be kept from the silos


def test_the_certificate_is_for_that_name_and_no_other(machines: Machines, tmp_path: Path) -> None:
    folder = machines.disks / "west" / "again"
    shutil.copytree(
        machines.disks / "west" / "hospital", folder, ignore=shutil.ignore_patterns("state", "flower", ".*")
    )
    file = folder / "node.yaml"
    file.write_text(file.read_text().replace(machines.host, machines.switch.address["server"]))
    machines.federation.kill("west")
    process = machines.start("west", "astray", "coterie federate node again")
    assert process.wait(timeout=PATIENCE) == 2
    assert "CERTIFICATE_VERIFY_FAILED" in machines.federation.said("astray")
    machines.federation.started.pop("astray")
