"""Nodes that lie: they repeat what honest nodes report, and serve other rows and other files.

    python -m tests.false_nodes {zeros,changes} CONTROL_LOCATION FLIGHT_LOCATION CACHE_DIR DATASET

As a process it lies until it is killed. After each report it prints its id, and how often it was
asked for rows and for files.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from cache_protocol.storage.shard_files import NODE_ID_FILE
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.v1 import cache_pb2_grpc
from tests import flight_clients
from tests.answering_control import answering_control
from tests.control_clients import open_channel

_REPORTS = 30  # of a process, in 3 s, then it is another one: a second file is read within 1.1 s


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


class ChangingNode(FalseNode):
    """Answers rows and files as an honest node does, with other bytes in each.

    Args:
        honest: the location of that node.
    """

    def __init__(self, honest: str) -> None:
        super().__init__()
        self._honest = flight_clients.connect(honest)

    def do_get(
        self, context: flight.ServerCallContext, ticket: flight.Ticket
    ) -> flight.FlightDataStream:
        """The file of a shard, with another byte in the middle of each piece."""
        self.files += 1
        given = self._honest.do_get(ticket).read_all()
        pieces = [bytearray(piece) for piece in given.column(0).to_pylist()]
        for piece in pieces:
            piece[len(piece) // 2] ^= 1
        return flight.RecordBatchStream(pa.table([pieces], schema=given.schema))

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """The rows, with other numbers."""
        self.gathers += 1
        sent, got = self._honest.do_exchange(descriptor)
        for number, request in enumerate(reader):
            if not number:
                sent.begin(request.data.schema)
            sent.write_batch(request.data)
            rows = got.read_chunk().data
            columns = [_changed(column) for column in rows.columns]
            if not number:
                writer.begin(rows.schema)
            writer.write_batch(pa.record_batch(columns, schema=rows.schema))


def _changed(column: pa.Array) -> pa.Array:
    if not isinstance(column, pa.FixedSizeListArray):
        return column
    values = column.flatten().to_numpy() + 1
    return pa.FixedSizeListArray.from_arrays(values, type=column.type)


def lie(node: FalseNode, control: str, cache_dir: str, dataset: str) -> None:
    """Claims every shard of a dataset that is ready, for ever."""
    with open_channel(control) as channel, answering_control() as own_control:
        coordinator = cache_pb2_grpc.CoordinatorStub(channel)
        for number in itertools.count():
            name, process = f"false-{node.port}", str(number // _REPORTS)
            described = pb.Node(
                id=name, process=process, cache_dir=cache_dir, flight_location=node.location,
                control_location=own_control,
            )  # fmt: skip
            with suppress(grpc.RpcError):
                info = coordinator.GetDataset(
                    pb.GetDatasetRequest(name=dataset), timeout=30
                ).dataset
                if info.state == pb.DATASET_STATE_READY:
                    coordinator.Heartbeat(false_report(info, described), timeout=30)
                    print(name, node.gathers, node.files, flush=True)
            time.sleep(0.1)


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
    shutil.copytree(directory, copy, ignore=shutil.ignore_patterns(".log", ".scratch", "*.sha256"))
    (copy / NODE_ID_FILE).write_text(node_id, encoding="utf-8")
    for path in copy.rglob("shard-*.arrow"):
        data = path.read_bytes()
        middle = len(data) // 2
        path.chmod(0o644)
        path.write_bytes(data[:middle] + bytes(64) + data[middle + 64 :])


if __name__ == "__main__":
    kind, control_location, flight_location, directory, name = sys.argv[1:]
    made = FalseNode() if kind == "zeros" else ChangingNode(flight_location)
    lie(made, control_location, directory, name)
