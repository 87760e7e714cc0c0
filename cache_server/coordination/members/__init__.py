"""The nodes: which exist and answer, and which shards each should hold."""
