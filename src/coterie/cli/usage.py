"""Mistakes in how a command is called, in one sentence."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from coterie.errors import nearest

if TYPE_CHECKING:
    import click

# Newer versions of typer bring a click of their own, whose classes are not click's. Both export this one.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def usage_sentence(error: Exception) -> str:
    """Say what is wrong; nothing for a group without a command, which has shown its help already.

    The nearest name is looked up here: which ones click and typer suggest, and how often, depends on their versions.
    """
    found: Any = error  # of typer's click
    message, context = str(found.format_message()).rstrip("."), found.ctx
    if context is None:
        return message
    command = context.command
    if (option := getattr(error, "option_name", None)) is not None and type(error).__name__ == "NoSuchOption":
        known = [name for parameter in command.params for name in parameter.opts if name.startswith("--")]
        return f"No such option {option!r}: {nearest(option, known)}{_see(context)}"
    unknown = re.match("No such command '(.*?)'", message)
    if unknown and isinstance(command, TyperGroup):
        return f"{unknown[0]}: {nearest(unknown[1], command.list_commands(context))}{_see(context)}"
    return f"{message}: {_see(context)}" if message else ""


def _see(context: click.Context) -> str:
    return f"see {context.command_path} --help"
