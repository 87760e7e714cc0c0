"""The states of a dataset by the names that people and programs see."""

from __future__ import annotations

from protos.cache.v1 import cache_pb2 as pb

STATE_NAMES = {
    pb.DATASET_STATE_LOADING: "loading",
    pb.DATASET_STATE_READY: "ready",
    pb.DATASET_STATE_FAILED: "failed",
}
