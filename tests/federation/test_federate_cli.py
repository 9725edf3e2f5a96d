"""The commands that need no server, and what the wire table says."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.errors import ConfigError, CoterieError
from coterie.federation.resident import ask, resident
from coterie.federation.wire_table import lines

SOURCE = Path(__file__).resolve().parents[2] / "src" / "coterie"
needs_flower = pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="flwr is not installed")


def test_only_one_place_imports_flower() -> None:
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "flwr" for name in names):
                found.add(path.relative_to(SOURCE).parts[:2])
    assert found == {("engines", "flower")}


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


def test_blocks_go_to_the_node_that_stays_and_back() -> None:
    with resident(lambda block: block[::-1]) as path:
        assert Path(path).parent.stat().st_mode & 0o077 == 0
        assert ask(path, b"abc") == b"cba"
        assert ask(path, b"") == b""
        large = bytes(range(256)) * 2**14
        assert ask(path, large) == large[::-1]
    with pytest.raises(OSError):
        ask(path, b"abc")
