"""Mutated messages and configurations: whatever comes, what is said is a sentence of ours, and nothing grows.

``make fuzz`` tries 100,000 and 10,000 of them; without it there are some. ``COTERIE_FUZZ_SEED`` draws others, so that
several pieces make one whole.
"""

from __future__ import annotations

import os
import re
import resource
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from coterie import options
from coterie.compute.engine import Call
from coterie.config import from_mapping
from coterie.errors import CoterieError
from coterie.federation import agreement
from coterie.federation.agreement import Agreement
from coterie.federation.plan import Plan
from coterie.federation.project import NodeConfig, ServerConfig
from coterie.federation.remote_exchange import RemoteExchange, _Lost, _scores
from coterie.federation.server import serve
from coterie.federation.statement import Statement
from coterie.federation.transport import Failure
from coterie.federation.wire import Rejected, unpack
from coterie.yaml_file import read_yaml
from tests.federation import mutations
from tests.federation.grid import Local, make_federation, states

MESSAGES = int(os.environ.get("COTERIE_FUZZ_MESSAGES", "1200"))
CONFIGURATIONS = int(os.environ.get("COTERIE_FUZZ_CONFIGURATIONS", "400"))
SEED = int(os.environ.get("COTERIE_FUZZ_SEED", "0"))
LIMIT = 2**20
GROWTH = 300 * 2**20  # bytes that memory may grow by, however many there are: a model and its messages, some times


class Recording:
    """A grid that keeps what crosses it."""

    def __init__(self, local: Local) -> None:
        self.local = local
        self.down: list[bytes] = []
        self.up: list[bytes] = []
        self.remotes: list[RemoteExchange] = []

    def nodes(self) -> dict[int, str]:
        return self.local.grid.nodes()

    def exchange(
        self, messages: Mapping[int, bytes], deadline: float, patience: frozenset[int]
    ) -> dict[int, bytes | Failure]:
        replies = self.local.grid.exchange(messages, deadline, patience)
        self.down += messages.values()
        self.up += [reply for reply in replies.values() if isinstance(reply, bytes)]
        return replies


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Record two small runs of methods that send different things."""
    local = make_federation(tmp_path_factory.mktemp("recorded"), message_limit_mb=1)
    grid = Recording(local)
    init, made = RemoteExchange.__init__, grid.remotes

    def noted(self: RemoteExchange, *given: Any) -> None:
        init(self, *given)
        made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteExchange, "__init__", noted)
        for method in ("flame", "fedpg"):
            serve(local.agreement, grid, Plan(algorithm=method, rounds=2, wait=0.0), local.folder / method)
    return grid


def drawn(which: int) -> np.random.Generator:
    return np.random.default_rng([which, SEED] if SEED else which)


def memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_a_node_answers_whatever_it_is_sent(recorded: Recording) -> None:
    draw, node = drawn(1), recorded.local.grid.nodes_[100]
    log, said, before = node.folder / "errors.log", Counter[str](), memory()
    for number in range(MESSAGES // 2):
        block = mutations.mutated(recorded.down, draw)
        reply = node.handle(block)
        header = unpack(reply, LIMIT).header
        error = str(header.get("error") or "")
        if error.startswith("an unexpected"):
            pytest.fail(f"{number}: {error}\n{log.read_text()[-2000:]}\n{block[:2000]!r}")
        assert len(error) < 2**16 and str(node.folder) not in error
        said["answered" if not error else " ".join(error.split()[:4])] += 1
    assert not log.exists() and said["answered"] < MESSAGES // 2 and len(said) > 5
    assert memory() - before < GROWTH
    print(said.most_common(12))


def test_a_node_that_was_sent_anything_answers_as_before(recorded: Recording) -> None:
    """The last message of a run, once more: the node's state is what the server counts on."""
    local = recorded.local
    node = local.grid.nodes_[100]
    mine = [block for block in recorded.down if unpack(block, LIMIT).header.get("client") == node.client]
    reply = unpack(node.handle(mine[-1]), LIMIT).header
    assert not reply.get("error"), reply
    assert states(local.folder / "fedpg")[0].keys()


def test_a_server_reads_whatever_it_is_sent(recorded: Recording) -> None:
    draw, said, before = drawn(2), Counter[str](), memory()
    remote = recorded.remotes[0]
    genuine = unpack(recorded.up[-1], LIMIT).header
    for number in range(MESSAGES - MESSAGES // 2):
        block = mutations.mutated(recorded.up, draw)
        call = Call(int(draw.integers(1, 3)), "round", 0)
        client = int(draw.integers(3))
        good = draw.random() < 0.5  # to come past the first checks, the header says what is asked for
        if good:
            block = _addressed(block, {"run": remote._common["run"], "client": client, "token": remote._token(call)})
        try:
            found = remote._open(block, client, call, {})
            dict(_scores(found.header.get("scores"), remote._metrics, frozenset()))
            said["accepted"] += 1
        except (_Lost, Rejected) as error:
            why = str(error)
            assert not re.fullmatch(r"it cannot be read \(\w+\)", why), (number, why, block[:3000])
            said[" ".join(why.split()[:3])] += 1
    assert len(said) > 5 and memory() - before < GROWTH
    assert genuine["token"] and said.most_common(12)
    print(said.most_common(12))


def _addressed(block: bytes, values: dict[str, Any]) -> bytes:
    import json

    try:
        header, body = mutations.parts(block)
        own = json.loads(header["__metadata__"]["coterie"])
        header["__metadata__"]["coterie"] = json.dumps({**own, **values})
        return mutations.raw(header, body)
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError):
        return block


