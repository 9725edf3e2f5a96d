"""What the documentation says of federations is so; the table of what crosses the wire is made from the code."""

from __future__ import annotations

import itertools
import re
import textwrap
from pathlib import Path

import pytest
import yaml

from coterie.algorithms import registry
from coterie.cli.federate import app
from coterie.federation.agreement import Promise
from coterie.federation.project import NodeConfig
from coterie.simulation.privacy import Privacy

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "federation.md").read_text(encoding="utf-8")


def test_commands_that_are_named_exist() -> None:
    commands = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    assert set(re.findall(r"coterie\s+federate\s+(\w+)", TEXT)) == commands


def test_what_files_hold_is_a_configuration() -> None:
    node, privacy = (yaml.safe_load(textwrap.dedent(each)) for each in re.findall(r"```yaml\n(.*?)```", TEXT, re.S))
    assert NodeConfig(**node).member == "north"
    assert Promise(**privacy["privacy"]).noise == 8


def test_the_losses_that_are_named_are_those() -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    words = re.search(
        r"with `noise: ([\d.]+)` ten replies cost ε = ([\d.]+) at δ = ([\d.]+), a hundred ([\d.]+)\.", TEXT
    )
    assert words
    noise, ten, delta, hundred = map(float, words.groups())
    loss = Privacy(clip=1.0, noise=noise, delta=delta).epsilon
    assert (round(loss(10), 1), round(loss(100), 1)) == (ten, hundred)


def test_robust_means_are_options_of_the_methods_that_are_named() -> None:
    lines = [line.split() for line in re.findall(r"^coterie federate run demo .*--set.*$", TEXT, re.M)]
    assert len(lines) == 2
    for _, _, _, _, method, *options in lines:
        given = dict(each.split("=") for flag, each in itertools.pairwise(options) if flag == "--set")
        assert registry.make(method, given).settings()["aggregator"] == given["aggregator"] != "mean"
