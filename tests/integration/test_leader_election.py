"""Nodes that elect their coordinator; the API server is in this process. See tests/e2e, too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cache_client import NodeUnavailableError
from tests import forked_python
from tests.api_server import ApiServer
from tests.conftest import numbered_table
from tests.elected_nodes import ElectedNodes
from tests.etcd_server import EtcdServer

NUM_ROWS = 1_000


def test_a_coordinator_that_stops_hands_over_at_once_and_all_it_knew(tmp_path: Path) -> None:
    rows = numbered_table(NUM_ROWS)
    with (
        ApiServer() as api,
        ElectedNodes(
            api.write_kubeconfig(tmp_path / "kubeconfig"), "team", tmp_path / "nodes", count=2
        ) as cache,
    ):
        first = cache.leader()
        (second,) = (node for node in cache.nodes if node is not first)
        cache.client(second).write("table", rows, replicas=2)
        with pytest.raises(NodeUnavailableError, match="does not coordinate the cache now"):
            cache.datasets_at(second)

        assert first.stop() == 0
        assert cache.leader(first) is second
        assert cache.client(second).read("table").read_all().sort_by("row").equals(rows)
        assert cache.datasets_at(second) == ["table"]
        (lease,) = api.store.find("leases", "team")
        assert lease["spec"]["holderIdentity"].startswith(second.control_location)
        assert lease["spec"]["leaseTransitions"] >= 1


def test_a_coordinator_that_is_lost_with_its_disk_is_replaced_by_etcd(tmp_path: Path) -> None:
    rows = numbered_table(NUM_ROWS)
    with (
        EtcdServer(tmp_path / "etcd") as etcd,
        ElectedNodes(etcd.endpoint, "", tmp_path / "nodes", count=3) as cache,
    ):
        first = cache.leader()
        cache.client(first).write("table", rows, replicas=3)
        cache.lose(first)
        second = cache.leader(first)
        assert cache.datasets_at(second) == ["table"]
        assert cache.client(second).read("table").read_all().sort_by("row").equals(rows)
        cache.client(second).write("more", rows)
        assert any("-catalogue-" in key for key in etcd.all_keys())
        assert [*tmp_path.glob("nodes/*/catalogue")] == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "needs the API of a cluster"),
        (("--load-from-env",), "--load-from-env needs a fixed --coordinator"),
        (("--coordinator", "other:50052"), "cannot be combined with coordinator"),
        (("--catalogue-dir", "/catalogue"), "cannot be combined with catalogue_dir"),
    ],
)
def test_an_election_that_cannot_be_is_refused_at_the_start(
    tmp_path: Path, arguments: tuple[str, ...], reason: str
) -> None:
    ports = ("--flight-port", "0", "--control-port", "0", "--http-port", "0")
    ended = forked_python.run(
        [
            *(sys.executable, "-m", "cache_server", "serve", "--cache-dir", str(tmp_path), *ports),
            *("--leader-election", "kubernetes:team/cache", *arguments),
        ],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin", "KUBECONFIG": str(tmp_path / "none")},
        timeout=60,
    )
    assert ended.returncode == 78
    assert reason in ended.stderr
