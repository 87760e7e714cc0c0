"""Makes a version from a spec: pinned, fingerprinted and cut into shards."""
