"""Shard files: packs, seals, adopts and drops them, and reads their rows."""
