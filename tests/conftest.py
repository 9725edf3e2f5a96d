"""Settings common to all tests, and the choice that ``--quick`` makes of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis  # before any command freezes what the garbage collector knows, by which it looks around
import pytest

if os.environ.get("COTERIE_TEST_DEVICE", "cpu") == "cpu":
    # Read where kernels are defined: on a CPU they can only be interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from coterie.algorithms import registry
from coterie.randomness import torch_stream

torch.set_num_threads(1)

# A busy machine is no mistake in a test; the profile that Hypothesis takes in continuous integration says so by itself.
if hypothesis.settings.get_current_profile_name() == "default":
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("unhurried", deadline=None, suppress_health_check=slow)
    hypothesis.settings.load_profile("unhurried")

HERE = Path(__file__).parent

QUICK = (
    *("test_config.py", "test_conformance.py", "test_randomness.py", "algorithms/server_math"),
    *("oracles/test_fedacs.py", "oracles/test_fedamp.py", "oracles/test_flame.py", "oracles/test_fedpg.py"),
    *("algorithms/test_registry.py", "evaluation/test_selection.py", "rows/test_rows.py"),
    *("oracles/test_fedavg.py", "compute/test_layers.py", "compute/test_tasks.py"),
    *("runs/storage/test_checkpoints.py", "runs/storage/test_run_folder.py", "runs/test_resume.py"),
    *("runs/test_summary.py", "cli/test_cli.py", "federation/test_wire.py", "project/test_house.py"),
)
"""What ``--quick`` runs: what a mistake in most places breaks first, and soon done. No processes, pictures or pages."""

QUICK_METHODS = ("fedavg", "fedacs", "fedamp", "flame", "fedpg")
"""And for which methods, where a test is run for all of them: with one exchange and two, weights, duals, choices."""


@pytest.fixture(autouse=True)
def same_draws_in_any_order() -> Iterator[None]:
    """Whatever a test draws without a stream of its own does not hang on the tests before it."""
    with torch_stream(0, "test"):
        yield


@pytest.fixture(autouse=True)
def no_test_leaves_a_method_behind() -> Iterator[None]:
    """A method that a test registers is gone when it ends, lest others count it among Coterie's own."""
    memories: list[dict[str, Any]] = [registry._registered, registry._handed_over]
    before = [memory.keys() | registry._ours() for memory in memories]
    yield
    for memory, names in zip(memories, before, strict=True):
        for name in memory.keys() - names:
            del memory[name]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only the tests that find most mistakes soonest")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("--quick"):
        return None
    chosen = [HERE / name for name in QUICK]
    wanted = any(collection_path.is_relative_to(path) or path.is_relative_to(collection_path) for path in chosen)
    return None if wanted else True  # None leaves the other rules in force


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--quick"):
        return
    from tests.conformance_table import TABLE  # not above: what it imports is slow, and wants the settings made here

    kept, left_out = [], []
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        other = parameters.get("name") in TABLE.keys() - set(QUICK_METHODS)
        (left_out if other else kept).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept
