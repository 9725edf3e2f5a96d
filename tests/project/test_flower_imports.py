"""Flower stays behind one package, and its private parts behind the modules that say so in their names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "coterie"
PACKAGE = Path("federation/flower")
INTERNALS = {f"{PACKAGE}/_{name}internals.py" for name in ("", "control_", "superlink_", "node_")}
PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp"}


def imports_of_flower(text: str) -> set[str]:
    """List what a module imports of Flower: the modules that are named, ``from flwr import x`` as ``flwr.x``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            whole = node.module == "flwr"
            found |= {f"flwr.{alias.name}" for alias in node.names} if whole else {node.module or ""}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            found |= {str(each.value) for each in node.args if isinstance(each, ast.Constant)}
    return {name for name in found if name.split(".")[0] == "flwr"}


def private_names(text: str) -> set[str]:
    return imports_of_flower(text) - PUBLIC


@pytest.mark.parametrize(
    ("line", "private"),
    [
        ("from flwr.app import Message", False),
        ("import flwr.serverapp", False),
        ("from flwr import app", False),
        ("import numpy", False),
        ("from flwr.common.constant import Status", True),
        ("from flwr.app.message import make_message", True),
        ("import flwr", True),  # from which everything can be reached
        ("from flwr import common", True),
        ("def f():\n    from flwr.supercore.fab import Fab", True),
        ("if TYPE_CHECKING:\n    import flwr.proto.node_pb2 as pb", True),
        ("import importlib\nimportlib.import_module('flwr.supercore')", True),
    ],
)
def test_what_counts_as_private(line: str, private: bool) -> None:
    assert bool(private_names(line)) is private


def test_only_one_package_imports_flower_and_few_modules_more_than_its_public_face() -> None:
    texts = {path.relative_to(SOURCE): path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    outside = {str(path) for path, text in texts.items() if imports_of_flower(text) and path.parent != PACKAGE}
    assert not outside, f"only {PACKAGE} may import flwr, but {sorted(outside)} do"
    private = {str(path): sorted(found) for path, text in texts.items() if (found := private_names(text))}
    assert private.keys() == INTERNALS, f"only {sorted(INTERNALS)} may import Flower's private parts, but: {private}"
