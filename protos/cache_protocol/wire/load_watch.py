"""Waits for a load by watching it; for clients and for nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from tenacity import RetryCallState, Retrying, retry_if_result, wait_exponential

from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.load_progress import LoadMeter, LoadReport

_PAUSE = wait_exponential(multiplier=0.25, max=2.0)  # not random: scripts may seed `random`
_MIN_PAUSE_S = 0.05  # before a deadline


def wait_for_load(
    watch: Callable[[pb.DatasetInfo], Iterable[pb.DatasetInfo]],
    info: pb.DatasetInfo,
    on_progress: Callable[[LoadReport], None],
    deadline: float | None = None,
) -> pb.DatasetInfo:
    """Waits until the dataset is ready or failed, and returns it.

    If very many callers watch, the coordinator ends some watches early. Those are repeated after a
    pause.

    Args:
        watch: starts one watch, given the last known state; yields the dataset at every change.
            Must raise after the deadline; this function does not.
        info: the last known state of the dataset.
        on_progress: called in this thread at every change.
        deadline: by `time.monotonic`; the last pause ends before it, for one more watch.
    """
    meter = LoadMeter(info.spec.name)

    def watch_once() -> pb.DatasetInfo:
        nonlocal info
        for latest in watch(info):
            info = latest
            on_progress(meter.read(info.progress))
        return info

    def pause_s(state: RetryCallState) -> float:
        if deadline is None:
            return _PAUSE(state)
        return min(_PAUSE(state), max((deadline - time.monotonic()) / 2, _MIN_PAUSE_S))

    return Retrying(
        retry=retry_if_result(lambda known: known.state == pb.DATASET_STATE_LOADING), wait=pause_s
    )(watch_once)
