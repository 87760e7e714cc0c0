"""Readers that open streams and take nothing, on a real node."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pyarrow.parquet as pq
import pytest

from cache_client import CacheClient, CacheIterableDataset, Connection, DatasetSpec
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.local import LocalNode
from cache_server.rpc.stream_limits import MAX_CALLS_OF_CONNECTION
from tests.flight_clients import connect
from tests.waiting import wait_until

TOKEN, ROWS, WAIT_S = "a-token-of-everyone", 200_000, 60.0
ROW_IDS = pa.record_batch({"row": np.random.default_rng(1).permutation(ROWS)})
SMALL_WINDOWS = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536)]


def resident_bytes(pid: int) -> int:
    """Without the mapped shards."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


@pytest.mark.parametrize("token", [None, TOKEN])
def test_stalled_streams_are_refused_above_a_limit_and_cut_off_after_a_deadline(
    tmp_path: Path, token: str | None
) -> None:
    source = tmp_path / "source.parquet"
    pq.write_table(pa.table({"row": range(ROWS)}), source)
    arguments = ["--allow-source", "", "--slow-reader-timeout-s", "5"]
    node = LocalNode(tmp_path / "node", arguments, token)
    try:
        node.start()
        info = CacheClient(Connection(node.endpoint, token=token)).load(DatasetSpec("t", source))
        request = pb.GatherRequest(dataset="t", fingerprint=info.fingerprint)
        command = flight.FlightDescriptor.for_command(request.SerializeToString())
        before = resident_bytes(node.pid)
        with connect(node.endpoint, token, generic_options=SMALL_WINDOWS) as stalling:

            def gather() -> flight.MetadataRecordBatchReader:
                writer, reader = stalling.do_exchange(command)
                writer.begin(ROW_IDS.schema)
                with suppress(pa.ArrowException, flight.FlightError):  # refused: the reader knows
                    writer.write_batch(ROW_IDS)
                writers.append(writer)
                return reader

            writers: list[flight.FlightStreamWriter] = []
            streams = [gather() for _ in range(MAX_CALLS_OF_CONNECTION + 20)]
            dataset = CacheIterableDataset(
                "t",
                batch_size=50_000,
                cache=Connection(node.endpoint, local=False, token=token),
                columns=["row"],
            )
            assert [r for b in dataset for r in b["row"].tolist()] == [*range(ROWS)]
            assert resident_bytes(node.pid) - before < 600 * 2**20
            wait_until(lambda: "slow reader cut off" in node.log_tail(), WAIT_S, "it is cut off")
            refusals = []
            for stream in streams:
                with pytest.raises(flight.FlightUnavailableError) as caught:
                    stream.read_all()
                refusals.append(str(caught.value))
            limits = (
                "has at most 128 running calls on a node",
                "have at most 67108864 bytes a conn",
            )
            assert any(limit in refusal for limit in limits for refusal in refusals)
            assert gather().read_chunk().data.num_rows == len(ROW_IDS)
            for writer in writers:
                with suppress(pa.ArrowException, flight.FlightError):
                    writer.close()
            wait_until(
                lambda: resident_bytes(node.pid) - before < 250 * 2**20,
                WAIT_S,
                "the memory of refused requests is given back",
            )
    finally:
        node.close()
