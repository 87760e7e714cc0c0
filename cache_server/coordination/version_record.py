"""What the coordinator remembers of one version, and learns of it from heartbeats."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from cache_protocol.errors import CacheError, LoadError
from cache_protocol.storage.row_index import row_starts
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination.catalogue import Catalogue, CatalogueEntry, SealedSummary
from cache_server.plan.pinned_version import PinnedVersion
from cache_server.source.pinned import Pin

logger = logging.getLogger(__name__)


@dataclass
class VersionRecord:
    """What is known of one version.

    Attributes:
        result_shards: of a whole query; None until it has run.
        pins: keep the source as it was planned; closed when no split will be read any more.
        last_used: by the coordinator's clock; None while nobody has read its rows.
        asked_at: by the coordinator's clock; None of one that was there before a restart.
        is_failure_saved: on disk, so that a restart finds it.
    """

    pinned: PinnedVersion
    created: int
    secrets: pb.Secrets = field(default_factory=pb.Secrets)
    pins: tuple[Pin, ...] = ()
    sealed: dict[int, SealedSummary] = field(default_factory=dict)
    failure: CacheError | None = None
    attempt: int = 0
    was_ready: bool = False
    result_shards: int | None = None
    last_used: float | None = None
    asked_at: float | None = None
    is_failure_saved: bool = False
    _row_starts: tuple[int, ...] | None = field(default=None, init=False, repr=False)

    @classmethod
    def from_catalogue(cls, entry: CatalogueEntry) -> VersionRecord:
        """One that was there before a restart."""
        has_run = entry.was_ready or bool(entry.sealed)
        return cls(
            entry.pinned,
            entry.created,
            sealed=dict(enumerate(entry.sealed)),
            failure=entry.failure,
            attempt=entry.attempt,
            was_ready=entry.was_ready,
            result_shards=len(entry.sealed) if has_run else None,
            is_failure_saved=entry.failure is not None,
        )

    def save(self, catalogue: Catalogue) -> None:
        """Has it last over a restart, as it is now.

        Raises:
            LoadError: it cannot be written; what was kept before still is.
        """
        sealed: list[SealedSummary] = []
        if self.row_starts() is not None:
            sealed = [self.sealed[index] for index in range(self.num_shards or 0)]
        try:
            catalogue.write(
                self.pinned,
                self.attempt,
                sealed,
                self.created,
                was_ready=self.was_ready,
                failure=self.failure,
            )
        except OSError as error:
            raise LoadError(
                f"cannot keep the catalogue entry of {self.pinned.spec.name!r}: {error.strerror}"
            ) from None

    def save_failure(self, catalogue: Catalogue) -> None:
        """Has a failure, if there is one, last over a restart; to be called until it does."""
        if self.failure is None or self.is_failure_saved:
            return
        try:
            self.save(catalogue)
            self.is_failure_saved = True
        except LoadError as error:  # it is missed after a restart only
            logger.error("failure not kept reason=%s", error)

    @property
    def num_shards(self) -> int | None:
        """None while a whole query has not run."""
        return self.result_shards if self.pinned.shards is None else len(self.pinned.shards)

    @property
    def lacks_secrets(self) -> bool:
        """Whether its source cannot be read before somebody gives its secrets again."""
        return self.pinned.has_secrets and not self.secrets.tables

    def row_starts(self) -> tuple[int, ...] | None:
        """First row id of each shard and the total; None until every shard was sealed once."""
        if self._row_starts is None and len(self.sealed) == self.num_shards:
            self._row_starts = row_starts([self.sealed[i].num_rows for i in range(self.num_shards)])
        return self._row_starts

    def release(self) -> None:
        """Lets go of the source."""
        for pin in self.pins:
            pin.close()
        self.pins = ()

    def apply_report(self, actual: pb.ActualDataset, node_id: str) -> bool:
        """What a node says of this version: shards that it sealed, or why it cannot.

        Returns:
            whether anything was learned.
        """
        if not self.is_current(actual):
            return False
        before = (self.failure, self.result_shards, len(self.sealed))
        if actual.failure and not self.was_ready:
            self.fail(self.load_error(actual.failure))
        if actual.HasField("num_shards") and self.result_shards is None:
            self.result_shards = actual.num_shards
        for shard in actual.shards:
            if shard.failure:
                if not self.was_ready:
                    self.fail(self.load_error(shard.failure))
            elif shard.sealed and shard.index < (self.num_shards or 0):
                self._apply_sealed(shard, node_id)
        return before != (self.failure, self.result_shards, len(self.sealed))

    def _apply_sealed(self, shard: pb.ActualShard, node_id: str) -> None:
        summary = SealedSummary(shard.num_rows, shard.num_bytes, shard.checksum)
        known = self.sealed.setdefault(shard.index, summary)
        same = known.num_rows == summary.num_rows
        if self.pinned.shards is None:
            same = known.checksum == summary.checksum
        if not same:
            reason = (
                f"shard {shard.index} has {summary.num_rows} rows on node {node_id} and "
                f"{known.num_rows} elsewhere, or other ones: load it again"
            )
            self.fail(self.load_error(reason))

    def is_current(self, actual: pb.ActualDataset) -> bool:
        """Whether what a node reports counts: a node that has just started knows of no attempt."""
        return not actual.HasField("attempt") or actual.attempt == self.attempt

    def fail(self, error: CacheError) -> None:
        """The first failure of a version is the one that its users are told."""
        if self.failure is None:
            self.failure = error
            self.release()
            logger.error("dataset failed reason=%s", error)

    def load_error(self, reason: str) -> LoadError:
        """A failure, with the name of the dataset."""
        return LoadError(f"dataset {self.pinned.spec.name!r}: {reason}")
