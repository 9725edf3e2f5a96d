"""Nodes that die, hang, raise, come back, join late or send garbage: the round goes on, nobody's state is spoilt.

The oracle of a fault is a simulation that loses just the replies that the fault costs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from coterie.compute.engine import Call
from coterie.errors import ConfigError, RunFolderError
from coterie.federation.node import Node
from coterie.federation.plan import Plan
from coterie.federation.server import serve
from coterie.federation.transport import Failure
from coterie.federation.wire import pack, unpack
from coterie.runs.experiment import Experiment
from coterie.runs.storage import events
from coterie.simulation.scoring import Score, Scorer
from tests.federation.grid import Dying, Fault, Local, LocalGrid, equal, make_federation, node_rows, reference, states
from tests.small_runs import Killed

LIMIT = 2**30
SPOILT = 99  # the transport's number of client 1, which the faults are about


def plan(algorithm: str = "flame", rounds: int = 3, **more: Any) -> Plan:
    return Plan(algorithm=algorithm, rounds=rounds, **{"wait": 0.0, "deadline": 5.0, **more})


def told(path: Path, what: str) -> list[events.Event]:
    return [event for event in events.read(path) if event.what == what]


def in_round(number: int, fault: Fault, exchange: int | None = None) -> Fault:
    def apply(message: bytes, reply: bytes) -> bytes | Failure | None:
        header = unpack(message, LIMIT).header
        hit = (header.get("round"), header.get("purpose")) == (number, "round")
        return fault(message, reply) if hit and exchange in (None, header["exchange"]) else reply

    return apply


def expect(local: Local, algorithm: str, rounds: int, lost: Callable[[Tensor, Call], Tensor]) -> None:
    """Compare with a simulation that loses replies: the server's state and every node's own row."""
    other = reference(local, algorithm, local.folder / "reference", lost)
    for number in range(1, rounds + 1):
        other.play_round(torch.arange(3), number)
    equal(states(local.folder / "run")[0], other.server)
    for client in range(3):
        equal(
            node_rows(local, client, local.folder / "run"),
            {name: rows[client : client + 1] for name, rows in other.clients.rows.items()},
        )


def loses(number: int, exchange: int = 0) -> Callable[[Tensor, Call], Tensor]:
    def lost(clients: Tensor, call: Call) -> Tensor:
        return (clients == 1) & (call.round == number) & (call.exchange == exchange)

    return lost


def altered(change: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> Fault:
    def apply(message: bytes, reply: bytes) -> bytes:
        envelope = unpack(reply, LIMIT)
        change(envelope.header, envelope.tensors)
        return pack(envelope.header, envelope.tensors)

    return apply


def wrong_shape(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for name in tensors:
        tensors[name] = tensors[name].repeat(2)


def wrong_type(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for name in tensors:
        tensors[name] = tensors[name].double()


def wrong_name(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["reply/more"] = torch.zeros(1)


def another_run(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    header["run"] = "0123456789abcdef"


def another_round(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    header["token"] = header["token"].replace("-2-", "-1-")


def another_client(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    header["client"] = 0


def not_a_number(message: bytes, reply: bytes) -> bytes:
    envelope = unpack(reply, LIMIT)
    spoilt = {name: torch.full_like(value, float("nan")) for name, value in envelope.tensors.items()}
    return save(spoilt, metadata={"coterie": json.dumps({**envelope.header, "order": list(spoilt)})})


def huge(message: bytes, reply: bytes) -> bytes:
    return reply + bytes(2**20 + 1)


@pytest.mark.parametrize(
    ("fault", "what", "says"),
    [
        (lambda message, reply: None, "no reply", "not within 5 s"),
        (lambda message, reply: Failure("it broke"), "error", "it broke"),
        (lambda message, reply: b"garbage", "garbage", "cannot be read"),
        (lambda message, reply: reply[:-5], "garbage", "cannot be read"),
        (altered(wrong_shape), "garbage", "must be float32"),
        (altered(wrong_type), "garbage", "float64"),
        (altered(wrong_name), "garbage", "reply/more"),
        (altered(another_run), "garbage", "its run is '0123456789abcdef'"),
        (altered(another_round), "garbage", "its token is"),
        (altered(another_client), "garbage", "its client is 0, but must be 1"),
        (not_a_number, "garbage", "not finite"),
        (huge, "garbage", "at most"),
    ],
    ids=["hangs", "raises", "noise", "cut", "shape", "type", "name", "run", "round", "client", "nan", "huge"],
)
def test_the_round_goes_on_without_a_node_that_fails(tmp_path: Path, fault: Fault, what: str, says: str) -> None:
    local = make_federation(tmp_path, message_limit_mb=1)
    local.grid.faults[SPOILT] = in_round(2, fault)
    serve(local.agreement, local.grid, plan(), tmp_path / "run")
    (event,) = [each for each in told(tmp_path / "run", what) if each.client == 1]
    assert event.round == 2
    assert says in event.reason
    expect(local, "flame", 3, loses(2))


def test_a_reply_that_is_lost_in_the_second_exchange_takes_back_only_that(tmp_path: Path) -> None:
    local = make_federation(tmp_path)
    local.grid.faults[SPOILT] = in_round(2, lambda message, reply: None, exchange=1)
    serve(local.agreement, local.grid, plan("fedpg"), tmp_path / "run")
    expect(local, "fedpg", 3, loses(2, exchange=1))


def test_a_node_that_raises_says_so_without_quoting_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = make_federation(tmp_path)
    node, secret = local.grid.nodes_[SPOILT], "patient 4711"
    monkeypatch.setattr(node, "_work", lambda *given: (_ for _ in ()).throw(ValueError(secret)))
    serve(local.agreement, local.grid, plan(rounds=1), tmp_path / "run")
    (event,) = told(tmp_path / "run", "error")
    assert (event.client, event.reason) == (1, "an unexpected ValueError on the node; its log says more")
    assert secret in (node.folder / "errors.log").read_text()


def test_a_loss_that_is_nan_is_an_error_of_that_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, local = Scorer.score, make_federation(tmp_path)

    def spoilt(self: Scorer, *given: Any) -> list[Score]:
        scores = real(self, *given)
        return [replace(each, values=each.values * float("nan")) if each.metric == "loss" else each for each in scores]

    monkeypatch.setattr(Scorer, "score", spoilt)
    with pytest.raises(RunFolderError, match="never measured"):  # a run of such losses is never finished
        serve(local.agreement, local.grid, Plan(algorithm="fedavg", rounds=1, wait=0.0), tmp_path / "run")
    found = [event for event in events.read(tmp_path / "run") if event.what == "no evaluation"]
    assert {event.client for event in found} == {0, 1, 2} and not (tmp_path / "run" / "summary.json").exists()
    assert all("loss of the" in event.reason and "no longer" in event.reason for event in found)


def test_a_log_of_errors_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = make_federation(tmp_path).grid.nodes_[SPOILT]
    monkeypatch.setattr("coterie.federation.node._LOG_LIMIT", 1)
    monkeypatch.setattr(node, "_answer", lambda *given: (_ for _ in ()).throw(ValueError("no")))
    for _ in range(3):
        node.handle(pack({}, {}))
    assert (node.folder / "errors.log").read_text().count("ValueError: no") == 1


def test_a_node_that_dies_and_comes_back_goes_on_from_its_own_state(tmp_path: Path) -> None:
    local = make_federation(tmp_path)

    def before(grid: LocalGrid) -> None:
        if grid.exchanges == 5:
            old = grid.nodes_[SPOILT]
            grid.nodes_[SPOILT] = Node(local.agreement, 1, local.datasets[1], old.folder)

    # Before round r there were a hello and r - 1 rounds: away for rounds 2 and 3, then back as a new process.
    local.grid.away = lambda done: {SPOILT} if done in (2, 3) else set()
    local.grid.before = before
    serve(local.agreement, local.grid, plan(rounds=5), tmp_path / "run")
    assert [event.round for event in told(tmp_path / "run", "no reply")] == [2, 3]
    expect(local, "flame", 5, lambda clients, call: (clients == 1) & (2 <= call.round <= 3))


def test_a_node_that_comes_back_under_another_number_is_the_same_client(tmp_path: Path) -> None:
    local = make_federation(tmp_path)

    def before(grid: LocalGrid) -> None:
        if grid.exchanges == 3 and SPOILT in grid.nodes_:
            grid.nodes_[7] = Node(local.agreement, 1, local.datasets[1], grid.nodes_.pop(SPOILT).folder)
            grid.hidden = {SPOILT}

    local.grid.before = before
    serve(local.agreement, local.grid, plan(rounds=4), tmp_path / "run")
    assert [event.client for event in told(tmp_path / "run", "returned")] == [1]
    expect(local, "flame", 4, loses(2))


def test_a_node_that_joins_late_is_there_from_the_next_round(tmp_path: Path) -> None:
    """As in the papers: it was a member from the beginning, whose replies were lost."""
    local = make_federation(tmp_path)
    local.grid.away = lambda done: {SPOILT} if done < 3 else set()
    serve(local.agreement, local.grid, plan("fedacs", rounds=4, settings={"newcomers": "initial"}), tmp_path / "run")
    assert [(event.round, event.client) for event in told(tmp_path / "run", "joined")][-1] == (3, 1)
    expect(local, "fedacs", 4, lambda clients, call: (clients == 1) & (call.round <= 2))


@pytest.mark.parametrize(("algorithm", "exchange"), [("fedacs", 0), ("fedamp", 0), ("fedamp", 1), ("flame", 0)])
def test_a_newcomer_that_does_not_answer_is_as_one_that_comes_later(
    tmp_path: Path, algorithm: str, exchange: int
) -> None:
    """It does not answer in one of the exchanges of its first round, the third, or it comes in the fourth."""

    def silent(message: bytes, reply: bytes) -> bytes | None:
        header = unpack(message, LIMIT).header
        hit = (header.get("round"), header.get("purpose"), header.get("exchange")) == (3, "adapt", exchange)
        return None if hit else reply

    found = []
    for comes in (3, 4):
        folder = tmp_path / str(comes)
        folder.mkdir()
        local = make_federation(folder)
        local.grid.away = lambda done, comes=comes: {SPOILT} if done < comes else set()  # type: ignore[misc]
        local.grid.faults = {SPOILT: silent}
        serve(local.agreement, local.grid, plan(algorithm, rounds=5, settings={"local_epochs": 1}), folder / "run")
        found.append((states(folder / "run")[0], [node_rows(local, client, folder / "run") for client in range(3)]))
        lost = [event.round for event in told(folder / "run", "no reply") if event.client == 1]
        assert lost == ([3] if comes == 3 else [])
    equal(found[0][0], found[1][0])
    for one, other in zip(found[0][1], found[1][1], strict=True):
        equal(one, other)


def test_a_round_with_too_few_replies_is_void(tmp_path: Path) -> None:
    local = make_federation(tmp_path)
    local.grid.faults[SPOILT] = in_round(2, lambda message, reply: None)
    serve(local.agreement, local.grid, plan(minimum=3), tmp_path / "run")
    (event,) = told(tmp_path / "run", "void round")
    assert event.round == 2
    expect(local, "flame", 3, lambda clients, call: torch.full_like(clients, call.round == 2, dtype=torch.bool))


def test_too_few_members_at_the_start(tmp_path: Path) -> None:
    local = make_federation(tmp_path)
    local.grid.hidden = {SPOILT}
    with pytest.raises(ConfigError, match="2 of 3 members came within 0 s, but minimum is 3"):
        serve(local.agreement, local.grid, plan(minimum=3), tmp_path / "run")


def test_a_method_that_starts_from_everybodys_samples_needs_everybody(tmp_path: Path) -> None:
    local = make_federation(tmp_path)
    local.grid.hidden = {SPOILT}
    with pytest.raises(ConfigError, match="not all members are there"):
        serve(local.agreement, local.grid, plan(settings={"alpha": "size"}), tmp_path / "run")


@pytest.mark.parametrize("exchange", range(1, 8))
def test_a_killed_server_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: int
) -> None:
    """FedPG, three rounds: hello, two exchanges a round, an evaluation; killed after each of them."""
    local = make_federation(tmp_path)
    grid = local.grid
    with monkeypatch.context() as kill, pytest.raises(Killed):
        kill.setattr(Experiment, "keep", lambda self: None)  # a kill leaves no time to keep anything
        serve(local.agreement, Dying(grid, exchange), plan("fedpg"), tmp_path / "run")
    local.restart()
    grid.exchanges = 100
    serve(local.agreement, grid, plan("fedpg"), tmp_path / "run")
    assert len(told(tmp_path / "run", "resumed")) == 1
    expect(local, "fedpg", 3, lambda clients, call: torch.zeros_like(clients, dtype=torch.bool))
    frame = pd.read_parquet(tmp_path / "run" / "metrics.parquet")
    measured = frame[(frame["model"] == "personal") & (frame["metric"] == "accuracy") & (frame["split"] == "test")]
    assert sorted(measured["round"]) == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_a_second_server_for_a_run_that_has_one_is_refused(tmp_path: Path) -> None:
    """The first has the lock of the run's folder, and goes on as if nothing had been."""
    local, refused = make_federation(tmp_path), []

    def intrude(grid: LocalGrid) -> None:
        if grid.exchanges == 3:
            other = LocalGrid(grid.nodes_)
            with pytest.raises(RunFolderError, match="is in use by another process"):
                serve(local.agreement, other, plan(), tmp_path / "run")
            refused.append(other.exchanges)

    local.grid.before = intrude
    serve(local.agreement, local.grid, plan(), tmp_path / "run")
    assert refused == [0]  # it sent nothing to anybody
    assert [event.what for event in events.read(tmp_path / "run")].count("began") == 1
    expect(local, "flame", 3, lambda clients, call: torch.zeros_like(clients, dtype=torch.bool))


