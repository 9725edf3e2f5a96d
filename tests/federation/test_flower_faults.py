"""A node and then the server are killed in the middle of a real run; the run goes on and ends as the mathematics says.

The oracle is a simulation that loses just the replies that events say were lost, so it holds however slow the machine
is and whoever else was late.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")

from coterie.compute.engine import Call
from coterie.federation.node_state import NodeState
from coterie.results import Result
from coterie.runs.storage import events
from tests.federation.conftest import Followed, local_view
from tests.federation.grid import equal, node_rows, reference, states
from tests.federation.running import PATIENCE, wait_until

pytestmark = pytest.mark.processes

ROUNDS, KILLED = 9, 1  # enough for a node to come back before the last, on a slow machine too
LOST = ("no reply", "error", "garbage")


class Story:
    """One run of FLAME, whose nodes have states of their own, with what happened to it."""

    def __init__(self, followed: Followed) -> None:
        self.followed, self.federation = followed, followed.federation
        self.run = self.federation.folder / "runs" / "story"
        self.member = followed.members[KILLED]
        # What is not there costs a deadline. Long enough for the others on this machine, as slow as it is now.
        slowest = float(Result(self.federation.folder / "runs" / "fedavg-1").timings["training"].max())
        self.deadline = max(10.0, 1.5 * slowest)

    def told(self, what: str, client: int | None = None) -> list[events.Event]:
        return [each for each in events.read(self.run) if each.what == what and each.client == client]

    def command(self, name: str) -> None:
        options = ("--rounds", str(ROUNDS), "--deadline", f"{self.deadline:.0f}", "--wait", str(PATIENCE))
        self.federation.run(name, "flame", *options, "--out", str(self.run))

    def done(self) -> int:
        """Count the rounds that are in a checkpoint."""
        found = [int(path.name.split("-")[-1]) for path in (self.run / "checkpoint").glob("*[0-9]")]
        return max(found, default=0)

    def play(self) -> None:
        federation = self.federation
        self.command("story")
        running = federation.started["story"]
        wait_until(lambda: self.done() >= 1, "the first round is over", running)
        federation.kill(self.member)
        wait_until(lambda: self.told("no reply", KILLED), "the killed node is missed", running)
        federation.node(self.member)
        wait_until(lambda: f"{self.member} returned" in federation.said("story"), "the node is back", running)
        federation.kill("server")
        federation.stop("story")
        federation.serve()
        self.command("again")
        federation.end("again")

    def lost(self) -> set[tuple[int, int]]:
        """Say whose replies are missing in which round; what a stopped attempt lost does not count."""
        found: set[tuple[int, int]] = set()
        for event in events.read(self.run):
            if event.what == "resumed":
                found = {each for each in found if each[1] <= event.round}
            elif event.what == "void round":
                found |= {(client, event.round) for client in range(len(self.followed.members))}
            elif event.what in LOST and event.client is not None:
                found.add((event.client, event.round))
        return found


@pytest.fixture(scope="module")
def story(followed: Followed, printed: dict[str, str]) -> Story:
    found = Story(followed)
    found.play()
    return found


def test_the_round_went_on_without_the_killed_node(story: Story) -> None:
    missed = {number for client, number in story.lost() if client == KILLED}
    assert missed
    shown = story.federation.said("story")
    assert f"round {min(missed)}: {story.member} no reply" in shown
    assert f"{story.member} returned" in shown
    result = Result(story.run)
    assert result.finished
    assert result.timings["round"].tolist() == list(range(1, ROUNDS + 1))


def test_the_server_that_was_killed_went_on_from_its_checkpoint(story: Story) -> None:
    (resumed,) = story.told("resumed")
    assert 1 <= resumed.round < ROUNDS
    assert "resumed" in story.federation.said("again")
    assert len(story.told("began")) == 1


def test_everybody_ends_where_the_mathematics_says(story: Story, tmp_path: Path) -> None:
    local, lost = local_view(story.followed), story.lost()

    def misses(clients: Tensor, call: Call) -> Tensor:
        return torch.tensor([(client, call.round) in lost for client in clients.tolist()], dtype=torch.bool)

    other = reference(local, "flame", tmp_path, misses)
    everyone = torch.arange(len(story.followed.members))
    for number in range(1, ROUNDS + 1):
        other.play_round(everyone, number)
    equal(states(story.run)[0], other.server)
    name = json.loads((story.run / "choices.json").read_text())["run"]
    for client in everyone.tolist():
        expected = {key: rows[client : client + 1] for key, rows in other.clients.rows.items()}
        equal(node_rows(local, client, story.run), expected)
        # Nodes noticed that the interrupted attempt does not count: nothing of it is left.
        assert NodeState(local.node_folder(client) / "state", name, {}).pending() == []
