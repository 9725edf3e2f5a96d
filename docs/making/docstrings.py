"""Docstrings as the reference shows them: what is written for Sphinx becomes Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|attr|data|mod|exc):`(?P<short>~?)(?P<name>[\w.]+)`")


class Docstrings(griffe.Extension):
    """Turns ``:class:`name``` into links and ``text::`` into a paragraph with a block of code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change an object's docstring once it is read.

        Parameters
        ----------
        obj
            The object.
        **_
            What else there is.
        """
        if obj.docstring is not None:
            text = re.sub(r"^::$\n?", "", obj.docstring.value, flags=re.M)
            text = re.sub(r"::$", ":", text, flags=re.M)
            obj.docstring.value = _ROLE.sub(lambda match: _link(match, obj), text)


def _link(match: re.Match[str], here: griffe.Object) -> str:
    name = match["name"].lstrip(".")
    shown = name.rpartition(".")[2] if match["short"] else name
    target = name if name.startswith("coterie.") else f"{here.module.path}.{name}"
    # Optional: what has no place in the reference stays as plain text, without a warning.
    return f'<autoref optional identifier="{target}"><code>{shown}</code></autoref>'
