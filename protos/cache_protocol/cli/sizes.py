"""How bytes are shown to a person."""

from __future__ import annotations


def size(num_bytes: int) -> str:
    """Bytes for a person."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(size, 1) < 1024:
            return f"{size:.1f} {unit}" if unit != "B" else f"{num_bytes} B"
        size /= 1024
    return f"{size:.1f} TiB"
