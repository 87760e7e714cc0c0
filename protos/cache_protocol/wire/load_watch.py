"""Waiting for a load by watching it, as a client and a node beside its coordinator do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from tenacity import RetryCallState, Retrying, retry_if_result, wait_exponential

from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.load_progress import LoadMeter, LoadReport

_PAUSE = wait_exponential(multiplier=0.25, max=2.0)  # without chance, which scripts may have seeded
_LEAST_PAUSE_S = 0.05  # before a deadline


def wait_until_settled(
    watch: Callable[[pb.DatasetInfo], Iterable[pb.DatasetInfo]],
    info: pb.DatasetInfo,
    on_progress: Callable[[LoadReport], None],
    deadline: float | None = None,
) -> pb.DatasetInfo:
    """The dataset when it is ready or has failed.

    A coordinator that very many callers watch ends some of their watches before. It is then asked
    again, after a pause.

    Args:
        watch: given what is known, one watch: the dataset at every change. Raises when the deadline
            is over; this function does not.
        info: the dataset as it is known before.
        on_progress: called in this thread for whatever a watch gives.
        deadline: by `time.monotonic`; pauses end before it, so that it is asked once more.
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
        return min(_PAUSE(state), max((deadline - time.monotonic()) / 2, _LEAST_PAUSE_S))

    return Retrying(
        retry=retry_if_result(lambda known: known.state == pb.DATASET_STATE_LOADING), wait=pause_s
    )(watch_once)
