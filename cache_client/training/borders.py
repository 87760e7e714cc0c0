"""Borders of steps, at which the ranks of a job agree on what they read from there on.

Each rank asks the cache, halfway before a border, what the job reads from the border's position on.
The cache answers all ranks as it answered the first one. So no rank waits for another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from cache_client.job.ranks import is_of_one_process
from cache_client.reading.shard_maps import wait_for_shard_map
from cache_client.training.job_config import JobConfig
from cache_client.training.opened import Opened
from cache_protocol.errors import CacheError
from cache_protocol.v1 import cache_pb2 as pb

STEPS: Final = 64
"""Steps from one border to the next."""


class Asked:
    """A question that is asked in the background.

    Args:
        ask: the question.
    """

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask = ask
        self._found: bool | CacheError = False
        self._thread = threading.Thread(target=self._run, name="cache-border", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self._ask()
        except CacheError as error:
            self._found = error

    def answer(self) -> bool:
        """Waits for the answer.

        Raises:
            CacheError: there is none.
        """
        self._thread.join()
        if isinstance(self._found, CacheError):
            raise self._found
        return self._found


def has_news(config: JobConfig, epoch: int, at: int, now: Opened) -> bool:
    """Whether ranks read another version, or without other rows, from a position of an epoch on.

    Raises:
        CacheError: as `wait_for_shard_map`.
    """
    access, follow = config.access, None
    if not is_of_one_process(config.job):
        follow = pb.EpochOfJob(job=config.job, epoch=epoch, amended_at=at)
    found = wait_for_shard_map(
        access.endpoint, config.name, config.columns, access.ready_deadline_s, access.credentials,
        follow=follow, others=now.shards.locations(access.endpoint),
    )  # fmt: skip
    read = now.shards.fingerprint, now.shards.erasures
    return (found.fingerprint, found.erasures) != read
