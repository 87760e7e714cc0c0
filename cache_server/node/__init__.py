"""A cache node: makes the shards it holds equal to the desired ones, and serves their rows."""
