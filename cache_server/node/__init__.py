"""A cache node: loads the shards that it should hold, and serves their rows."""
