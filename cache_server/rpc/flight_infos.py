"""A dataset as a Flight client finds it: endpoints, tickets, sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import pyarrow.flight as flight

from cache_protocol.errors import NotReadyError, RequestError, require_ready
from cache_protocol.storage.layout import Layout, schema_from_bytes
from cache_protocol.storage.row_index import ROWS_OF_A_SHARD
from cache_protocol.storage.shard_files import shard_file_name
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.protocol_version import PROTOCOL
from cache_server.auth.principals import EVERYTHING, Viewer
from cache_server.shards.version_key import VersionKey


def layout_of(info: pb.DatasetInfo) -> Layout:
    """The layout of every column of a dataset, with the nulls that were loaded so far."""
    return Layout(schema_from_bytes(info.schema), info.nulls)


def flight_info(
    descriptor: flight.FlightDescriptor,
    info: pb.DatasetInfo,
    columns: Sequence[str],
    part: tuple[int, int] | None,
    viewer: Viewer = EVERYTHING,
) -> flight.FlightInfo:
    """One endpoint for each shard of a ready dataset, in row order.

    Args:
        part: index and total; None: all rows.
    """
    layout = layout_of(info).select(columns)
    start, stop = 0, info.num_rows
    if part is not None:
        index, total = part
        start, stop = info.num_rows * index // total, info.num_rows * (index + 1) // total
    return flight.FlightInfo(
        layout.announced,
        descriptor,
        list(_endpoints(info, columns, start, stop, viewer, alone=part is not None)),
        stop - start,
        _total_bytes(info, layout, stop - start),
        ordered=True,
        app_metadata=_read_plan(info, viewer),
    )


def sealed_info(
    descriptor: flight.FlightDescriptor,
    info: pb.DatasetInfo,
    request: pb.ReadRequest,
    viewer: Viewer,
) -> flight.FlightInfo:
    """One endpoint for each shard of the log that has rows, which are numbered by shard.

    Raises:
        LoadError: the load failed. NodeUnavailableError: nodes with its rows are away.
        NotReadyError: the log has no more groups yet, or no node has one of its shards now.
        RequestError: the coordinator keeps no log.
    """
    if info.state in (
        pb.DATASET_STATE_FAILED,
        pb.DATASET_STATE_UNAVAILABLE,
        pb.DATASET_STATE_EVICTED,
    ):
        require_ready(info)
    if not info.HasField("log"):
        raise RequestError("the coordinator is of a release without logs of loads: update it")
    logged: list[tuple[int, int]] = []
    has_more = len(info.log.groups) > request.known_groups or info.log.closed
    if has_more:  # readers that wait ask often
        pairs = (zip(each.shards, each.num_rows, strict=True) for each in info.log.groups)
        logged = sorted(pair for pair in chain.from_iterable(pairs) if pair[1])
    lost = [index for index, _ in logged if not info.shards[index].node_ids]
    if lost or not has_more:
        progress = info.progress
        waits = f"no node has shard {lost[0]} now" if lost else "no more rows can be read yet"
        raise NotReadyError(
            f"dataset {info.spec.name!r} is loading, and {waits}: {progress.shards_done} of "
            f"{progress.shards_total} shards, {progress.rows_done} rows so far"
        )
    sealed = pb.DatasetInfo(spec=info.spec, fingerprint=info.fingerprint, nodes=info.nodes)
    for index, num_rows in logged:
        shard = sealed.shards.add()
        shard.CopyFrom(info.shards[index])
        shard.rows.start = index * ROWS_OF_A_SHARD
        shard.rows.stop = shard.rows.start + num_rows
    columns, last = request.columns, 2**63 - 1
    return flight.FlightInfo(
        layout_of(info).select(columns).announced,
        descriptor,
        list(_endpoints(sealed, columns, 0, last, viewer, alone=False)),
        sum(shard.rows.stop - shard.rows.start for shard in sealed.shards),
        -1,
        app_metadata=_read_plan(info, viewer, info.log),
    )


def _read_plan(info: pb.DatasetInfo, viewer: Viewer, log: pb.LoadLog | None = None) -> bytes:
    plan = pb.ReadPlan(
        dataset=info.spec.name,
        fingerprint=info.fingerprint,
        lease_s=info.lease_s,
        log=log,
        protocol=PROTOCOL,
        full_name=viewer.resolve(info.spec.name),
        zones={node.id: node.zone for node in info.nodes if node.zone},
        preparing_nodes=_preparing_nodes(info),
        erasures=info.erasures,
        erased_rows=info.erased_rows,
    )
    return plan.SerializeToString()


def _preparing_nodes(info: pb.DatasetInfo) -> list[str]:
    """The nodes with a scratch disk that hold more of a version than fits in their memory."""
    limits = {node.id: most for node in info.nodes if (most := node.prepares_above_bytes)}
    held = dict.fromkeys(limits, 0)
    for shard in info.shards if held else ():
        for node_id in shard.node_ids:
            if node_id in held:
                held[node_id] += shard.num_bytes
    return [node_id for node_id, num_bytes in held.items() if num_bytes > limits[node_id]]


def _endpoints(
    info: pb.DatasetInfo,
    columns: Sequence[str],
    start: int,
    stop: int,
    viewer: Viewer,
    *,
    alone: bool,
) -> Iterator[flight.FlightEndpoint]:
    """One endpoint for each shard with some of the rows ``[start, stop)``.

    Args:
        viewer: who asks; the folder of the dataset has its full name.
        alone: only one location each. Clients that request a part, as those of the Kubeflow data
            cache, read every location of an endpoint. Others choose one of the nodes or files.
    """
    folder = VersionKey(viewer.resolve(info.spec.name), info.fingerprint).folder
    locations = {node.id: node.flight_location for node in info.nodes}
    directories = {
        node.id: Path(node.cache_dir, folder, info.fingerprint).as_uri() for node in info.nodes
    }
    for shard in info.shards:
        first, last = max(start, shard.rows.start), min(stop, shard.rows.stop)
        if first >= last:
            continue
        rows = pb.RowRange(start=first, stop=last)
        ticket = pb.ReadTicket(
            dataset=info.spec.name, fingerprint=info.fingerprint, rows=rows, columns=columns
        )
        uris = [locations[node_id] for node_id in shard.node_ids]
        if alone:
            del uris[1:]
        else:
            file = shard_file_name(shard.index)
            uris += [f"{directories[node_id]}/{file}" for node_id in shard.node_ids]
        placement = pb.ShardPlacement(
            index=shard.index,
            rows=rows,
            num_bytes=shard.num_bytes,
            checksum=shard.checksum,
            node_ids=shard.node_ids[: 1 if alone else None],
        )
        yield flight.FlightEndpoint(
            ticket.SerializeToString(), uris, None, placement.SerializeToString()
        )


def _total_bytes(info: pb.DatasetInfo, layout: Layout, num_rows: int) -> int:
    """Bytes of the shard files, or of selected columns; -1 if their size varies."""
    if num_rows == info.num_rows and layout.logical.equals(layout_of(info).logical):
        return info.num_bytes
    if num_rows and any(column.kind == "plain" for column in layout.columns):
        return -1
    return num_rows * layout.fixed_row_bytes
