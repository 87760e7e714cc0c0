"""The training jobs that read from the cache, as their readers report."""
