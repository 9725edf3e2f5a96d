"""A node's state on its disk: pending until it counts, then committed, whole whenever the process stops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coterie.errors import CheckpointError
from coterie.federation.node_state import NodeState
from coterie.federation.wire import Rejected
from coterie.rows import Rows


def rows(value: float) -> Rows:
    return {"w": torch.full((1, 3), value), "c": torch.tensor([[int(value)]])}


def value(state: NodeState, base: str = "") -> float:
    found = state.rows(base)
    assert list(found) == ["w", "c"]
    assert torch.equal(found["c"], found["w"][:, :1].long())
    return float(found["w"][0, 0])


def test_a_pending_state_counts_only_when_the_server_says_so(tmp_path: Path) -> None:
    state = NodeState(tmp_path, "run", rows(0))
    state.settle("", [])
    assert (value(state), state.token) == (0, "")
    state.put("s-1-round-0", rows(1))
    assert value(state) == 0
    assert value(state, "s-1-round-0") == 1
    again = NodeState(tmp_path, "run", rows(0))  # as after a restart
    again.settle("s-1-round-0", [])
    assert (value(again), again.token, again.pending()) == (1, "s-1-round-0", [])
    again.settle("s-1-round-0", [])
    assert value(again) == 1


def test_what_does_not_count_is_dropped_and_what_is_needed_is_kept(tmp_path: Path) -> None:
    state = NodeState(tmp_path, "run", rows(0))
    for number in range(3):
        state.put(f"s-1-round-{number}", rows(number + 1))
    state.settle("", ["s-1-round-1"])
    assert state.pending() == ["s-1-round-1"]
    assert value(state) == 0
    with pytest.raises(Rejected, match="no pending state 's-1-round-0'"):
        state.rows("s-1-round-0")


def test_an_earlier_reply_of_a_round_may_be_the_one_that_counts(tmp_path: Path) -> None:
    state = NodeState(tmp_path, "run", rows(0))
    state.put("s-1-round-0", rows(1))
    state.put("s-1-round-1", rows(2))
    state.settle("s-1-round-0", [])
    assert (value(state), state.pending()) == (1, [])


def test_a_lost_state_is_refused_unless_that_is_fine(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match="counts on the node's state 's-4-round-0', but the node has 'none'"):
        NodeState(tmp_path, "run", rows(0)).settle("s-4-round-0", [])
    fine = NodeState(tmp_path, "run", rows(7), lost_is_fine=True)
    fine.settle("s-4-round-0", [])
    assert (value(fine), fine.token) == (7, "s-4-round-0")


def test_runs_do_not_see_each_other(tmp_path: Path) -> None:
    one, two = NodeState(tmp_path, "one", rows(0)), NodeState(tmp_path, "two", rows(0))
    one.put("s-1-round-0", rows(1))
    one.settle("s-1-round-0", [])
    two.settle("", [])
    assert (value(one), value(two)) == (1, 0)


@pytest.mark.parametrize("name", ["../x", "", "a/b", "A", "a" * 81])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(Rejected):
        NodeState(tmp_path, name, rows(0))
    with pytest.raises(Rejected):
        NodeState(tmp_path, "run", rows(0)).put(name, rows(1))


def test_a_damaged_state_is_said_to_be_so(tmp_path: Path) -> None:
    state = NodeState(tmp_path, "run", rows(0))
    state.put("s-1-round-0", rows(1))
    state.settle("s-1-round-0", [])
    (tmp_path / "run" / "committed.safetensors").write_bytes(b"spoilt")
    with pytest.raises(CheckpointError, match="damaged"):
        state.rows()
