"""The commands that need no server, and what the wire table says."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from coterie.cli import federate
from coterie.cli.app import app
from coterie.errors import ConfigError, CoterieError, RunFolderError
from coterie.federation import agreement
from coterie.federation.agreement import Schema
from coterie.federation.monitor import RunMonitor
from coterie.federation.plan import Plan
from coterie.federation.schema_table import lines
from coterie.federation.server import serve
from tests.federation.grid import LocalGrid, make_federation

needs_flower = pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="flwr is not installed")


def test_what_fedpg_sends_is_what_its_paper_says() -> None:
    """Down the model, the direction and a step's length; up a gradient and a loss: each once a round."""
    sent = {(line.way, line.name): line.shape for line in lines("fedpg") if line.when.startswith("round")}
    assert sent == {
        ("server → node", "w"): "n",
        ("node → server", "g"): "n",
        ("node → server", "loss"): "1",
        ("server → node", "d"): "n",
        ("server → node", "gamma"): "1",
    }


def test_fedrep_never_sends_a_head() -> None:
    assert {line.shape for line in lines("fedrep")} == {"b"}


def test_local_sends_no_model_up() -> None:
    assert not any("n" in line.shape for line in lines("local") if line.way == "node → server")


def test_the_table_in_the_terminal() -> None:
    done = CliRunner().invoke(app, ["federate", "wire", "fedavg"], catch_exceptions=False)
    assert "| round, task train | server → node | `w` | n | every node, the same |" in done.output
    assert "| round, task train | node → server | `w` | n | the server |" in done.output


def test_commands_say_that_flower_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"flwr is not installed: install Coterie with its extra"):
        CliRunner().invoke(app, ["federate", "init", str(tmp_path / "p")], catch_exceptions=False)


@needs_flower
@pytest.mark.parametrize("host", ["bad host", "fed.example.org/", "-x", "fed:1", ""])
def test_a_host_that_is_none_is_refused_before_anything_is_written(tmp_path: Path, host: str) -> None:
    from coterie.federation import project

    with pytest.raises(ConfigError, match=r"host is .*, but must be a name"):
        project.init(tmp_path / "demo", ["a"], host)
    assert not (tmp_path / "demo").exists()


@needs_flower
def test_a_project_is_not_written_over(tmp_path: Path) -> None:
    command = ["federate", "init", str(tmp_path / "p"), "--nodes", "2"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert "coterie federate node" in done.output
    with pytest.raises(CoterieError, match="is not empty"):
        CliRunner().invoke(app, command, catch_exceptions=False)


@needs_flower
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"member": "silo-9"}, "'silo-9' is not in the roster"),
        ({"member": "silo-1"}, "is not the key that federation.yaml has for 'silo-1'"),
        ({"data": "other.npz"}, "there is no file"),
        ({"server": "somewhere"}, "server"),
    ],
)
def test_a_node_that_disagrees_does_not_start(tmp_path: Path, change: dict[str, str], says: str) -> None:
    CliRunner().invoke(app, ["federate", "init", str(tmp_path / "p"), "--nodes", "2"], catch_exceptions=False)
    file = tmp_path / "p" / "nodes" / "silo-0" / "node.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **change}))
    with pytest.raises(CoterieError, match=says):
        CliRunner().invoke(app, ["federate", "node", str(file.parent)], catch_exceptions=False)


@needs_flower
def test_what_a_node_writes_is_for_its_user_alone_and_what_a_killed_one_left_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coterie.federation.flower import node_runner

    CliRunner().invoke(app, ["federate", "init", str(tmp_path / "p"), "--nodes", "1"], catch_exceptions=False)
    folder = tmp_path / "p" / "nodes" / "silo-0"
    (folder / ".privacy.json.draft").touch()
    agreed = agreement.read(folder / agreement.FILE)

    def play(place: Any, handle: Any, say: Any) -> None:
        node = SimpleNamespace(handle=handle)
        grid = LocalGrid({7: node}, keys={7: agreed.members[0].key or ""})  # type: ignore[dict-item]
        serve(agreed, grid, Plan(algorithm="flame", rounds=2, wait=0.0), tmp_path / "run")

    monkeypatch.setattr(node_runner, "run_node", play)
    before = os.umask(0o022)
    try:
        CliRunner().invoke(app, ["federate", "node", str(folder)], catch_exceptions=False)
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    written = [path for name in ("state", "models") for path in (folder / name, *(folder / name).rglob("*"))]
    assert {path.name for path in written} >= {"committed.safetensors", "model.safetensors", "metrics.json"}
    assert {path for path in written if path.stat().st_mode & 0o077} == set()
    assert not (folder / ".privacy.json.draft").exists()


@needs_flower
def test_certificates_that_end_soon_are_told_by_status(tmp_path: Path) -> None:
    from coterie.federation.flower import renewal

    CliRunner().invoke(app, ["federate", "init", str(tmp_path / "p"), "--port", "1"], catch_exceptions=False)
    command = ["federate", "status", str(tmp_path / "p")]
    assert "renew" not in CliRunner().invoke(app, command, catch_exceptions=False).output
    renewal.renew(tmp_path / "p", 20, new_key=False, authority_too=False)
    assert "server.crt ends in 19 days" in CliRunner().invoke(app, command, catch_exceptions=False).output


