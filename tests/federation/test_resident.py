"""What a node keeps between messages, what it computes with, and what it lets itself be asked."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.algorithms.base import Minibatches
from coterie.compute import batched
from coterie.compute.batched import BatchedEngine
from coterie.compute.cuda_graphs import RecordedFold
from coterie.compute.engine import Call
from coterie.compute.loop import LoopEngine
from coterie.errors import ConfigError
from coterie.federation import project, resident
from coterie.federation.node import Node
from coterie.federation.party_data import make_simulation, own_population
from coterie.federation.plan import Plan
from coterie.federation.reply_schema import ReplySchema, blank_engine
from coterie.federation.resident import Means
from coterie.federation.schema import observe
from coterie.federation.server import serve
from coterie.federation.wire import pack, unpack
from coterie.runs.storage import events
from coterie.simulation.simulation import Simulation
from tests.federation.grid import Local, make_agreement, make_federation, parts, states

LIMIT = 2**30


def with_means(folder: Path, means: Means, **more: Any) -> Local:
    local = make_federation(folder, **more)
    local.grid.nodes_ = {
        number: Node(local.agreement, node.client, local.datasets[node.client], node.folder, means=means)
        for number, node in local.grid.nodes_.items()
    }
    return local


def play(local: Local, folder: Path, algorithm: str = "fedavg", rounds: int = 3, **more: Any) -> Path:
    plan = Plan(algorithm=algorithm, rounds=rounds, wait=0.0, **more)
    return serve(local.agreement, local.grid, plan, folder)


def test_a_run_is_put_together_once_and_few_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    real = resident.make_simulation

    def counted(config: Any, *given: Any) -> Any:
        made.append(config.algorithm)
        return real(config, *given)

    monkeypatch.setattr(resident, "make_simulation", counted)
    local = make_federation(tmp_path)
    play(local, tmp_path / "one", "fedpg")  # two exchanges a round
    assert made == ["fedpg"] * 3  # one for each node
    for number in range(3):
        play(local, tmp_path / f"more-{number}", rounds=1)
    assert all(len(node._residents._kept) == 2 for node in local.grid.nodes_.values())


def test_the_first_model_is_held_once_and_never_written_into(tmp_path: Path) -> None:
    local = make_federation(tmp_path)
    play(local, tmp_path / "shared", "fedavg", rounds=2)
    for node in local.grid.nodes_.values():
        (kept,) = node._residents._kept.values()
        start = kept.simulation.engine.problem.start
        assert kept.begin["w"].data_ptr() == start.data_ptr()
        fresh = make_federation(tmp_path / f"again-{node.client}")
        play(fresh, tmp_path / f"again-{node.client}" / "run", "fedavg", rounds=1)
        (other,) = fresh.grid.nodes_[100 - node.client]._residents._kept.values()
        assert torch.equal(other.simulation.engine.problem.start, start)


def test_a_task_runs_within_what_the_process_wants_for_it(tmp_path: Path) -> None:
    local, inside = make_federation(tmp_path), []

    @contextlib.contextmanager
    def noted() -> Iterator[None]:
        inside.append("in")
        yield
        inside.append("out")

    for node in local.grid.nodes_.values():
        node.while_computing = noted
    play(local, tmp_path / "run", rounds=2)
    assert inside == ["in", "out"] * 6  # three nodes, two rounds


def test_a_node_computes_with_the_threads_that_its_silo_chose(tmp_path: Path) -> None:
    local, found = with_means(tmp_path, Means(threads=2)), set[int]()

    @contextlib.contextmanager
    def noted() -> Iterator[None]:
        found.add(torch.get_num_threads())
        yield

    for node in local.grid.nodes_.values():
        node.while_computing = noted
    assert local.agreement.threads == 1
    play(local, tmp_path / "run", rounds=1)
    assert found == {2}


def test_runs_that_take_turns_do_not_mix(tmp_path: Path) -> None:
    """One run's messages come between another's, of another learning rate; each ends as it would alone."""
    both, alone = make_federation(tmp_path / "both"), make_federation(tmp_path / "alone")
    other: dict[str, Any] = {"settings": {"lr": 0.5}}

    def between(grid: Any) -> None:
        if grid.exchanges == 3:
            grid.before = None
            play(both, tmp_path / "both" / "second", "flame", **other)

    both.grid.before = between
    play(both, tmp_path / "both" / "first", "flame")
    for name, more in (("first", {}), ("second", other)):
        expected = states(play(alone, tmp_path / "alone" / name, "flame", **more))[0]
        found = states(tmp_path / "both" / name)[0]
        assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.parametrize("algorithm", ["fedavg", "fedacs", "flame"])
def test_a_batched_node_agrees_with_a_loop(tmp_path: Path, algorithm: str) -> None:
    """As engines do: float64 and a few steps leave nothing but rounding."""
    found = []
    for engine in ("loop", "batched"):
        local = with_means(tmp_path / engine, Means(engine=engine), dtype="float64")  # type: ignore[arg-type]
        found.append(states(play(local, tmp_path / engine / "run", algorithm))[0])
        assert {node._residents._kept[key].simulation.engine.name for node in local.grid.nodes_.values()
                for key in node._residents._kept} == {engine}  # fmt: skip
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("algorithm", "settings", "asks"),
    [
        ("fedavg", {"local_epochs": 3}, "3 epochs"),
        ("fedrep", {"head_epochs": 2}, "3 epochs"),  # and one of the body
        ("flame", {}, "5 epochs"),  # of a newcomer
        ("ditto", {"local_steps": 5}, "5 steps"),
        ("per_fedavg", {"adapt_steps": 5}, "5 steps"),
        ("pfedme", {"local_epochs": 2, "inner_steps": 2}, "4 epochs"),
        ("pfedme", {"local_rounds": 3, "inner_steps": 2}, "6 steps"),
    ],
)
def test_a_node_does_not_let_itself_be_asked_for_more(
    tmp_path: Path, algorithm: str, settings: dict[str, int], asks: str
) -> None:
    local, means = make_federation(tmp_path), Means(max_epochs=2, max_steps=4)
    first = local.grid.nodes_[100]
    local.grid.nodes_[100] = Node(local.agreement, 0, local.datasets[0], first.folder, means=means)
    settings = {"local_epochs": 1, **settings}
    play(local, tmp_path / "run", algorithm, rounds=1, settings=settings)
    (found,) = [event for event in events.read(tmp_path / "run") if event.what == "refused"]
    name = asks.split()[1]
    most = getattr(means, f"max_{name}")
    assert found.reason == f"node 100: it asks for {asks}, but the node's node.yaml allows max_{name}: {most}"
    # A server that does not ask first gets no other answer, and the node does not even look what is sent.
    message = unpack(local.grid.sent[1][99], LIMIT)
    header = unpack(first.handle(pack({**message.header, "client": 0}, message.tensors)), LIMIT).header
    assert "error" not in header
    refusing = local.grid.nodes_[100]
    header = unpack(refusing.handle(pack({**message.header, "client": 0}, message.tensors)), LIMIT).header
    assert f"asks for {asks}" in header["error"] and not refusing._residents._seen


@pytest.mark.parametrize("how", ["loop", "batched", "recorded"])
def test_a_task_is_given_up_after_some_seconds(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "make_simulation", recording) if how == "recorded" else None
    local = with_means(tmp_path, Means(engine="loop" if how == "loop" else "batched"))
    for node in local.grid.nodes_.values():
        node.means = replace(node.means, max_seconds=1e-9)
    play(local, tmp_path / "run", rounds=1)
    found = [event for event in events.read(tmp_path / "run") if event.what == "error"]
    assert {event.client for event in found} == {0, 1, 2}
    assert all("longer than the 1e-09 s of max_seconds" in event.reason for event in found)


def recording(*given: Any) -> Simulation:
    """Put a run together whose steps are recorded, as on a GPU."""
    made = make_simulation(*given)
    assert isinstance(made.engine, BatchedEngine)
    made.engine.record = True
    return made


def test_what_a_gpu_recorded_for_a_message_serves_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "make_simulation", recording)
    made = []

    def counted(*given: Any) -> RecordedFold:
        made.append(RecordedFold(*given))
        return made[-1]

    monkeypatch.setattr(batched, "RecordedFold", counted)
    play(with_means(tmp_path, Means(engine="batched")), tmp_path / "run", rounds=3)
    assert len(made) == 3  # one for each node


def test_finding_out_what_is_sent_is_given_up_too(tmp_path: Path) -> None:
    local = with_means(tmp_path, Means(max_seconds=1e-9))
    with pytest.raises(ConfigError, match="0 of 3 members came"):
        play(local, tmp_path / "run", rounds=1)
    found = [event.reason for event in events.read(tmp_path / "run") if event.what == "refused"]
    assert len(found) == 3 and all("longer than the 1e-09 s of max_seconds" in reason for reason in found)


def test_code_is_named_by_the_silo_itself(tmp_path: Path) -> None:
    spec = "import:tests.federation.somebodys:Net"
    for field in ("model", "loss"):
        agreement = make_agreement(**{field: spec})
        with pytest.raises(ConfigError, match=rf"has the {field} '{spec}', which is code that the node would run"):
            Node(agreement, 0, parts(3)[0], tmp_path)
        with pytest.raises(ConfigError, match="which is code"):
            Node(agreement, 0, parts(3)[0], tmp_path, means=Means(allow=(f"{spec}s",)))
        assert Node(agreement, 0, parts(3)[0], tmp_path, means=Means(allow=(spec,)))


METHOD = """
from typing import ClassVar

