"""Reads shard files back from the nodes that claim to hold them, for the coordinator.

A copy counts once its file was read over the network and had its checksum: see `HolderChecks`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import closing
from typing import Protocol

from cache_protocol.errors import NodeUnavailableError
from cache_protocol.storage.shard_files import (
    checksum_of,
)
from cache_protocol.wire.credentials import Credentials
from cache_server.coordination.holdings.holder_checks import Outcome, ShardCheck
from cache_server.node import peer_files
from cache_server.secrets import error_text
from cache_server.shards.checksums import PieceDigests
from cache_server.shards.stoppable_thread import StoppableThread

logger = logging.getLogger(__name__)

_THREADS = 4
_WAIT_S, _CLOSE_S = 0.5, 1.0
_LEAST_BYTES_PER_S, _LEAST_S = 16 << 20, 10.0  # a slower node does not give the file
_MAX_BYTES_PER_S_AGAIN = 32 << 20  # of proven files


class Checks(Protocol):
    """Where the checks come from: the coordinator."""

    def next_check(self, wait_s: float) -> ShardCheck | None:
        """The next file to read; None: nothing was due within ``wait_s``."""

    def apply_check(self, check: ShardCheck, outcome: Outcome) -> None:
        """Takes the outcome of a check."""


class SecondReader(StoppableThread):
    """Reads files in a few threads, from `start` to `close`, which waits for no silent node.

    Args:
        checks: to make.
        credentials: of this node.
        clock: monotonic seconds.
    """

    def __init__(
        self, checks: Checks, credentials: Credentials, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__("second-reader", num_threads=_THREADS, close_s=_CLOSE_S)
        self._checks = checks
        self._credentials = credentials
        self._clock = clock

    def _run(self) -> None:
        while not self._stop.is_set():
            check = self._checks.next_check(_WAIT_S)
            if check is None:
                continue
            start = self._clock()
            outcome = Outcome.UNREAD
            try:
                outcome = self.read(check)
            except NodeUnavailableError as error:
                logger.debug("shard not checked reason=%s", error)
            except error_text.EXITS:
                raise
            except Exception:  # the other checks must continue
                logger.exception("shard not checked node=%s", check.holder.location)
            finally:
                self._checks.apply_check(check, outcome)
            if not check.is_first:
                least_s = check.num_bytes / _MAX_BYTES_PER_S_AGAIN * _THREADS
                self._stop.wait(max(0.0, least_s - (self._clock() - start)))

    def read(self, check: ShardCheck) -> Outcome:
        """Reads a file and compares its checksum.

        Raises:
            NodeUnavailableError: the node did not give it, or too slowly.
        """
        key, index, _ = check.claim
        deadline = self._clock() + _LEAST_S + check.num_bytes / _LEAST_BYTES_PER_S
        digests, num_bytes = PieceDigests(), 0
        chunks = peer_files.shard_file(
            check.holder.location, key, index, credentials=self._credentials,
            timeout_s=deadline - self._clock(),
        )  # fmt: skip
        with closing(chunks):
            for chunk in chunks:
                if self._stop.is_set():
                    return Outcome.UNREAD
                digests.add(num_bytes, chunk)
                num_bytes += len(chunk)
                if num_bytes > check.num_bytes:
                    break
        found = checksum_of(digests.in_order())
        return Outcome.MATCHES if found == check.checksum else Outcome.DIFFERS
