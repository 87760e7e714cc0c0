"""Shard files and their rows, for nodes and for clients on the same machine."""