from coterie.algorithms.fedavg import FedAvg


class Mine(FedAvg):
    name: ClassVar[str] = "mine_{number}"
    title: ClassVar[str] = "Mine"
    citation: ClassVar[str] = "nobody"
"""


def test_a_method_of_the_members_own_runs_where_each_silo_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for number in (1, 2):
        (tmp_path / f"methods_of_members_{number}.py").write_text(METHOD.format(number=number))
    first, second = (f"import:methods_of_members_{number}:Mine" for number in (1, 2))
    agreed = {"algorithms": ("fedavg", first)}
    with pytest.raises(ConfigError, match=f"has the method '{first}', which is code that the node would run"):
        make_federation(tmp_path / "refused", means=Means(allow=(second,)), **agreed)
    assert "methods_of_members_1" not in sys.modules  # before it was allowed nothing of it ran
    local = make_federation(tmp_path / "own", means=Means(allow=(first,)), **agreed)
    found = states(play(local, tmp_path / "own" / "run", "mine_1"))[0]
    again = states(play(make_federation(tmp_path / "plain"), tmp_path / "plain" / "run"))[0]
    assert all(torch.equal(value, again[name]) for name, value in found.items())
    with pytest.raises(ConfigError, match="agrees on fedavg, mine_1 only"):
        play(local, tmp_path / "own" / "other", "fedprox")
    with pytest.raises(ConfigError, match="'Missing' is missing in 'methods_of_members_2'"):
        make_agreement(algorithms=(second.replace("Mine", "Missing"),)).experiment("fedavg", {})
    with pytest.raises(ConfigError, match="it must be a class of an Algorithm"):
        make_agreement(algorithms=(second.replace("Mine", "ClassVar"),)).experiment("fedavg", {})


def test_node_yaml_says_what_a_node_computes_with(tmp_path: Path) -> None:
    text = "member: a\ndata: data.npz\nserver: localhost:1\n"
    (tmp_path / "node.yaml").write_text(text)
    assert project.read_node(tmp_path).means() == Means()
    (tmp_path / "node.yaml").write_text(
        f"{text}engine: batched\ndevice: cuda:1\nthreads: 3\nmax_epochs: 5\nmax_steps: 6\nmax_seconds: 7\n"
        "allow: ['import:a:B']\n"
    )
    wanted = Means("batched", "cuda:1", 3, 5, 6, 7.0, ("import:a:B",))
    assert project.read_node(tmp_path).means() == wanted
    config = wanted.applied(make_agreement().experiment("fedavg", {}))
    assert (config.engine, config.device, config.threads) == ("batched", "cuda:1", 3)
    (tmp_path / "node.yaml").write_text(f"{text}device: tpu\n")
    with pytest.raises(ConfigError, match="device is 'tpu'"):
        project.read_node(tmp_path)


@pytest.mark.parametrize("field", ["local_epochs", "local_steps"])
def test_finding_out_what_is_sent_takes_one_pass_however_long_a_round_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    agreement, steps = make_agreement(), 0
    real = LoopEngine._batch

    def counted(self: LoopEngine, *given: Any) -> Any:
        nonlocal steps
        steps += 1
        return real(self, *given)

    monkeypatch.setattr(LoopEngine, "_batch", counted)
    seen, replies = [], []
    for passes in (1, Minibatches.MOST):
        steps, config = 0, agreement.experiment("ditto", {field: passes})
        seen.append((observe(config, agreement), steps))
        steps = 0
        blank = make_simulation(config, agreement, own_population(parts(3)[0], 0, config), None, tmp_path)
        schema = ReplySchema(
            blank_engine(blank.engine, agreement), blank.tasks, blank.clients.gather(torch.tensor([0]))
        )
        replies.append((schema.of(next(iter(blank.tasks)), {"w": blank.engine.problem.start}, Call(1, "round")), steps))
    assert seen[0] == seen[1] and seen[0][1] > 0
    assert replies[0] == replies[1] and replies[0][1] > 0
    with pytest.raises(ConfigError, match=field):
        agreement.experiment("ditto", {field: Minibatches.MOST + 1})
