"""Engines with several workers, which write datasets and read them: Ray and Spark."""
