"""Nodes that promised privacy: what leaves them is clipped and noisy, counted on their own disks, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from pydantic import ValidationError

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: these tests need coterie[privacy]")

from coterie.errors import CheckpointError
from coterie.federation.agreement import Promise
from coterie.federation.node import Node
from coterie.federation.plan import Plan
from coterie.federation.privacy_ledger import FILE, KEY, Ledger
from coterie.federation.server import serve
from coterie.federation.wire import Rejected, pack, unpack
from coterie.results import Result
from coterie.runs.storage import events
from coterie.runs.storage.atomic_files import read_json
from coterie.simulation.privacy import Privacy
from coterie.version import __version__
from tests.federation.grid import Local, equal, make_federation, node_rows, simulated, states

LIMIT = 2**30
NOISY = Promise(clip=0.5, noise=4.0)


def play(folder: Path, algorithm: str, promise: Promise, rounds: int = 2, **more: Any) -> Local:
    local = make_federation(folder, privacy=promise)
    serve(local.agreement, local.grid, Plan(algorithm=algorithm, rounds=rounds, wait=0.0, **more), folder / "run")
    return local


@pytest.mark.parametrize("algorithm", ["fedavg", "flame", "fedpg", "scaffold"])
def test_clipping_alone_is_that_of_a_simulation(tmp_path: Path, algorithm: str) -> None:
    local = play(tmp_path, algorithm, Promise(clip=0.3, noise=0.0))
    other = simulated(local, algorithm, 2, tmp_path / "simulation", privacy="clip=0.3,noise=0")
    server, clients = states(other)
    equal(states(tmp_path / "run")[0], server)
    for client in range(3):
        expected = {name: rows[client : client + 1] for name, rows in clients.items()}
        equal(node_rows(local, client, tmp_path / "run"), expected)
    plain = states(simulated(local, algorithm, 2, tmp_path / "plain"))[0]
    assert any(not torch.equal(plain[name], value) for name, value in server.items())


def test_what_arrives_is_the_clipped_change_with_noise_that_the_shared_seed_does_not_tell(tmp_path: Path) -> None:
    arrived = []
    for name in ("one", "other"):
        local = make_federation(tmp_path / name, privacy=Promise(clip=0.5, noise=0.2), model="mlp:hidden=200")
        replies: dict[int, torch.Tensor] = {}
        for number in local.grid.nodes_:

            def keep(message: bytes, reply: bytes, number: int = number, kept: Any = replies) -> bytes:
                tensors = unpack(reply, LIMIT).tensors
                if tensors:
                    kept[number] = tensors["reply/w"] - unpack(message, LIMIT).tensors["message/w"]
                return reply

            local.grid.faults[number] = keep
        serve(local.agreement, local.grid, Plan(algorithm="fedavg", rounds=1, wait=0.0), tmp_path / name / "run")
        arrived.append(torch.stack([replies[number] for number in sorted(replies)]).double())
    one, other = arrived
    # Same samples, same seed, other secrets: the same change under other noise. Their difference is noise alone, of
    # variance 2σ², and the mean square of n normal numbers is off by √(2/n) of itself at one standard deviation.
    gap, sigma = one - other, 0.2 * 0.5
    assert abs(float(gap.square().mean()) / (2 * sigma**2) - 1) < 6 * (2 / gap.numel()) ** 0.5
    # And each is a vector of length 0.5 plus that noise.
    expected = 0.5**2 / one.shape[1] + sigma**2
    assert abs(float(one.square().mean()) / expected - 1) < 0.05


def test_nothing_else_leaves_a_node(tmp_path: Path) -> None:
    local = make_federation(tmp_path, privacy=NOISY)
    headers: list[dict[str, Any]] = []
    for number in local.grid.nodes_:

        def keep(message: bytes, reply: bytes) -> bytes:
            headers.append(unpack(reply, LIMIT).header)
            return reply

        local.grid.faults[number] = keep
    serve(local.agreement, local.grid, Plan(algorithm="fedavg", rounds=2, wait=0.0), tmp_path / "run")
    common = {"run", "round", "purpose", "exchange", "token", "client", "schema"}
    hello = [header for header in headers if "sizes" in header]
    assert len(hello) == 3
    for header in hello:
        assert header.keys() == common | {"sizes"}
        assert header["sizes"] == {"train": 1, "validation": 1, "test": 1}
    for header in (header for header in headers if "sizes" not in header):
        assert header.keys() == common | {"epsilon"}
    result = Result(tmp_path / "run")
    assert result.finished
    assert result.summary["personal"] is None
    assert set(result.metrics["model"].astype(str)) == {"federation"}
    assert not (tmp_path / "run" / "shares.parquet").exists()
    # What models do is known where the samples are.
    (file,) = (local.node_folder(1) / "models").glob("*/metrics.json")
    facts = json.loads(file.read_text())
    assert 0 <= facts["metrics"]["personal"]["test"]["accuracy"] <= 1
    assert facts["privacy"]["epsilon"] == facts["privacy"]["epsilon_of_all_runs"] == NOISY.epsilon(2)


def test_metrics_are_told_where_that_was_agreed(tmp_path: Path) -> None:
    play(tmp_path, "fedavg", NOISY.model_copy(update={"tell_metrics": True}))
    result = Result(tmp_path / "run")
    assert result.summary["personal"]["final"]["mean"] > 0
    recorded = result.metrics.query("metric == 'epsilon'")
    assert recorded["round"].tolist() == [1, 2]
    assert recorded["value"].tolist() == [NOISY.epsilon(1), NOISY.epsilon(2)]
    assert result.summary["privacy"]["epsilon"] == NOISY.epsilon(2)


def test_replies_that_are_lost_count_too_and_runs_add_up(tmp_path: Path) -> None:
    local = make_federation(tmp_path, privacy=NOISY)
    local.grid.faults[99] = lambda message, reply: None  # the network eats what client 1 sends
    local.grid.nodes_[99] = Node(local.agreement, 1, local.datasets[1], local.node_folder(1))
    plan = Plan(algorithm="fedavg", rounds=2, wait=0.0)
    # Of a member whose hello is lost nothing is asked; so let that one through.
    local.grid.faults[99] = lambda message, reply: reply if "sizes" in unpack(reply, LIMIT).header else None
    serve(local.agreement, local.grid, plan, tmp_path / "run")
    assert [event.client for event in events.read(tmp_path / "run") if event.what == "no reply"] == [1, 1]
    assert Ledger(local.node_folder(1), NOISY).epsilon() == NOISY.epsilon(2)
    serve(local.agreement, local.grid, plan, tmp_path / "again")
    ledger = Ledger(local.node_folder(0), NOISY)
    assert ledger.epsilon() == NOISY.epsilon(4)
    for name in ("run", "again"):
        run = json.loads((tmp_path / name / "choices.json").read_text())["run"]
        assert ledger.epsilon(run) == NOISY.epsilon(2)


def test_a_node_stops_where_its_budget_ends(tmp_path: Path) -> None:
    budget = (NOISY.epsilon(2) + NOISY.epsilon(3)) / 2
    local = play(tmp_path, "fedavg", NOISY.model_copy(update={"budget": budget}), rounds=4)
    told = [event for event in events.read(tmp_path / "run") if event.what == "error"]
    assert {event.round for event in told} == {3, 4}
    assert all("privacy budget of" in event.reason for event in told)
    assert Ledger(local.node_folder(0), NOISY).epsilon() == NOISY.epsilon(2) < budget
    assert len([event for event in events.read(tmp_path / "run") if event.what == "void round"]) == 2


def rows(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1, 50), value)}


def test_noise_is_repeated_only_where_everything_is(tmp_path: Path) -> None:
    """The same reply to the same message tells nothing new; with anything else, equal noise would cancel out."""
    ledger = Ledger(tmp_path, Promise(clip=1.0, noise=1.0))
    first = ledger.release(rows(0.01), rows(0), {}, "run", b"message")["w"]
    assert torch.equal(ledger.release(rows(0.01), rows(0), {}, "run", b"message")["w"], first)
    for reply, digest in ((0.01, b"other"), (0.02, b"message")):
        gap = ledger.release(rows(reply), rows(0), {}, "run", digest)["w"] - first
        assert float(gap.std()) > 0.5
    assert (tmp_path / KEY).stat().st_mode & 0o077 == 0
    assert read_json(tmp_path / FILE) == {"format": 1, "coterie": __version__, "replies": {"run": {"1.0": 4}}}


@pytest.mark.parametrize("name", [FILE, KEY])
def test_no_flipped_bit_gives_another_count_or_other_noise(tmp_path: Path, name: str) -> None:
    ledger = Ledger(tmp_path, NOISY)
    first = ledger.release(rows(0.01), rows(0), {}, "run", b"message")["w"]
    path, count = tmp_path / name, (tmp_path / FILE).read_bytes()
    whole, found = path.read_bytes(), 0
    for place in range(len(whole)):
        (tmp_path / FILE).write_bytes(count)
        spoilt = bytearray(whole)
        spoilt[place] ^= 1 << place % 8
        path.write_bytes(spoilt)
        try:
            assert ledger.epsilon("run") == NOISY.epsilon(1)
            assert torch.equal(ledger.release(rows(0.01), rows(0), {}, "run", b"message")["w"], first)
        except CheckpointError as error:
            assert "is damaged" in str(error)
            found += 1
    assert found >= len(whole) - 20  # of the checksum's own mark


def test_records_that_are_damaged_or_of_another_version_are_said_to_be(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, NOISY)
    ledger.release(rows(0.1), rows(0), {}, "run", b"m")
    (tmp_path / FILE).write_text("{}")
    with pytest.raises(CheckpointError, match="is damaged: put back a copy"):
        ledger.epsilon()
    for format_, says in ((None, "has no format, as before there were any,"), (2, "is of a newer format, 2,")):
        (tmp_path / FILE).write_text(json.dumps({"replies": {}} | ({} if format_ is None else {"format": format_})))
        with pytest.raises(
            CheckpointError, match=rf"{FILE} of its replies {says} and Coterie \S+ reads format 1: use the version that"
        ):
            ledger.epsilon()
    (tmp_path / FILE).write_text(json.dumps({"format": 1, "replies": {}}))
    (tmp_path / KEY).write_bytes(b"short")
    with pytest.raises(CheckpointError, match="secret"):
        ledger.release(rows(0.1), rows(0), {}, "run", b"m")


def test_a_node_whose_count_is_lost_does_not_go_on(tmp_path: Path) -> None:
    local = play(tmp_path, "fedavg", NOISY, rounds=1)
    folder, node = local.node_folder(1), local.grid.nodes_[99]
    (folder / FILE).unlink()
    with pytest.raises(CheckpointError, match=rf"{FILE} is missing, but {KEY} is there"):
        Node(local.agreement, 1, local.datasets[1], folder)
    # One that runs already says nothing of its samples any more.
    message = unpack(local.grid.sent[1][99], LIMIT)
    again = pack({**message.header, "run": "f" * 16}, message.tensors)
    assert "is missing" in unpack(node.handle(again), LIMIT).header["error"]
    (folder / KEY).unlink()
    assert Ledger(folder, NOISY).epsilon() == 0


@pytest.mark.parametrize("algorithm", ["fedavg", "fedpg"])
def test_a_node_that_fails_answers_no_change_with_noise_and_pays_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """A server that sends what breaks on some samples and not on others must not see the difference."""
    local = make_federation(tmp_path, privacy=Promise(clip=0.5, noise=0.2), model="mlp:hidden=200")
    arrived: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []

    def keep(message: bytes, reply: bytes) -> bytes:
        found = unpack(reply, LIMIT)
        assert "error" not in found.header
        if found.tensors:
            arrived.append((unpack(message, LIMIT).under("message"), found.under("reply")))
        return reply

    local.grid.faults[99] = keep
    broken = local.grid.nodes_[99]

    def fail(*given: Any) -> None:
        raise ValueError("patient 4711")

    monkeypatch.setattr(broken, "_compute", fail)
    serve(local.agreement, local.grid, Plan(algorithm=algorithm, rounds=2, wait=0.0), tmp_path / "run")
    assert not [event for event in events.read(tmp_path / "run") if event.what in ("error", "garbage", "no reply")]
    assert Ledger(local.node_folder(1), NOISY)._read() == Ledger(local.node_folder(0), NOISY)._read()
    assert "patient 4711" in (broken.folder / "errors.log").read_text()
    assert len(arrived) == 2
    for message, reply in arrived:
        start = message if algorithm == "fedavg" else {}  # FedPG's are gradients and losses
        changes = [(value - start.get(name, 0)).double().flatten() for name, value in reply.items()]
        noise = torch.cat(changes)
        # Noise of standard deviation 0.1 and nothing else: its mean square is off by √(2/n) at one deviation.
        assert abs(float(noise.square().mean()) / 0.1**2 - 1) < 6 * (2 / noise.numel()) ** 0.5


def test_a_budget_is_kept_before_anything_is_written(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, Promise(clip=1.0, noise=1.0, budget=0.1))
    with pytest.raises(Rejected, match=r"privacy budget of 0\.1 is spent: one more reply would make it"):
        ledger.release(rows(0.1), rows(0), {}, "run", b"m")
    assert not (tmp_path / FILE).exists()


def test_the_promise_is_part_of_the_agreement(tmp_path: Path) -> None:
    local, other = make_federation(tmp_path, privacy=NOISY), make_federation(tmp_path / "other")
    assert local.agreement.digest != other.agreement.digest
    header = {"federation": other.agreement.digest, "algorithm": "fedavg", "kind": "hello", "run": "a"}
    said = unpack(local.grid.nodes_[99].handle(pack(header, {})), LIMIT).header["error"]
    assert "is not the node's" in said
    with pytest.raises(ValidationError):
        Promise(clip=1.0, noise=1.0, budget=0.0)
    assert isinstance(NOISY, Privacy)


def test_federated_and_simulated_losses_are_the_same(tmp_path: Path) -> None:
    local = play(tmp_path, "fedpg", NOISY.model_copy(update={"tell_metrics": True}))
    other = simulated(local, "fedpg", 2, tmp_path / "simulation", privacy=NOISY.written())
    ours, theirs = (
        pd.read_parquet(path / "metrics.parquet").query("metric == 'epsilon'")["value"].tolist()
        for path in (tmp_path / "run", other)
    )
    assert ours == theirs == [NOISY.epsilon(1), NOISY.epsilon(2)]  # of two exchanges a round, one has a reply