@needs_flower
@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # which Flower builds its apps with
def test_without_a_server_commands_say_so_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(app, ["federate", "init", "p", "--port", "1"], catch_exceptions=False)  # nobody has port 2
    done = CliRunner().invoke(app, ["federate", "status", "p"], catch_exceptions=False)
    assert "the server is not running" in done.output
    with pytest.raises(ConfigError, match=r"does not answer: is the server running\?"):
        CliRunner().invoke(app, ["federate", "run", "p", "fedavg"], catch_exceptions=False)
    assert not list(Path("p/server/plans").iterdir()) and not list(Path("p/runs").iterdir())
    with pytest.raises(ConfigError, match=r"the file '.*nowhere/federation.yaml' cannot be read"):
        CliRunner().invoke(app, ["federate", "status", "nowhere"], catch_exceptions=False)
    Path("p/runs/old").mkdir()
    Path("p/runs/old/summary.json").touch()
    with pytest.raises(RunFolderError, match="old is finished: choose another --out"):
        CliRunner().invoke(app, ["federate", "run", "p", "fedavg", "--out", "p/runs/old"], catch_exceptions=False)


def test_what_a_second_submission_is_told_is_not_taken_for_the_firsts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two for one run, at the same time: each has a plan of its own, beside which the server says what went wrong."""
    plans: list[Path] = []

    class Link:
        def submit(self, folder: Path, settings: dict[str, str]) -> int:
            plans.append(Path(settings["plan"]))
            assert yaml.safe_load(plans[-1].read_text())["algorithm"] == "fedavg"
            if len(plans) == 1:
                with pytest.raises(ConfigError, match="the run failed: it is in use"):
                    federate._submit(tmp_path, plan, tmp_path / "run")
                (tmp_path / "run").mkdir()
                (tmp_path / "run" / "summary.json").write_text("{}")
            else:
                plans[-1].with_suffix(".error").write_text("it is in use\n")
            return len(plans)

    plan = Plan(algorithm="fedavg")
    monkeypatch.setattr(federate, "_control", lambda folder: Link())
    federate._submit(tmp_path, plan, tmp_path / "run")
    assert len(set(plans)) == 2
    assert not list((tmp_path / "server" / "plans").iterdir())


class Answering:
    """Stands for a SuperLink that answers as it is told to."""

    def __init__(self, *answers: bool | None) -> None:
        self.answers = list(answers)

    def is_over(self, run: int) -> bool:
        answer = self.answers.pop(0)
        if answer is None:
            raise ConfigError("does not answer")
        return answer


@pytest.mark.parametrize(
    ("answers", "is_lost"), [((False, False, True), False), ((None, False, None, True), False), ((None,) * 4, True)]
)
def test_a_server_that_is_slow_to_answer_is_not_given_up_at_once(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[bool | None, ...], is_lost: bool
) -> None:
    """Asked every 16 seconds here; after 60 without an answer it is lost."""
    now = [0.0]
    pause = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + 16.0))
    monkeypatch.setattr(federate, "time", pause)
    link = Answering(*answers)
    waiting = federate._waiting(cast(Any, link), 1, ())
    if is_lost:
        with pytest.raises(ConfigError, match="does not answer"):
            list(waiting)
    else:
        assert len(list(waiting)) == len(answers) + 1
    assert not link.answers


def test_data_are_described_in_the_words_of_the_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("patients.csv").write_text("age,ward,outcome\n20,b,ill\n40,a,well\n")
    text = "table:path=patients.csv,label=outcome,task=binary"
    done = CliRunner().invoke(app, ["federate", "describe", text], catch_exceptions=False)
    schema = Schema(**yaml.safe_load(done.stdout)["data"])
    assert (schema.task, schema.input_shape, schema.classes) == ("binary", (3,), ("ill", "well"))
    assert schema.columns == ("age", "ward=a", "ward=b")
    assert (schema.mean, schema.std) == ((30.0, 0.0, 0.0), (10.0, 1.0, 1.0))  # of the numbers 20 and 40


def test_a_run_is_told_line_by_line(tmp_path: Path) -> None:
    local = make_federation(tmp_path)
    run = tmp_path / "run"
    watch = RunMonitor(run, 3)
    told: list[str] = []

    def look(grid: LocalGrid) -> None:
        told.extend(watch.new_lines())

    local.grid.before = look
    local.grid.away = lambda done: {99} if done == 2 else set()
    serve(local.agreement, local.grid, Plan(algorithm="fedavg", rounds=3, wait=0.0), run)
    told.extend(watch.new_lines())
    assert [re.sub(r"[\d.]+ (kB|s)\b", "N", line) for line in told if " of 3: " in line] == [
        "round 1 of 3: 3 nodes replied, N down, N up, N",
        "round 2 of 3: 2 nodes replied, N down, N up, N",
        "round 3 of 3: 3 nodes replied, N down, N up, N",
    ]
    after = [line for line in told if line.startswith("after round")]
    assert [line[:14] for line in after] == [f"after round {number}:" for number in (1, 2, 3)]
    metrics = pd.read_parquet(run / "metrics.parquet").query("split == 'test' and metric == 'accuracy' and round == 3")
    mean = metrics.query("model == 'personal'")["value"].mean()
    assert re.search(rf"personal [^;]*accuracy {mean:.4f}", after[-1])
    assert [line for line in told if "returned" in line] == ["round 3: silo-1 returned (it replies again)"]
    assert list(watch.new_lines()) == [] == list(RunMonitor(run, 3).new_lines())
