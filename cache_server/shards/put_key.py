"""The name of a put: one stream of one attempt at one partition of a write. Pure.

Its rows lie on a node like those of a version. A commit moves them to a version.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from cache_server.shards.version_key import VersionKey

MAX_PARTITION, MAX_ATTEMPT = 2**32 - 1, 2**64 - 1
_NAME = re.compile(r"put-([0-9a-f]{32})-([0-9]{1,10})-([0-9]{1,20})-([0-9a-f]{8})")


@dataclass(frozen=True, order=True)
class PutKey:
    """The name of a put.

    Attributes:
        stream: random; two streams of one attempt have different ones.
    """

    write_id: str
    partition: int
    attempt: int
    stream: str

    @classmethod
    @lru_cache(maxsize=65_536)  # each heartbeat names every put again
    def of(cls, fingerprint: str) -> PutKey | None:
        """The put of a name in place of a fingerprint; None: it is the fingerprint of a version."""
        found = _NAME.fullmatch(fingerprint)
        if found is None:
            return None
        write_id, partition, attempt, stream = found.groups()
        return cls(write_id, int(partition), int(attempt), stream)

    def version_key(self, dataset: str) -> VersionKey:
        """Where its rows lie."""
        name = f"put-{self.write_id}-{self.partition}-{self.attempt}-{self.stream}"
        return VersionKey(dataset, name)


def put_checksum(checksums: Iterable[str]) -> str:
    """The checksum of a put: of those of its shards, in their order."""
    return hashlib.sha256(" ".join(checksums).encode()).hexdigest()[:32]
