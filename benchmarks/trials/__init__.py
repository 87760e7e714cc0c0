"""Programs that try to break a cache for minutes; the suite runs a little of each."""
