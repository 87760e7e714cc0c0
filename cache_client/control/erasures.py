"""Asks the cache which rows of a version were erased."""

from __future__ import annotations

from dataclasses import replace

from cache_client.control.coordinator import Coordinator
from cache_client.flight.routing import ShardMap
from cache_client.job.connection import Access
from cache_client.order.erased import Erased, Notes
from cache_protocol.storage.row_sets import decode_rows
from cache_protocol.v1 import cache_pb2 as pb


def erased_acts(
    coordinator: Coordinator, name: str, fingerprint: str, start: int = 0
) -> list[pb.ErasedRows]:
    """The acts that erased rows of a version, in their order.

    Args:
        fingerprint: of the version; empty: the newest.
        start: leave out so many acts, the first ones.

    Raises:
        DatasetNotFoundError, StaleVersionError: there is no such version.
        NodeUnavailableError: the coordinator does not answer in time.
    """
    found: list[pb.ErasedRows] = []
    more = True
    while more:
        request = pb.GetErasedRowsRequest(
            dataset=name, fingerprint=fingerprint, start=start + len(found)
        )
        answer: pb.GetErasedRowsResponse = coordinator.ask("GetErasedRows", request)
        found += answer.acts
        fingerprint, more = answer.fingerprint, answer.more
    return found


def read_erased(access: Access, shards: ShardMap) -> Erased:
    """All rows of a version that were erased; a view leaves out those that its map knows.

    Raises:
        DatasetNotFoundError, StaleVersionError: the version is gone.
        NodeUnavailableError: the coordinator does not answer in time.
    """
    acts = dict(shards.erased.acts)
    new = erased_acts(Coordinator(access), shards.dataset, shards.fingerprint, len(acts))
    acts |= {act.number: decode_rows(act.rows) for act in new}
    return Erased(acts, [0, *sorted(acts)][min(shards.erasures, len(acts))])


def with_erased(
    access: Access, shards: ShardMap, until: int | None = None, notes: Notes | None = None
) -> ShardMap:
    """The map with the rows that were erased.

    Args:
        until: the last act whose rows a view leaves out; None: the last that the map knows.
        notes: see `Erased`.

    Raises:
        CacheError: as `read_erased`.
    """
    if not shards.erasures:
        return shards
    erased = read_erased(access, shards)
    if until is not None:
        erased = replace(erased, until=until)
    return replace(shards, erased=replace(erased, notes=notes or {}))
