"""Commits and aborts writes: the end of a `Write`, wherever it is unpickled."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tenacity import (
    Retrying,
    retry_if_exception_type,
    retry_if_result,
    stop_after_delay,
    stop_never,
    wait_exponential,
)

from cache_client.control.coordinator import Calls, Coordinator
from cache_client.control.infos import DatasetInfo, dataset_info
from cache_client.control.loads import listeners_of, wait_until_loaded
from cache_client.writing.writes import Write
from cache_protocol.errors import (
    LostPartitionsError,
    NodeUnavailableError,
    NotReadyError,
    RequestError,
    StaleVersionError,
    require_ready,
    some_of,
)
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.channels import backoff
from cache_protocol.wire.load_progress import LoadReport

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0  # until an append before is ready


@dataclass(frozen=True)
class Commits:
    """Ends the writes that a coordinator began. Thread-safe."""

    coordinator: Coordinator

    def commit(
        self,
        write: Write,
        chosen: Sequence[pb.ChosenAttempt],
        *,
        wait: bool,
        timeout_s: float | None,
        on_progress: Callable[[LoadReport], None] | None,
    ) -> DatasetInfo:
        """Commits a write; see `Write.commit`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        request = pb.CommitWriteRequest(write_id=write.write_id, partitions=chosen)
        # A repeated commit answers with the version of the first one, or one that has its rows.
        commit = partial(self._commit, request, write.name, timeout_s)
        info = commit()
        if wait:
            info = self._wait(write.name, info, commit, on_progress, deadline)
        if wait and info.state != pb.DATASET_STATE_READY:
            require_ready(info)
        return dataset_info(info)

    def _wait(
        self,
        name: str,
        info: pb.DatasetInfo,
        commit: Callable[[], pb.DatasetInfo],
        on_progress: Callable[[LoadReport], None] | None,
        deadline: float | None,
    ) -> pb.DatasetInfo:
        """The version once every replica is there, or it failed.

        While nodes with its rows are away, it waits as long as for a node that does not answer.
        """

        def settled() -> pb.DatasetInfo:
            nonlocal info
            while True:
                try:
                    with listeners_of(name, on_progress, show=False) as report:
                        waited = partial(_wait_until_loaded, name, info, report, deadline)
                        info = self.coordinator.run(waited, deadline)
                    return info
                except StaleVersionError as replaced:  # by an append, or by other rows
                    try:
                        info = commit()
                    except RequestError:
                        raise replaced from None

        deadline_s = self.coordinator.access.deadline_s
        if deadline is not None:
            deadline_s = min(deadline_s, max(0.0, deadline - time.monotonic()))
        back = Retrying(
            retry=retry_if_result(lambda known: known.state == pb.DATASET_STATE_UNAVAILABLE),
            stop=stop_after_delay(deadline_s),
            wait=backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S),
            retry_error_callback=lambda state: info,
        )
        found: pb.DatasetInfo = back(settled)
        return found

    def _commit(
        self, request: pb.CommitWriteRequest, name: str, timeout_s: float | None
    ) -> pb.DatasetInfo:
        """Asks for a commit, again while the version to append to is not ready."""

        def ask() -> pb.CommitWriteResponse:
            answer: pb.CommitWriteResponse = self.coordinator.ask("CommitWrite", request)
            return answer

        reachable = Retrying(
            retry=retry_if_exception_type(NodeUnavailableError),
            stop=stop_after_delay(self.coordinator.access.deadline_s),
            wait=wait_exponential(multiplier=0.25, max=2.0),
            reraise=True,
        )
        ready = Retrying(
            retry=retry_if_exception_type(NotReadyError),
            stop=stop_never if timeout_s is None else stop_after_delay(timeout_s),
            wait=backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S),
            reraise=True,
        )
        answer: pb.CommitWriteResponse = ready(reachable, ask)
        if answer.lost:
            raise LostPartitionsError(
                f"dataset {name!r} was not committed: no live node has partitions "
                f"{some_of(answer.lost)}, as they were chosen. Put them again, by "
                "other attempts",
                answer.lost,
            )
        return answer.dataset

    def abort(self, write: Write) -> None:
        """Aborts a write; see `Write.abort`."""
        request = pb.AbortWriteRequest(write_id=write.write_id)
        self.coordinator.ask("AbortWrite", request)


def _wait_until_loaded(
    name: str,
    info: pb.DatasetInfo,
    report: Callable[[LoadReport], None],
    deadline: float | None,
    calls: Calls,
) -> pb.DatasetInfo:
    return wait_until_loaded(calls, name, info, report, deadline)
