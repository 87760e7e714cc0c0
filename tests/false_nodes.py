"""Nodes that lie: they repeat what honest nodes report, and serve other rows and other files."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from cache_protocol.storage.shard_files import NODE_ID_FILE
from cache_protocol.v1 import cache_pb2 as pb


class FalseNode(flight.FlightServerBase):
    """A Flight server that answers every row with zeros, and every file with noise.

    Attributes:
        gathers, files: how often it was asked for rows, and for files.
    """

    def __init__(self) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.gathers = self.files = 0
        self.location = f"grpc://127.0.0.1:{self.port}"

    def do_get(
        self, context: flight.ServerCallContext, ticket: flight.Ticket
    ) -> flight.FlightDataStream:
        """Noise, as the file of a shard."""
        self.files += 1
        schema = pa.schema([pa.field("chunk", pa.large_binary())])
        noise = pa.record_batch([pa.array([b"noise" * 100], pa.large_binary())], schema=schema)
        return flight.RecordBatchStream(pa.Table.from_batches([noise]))

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """Zeros, for every row."""
        self.gathers += 1
        begun = False
        for chunk in reader:
            zeros = pa.FixedSizeListArray.from_arrays(
                np.zeros(2 * chunk.data.num_rows, np.int64), 2
            )
            batch = pa.record_batch({"int64": zeros})
            if not begun:
                writer.begin(batch.schema)
                begun = True
            writer.write_batch(batch)


def false_report(info: pb.DatasetInfo, node: pb.Node) -> pb.HeartbeatRequest:
    """The heartbeat of a node that claims every shard of a dataset, with its checksums."""
    report = pb.HeartbeatRequest(node=node)
    claim = report.datasets.add(dataset=info.spec.name, fingerprint=info.fingerprint, attempt=0)
    for shard in info.shards:
        claim.shards.add(
            index=shard.index, sealed=True, num_rows=shard.rows.stop - shard.rows.start,
            num_bytes=shard.num_bytes, checksum=shard.checksum, rows_fixed=True,
            row_start=shard.rows.start,
        )  # fmt: skip
    return report


def false_copy(directory: Path, copy: Path, node_id: str) -> None:
    """Copies the directory of a node under another id, with other values in its files."""
    shutil.copytree(directory, copy, ignore=shutil.ignore_patterns(".log", ".scratch"))
    (copy / NODE_ID_FILE).write_text(node_id, encoding="utf-8")
    for path in copy.rglob("shard-*.arrow"):
        data = path.read_bytes()
        middle = len(data) // 2
        path.chmod(0o644)
        path.write_bytes(data[:middle] + bytes(64) + data[middle + 64 :])
