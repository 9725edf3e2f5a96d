"""Mistakes in how a command is called, in one sentence."""

from __future__ import annotations

import re

import click

from coterie.errors import nearest


def usage_sentence(error: click.UsageError) -> str:
    """Say what is wrong; nothing for a group without a command, which has shown its help already.

    The nearest name is looked up here: which ones click and typer suggest, and how often, depends on their versions.
    """
    message, context = error.format_message().rstrip("."), error.ctx
    if context is None:
        return message
    command = context.command
    if isinstance(error, click.NoSuchOption):
        known = [name for parameter in command.params for name in parameter.opts if name.startswith("--")]
        return f"No such option {error.option_name!r}: {nearest(error.option_name, known)}{_see(context)}"
    unknown = re.match("No such command '(.*?)'", message)
    if unknown and isinstance(command, click.Group):
        return f"{unknown[0]}: {nearest(unknown[1], command.list_commands(context))}{_see(context)}"
    return f"{message}: {_see(context)}" if message else ""


def _see(context: click.Context) -> str:
    return f"see {context.command_path} --help"
