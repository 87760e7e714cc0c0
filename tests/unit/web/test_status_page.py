"""What the page of a node says."""

from __future__ import annotations

import re
from dataclasses import replace

from cache_protocol.v1 import cache_pb2 as pb
from cache_server.node.status import CacheStatus, NodeStatus, VersionStatus
from cache_server.node.traffic import Counts, Read, Served
from cache_server.shards.version_key import VersionKey
from cache_server.web.page import page
from tests.node_statuses import STATUS


def lines(html: str) -> list[str]:
    """The rows of its tables, without tags."""
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    return [" | ".join(re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)) for row in rows]


def test_a_node_shows_its_shards_what_it_sent_and_what_it_refused() -> None:
    shown = lines(page(STATUS))

    assert "memory | 3.0 MiB of 2.0 GiB" in shown
    assert "trips | f00 | 7 | 8 | 2 | 0 | 2.0 KiB" in shown
    assert "trips | exchange | 1,234,567 | 4.0 KiB" in shown
    assert "NotReadyError | 5" in shown
    assert "<h2>Nodes</h2>" not in page(STATUS)


def test_a_coordinator_shows_every_node_and_dataset() -> None:
    nodes = (
        pb.Node(id="a1", flight_location="grpc://a:1", alive=True, stored_shards=2),
        pb.Node(id="b2", flight_location="grpc://b:1", stored_bytes=1024),
    )
    loading = pb.DatasetInfo(
        spec=pb.DatasetSpec(name="trips"),
        state=pb.DATASET_STATE_LOADING,
        progress=pb.LoadProgress(rows_done=1000, shards_done=1, shards_total=4, elapsed_s=10),
    )
    failed = pb.DatasetInfo(
        spec=pb.DatasetSpec(name="broken"),
        state=pb.DATASET_STATE_FAILED,
        error=pb.Error(message="no such file"),
    )

    later = pb.DatasetInfo(spec=pb.DatasetSpec(name="later"), state=9)

    html = page(replace(STATUS, cache=CacheStatus(nodes, (failed, loading, later))))

    shown = lines(html)
    assert "a1 | grpc://a:1 | alive | 2 | 0 B" in shown
    assert "b2 | grpc://b:1 | lost | 0 | 1.0 KiB" in shown
    (trips,) = [line for line in shown if line.startswith("trips | loading | 1,000 | 1 of 4 |")]
    assert trips.endswith("</svg> 25%, 100 rows/s, 30 s left")
    assert "broken | failed: no such file | 0 | 0 of 0 | 0 B | " in shown
    assert "later | state 9 | 0 | 0 of 0 | 0 B | " in shown, "of a release to come"
    assert re.findall(r'class="bad">(.*?)<', html) == ["failed: no such file", "lost"]


def test_a_node_that_is_not_ready_or_has_no_coordinator_says_so() -> None:
    html = page(replace(STATUS, ready=False, coordinator=""))

    assert '<span class="bad">not ready</span>' in html
    assert "coordinator | not reached yet" in lines(html)


def test_no_text_of_a_source_becomes_a_tag() -> None:
    evil = "<script>alert('x')</script>"
    broken = pb.DatasetInfo(
        spec=pb.DatasetSpec(name=evil), state=pb.DATASET_STATE_FAILED, error=pb.Error(message=evil)
    )
    html = page(
        NodeStatus(
            node=pb.Node(id=evil, cache_dir=evil),
            ready=True,
            coordinator=evil,
            versions=(VersionStatus(VersionKey(evil, evil), 0, 0, 0, 0, 0),),
            huge_page_bytes=0,
            counts=Counts({Read(evil, evil): Served()}, {evil: 1}),
            cache=CacheStatus((pb.Node(id=evil, flight_location=evil),), (broken,)),
        )
    )

    assert "<script" not in html
    assert html.count("&lt;script&gt;") >= 10


def test_the_page_says_how_far_nodes_are_drained() -> None:
    drains = pb.Drain(shards_left=3, bytes_left=2048, waits="<open>"), pb.Drain(done=True)
    nodes = tuple(pb.Node(id=f"n{i}", alive=True, drain=each) for i, each in enumerate(drains))
    html = page(replace(STATUS, cache=CacheStatus(nodes, ())))
    assert "draining: 3 shards left, 2.0 KiB; waits: &lt;open&gt;" in html and "drained" in html
