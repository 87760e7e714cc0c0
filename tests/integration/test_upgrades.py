"""The last release beside this one: each part of a cache may be of either."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cache_client import CacheClient, RequestError
from cache_protocol.wire import protocol_version
from cache_server import LocalCluster
from tests.conftest import write_numbered
from tests.last_release import ReleaseClient, last_release, nodes_are_old, run_as
from tests.waiting import files_below, wait_until

ROWS, FILES = 80, 8
HALF = 5  # steps of 8 rows


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_numbered(tmp_path_factory.mktemp("source"), ROWS, files=FILES)


@pytest.fixture(scope="module")
def old_client() -> Iterator[ReleaseClient]:
    with ReleaseClient(is_old=True) as client:
        assert client.do("where_it_is", "").startswith(str(last_release()))
        yield client


@pytest.fixture(scope="module")
def new_client() -> Iterator[ReleaseClient]:
    with ReleaseClient(is_old=False) as client:
        yield client


@pytest.mark.parametrize(
    ("coordinator_is_old", "node_is_old"), [*itertools.product([True, False], repeat=2)]
)
def test_clients_of_both_releases_load_read_resume_and_write(
    old_client: ReleaseClient,
    new_client: ReleaseClient,
    source: Path,
    coordinator_is_old: bool,
    node_is_old: bool,
) -> None:
    def is_old(command: Sequence[str]) -> bool:
        return node_is_old if "--coordinator" in command else coordinator_is_old

    clients = {"old": old_client, "new": new_client}
    others = {"old": new_client, "new": old_client}
    with nodes_are_old(is_old), LocalCluster(nodes=2) as cluster:
        where, states = cluster.endpoint, {}
        for who, client in clients.items():
            assert client.do("load", where, name=who, source=str(source)) == ROWS
            states[who] = client.do("read", where, name=who, local=False, state=None, steps=HALF)
        for who, client in others.items():
            rows, state = states[who]
            rest, _ = client.do("read", where, name=who, local=False, state=state, steps=None)
            assert len(rows) == HALF * 8
            assert sorted(rows + rest) == list(range(ROWS))
        for who, client in clients.items():
            written = client.do("write", where, name=f"{who}-rows", start=0, stop=40, append=False)
            assert written == 40
        for who, client in others.items():
            name = f"{who}-rows"
            assert client.do("write", where, name=name, start=40, stop=80, append=True) == 80
            rows, _ = client.do("read", where, name=name, local=True, state=None, steps=None)
            assert sorted(rows) == list(range(80))
            assert name not in client.do("drop", where, name=name)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])  # the coordinator is the first of the cluster
def test_a_cache_is_upgraded_in_place_and_reads_no_source(
    old_client: ReleaseClient, new_client: ReleaseClient, tmp_path: Path, order: list[int]
) -> None:
    source = write_numbered(tmp_path / "source", ROWS, files=FILES)
    with (
        nodes_are_old(lambda _: True),
        LocalCluster(nodes=2, cache_dir=tmp_path / "cache") as cluster,
    ):
        old_client.do("load", cluster.endpoint, name="loaded", source=str(source))
        for name in ("written", "dropped"):
            old_client.do("write", cluster.endpoint, name=name, start=0, stop=ROWS, append=False)
        shutil.rmtree(source)
        rows: dict[str, list[int]] = {"loaded": [], "written": []}
        states = dict.fromkeys(rows)

        def train(client: ReleaseClient, steps: int | None) -> None:
            for name in rows:
                some, states[name] = client.do(
                    "read",
                    cluster.endpoint,
                    name=name,
                    local=False,
                    state=states[name],
                    steps=steps,
                )
                rows[name] += some

        train(old_client, 3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(protocol_version, "PROTOCOL", 3)
            with pytest.raises(RequestError, match=r"the cache at \S+ is too old for this client"):
                CacheClient(cluster.endpoint).datasets()
        for index in order:
            run_as(cluster.nodes[index], is_old=False)
            cluster.nodes[index].restart()
            cluster.wait_for_nodes()
            train(old_client, 3)
            if index == order[0]:  # the other node is of the last release
                old_client.do("drop", cluster.endpoint, name="dropped")
        train(new_client, None)
        for name in rows:
            assert sorted(rows[name]) == list(range(ROWS))
        appended = new_client.do(
            "write", cluster.endpoint, name="written", start=ROWS, stop=ROWS + 8, append=True
        )
        assert appended == ROWS + 8
        assert new_client.do("drop", cluster.endpoint, name="written") == ["loaded"]

        def only_the_loaded_rows_are_left() -> bool:
            shards = [path for path in files_below(cluster.cache_dir) if path.suffix == ".arrow"]
            return {path.parent.parent.name for path in shards} == {"loaded"}

        wait_until(only_the_loaded_rows_are_left, 30.0, "dropped rows are gone from the nodes")
