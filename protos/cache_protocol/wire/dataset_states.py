"""The names of dataset states, for people and programs."""

from __future__ import annotations

from cache_protocol.v1 import cache_pb2 as pb

STATE_NAMES: dict[int, str] = {
    pb.DATASET_STATE_LOADING: "loading",
    pb.DATASET_STATE_READY: "ready",
    pb.DATASET_STATE_FAILED: "failed",
}


def state_name(state: int) -> str:
    """The name of a state; also for states of later releases."""
    return STATE_NAMES.get(state, f"state {state}")
