"""The table of what crosses the wire in the documentation is what methods send."""

from __future__ import annotations

import re
from pathlib import Path

from coterie.algorithms import registry
from coterie.cli.federate import app
from coterie.federation.project import NodeConfig
from coterie.federation.wire_table import lines

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "federation.md").read_text(encoding="utf-8")


def test_the_wire_table_is_what_methods_send() -> None:
    expected = [
        f"| `{name}` | {line.when} | {line.way} | `{line.name}` | {line.shape} | {line.to} |"
        for name in registry.names()
        for line in lines(name)
    ]
    written = [line for line in TEXT.splitlines() if re.match(r"\| `\w+` \| (round|personalise|evaluation)", line)]
    assert written == expected, "in docs/federation.md, write these rows:\n" + "\n".join(expected)


def test_commands_that_are_named_exist() -> None:
    commands = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    assert set(re.findall(r"coterie\s+federate\s+(\w+)", TEXT)) == commands


def test_what_a_nodes_file_holds_is_a_configuration() -> None:
    import textwrap

    import yaml

    (block,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.S)
    assert NodeConfig(**yaml.safe_load(textwrap.dedent(block))).member == "north"
