"""The status of a node with a part of one dataset."""

from __future__ import annotations

from cache_protocol.v1 import cache_pb2 as pb
from cache_server.node.status import NodeStatus, VersionStatus
from cache_server.node.traffic import Counts, Read, Served
from cache_server.shards.version_key import VersionKey

STATUS = NodeStatus(
    node=pb.Node(
        id="a1", flight_location="grpc://host:1", control_location="host:2", cache_dir="/cache",
        memory_limit_bytes=2 * 2**30, stored_bytes=3 * 2**20,
    ),
    ready=True,
    coordinator="host:2",
    coordinator_page="http://host:3/",
    versions=(
        VersionStatus(VersionKey("trips", "f00"), 7, 8, loading=2, failed=0, num_bytes=2048),
    ),
    huge_page_bytes=0,
    counts=Counts({Read("trips", "exchange"): Served(1_234_567, 4096)}, {"NotReadyError": 5}),
    cache=None,
)  # fmt: skip