def test_a_finished_run_and_another_plan_are_refused(tmp_path: Path) -> None:
    local = make_federation(tmp_path)
    serve(local.agreement, local.grid, plan(rounds=1), tmp_path / "run")
    with pytest.raises(RunFolderError, match="is finished"):
        serve(local.agreement, local.grid, plan(rounds=1), tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(RunFolderError, match="another algorithm, settings, rounds"):
        serve(local.agreement, local.grid, plan("fedavg", rounds=2), tmp_path / "run")


def test_a_node_whose_state_is_lost_is_left_out(tmp_path: Path) -> None:
    local = make_federation(tmp_path)

    def before(grid: LocalGrid) -> None:
        if grid.exchanges == 4:  # the third round: what it replied in the first counts by then
            folder = grid.nodes_[SPOILT].folder / "state"
            for path in sorted(folder.rglob("*"), reverse=True):
                path.unlink() if path.is_file() else path.rmdir()

    local.grid.before = before
    serve(local.agreement, local.grid, plan(rounds=3), tmp_path / "run")
    events_ = [each for each in told(tmp_path / "run", "error") if each.client == 1]
    assert events_ and all("counts on the node's state" in each.reason for each in events_)


def test_strangers_and_doubles_are_not_admitted(tmp_path: Path) -> None:
    local = make_federation(tmp_path)
    other = make_federation(tmp_path / "other", seed=4)
    local.grid.nodes_[5] = other.grid.nodes_[SPOILT]  # has another federation.yaml
    local.grid.nodes_[6] = Node(local.agreement, 1, local.datasets[0], tmp_path / "double")
    serve(local.agreement, local.grid, plan(rounds=1), tmp_path / "run")
    reasons = sorted(event.reason for event in told(tmp_path / "run", "refused"))
    assert "federation.yaml is not the node's" in reasons[0]
    assert "another node is that already" in reasons[1]


def test_a_node_needs_its_members_key(tmp_path: Path) -> None:
    keys = [f"ecdsa-sha2-nistp384 AAAA{number}" for number in range(3)]
    members = tuple({"name": f"silo-{number}", "key": f"{key} comment"} for number, key in enumerate(keys))
    local = make_federation(tmp_path, members=members)
    local.grid.keys = {100: keys[0], SPOILT: keys[2], 98: keys[2]}
    serve(local.agreement, local.grid, plan(rounds=1), tmp_path / "run")
    (event,) = told(tmp_path / "run", "refused")
    assert "says that it is 'silo-1', but it does not have that member's key" in event.reason


def test_a_node_refuses_what_its_agreement_does_not_allow(tmp_path: Path) -> None:
    local = make_federation(tmp_path, algorithms=("fedavg",))
    with pytest.raises(ConfigError, match="agrees on fedavg only"):
        serve(local.agreement, local.grid, plan("flame"), tmp_path / "run")
    node = local.grid.nodes_[SPOILT]
    header = {"federation": local.agreement.digest, "algorithm": "flame", "settings": {}, "kind": "hello", "run": "a"}
    assert "agrees on fedavg only" in unpack(node.handle(pack(header, {})), LIMIT).header["error"]
    files = {**header, "algorithm": "/tmp/evil.py"}
    assert "not files" in unpack(node.handle(pack(files, {})), LIMIT).header["error"]


def test_a_run_keeps_its_method_and_settings(tmp_path: Path) -> None:
    """Another method's task would be run on the state of this one, and might send what this one keeps."""
    local = make_federation(tmp_path)
    serve(local.agreement, local.grid, Plan(algorithm="ditto", rounds=2, wait=0.0), tmp_path / "run")
    sent = [unpack(messages[100], LIMIT) for messages in local.grid.sent if 100 in messages]
    last = [envelope for envelope in sent if envelope.header.get("task")][-1]
    counted = sent[-1].header["counted"]
    changes: list[tuple[dict[str, Any], str]] = [
        ({}, ""),
        ({"settings": {**last.header["settings"], "local_epochs": 1}}, "not those that the run began with"),
        ({"algorithm": "fedavg", "settings": {}}, "not those that the run began with"),
    ]
    for change, says in changes:
        header = {**last.header, "evaluate": None, "counted": counted, "base": "", "keep": [], **change}
        block = pack(header, {name: value for name, value in last.tensors.items() if name.startswith("message/")})
        reply = unpack(local.grid.nodes_[100].handle(block), LIMIT).header
        assert says in (reply.get("error") or "") and bool(says) == bool(reply.get("error"))


def test_a_node_checks_what_the_server_sends(tmp_path: Path) -> None:
    local = make_federation(tmp_path)
    serve(local.agreement, local.grid, plan("fedavg", rounds=1), tmp_path / "run")
    node = local.grid.nodes_[SPOILT]
    envelope = unpack(local.grid.sent[1][SPOILT], LIMIT)
    good = {name: value for name, value in envelope.tensors.items() if name.startswith("message/")}
    header = {**envelope.header, "run": "f" * 16}
    assert "error" not in unpack(node.handle(pack(header, good)), LIMIT).header
    for bad, says in (
        ({}, "must hold ['w']"),
        ({"message/w": good["message/w"][:-1]}, "must be float32"),
        ({"message/w": good["message/w"].double()}, "float64"),
        ({**good, "message/v": torch.zeros(1)}, "['v', 'w']"),
    ):
        assert says in unpack(node.handle(pack(header, bad)), LIMIT).header["error"]
    for field, value, says in (
        ("client", 0, "its client is 0"),
        ("kind", "other", "its kind is 'other'"),
        ("federation", "x", "not the node's"),
        ("run", "../up", "not a run's name"),
        ("token", "../up", "not a token"),
        ("base", "s-1-round-0", "no pending state"),
    ):
        assert says in unpack(node.handle(pack({**header, field: value}, good)), LIMIT).header["error"]
    assert "error" in unpack(node.handle(b"noise"), LIMIT).header