BASES: dict[str, dict[str, Any]] = {
    "agreement": {
        "name": "x",
        "members": [{"name": "a"}, {"name": "b", "key": "ecdsa x"}],
        "data": {"task": "multiclass", "input_shape": [1, 8, 8], "classes": ["0", "1"], "mean": [0.0], "std": [1.0]},
        "model": "mlp:hidden=8",
        "privacy": {"clip": 1.0, "noise": 2.0},
        "algorithms": ["fedavg"],
        "seed": 1,
        "threads": 1,
    },
    "schema": {
        "name": "x",
        "members": [{"name": "a"}],
        "data": {
            "task": "binary",
            "input_shape": [2],
            "classes": ["0", "1"],
            "columns": ["age", "ward=a"],
            "mean": [1.0, 0.0],
            "std": [2.0, 1.0],
            "fill": [1.0, 0.0],
            "table": {"age": {"kind": "number", "bounds": [0, 100]}, "ward": {"kind": "category", "categories": ["a"]}},
            "told": {"members": ["a"], "seed": 1, "validation": 0.1, "test_fraction": 0.2},
        },
    },
    "node": {"member": "a", "data": "data.npz", "server": "here:1", "engine": "batched", "max_epochs": 3, "allow": []},
    "server": {"host": "127.0.0.1", "port": 1, "superlink_port": 2},
    "plan": {"algorithm": "fedavg", "rounds": 3, "settings": {"epochs": 2}, "minimum": 1, "track": []},
    "statement": {
        "version": 1, "member": "a", "place": 0, "seed": 1, "validation": 0.1, "test_fraction": 0.2, "task": "binary",
        "input_shape": [1], "label": "y", "classes": ["0", "1"], "table": {"age": {"kind": "number", "gaps": "mean"}},
        "rows": 3, "exact": {"age": {"count": 3.0, "mean": 1.0, "squares": 0.5}},
    },
    "experiment": {
        "algorithm": "fedavg", "settings": {"epochs": 1, "rate": 0.1}, "data": "digits", "partition": "dirichlet:0.5",
        "clients": 4, "rounds": 2, "model": "mlp:hidden=4", "metrics": ["accuracy"], "privacy": "clip=1,noise=2",
        "attack": "gaussian:0.2", "participation": 0.5, "engine": "loop", "device": "cpu", "scope": "local",
    },
}  # fmt: skip


def tried(kind: str, values: Any, folder: Path) -> None:
    """Read a configuration as its command does, and put together what is checked without data."""
    path = folder / "file.yaml"
    if kind == "experiment":
        if isinstance(values, dict):
            from_mapping(values)
        return
    path.write_text(yaml.safe_dump(values, allow_unicode=True), encoding="utf-8")
    found = read_yaml(path)
    if kind in ("agreement", "schema"):
        agreed = agreement.read(path)
        agreed.digest  # noqa: B018
        agreed.experiment("fedavg", {})
    elif kind == "plan":
        plan = options.make(Plan, found, "plan")
        plan.experiment(options.make(Agreement, BASES["agreement"], "federation.yaml"))
    else:
        options.make({"node": NodeConfig, "server": ServerConfig, "statement": Statement}[kind], found, kind)


def test_whatever_a_configuration_says_the_answer_is_a_sentence(tmp_path: Path) -> None:
    draw, said, before = drawn(3), Counter[str](), memory()
    kinds = list(BASES)
    for number in range(CONFIGURATIONS):
        kind = kinds[int(draw.integers(len(kinds)))]
        values: Any = BASES[kind]
        for _ in range(1 + int(draw.integers(3))):
            values = mutations.changed(values, draw)
        try:
            tried(kind, values, tmp_path)
            said["accepted"] += 1
        except CoterieError as error:
            assert "\n" not in str(error) and len(str(error)) < 20_000, (number, kind, values, str(error)[:500])
            said[kind] += 1
        except Exception as error:
            pytest.fail(f"{number}: {kind} {values!r} raised {type(error).__name__}: {error}")
    assert said["accepted"] > 0 and len(said) == len(kinds) + 1
    assert memory() - before < GROWTH
    print(said)
