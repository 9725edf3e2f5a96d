"""Numbers of bytes in words."""

from __future__ import annotations

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


def byte_unit(count: float) -> tuple[float, str]:
    """Give the unit that suits a number of bytes: how many bytes it has, and its name."""
    return next((each for each in _UNITS if count >= each[0]), _UNITS[-1])


def format_bytes(count: float) -> str:
    by, unit = byte_unit(count)
    return f"{count / by:.0f} {unit}" if by == 1 else f"{count / by:.3g} {unit}"
