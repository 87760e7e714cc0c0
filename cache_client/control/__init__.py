"""`CacheClient`."""
