"""Makes the shards of a node."""
