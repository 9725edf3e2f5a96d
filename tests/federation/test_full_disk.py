"""A node whose disk is full, or whose files are damaged: a sentence that names no folder, and nothing is spoilt."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from coterie.compute.engine import Call
from coterie.federation.plan import Plan
from coterie.federation.server import serve
from coterie.federation.transport import Failure
from coterie.federation.wire import unpack, without_folders
from coterie.runs.storage import events
from coterie.runs.storage.tensor_file import save_named
from tests.federation.grid import equal, make_federation, node_rows, reference, states

LIMIT, SPOILT = 2**30, 99  # bytes of a message, and the transport's number of client 1


@contextlib.contextmanager
def full_disk(room: int) -> Iterator[None]:
    """Let no file of this process become larger than so many bytes; the system then fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # cut off, it would stay for other processes
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = writes


def test_a_node_whose_disk_is_full_says_so_and_is_as_one_that_was_lost(tmp_path: Path) -> None:
    local = make_federation(tmp_path)
    handle = local.grid.nodes_[SPOILT].handle

    def on_a_full_disk(block: bytes) -> bytes:
        header = unpack(block, LIMIT).header
        with full_disk(200) if (header.get("round"), header.get("task")) == (2, "train") else contextlib.nullcontext():
            return handle(block)

    local.grid.nodes_[SPOILT].handle = on_a_full_disk  # type: ignore[method-assign]
    serve(local.agreement, local.grid, Plan(algorithm="flame", rounds=3, wait=0.0), tmp_path / "run")
    told = [event for event in events.read(tmp_path / "run") if event.what == "error"]
    assert [(event.round, event.client) for event in told] == [(2, 1)]
    assert told[0].reason == "the node cannot read or write its files: File too large"

    def lost(clients: torch.Tensor, call: Call) -> torch.Tensor:
        return (clients == 1) & (call.round == 2)

    other = reference(local, "flame", tmp_path / "reference", lost)
    for number in range(1, 4):
        other.play_round(torch.arange(3), number)
    equal(states(tmp_path / "run")[0], other.server)
    for client in range(3):
        expected = {name: rows[client : client + 1] for name, rows in other.clients.rows.items()}
        equal(node_rows(local, client, tmp_path / "run"), expected)


def test_a_full_disk_is_an_oserror_to_who_writes_tensors(tmp_path: Path) -> None:
    with full_disk(1000), pytest.raises(OSError, match="File too large") as told:
        save_named(tmp_path / "x", {"w": torch.zeros(1000)})
    assert told.value.strerror == "File too large"


def test_no_folder_of_a_nodes_machine_is_told_to_the_server(tmp_path: Path) -> None:
    folder = tmp_path / "Saint Mary's (ward 7)"
    local = make_federation(folder)
    node = local.grid.nodes_[SPOILT]
    replies: list[bytes] = []

    def keep(message: bytes, reply: bytes) -> bytes | Failure:
        replies.append(reply)
        return reply

    def damage(grid: object) -> None:
        for path in (node.folder / "state").glob("*/committed.safetensors"):
            path.write_bytes(path.read_bytes()[:-1] + b"!")

    local.grid.faults[SPOILT], local.grid.before = keep, damage
    serve(local.agreement, local.grid, Plan(algorithm="flame", rounds=3, wait=0.0), folder / "run")
    errors = [str(unpack(each, LIMIT).header.get("error") or "") for each in replies]
    (said,) = set(filter(None, errors))
    assert "committed.safetensors is damaged (" in said and "does not match its checksum" in said
    for part in ("Saint", "ward", str(tmp_path)):
        assert part not in said
    log = (node.folder / "errors.log").read_text()
    assert str(node.folder) in log and "does not match its checksum" in log


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("the file '/data/silo/data.csv' is missing", "the file 'data.csv' is missing"),
        ("/data/fed/state/x.safetensors: broken", "x.safetensors: broken"),
        ("its model is import:package.module:name, and/or https://example.org/a", None),
        ("see /etc", "see etc"),
    ],
)
def test_names_of_folders_are_taken_out(text: str, told: str | None) -> None:
    assert without_folders(text, Path("/data/elsewhere"), Path("/")) == (text if told is None else told)


def test_what_a_party_said_itself_is_not_taken_for_a_folder_of_ours() -> None:
    known = repr({"settings": {"/ptimiser": "sgd"}})
    text = "FLAME has no setting '/ptimiser', and /data/silo/ptimiser is not there"
    assert without_folders(text, known=known) == "FLAME has no setting '/ptimiser', and ptimiser is not there"
