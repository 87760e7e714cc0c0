"""The versions of datasets: planned, written, ready, failed and dropped."""
