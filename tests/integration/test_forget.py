"""Rows that are forgotten are on no node, in no file and in no answer, and do not come back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_client import CacheClient, Connection, DatasetSpec
from cache_client.control.row_reads import open_version
from cache_client.job.connection import access_to
from cache_client.reading import local_shards
from cache_protocol.errors import RequestError
from cache_protocol.wire.attestations import verify
from cache_server.local import LocalCluster
from tests.waiting import wait_until

ROWS, PERSON = 4_000, 7
CANARY = b"canary-of-user-7"


def table(num_rows: int = ROWS) -> pa.Table:
    """Rows with 16-byte canaries in values of each kind of user 7."""
    ids = np.arange(num_rows)
    texts = [CANARY.decode() if i % 400 == PERSON else f"text of row {i:06}" for i in ids]
    return pa.table(
        {
            "user": ids % 400,
            "value": np.where(ids % 400 == PERSON, np.frombuffer(CANARY, np.int64)[0], ids),
            "text": texts,
            "tags": [[each, each] for each in texts],
            "blob": [each.encode() for each in texts],
            "flags": [[True, i % 2 == 0] for i in ids],
            "pair": pa.array([[each, each] for each in texts], pa.list_(pa.string(), 2)),
            "struct": [{"text": each, "on": True} for each in texts],
            "messages": [
                [{"role": "user", "text": each, "read": i % 2 == 0}]
                for i, each in zip(ids, texts, strict=True)
            ],
            "map": pa.array([[(each, True)] for each in texts], pa.map_(pa.string(), pa.bool_())),
        }
    )


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(2, tmp_path / "nodes", node_timeout_s=2.0) as running:
        yield running


def files_with_canaries(folder: Path) -> list[Path]:
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and CANARY[:8] in path.read_bytes():  # the number has eight bytes of it
            found.append(path)
    return found


def test_forgotten_rows_are_in_no_file_and_in_no_answer(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    client = CacheClient(cluster.endpoint)
    source = tmp_path / "source.parquet"
    pq.write_table(table(), source)
    spec = DatasetSpec("people", str(source), replicas=2, target_shard_bytes=65_536)
    client.load(spec)
    client.write("written", table(), replicas=2, target_shard_bytes=65_536)
    assert files_with_canaries(tmp_path / "nodes")

    for name in ("people", "written"):
        act = client.forget(name, f"user = {PERSON}", reason="request 12")
        assert act.done and act.num_rows == ROWS // 400
        content = verify(act.attestation, client.attestation_key().hex())
        assert content["dataset"] == name and content["away"] == []

    assert files_with_canaries(tmp_path / "nodes") == []
    for name in ("people", "written"):
        for local in (True, False):
            rows = CacheClient(Connection(cluster.endpoint, local=local)).read(name).read_all()
            kept = table().filter(pa.array(np.arange(ROWS) % 400 != PERSON))
            assert rows.equals(kept.cast(rows.schema))
        (erased,) = client.erased_rows(name)
        assert erased.tolist() == [i for i in range(ROWS) if i % 400 == PERSON]
        assert client.describe(name).num_rows == ROWS


def test_a_file_that_was_erased_before_it_was_mapped_is_left_to_its_node(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_shards, "_SAMPLED_PIECES", 0)  # samples may miss a row
    client = CacheClient(cluster.endpoint)
    client.write("large", pa.table({"user": np.arange(600_000)}))
    here = local_shards.LocalShards(open_version(access_to(cluster.endpoint), "large"))
    assert here.shards == {0}  # it has read the manifest, and mapped no file

    client.forget("large", "user = 300000", reason="request 12")

    with pytest.raises(local_shards.ShardFileLostError, match=r"piece 0|after it was sealed"):
        here.gather(np.array([1, 300_000]))


def test_a_load_after_a_drop_leaves_forgotten_rows_out(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    client = CacheClient(cluster.endpoint)
    source = tmp_path / "source.parquet"
    pq.write_table(table(), source)
    spec = DatasetSpec("people", str(source), target_shard_bytes=65_536)
    client.load(spec)
    client.forget("people", f"user = {PERSON}", reason="request 12")
    client.drop("people")
    pq.write_table(pa.concat_tables([table(100), table()]), source)

    info = client.load(spec)

    assert info.num_rows == ROWS + 100
    wanted = ROWS // 400 + 1
    wait_until(lambda: client.describe("people").erased_rows == wanted, 30, "an act")
    assert files_with_canaries(tmp_path / "nodes") == []
    rows = client.read("people").read_all()
    assert PERSON not in rows["user"].to_pylist()
    assert rows.num_rows == ROWS + 100 - ROWS // 400 - 1


def test_a_node_that_was_away_erases_before_it_serves(tmp_path: Path) -> None:
    with LocalCluster(2, tmp_path / "nodes", node_timeout_s=2.0) as cluster:
        client = CacheClient(cluster.endpoint)
        client.write("written", table(), replicas=2, target_shard_bytes=65_536)
        cluster.nodes[1].kill()
        wait_until(
            lambda: sum(node.alive for node in client.nodes()) == 1, 30, "the loss of a node"
        )

        act = client.forget("written", f"user = {PERSON}", reason="request 12", timeout_s=60)

        assert json.loads(act.attestation)["attestation"]["away"]
        cluster.nodes[1].start()
        wait_until(lambda: not files_with_canaries(tmp_path / "nodes"), 30, "the erasure")


def test_no_call_returns_while_a_node_that_counts_as_alive_may_have_the_rows(
    tmp_path: Path,
) -> None:
    with LocalCluster(2, tmp_path / "nodes", node_timeout_s=60.0) as cluster:
        client = CacheClient(cluster.endpoint)
        client.write("written", table(), replicas=2, target_shard_bytes=65_536)
        cluster.nodes[1].kill()

        # Another replica is searched where a node does not answer.
        found = client.forget("written", f"user = {PERSON}", reason="x", dry_run=True)
        assert found.num_rows == ROWS // 400

        for where, waits in {
            f"user = {PERSON}": "erases rows of",
            f"user IN ({PERSON})": "act 1 on dataset 'written' may have these rows",
        }.items():

            def gives_up(reason: str, waits: str = waits) -> None:
                if waits in reason:
                    raise InterruptedError(reason)

            with pytest.raises(InterruptedError):
                client.forget("written", where, reason="x", on_wait=gives_up, timeout_s=60)

        cluster.nodes[1].start()
        act = client.forget("written", f"user = {PERSON}", reason="x", timeout_s=60)
        assert files_with_canaries(tmp_path / "nodes") == []
        assert (act.number, act.num_rows) == (1, ROWS // 400) and act.attestation
        assert client.forget("written", f"user IN ({PERSON})", reason="x").number == 0
        assert len(client.forgotten("written")) == 1


def test_conditions_and_signatures_that_are_wrong_are_named(cluster: LocalCluster) -> None:
    client = CacheClient(cluster.endpoint)
    client.write("written", table(), target_shard_bytes=65_536)
    with pytest.raises(RequestError, match="usr"):
        client.forget("written", "usr = 7", reason="request 12")
    assert client.forget("written", "user = 7", reason="x", dry_run=True).number == 0
    assert client.forgotten("written") == []
    act = client.forget("written", "user = 7", reason="request 12")
    with pytest.raises(RequestError, match="changed after it was signed"):
        verify(act.attestation.replace("request 12", "request 13"))
    with pytest.raises(RequestError, match="another cache"):
        verify(act.attestation, "00" * 32)
