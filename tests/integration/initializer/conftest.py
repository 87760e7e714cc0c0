"""Fixtures of `tests.initializer_cluster`, for real programs."""

from __future__ import annotations

from tests.initializer_cluster import cluster, no_proxy, pods

__all__ = ["cluster", "no_proxy", "pods"]
