"""The short form of a shard map."""

from __future__ import annotations

from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.load_progress import lengthen_shards, shorten_shards


def test_a_map_comes_back_as_it_was_and_takes_half_the_bytes() -> None:
    info = pb.DatasetInfo()
    names = [f"{number:032x}" for number in range(100)]
    for name in names:
        info.nodes.add(id=name, flight_location="grpc://10.0.0.1:8815")
    for index in range(1_000):
        info.shards.add(
            index=index,
            rows=pb.RowRange(start=index * 10**5, stop=(index + 1) * 10**5),
            num_bytes=64 << 20,
            checksum=f"{index:032x}",
            node_ids=[names[index % 100], names[(index + 7) % 100]],
        )
    info.shards.add(checksum="ABCD", node_ids=names[:1])  # of no known form
    info.shards.add(checksum="")
    long = info.SerializeToString()

    shorten_shards(info)
    short = info.SerializeToString()
    lengthen_shards(info)

    assert info.SerializeToString() == long
    assert len(short) < 0.5 * len(long)
    lengthen_shards(info)  # of an older coordinator
    assert info.SerializeToString() == long
