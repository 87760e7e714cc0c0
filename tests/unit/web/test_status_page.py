"""What the page of a node says."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime

from cache_protocol.v1 import cache_pb2 as pb
from cache_server.node.status import CacheStatus, NodeStatus, VersionStatus
from cache_server.node.traffic import Counts, Read, Served
from cache_server.shards.version_key import VersionKey
from cache_server.web.html import View
from cache_server.web.page import page
from tests.made_up_jobs import FAILED, NODES, READY
from tests.node_statuses import STATUS


def lines(html: str) -> list[str]:
    """The rows of its tables, without tags."""
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    return [" | ".join(re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)) for row in rows]


def test_a_node_shows_its_shards_what_it_sent_and_what_it_refused() -> None:
    shown = lines(page(STATUS))

    assert "<dt>memory</dt><dd>3.0 MiB of 2.0 GiB</dd>" in page(STATUS)
    assert "trips | f00 | 7 | 8 | 2 | 0 | 2.0 KiB" in shown
    assert "trips | exchange | 1,234,567 | 4.0 KiB" in shown
    assert "NotReadyError | 5" in shown
    assert "<h2>Nodes</h2>" not in page(STATUS)


def test_a_node_that_is_not_the_coordinator_links_to_its_page() -> None:
    html = page(STATUS, View(job="train"))

    assert '<a href="http://host:3/?job=train">http://host:3/</a>' in html
    for address in ("", "javascript:alert(1)"):
        unknown = page(replace(STATUS, coordinator_page=address))
        assert "which this node has not reached yet" in unknown
        assert "javascript" not in unknown


def test_a_person_can_pause_the_updates() -> None:
    assert '<a href="?pause=1">Pause</a>' in page(STATUS)
    assert 'Paused. <a href="?">Resume updates</a>' in page(STATUS, View(paused=True))
    now = datetime(2026, 5, 1, 9, 8, 7, tzinfo=UTC)
    assert "09:08:07 UTC" in page(STATUS, now=now), "as of then"


def test_a_coordinator_shows_every_node_and_dataset() -> None:
    nodes = (
        pb.Node(id="a1", name="pod-a", flight_location="grpc://a:1", alive=True, stored_shards=2),
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
    assert "pod-a (a1) | alive | 0 B | 2 | grpc://a:1" in shown
    assert 'b2 | <span class="bad">lost</span> | 1.0 KiB | 0 | grpc://b:1' in shown
    (trips,) = [line for line in shown if line.startswith("trips | loading | <svg")]
    assert trips.endswith("</svg>\xa025%, 100 rows/s, 30 s left | 1,000 | 0 B | 1 of 4")
    assert 'broken | <span class="bad">failed</span> |  | 0 | 0 B | 0 of 0' in shown
    assert "later | state 9 |  | 0 | 0 B | 0 of 0" in shown, "of a release to come"
    problems = ["1 of 2 nodes lost: b2", "dataset broken failed: no such file"]
    assert re.findall(r'<li><span class="bad">(.*?)<', html) == problems


def test_an_error_of_many_lines_is_one_line_until_someone_asks() -> None:
    status = replace(STATUS, cache=CacheStatus(NODES, (READY, *[FAILED] * 5)))
    html, whole = page(status), page(status, View(shown=frozenset({"errors"})))

    assert "customers failed: cannot read s3://bucket/customers/part-0017.parquet" in html
    assert "2 more datasets failed" in html
    assert "row group 1:" not in html
    assert "row group 499: damaged page header" in whole
    assert 'href="?show=errors" aria-expanded="false">Show whole errors' in html


def test_a_node_that_is_not_ready_or_has_no_coordinator_says_so() -> None:
    html = page(replace(STATUS, ready=False, coordinator=""))

    assert '<span class="bad">not ready</span>' in html
    assert '<dt>coordinator</dt><dd><span class="bad">not reached yet</span></dd>' in html


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
            coordinator_page=f"http://{evil}",
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
