"""A member that sends what it likes: the run goes on without it, and an event names it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from coterie.federation.plan import Plan
from coterie.federation.server import serve
from coterie.federation.transport import Failure
from coterie.federation.update_bound import sent_norms, too_large, update_norms
from coterie.federation.wire import SCHEMA, Rejected, pack, sentence, unpack
from coterie.runs.storage import events
from tests.federation.grid import Fault, make_federation, states

LIMIT = 2**30
HOSTILE = 99  # the transport's number of client 1


def in_rounds(fault: Fault) -> Fault:
    """Leave the hello alone, which would only keep the member out."""
    return lambda message, reply: fault(message, reply) if unpack(message, LIMIT).header["kind"] == "work" else reply


def with_header(change: Callable[[dict[str, Any]], None]) -> Fault:
    def apply(message: bytes, reply: bytes) -> bytes:
        envelope = unpack(reply, LIMIT)
        change(envelope.header)
        return pack(envelope.header, envelope.tensors)

    return apply


def raw(text: str, tensors: dict[str, Tensor] | None = None) -> Fault:
    """A block whose header no JSON writer would write."""

    def apply(message: bytes, reply: bytes) -> bytes:
        envelope = unpack(reply, LIMIT)
        found = tensors or envelope.tensors
        plain = json.dumps({**envelope.header, "order": list(found)})
        return save(found, metadata={"coterie": f"{plain[:-1]}, {text}}}"})

    return apply


def of_many_sides(message: bytes, reply: bytes) -> bytes:
    outer = {
        "__metadata__": {"coterie": json.dumps({"schema": SCHEMA, "order": ["reply/w"]})},
        "reply/w": {"dtype": "F32", "shape": [1] * 70, "data_offsets": [0, 4]},
    }
    head = json.dumps(outer).encode()
    return len(head).to_bytes(8, "little") + head + bytes(4)


def enormous(message: bytes, reply: bytes) -> bytes:
    envelope = unpack(reply, LIMIT)
    return pack(envelope.header, {name: torch.full_like(value, 1e30) for name, value in envelope.tensors.items()})


SCORES = [["personal", "test", f"metric-{number}", 0.5] for number in range(200_000)]


@pytest.mark.parametrize(
    ("fault", "what", "says"),
    [
        (of_many_sides, "garbage", "cannot be read"),
        (raw('"scores": [["personal", "test", "accuracy", 1e999]]'), "garbage", "cannot be read"),
        (raw(f'"scores": [["personal", "test", "accuracy", 1{"0" * 400}]]'), "garbage", "cannot be read"),
        (raw('"error": "\\ud800"'), "garbage", "cannot be read"),
        (with_header(lambda header: header.update(scores=SCORES)), "garbage", "its header has"),
        (with_header(lambda header: header.update(scores=SCORES[:100])), "garbage", "of no model and metric"),
        (with_header(lambda header: header.update(scores="many")), "garbage", "of no model and metric"),
        (with_header(lambda header: header.update(more="x" * 2**21)), "garbage", "its header has"),
        (with_header(lambda header: header.update(error="\x1b[2J\nown\u202e" + "x" * 5000)), "error", "own"),
        (with_header(lambda header: header.update(token="t" * 9000)), "garbage", "its token is"),
        (enormous, "garbage", "more than 100 times the members' median"),
    ],
    ids=[
        "sides",
        "infinite",
        "digits",
        "surrogate",
        "scores",
        "unknown-scores",
        "no-scores",
        "header",
        "escapes",
        "token",
        "1e30",
    ],
)
def test_the_run_goes_on_as_if_it_had_not_replied(tmp_path: Path, fault: Fault, what: str, says: str) -> None:
    finals = []
    for name, spoil in (("hostile", fault), ("silent", lambda message, reply: None)):
        local = make_federation(tmp_path / name)
        local.grid.faults[HOSTILE] = in_rounds(spoil)
        plan = Plan(algorithm="fedavg", rounds=2, wait=0.0, eval_every=2)
        serve(local.agreement, local.grid, plan, tmp_path / name / "run")
        finals.append(states(tmp_path / name / "run")[0])
    assert all(torch.equal(value, finals[1][name]) for name, value in finals[0].items())
    found = [event for event in events.read(tmp_path / "hostile" / "run") if event.what == what]
    assert [event.round for event in found if event.client == 1] == [1, 2]
    assert {event.client for event in found} == {1}
    for event in found:
        assert says in event.reason
        assert str(event).isprintable()
        assert len(str(event)) < 500


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (of_many_sides, "cannot be read"),
        (raw('"sizes": {"train": 1e999}'), "cannot be read"),
        (raw(f'"sizes": {"[" * 100_000}{"]" * 100_000}'), "cannot be read"),
        (raw('"error": "\\ud800"'), "cannot be read"),
        (with_header(lambda header: header.update(more="x" * 2**21)), "its header has"),
        (with_header(lambda header: header.update(error="\x1b[2J\nown\u202e" + "x" * 5000)), "own"),
        (with_header(lambda header: header.update(sizes=[1] * 1000)), "its samples are"),
        (with_header(lambda header: header.update(client=2**62)), "it is client 4611686018427387904"),
        (lambda message, reply: Failure("own\x1b" * 5000), "own"),
    ],
    ids=["sides", "infinite", "nested", "surrogate", "header", "escapes", "sizes", "client", "failure"],
)
def test_whatever_a_node_says_of_itself_only_it_is_kept_out(tmp_path: Path, fault: Fault, says: str) -> None:
    local = make_federation(tmp_path)
    local.grid.faults[HOSTILE] = fault
    folder = serve(local.agreement, local.grid, Plan(algorithm="fedavg", rounds=1, wait=0.0), tmp_path / "run")
    (event,) = [event for event in events.read(folder) if event.what == "refused"]
    assert event.reason.startswith(f"node {HOSTILE}: ") and says in event.reason
    assert str(event).isprintable() and len(str(event)) < 500
    assert {event.client for event in events.read(folder) if event.what == "joined"} == {0, 2}


@pytest.mark.parametrize("algorithm", ["fedavg", "fedsgd", "fedpg", "fedadmm", "fedfomo"])
def test_of_two_replies_one_of_1e30_does_not_count(tmp_path: Path, algorithm: str) -> None:
    """Models, gradients and differences alike, and where the first model is all zeros."""
    local = make_federation(tmp_path, clients=2)
    local.grid.faults[HOSTILE] = in_rounds(enormous)
    plan = Plan(algorithm=algorithm, rounds=2, wait=0.0)
    serve(local.agreement, local.grid, plan, tmp_path / "run")
    found = [event for event in events.read(tmp_path / "run") if event.what == "garbage"]
    assert found and {event.client for event in found} == {1} and {event.round for event in found} == {1, 2}
    assert all("more than 100 times the" in event.reason and "of what was sent" in event.reason for event in found)
    assert all(float(value.double().abs().max()) < 10 for value in states(tmp_path / "run")[0].values())


def scored(value: object) -> Fault:
    def tell(header: dict[str, Any]) -> None:
        header["scores"] = [[model, split, metric, value] for model, split, metric, _ in header.get("scores") or ()]

    return with_header(tell)


@pytest.mark.parametrize("value", [1.7e308, -1e300, 1.5, -0.1])
def test_a_score_that_cannot_be_is_garbage(tmp_path: Path, value: float) -> None:
    local = make_federation(tmp_path)
    local.grid.faults[HOSTILE] = in_rounds(scored(value))
    folder = serve(local.agreement, local.grid, Plan(algorithm="fedavg", rounds=2, wait=0.0), tmp_path / "run")
    found = [event for event in events.read(folder) if event.client == 1 and event.what != "joined"]
    assert [event.what for event in found] == ["garbage", "no evaluation"]  # the first round has nothing to evaluate
    assert all("but that is between" in event.reason for event in found)


def test_a_privacy_loss_that_nobody_promised_is_not_recorded(tmp_path: Path) -> None:
    local = make_federation(tmp_path)
    local.grid.faults[HOSTILE] = in_rounds(with_header(lambda header: header.update(epsilon=1e308)))
    folder = serve(local.agreement, local.grid, Plan(algorithm="fedavg", rounds=1, wait=0.0), tmp_path / "run")
    assert "epsilon" not in set(pd.read_parquet(folder / "metrics.parquet")["metric"])


def test_a_member_that_says_it_has_everything_is_refused(tmp_path: Path) -> None:
    local = make_federation(tmp_path)

    def boast(message: bytes, reply: bytes) -> bytes:
        envelope = unpack(reply, LIMIT)
        if "sizes" in envelope.header:
            envelope.header["sizes"]["train"] = 2**39
        return pack(envelope.header, envelope.tensors)

    local.grid.faults[HOSTILE] = boast
    serve(local.agreement, local.grid, Plan(algorithm="fedavg", rounds=1, wait=0.0), tmp_path / "run")
    refused = [event for event in events.read(tmp_path / "run") if event.what == "refused"]
    assert (
        refused and "says that it has 549755813888 samples in train, but must have 1 to 10000000" in refused[0].reason
    )
    # As many as are allowed cost the server no memory.
    local.grid.faults[HOSTILE] = lambda message, reply: boast(message, reply)
    plan = Plan(algorithm="fedavg", rounds=1, wait=0.0, max_samples=2**39)
    serve(local.agreement, local.grid, plan, tmp_path / "again")
    assert not [event for event in events.read(tmp_path / "again") if event.what == "refused"]


def test_a_refused_node_is_named_by_its_key(tmp_path: Path) -> None:
    keys = [f"ecdsa-sha2-nistp384 AAAA{number}" for number in range(3)]
    members = tuple({"name": f"silo-{number}", "key": key} for number, key in enumerate(keys))
    local = make_federation(tmp_path, members=members)
    local.grid.keys = {100 - number: key for number, key in enumerate(keys)}
    local.grid.faults[HOSTILE] = lambda message, reply: b"noise"
    serve(local.agreement, local.grid, Plan(algorithm="fedavg", rounds=1, wait=0.0), tmp_path / "run")
    (event,) = [event for event in events.read(tmp_path / "run") if event.what == "refused"]
    assert "node 99, with the key of silo-1: it cannot be read" in event.reason


def test_norms_are_of_the_change_over_all_tensors() -> None:
    message = {"w": torch.ones(2, 2), "v": torch.zeros(2, 1)}
    replies = {"w": torch.tensor([[4.0, 1.0], [1.0, 1.0]]), "gradient": torch.tensor([[4.0], [2.0]])}
    # sqrt(3² + 4²), and the gradient alone where the model has not changed
    assert update_norms(replies, message, {"gradient": None}).tolist() == [5.0, 2.0]
    # relative to another tensor of the message, of another shape: the reply itself
    assert update_norms({"w": replies["w"]}, message, {"w": "v"}).tolist() == [math.sqrt(17), math.sqrt(2)]


def test_what_a_reply_alone_is_compared_with() -> None:
    w, gradient, loss = torch.tensor([[3.0, 4.0, 0.0]]), torch.full((1, 3), 9.0), torch.tensor([7.0])
    both = {"g": None, "loss": None}
    assert sent_norms({"w": gradient}, {"w": w}, {}).tolist() == [5.0]
    assert sent_norms({"g": gradient, "loss": loss}, {"w": w}, both).tolist() == [5.0]  # the model it is a gradient of
    assert sent_norms({"g": gradient, "loss": loss}, {"w": 0 * w}, both).tolist() == [math.sqrt(3)]  # a model of ones
    assert sent_norms({"g": gradient, "loss": loss}, {}, both, longest=3).tolist() == [math.sqrt(3)]
    # Losses of some steps, beside a direction that is sent or that the client has: they may be as large as they are.
    losses = {"losses": torch.full((1, 2), 1e9)}
    assert sent_norms(losses, {"steps": torch.ones(1, 2), "d": w}, {"losses": None}).tolist() == [0.0]
    assert sent_norms(losses, {"steps": torch.ones(1, 2)}, {"losses": None}, longest=3).tolist() == [0.0]
    assert sent_norms({"loss": loss}, {}, {"loss": None}).tolist() == [0.0]


def test_only_what_stands_out_from_a_majority_is_too_large() -> None:
    def never() -> Tensor:
        raise AssertionError("a majority says more than what was sent")

    def nothing() -> Tensor:
        return torch.zeros(3)

    norms = torch.tensor([1.0, 2.0, 300.0], dtype=torch.float64)
    assert list(too_large(norms, 100, never)) == [2]
    assert not too_large(norms, 150, never)  # 300 is 150 times the median of 2
    assert not too_large(norms[1:], 10, lambda: torch.zeros(2))  # of two, who is to say which
    assert list(too_large(norms[[2, 0]], 10, lambda: torch.ones(2))) == [0]  # but one changes far more than there was
    assert list(too_large(torch.tensor([0.0, 0.0, 20.0], dtype=torch.float64), 10, lambda: torch.ones(3))) == [2]
    assert not too_large(torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64), 10, nothing)
    assert list(too_large(torch.tensor([1.0, 1.0, math.inf], dtype=torch.float64), 10, never)) == [2]


def test_what_others_say_is_one_line_that_ends() -> None:
    assert sentence("a\x1b[31m\n\tb") == "a\N{REPLACEMENT CHARACTER}[31m b"
    assert len(sentence("x" * 10**6)) < 410


def test_blocks_of_other_writers_are_read_and_gaps_are_not() -> None:
    tensors = {"a": torch.arange(3, dtype=torch.int32), "b": torch.tensor([True, False]), "c": torch.zeros(0, 2)}
    block = save(tensors, metadata={"coterie": json.dumps({"schema": SCHEMA, "order": ["a", "b", "c"]})})
    found = unpack(block, LIMIT).tensors
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
    with pytest.raises(Rejected, match="cannot be read"):
        unpack(block + b"\0", LIMIT)
    for shape, offsets in (([1], [4, 8]), ([2], [0, 4]), ([-1], [0, -4]), ([1.0], [0, 4]), ([True], [0, 4])):
        outer = {
            "__metadata__": {"coterie": json.dumps({"schema": SCHEMA, "order": ["w"]})},
            "w": {"dtype": "F32", "shape": shape, "data_offsets": offsets},
        }
        head = json.dumps(outer).encode()
        with pytest.raises(Rejected, match="cannot be read"):
            unpack(len(head).to_bytes(8, "little") + head + bytes(8 if offsets[1] == 8 else 4), LIMIT)
