"""Malformed calls are errors of their requests, and of nothing else."""

from __future__ import annotations

from benchmarks.trials import fuzz


def test_malformed_calls_harm_neither_the_node_nor_its_readers() -> None:
    # A leak of grpcio was 20 KB a call. A short run cannot tell less than what warm-up takes.
    print(fuzz.run(3000, seed=1, max_growth_bytes_per_call=2000.0))
