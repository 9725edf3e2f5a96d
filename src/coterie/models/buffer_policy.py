"""What becomes of running statistics between clients and server, as it is written in one line of text."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from coterie.errors import ConfigError

POLICIES = ("averaged", "local", "frozen")
"""Sent, averaged and sent back; kept by each client; held at what the model was built with."""


def is_meant(name: str, pattern: str) -> bool:
    """Return whether a pattern means what has a name: by it, or by the name of a module around it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def parse(text: str) -> tuple[tuple[str, str], ...]:
    """Read ``policy`` or ``pattern=policy`` between commas; a policy without a pattern is for all layers."""
    pairs = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        pattern, _, policy = (each.strip() for each in part.rpartition("="))
        if policy not in POLICIES or (not pattern and "=" in part):
            raise ConfigError(
                f"buffers has {part!r}, but must be {', '.join(POLICIES[:-1])} or {POLICIES[-1]}, or give one of them "
                "to some layers, as in 'layer1=local,*.bn2=frozen'"
            )
        pairs.append((pattern or "*", policy))
    return tuple(pairs)


def policies(text: str, layers: Mapping[str, Collection[str]]) -> dict[str, str]:
    """Give the policy of each layer, with all its names, that the text names; of two that name it, the later holds."""
    found: dict[str, str] = {}
    for pattern, policy in parse(text):
        named = [layer for layer, names in layers.items() if any(is_meant(name, pattern) for name in names)]
        if not named:
            known = ", ".join(list(layers)[:8]) + (", ..." if len(layers) > 8 else "")
            have = f"those are {known}" if layers else "the model has none"
            written = policy if pattern == "*" else pattern
            raise ConfigError(f"buffers has {written!r}, which matches no layer with running statistics: {have}")
        found |= dict.fromkeys(named, policy)
    return found
