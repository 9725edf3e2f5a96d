"""The two consoles: what people pipe goes to ``out``, what they read meanwhile to ``err``."""

from __future__ import annotations

from rich.console import Console

out = Console(soft_wrap=False)
err = Console(stderr=True, soft_wrap=True)
