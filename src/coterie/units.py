"""Quantities as people read them."""

from __future__ import annotations

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def bytes_unit(count: float) -> tuple[float, str]:
    """Choose the unit in which to write a number of bytes: how many bytes it is, and its symbol."""
    # Compared as it will be written: 999,999 bytes are 1 MB, and not 1e+03 kB.
    return next((unit for unit in _BYTES if float(f"{count / unit[0]:.3g}") >= 1), (1.0, "bytes"))


def format_bytes(count: float) -> str:
    """Write a number of bytes with three digits, in the largest decimal unit that it fills."""
    size, symbol = bytes_unit(count)
    return f"{count:.0f} {symbol}" if size == 1 else f"{count / size:.3g} {symbol}"
