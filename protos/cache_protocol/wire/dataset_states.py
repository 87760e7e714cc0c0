"""The states of a dataset by the names that people and programs see."""

from __future__ import annotations

from cache_protocol.v1 import cache_pb2 as pb

STATE_NAMES: dict[int, str] = {
    pb.DATASET_STATE_LOADING: "loading",
    pb.DATASET_STATE_READY: "ready",
    pb.DATASET_STATE_FAILED: "failed",
}


def state_name(state: int) -> str:
    """What people see; also of a state that a later release may have."""
    return STATE_NAMES.get(state, f"state {state}")
