"""Shard files: packed, sealed, adopted, dropped; and their rows, to readers."""
