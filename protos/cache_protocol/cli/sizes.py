"""Sizes in bytes, for people."""

from __future__ import annotations


def size(num_bytes: int) -> str:
    """A number of bytes with a unit, such as ``1.5 MiB``."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(size, 1) < 1024:
            return f"{size:.1f} {unit}" if unit != "B" else f"{num_bytes} B"
        size /= 1024
    return f"{size:.1f} TiB"
