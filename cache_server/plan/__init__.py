"""From a spec to a version: pinned, fingerprinted and cut into shards."""
