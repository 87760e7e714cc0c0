"""How rows lie in shard files and in memory, for nodes and for clients on the same machine."""
