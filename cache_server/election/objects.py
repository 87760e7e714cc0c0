"""What an election needs of a store that all nodes reach: a lease, and documents with versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from cache_server.election.lease import Lease

LEASE_TIMEOUT_S = (1.0, 2.0)  # to connect, to answer: a renewal is made again before it is over
TIMEOUT_S = (2.0, 4.0)  # the same, for any other call


class ConflictError(OSError):
    """The object has changed since it was read, or there is one of this name."""


class RefusedError(OSError):
    """The store will never do this; nothing has changed."""


@dataclass(frozen=True)
class StoredMap:
    """A document, such as a ConfigMap.

    Attributes:
        version: another one after each change; empty: it is not stored yet.
        notes: short texts beside the content, such as annotations.
        made_s: seconds since the epoch; 0: unknown.
    """

    name: str
    content: bytes
    notes: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    made_s: float = 0.0


class LeaseStore(Protocol):
    """Where the lease of a cache is. Thread-safe.

    Each call has a deadline and is made once: its caller knows what may be repeated.
    """

    def read_lease(self) -> Lease | None:
        """The lease; None: there is none.

        Raises:
            OSError: the store does not answer.
        """

    def write_lease(self, before: Lease | None, holder: str, duration_s: float) -> Lease:
        """Makes, takes, renews or frees the lease.

        Args:
            before: as it was read; None: there was none.
            holder: from now on; empty: no process.

        Raises:
            ConflictError: another process was faster. OSError: it may have been written.
        """


class ElectionStore(LeaseStore, Protocol):
    """The lease and the documents of one cache. Thread-safe."""

    @property
    def name(self) -> str:
        """Of the cache: the names of its documents begin with it."""

    @property
    def kind(self) -> str:
        """Of the documents, as their users call them, such as ``configmap``."""

    def read_map(self, name: str) -> StoredMap | None:
        """A document; None: there is none.

        Raises:
            OSError: the store does not answer.
        """

    def maps(self) -> Iterator[StoredMap]:
        """Every document of this cache.

        Raises:
            OSError: the store does not answer.
        """

    def write_map(self, wanted: StoredMap) -> StoredMap:
        """Makes a document, or replaces the version that was read.

        Raises:
            ConflictError: there is one, or it has another version.
            RefusedError: the store takes no such document.
            OSError: it may have been written.
        """

    def remove_map(self, name: str) -> None:
        """Removes a document, if there is one.

        Raises:
            OSError: it may still be there.
        """
