"""Programs that measure, one file a question; results go to ``benchmarks/results``."""
