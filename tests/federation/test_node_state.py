"""A node's state on its disk: pending until it counts, then committed, whole whenever the process stops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from coterie.errors import CheckpointError
from coterie.federation.node_state import NodeState, tidy
from coterie.federation.wire import Rejected
from coterie.rows import Rows
from coterie.version import __version__


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


def with_metadata(state: NodeState, folder: Path, **changed: str | None) -> Path:
    """Commit a state, then change what its file says of itself."""
    state.put("s-1-round-0", rows(1))
    state.settle("s-1-round-0", [])
    path = folder / "run" / "committed.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = {**file.metadata(), **changed}
    metadata["checksum"] = None  # as of a file that was written so
    save_file(load_file(path), path, {name: value for name, value in metadata.items() if value is not None})
    return path


def test_no_flipped_bit_gives_another_state(tmp_path: Path) -> None:
    state = NodeState(tmp_path, "run", rows(0))
    state.put("s-1-round-0", rows(1))
    state.settle("s-1-round-0", [])
    path = tmp_path / "run" / "committed.safetensors"
    whole, found = path.read_bytes(), 0
    for place in range(len(whole)):
        spoilt = bytearray(whole)
        spoilt[place] ^= 1 << place % 8
        path.write_bytes(spoilt)
        try:
            assert (value(state), state.token) == (1, "s-1-round-0")  # of the checksum's own mark
        except CheckpointError as error:
            assert "is damaged" in str(error) or "format" in str(error)
            found += 1
    assert found >= len(whole) - 20


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    state = NodeState(tmp_path / "state", "run", rows(0))
    state.put("s-1-round-0", rows(1))
    (tmp_path / "models" / "run").mkdir(parents=True)
    (tmp_path / "models" / "run" / "model.safetensors").touch()
    stray = [
        tmp_path / ".privacy.json.draft",
        tmp_path / "state" / "run" / ".committed.safetensors.draft",
        tmp_path / "state" / "run" / "pending" / ".s-1-round-1.safetensors.draft",
        tmp_path / "models" / "run" / ".model.safetensors.draft",
    ]
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    for path in stray:
        path.touch()
    tidy(tmp_path)
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_state_says_its_format(tmp_path: Path) -> None:
    state = NodeState(tmp_path, "run", rows(0))
    with safe_open(with_metadata(state, tmp_path), framework="pt") as file:
        assert file.metadata()["format"] == "1"
    assert value(state) == 1


@pytest.mark.parametrize(
    ("format_", "says"),
    [
        (None, "has no format, as before there were any, and {reads}: use the version that wrote it"),
        ("2", "is of a newer format, 2, and {reads}: use {writer}"),
        ("0", "is of an older format, 0, and {reads}: use {writer}"),
    ],
)
def test_a_state_of_another_format_is_one_sentence(tmp_path: Path, format_: str | None, says: str) -> None:
    state = NodeState(tmp_path, "run", rows(0))
    path = with_metadata(state, tmp_path, format=format_)
    reads, writer = f"Coterie {__version__} reads format 1", f"Coterie {__version__}, which wrote it"
    expected = f"the node's state {path} {says.format(reads=reads, writer=writer)}"
    for read in (state.rows, lambda: state.settle("s-1-round-0", []), lambda: state.token):
        with pytest.raises(CheckpointError) as told:
            read()
        assert str(told.value) == expected


def test_a_format_that_is_no_number_is_damage(tmp_path: Path) -> None:
    state = NodeState(tmp_path, "run", rows(0))
    with_metadata(state, tmp_path, format="one")
    with pytest.raises(CheckpointError, match="damaged"):
        state.rows()
