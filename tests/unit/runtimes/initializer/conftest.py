"""Fixtures of the initializer's tests: an API server, and pods that start."""

from __future__ import annotations

from tests.initializer_cluster import cluster, no_proxy, pods

__all__ = ["cluster", "no_proxy", "pods"]
