"""One real federation for all tests that need one, made by following the tutorial."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from coterie.federation import agreement
from coterie.federation.party_data import load_own
from tests.federation.grid import Local, LocalGrid

TUTORIALS = "fedacs"
OTHERS = ("fedavg", "flame", "fedpg")
ROUNDS = 3
TUTORIAL = Path(__file__).resolve().parents[2] / "docs" / "federation.md"


def commands(title: str) -> list[str]:
    """Give the lines of the programs under a heading of the tutorial, in order."""
    text = TUTORIAL.read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert found, title
    return [line for block in re.findall(r"^```bash\n(.*?)^```$", found[1], re.M | re.S) for line in block.splitlines()]


class Followed:
    """The tutorial's first half, up to where the nodes run; then what else was run, and what was printed."""

    def __init__(self, folder: Path) -> None:
        from tests.federation.running import Federation, coterie

        self._coterie = coterie
        self.lines = commands("Three silos on one machine")
        self.home = folder
        self.federation = Federation(folder / "demo")
        self.members: list[str] = []
        self.rest: list[str] = []
        self.port = 0

    def begin(self) -> None:
        """Follow the lines up to where the nodes are connected."""
        from tests.federation.running import free_pair

        (init,) = [line for line in self.lines if " init " in line]
        assert self.lines[0] == init
        # Word by word but for the port, which another federation on this machine may have.
        self.port = free_pair()
        self.do(f"{init} --port {self.port}")
        for line in self.lines[1:]:
            words = shlex.split(line)
            if line == "coterie federate server demo":
                self.federation.serve()
            elif line.startswith("coterie federate node demo/nodes/"):
                self.members.append(Path(words[3]).name)
                self.federation.node(self.members[-1])
            else:
                self.rest.append(line)
        self.federation.wait_for_nodes(len(self.members))

    def do(self, line: str) -> str:
        """Run a line of the tutorial to its end; give what it prints."""
        from tests.federation.running import PATIENCE

        program, *arguments = shlex.split(line)
        assert program == "coterie"
        done = subprocess.run(
            self._coterie(*arguments),
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"},
            cwd=self.home,
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * PATIENCE,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="session")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Followed]:
    pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")
    tutorial = Followed(tmp_path_factory.mktemp("empty"))
    try:
        tutorial.begin()
        yield tutorial
    finally:
        tutorial.federation.close()


@pytest.fixture(scope="session")
def printed(followed: Followed) -> dict[str, str]:
    """Go on with the tutorial; beside its run, at the same time, other methods: each run has its own state."""
    from tests.federation.running import PATIENCE

    federation = followed.federation
    options = ("--rounds", str(ROUNDS), "--deadline", str(PATIENCE), "--wait", str(PATIENCE), "--minimum", "3")
    for name in OTHERS:
        federation.run(name, name, *options)
    found = {}
    for line in followed.rest:
        found[line] = followed.do(line)
        for name in [each for each in OTHERS if each in federation.started]:
            federation.end(name)
    return found


class Flower(Local):
    def node_folder(self, client: int) -> Path:
        return self.folder / "nodes" / self.agreement.members[client].name


def local_view(followed: Followed) -> Flower:
    """Give what the nodes hold, for a simulation of the same."""
    folder = followed.federation.folder
    agreed = agreement.read(folder / agreement.FILE)
    datasets = [load_own("data.npz", folder / "nodes" / name, agreed) for name in followed.members]
    return Flower(agreed, LocalGrid({}), folder, datasets)
