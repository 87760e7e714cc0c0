"""The last release beside this one: each part of a cache may be of either."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_server import LocalCluster
from tests.conftest import write_numbered
from tests.last_release import ReleaseClient, last_release, nodes_are_old

ROWS, FILES = 80, 8
HALF = 5  # steps of 8 rows


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_numbered(tmp_path_factory.mktemp("source"), ROWS, files=FILES)


@pytest.fixture(scope="module")
def old_client() -> Iterator[ReleaseClient]:
    last_release()
    with ReleaseClient(is_old=True) as client:
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
    def is_old(command: object) -> bool:
        return node_is_old if "--coordinator" in command else coordinator_is_old

    with nodes_are_old(is_old), LocalCluster(nodes=2) as cluster:
        states = {}
        for who, client in {"old": old_client, "new": new_client}.items():
            assert str(last_release()) in client.do("where", cluster.endpoint) or who == "new"
            assert client.do("load", cluster.endpoint, name=who, source=str(source)) == ROWS
            states[who] = client.do(
                "read", cluster.endpoint, name=who, local=False, state=None, steps=HALF
            )
        for who, client in {"old": new_client, "new": old_client}.items():
            rows, state = states[who]
            rest, _ = client.do(
                "read", cluster.endpoint, name=who, local=False, state=state, steps=None
            )
            assert len(rows) == HALF * 8
            assert sorted(rows + rest) == list(range(ROWS))
        for who, client in {"old": old_client, "new": new_client}.items():
            name = f"written-{who}"
            client.do("write", cluster.endpoint, name=name, start=0, stop=40, append=False)
        for who, client in {"old": new_client, "new": old_client}.items():
            name = f"written-{who}"
            wrote = client.do("write", cluster.endpoint, name=name, start=40, stop=80, append=True)
            assert wrote == 80
            rows, _ = client.do(
                "read", cluster.endpoint, name=name, local=True, state=None, steps=None
            )
            assert sorted(rows) == list(range(80))
            assert name not in client.do("drop", cluster.endpoint, name=name)
