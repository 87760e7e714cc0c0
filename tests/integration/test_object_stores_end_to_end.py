"""From an object store to ready by real nodes: what is read, how often, what a failure leaves."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from cache_client import CacheClient, DatasetSpec, __main__
from cache_protocol.errors import LoadError
from cache_server import LocalCluster
from tests.conftest import numbered_table
from tests.object_store import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, Request, S3Server
from tests.waiting import files_below, wait_until

WAIT_S = 30.0
BUCKET = "lake"
WRONG_KEY_ID, WRONG_SECRET = "AKIAWRONGWRONGWRONGW", "the/wrong+secret"


class Store(S3Server):
    """A server that counts the bytes it sends and does as told at the n-th GET of an object."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        self._gets: Counter[str] = Counter()
        self._told: list[tuple[re.Pattern[str], int, Callable[[], object]]] = []
        self._counting = threading.Lock()

    def at(self, number: int, pattern: str, action: Callable[[], object]) -> None:
        """Has ``action`` run when an object is asked for the ``number``-th time, before it is sent.

        The first time is when the coordinator looks at its footer, the second when a node reads it.
        """
        self._told.append((re.compile(pattern), number, action))

    def clear(self) -> None:
        super().clear()
        with self._counting:
            self._told.clear()
            self._gets.clear()
            self.sent.clear()

    def gets(self, prefix: str) -> dict[str, int]:
        """How often each object below ``prefix`` was asked for."""
        with self._counting:
            return {key: n for key, n in self._gets.items() if key.startswith(f"{BUCKET}/{prefix}")}

    def answer(
        self, request: Request, environ: dict[str, Any]
    ) -> tuple[str, list[tuple[str, str]], bytes, bool]:
        is_object = request.method == "GET" and "/" in request.key
        if is_object:
            with self._counting:
                self._gets[request.key] += 1
                number = self._gets[request.key]
                told = [
                    a for pattern, n, a in self._told if n == number and pattern.search(request.key)
                ]
            for action in told:
                action()
        answer = super().answer(request, environ)
        if is_object:
            with self._counting:
                self.sent[request.key] += len(answer[2])
        return answer


@pytest.fixture(scope="module", autouse=True)
def no_credentials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A machine without credentials, for this process and the nodes."""
    nowhere = str(tmp_path_factory.mktemp("aws") / "none")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
                patch.delenv(name)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_CONFIG_FILE", nowhere)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", nowhere)
        yield


@pytest.fixture(scope="module")
def running() -> Iterator[Store]:
    server = Store()
    with server:
        yield server


@pytest.fixture
def store(running: Store) -> Iterator[Store]:
    running.clear()
    yield running
    running.clear()


@pytest.fixture(scope="module")
def cluster(
    no_credentials: None, running: Store, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    """Two nodes of this module, whose folders can be searched."""
    with LocalCluster(2, tmp_path_factory.mktemp("cache")) as two:
        yield two


def parquet(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def put_numbered(store: Store, prefix: str, objects: int, rows_each: int = 5) -> pa.Table:
    """Objects ``prefix/part-00000.parquet`` and so on; all of their rows."""
    whole = numbered_table(objects * rows_each)
    store.put_many(
        BUCKET,
        {
            f"{prefix}/part-{i:05d}.parquet": parquet(whole.slice(i * rows_each, rows_each))
            for i in range(objects)
        },
    )
    return whole


def spec_of(store: Store, name: str, prefix: str, **arguments: Any) -> DatasetSpec:
    given = {"storage_options": store.storage_options, **arguments}
    return DatasetSpec(name, f"s3://{BUCKET}/{prefix}", **given)


def cached(client: CacheClient, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = client.head(name, 10**9).to_pylist()
    return rows


def held(client: CacheClient, name: str) -> dict[int, tuple[str, ...]]:
    """The nodes that hold each shard that is sealed somewhere."""
    return {index: nodes for index, nodes in client.describe(name).placement.items() if nodes}


def left_behind(cluster: LocalCluster, name: str) -> list[Path]:
    return files_below(
        *(node.cache_dir / folder for node in cluster.nodes for folder in (name, ".scratch"))
    )


def assert_no_secret(text: str) -> None:
    for secret in (ACCESS_KEY_ID, SECRET_ACCESS_KEY, WRONG_KEY_ID, WRONG_SECRET):
        assert secret not in text


def assert_no_secret_on_disk(cluster: LocalCluster) -> None:
    files = files_below(cluster.cache_dir)
    assert len(files) >= 3  # logs and a catalogue at least
    for path in files:
        with suppress(FileNotFoundError):  # written for a moment
            assert_no_secret(path.read_bytes().decode("latin-1"))


# -- every row once --------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_more_objects_than_a_listing_has_are_every_row_once_and_each_is_read_by_one_node(
    store: Store, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, replicas: int
) -> None:
    objects = 100
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "30")  # of a listing; S3 has 1,000
    client = CacheClient(cluster.endpoint)
    expected = put_numbered(store, f"many-{replicas}", objects)

    info = client.load(
        spec_of(store, "many", f"many-{replicas}", target_shard_bytes="1KiB", replicas=replicas)
    )

    assert sum("continuation-token" in request.query for request in store.requests) == 3
    assert info.num_rows == expected.num_rows
    assert cached(client, "many") == expected.to_pylist()
    wait_until(
        lambda: all(len(nodes) == replicas for nodes in client.describe("many").placement.values()),
        WAIT_S,
        f"{replicas} of every shard",
    )
    ids = {node_id for nodes in held(client, "many").values() for node_id in nodes}
    assert ids == {node.node_id for node in cluster.nodes}
    gets = store.gets(f"many-{replicas}/")
    assert len(gets) == objects
    assert max(gets.values()) <= 2  # the footer, and the rows
    client.drop("many")


# -- failures of nodes -----------------------------------------------------------------------------

FREE, HELD = 12, 12  # objects, each of which is a shard


def begin_and_kill(
    store: Store, cluster: LocalCluster, prefix: str
) -> tuple[DatasetSpec, pa.Table, dict[int, tuple[str, ...]], dict[str, int]]:
    """Kills the second node when the first half of a table is sealed, the other half under way.

    Returns:
        the spec, its rows, who held which shards, and how often each object was asked for.
    """
    gate = threading.Event()
    expected = put_numbered(store, prefix, FREE + HELD)
    store.at(2, rf"{prefix}/part-000({'|'.join(map(str, range(FREE, FREE + HELD)))})", gate.wait)
    client = CacheClient(cluster.endpoint)
    spec = spec_of(store, prefix, prefix, target_shard_bytes=1)
    client.load(spec, wait=False)
    wait_until(lambda: len(held(client, prefix)) >= FREE, WAIT_S, "half of the table is sealed")
    sealed = held(client, prefix)
    assert len(sealed) == FREE
    assert {node_id for nodes in sealed.values() for node_id in nodes} == {
        node.node_id for node in cluster.nodes
    }
    before = store.gets(prefix)

    cluster.nodes[1].kill()
    gate.set()
    return spec, expected, sealed, before


def object_of(prefix: str, shard: int) -> str:
    return f"{BUCKET}/{prefix}/part-{shard:05d}.parquet"


def test_a_node_that_is_killed_and_restarted_does_not_read_its_sealed_shards_again(
    store: Store, cluster: LocalCluster
) -> None:
    spec, expected, sealed, before = begin_and_kill(store, cluster, "killed")
    cluster.nodes[1].start()
    client = CacheClient(cluster.endpoint)

    info = client.load(spec, timeout_s=WAIT_S)

    assert info.num_rows == expected.num_rows
    assert cached(client, "killed") == expected.to_pylist()
    after = store.gets("killed")
    # The spec was given again, so every footer was looked at again; no rows of these were.
    again = [
        shard
        for shard in sealed
        if after[object_of("killed", shard)] > before[object_of("killed", shard)] + 1
    ]
    assert again == []
    client.drop("killed")


def test_the_node_that_is_left_finishes_the_load_without_reading_its_shards_again(
    store: Store, tmp_path: Path
) -> None:
    # Long enough that a node on busy cores is not taken for lost before it is killed.
    with LocalCluster(2, tmp_path, node_timeout_s=5.0) as cluster:
        spec, expected, sealed, before = begin_and_kill(store, cluster, "left")
        client = CacheClient(cluster.endpoint)
        survivor = cluster.nodes[0].node_id

        wait_until(lambda: client.describe("left").state == "ready", WAIT_S, "the table is ready")

        assert cached(client, "left") == expected.to_pylist()
        after = store.gets("left")
        for shard, nodes in sealed.items():
            if survivor in nodes:
                assert after[object_of("left", shard)] == before[object_of("left", shard)]
        assert client.load(spec).num_rows == expected.num_rows


def test_a_lost_disk_needs_the_credentials_again_after_a_restart_of_the_coordinator(
    store: Store, tmp_path: Path
) -> None:
    expected = put_numbered(store, "lost", 8)
    spec = spec_of(store, "lost", "lost", target_shard_bytes=1)
    with LocalCluster(2, tmp_path) as cluster:
        CacheClient(cluster.endpoint).load(spec)
        for node in cluster.nodes:
            node.kill()
        for path in cluster.nodes[1].cache_dir.glob("lost/*/shard-*"):
            path.unlink()
        for node in cluster.nodes:
            node.start()
        cluster.wait_for_nodes()
        client = CacheClient(cluster.endpoint)
        wait_until(lambda: client.describe("lost").state == "failed", WAIT_S, "it is failed")
        error = client.describe("lost").error
        assert error is not None and "credentials of 'lost' were not kept" in error
        assert "load its spec again" in error

        assert client.load(spec).num_rows == expected.num_rows

        assert cached(client, "lost") == expected.to_pylist()
        assert_no_secret_on_disk(cluster)


# -- failures of the store -------------------------------------------------------------------------


def test_requests_that_fail_five_times_lose_nothing(store: Store, cluster: LocalCluster) -> None:
    client = CacheClient(cluster.endpoint)
    expected = put_numbered(store, "busy", 6)
    store.at(1, "busy/part-00001", lambda: store.fail("busy/part-00001", times=5))
    store.at(2, "busy/part-00003", lambda: store.fail("busy/part-00003", times=5))

    client.load(spec_of(store, "busy", "busy", target_shard_bytes=1))

    assert cached(client, "busy") == expected.to_pylist()
    assert store.gets("busy/") == {object_of("busy", i): 7 if i in (1, 3) else 2 for i in range(6)}
    client.drop("busy")


def test_a_body_that_breaks_is_taken_up_where_it_broke(store: Store, cluster: LocalCluster) -> None:
    client = CacheClient(cluster.endpoint)
    expected = put_numbered(store, "broken", 6)
    for number in (1, 4):
        key = f"broken/part-0000{number}"
        store.at(2, key, partial(store.break_body, key))

    client.load(spec_of(store, "broken", "broken"))

    assert cached(client, "broken") == expected.to_pylist()
    spans = [request.span for request in store.requests if request.key == object_of("broken", 4)]
    assert spans[:2] == ["", ""] and re.fullmatch(r"bytes=[1-9]\d+-\d+", spans[2])
    client.drop("broken")


def test_wrong_keys_are_one_error_that_names_bucket_and_endpoint_and_never_a_key(
    store: Store, cluster: LocalCluster
) -> None:
    client = CacheClient(cluster.endpoint)
    put_numbered(store, "private", 3)
    store.require(ACCESS_KEY_ID)
    wrong = {**store.options, "access_key_id": WRONG_KEY_ID, "secret_access_key": WRONG_SECRET}

    with pytest.raises(LoadError) as caught:
        client.load(spec_of(store, "private", "private", storage_options=wrong))

    message = str(caught.value)
    assert f"access to bucket {BUCKET!r} at {store.endpoint} was refused (403" in message
    assert "check the credentials" in message and "\n" not in message
    assert_no_secret(message)
    assert_no_secret_on_disk(cluster)
    assert "private" not in {info.name for info in client.datasets()}
    assert client.load(spec_of(store, "private", "private")).num_rows == 15
    client.drop("private")


def test_keys_that_are_refused_to_a_node_are_named_like_those_of_the_plan(
    store: Store, cluster: LocalCluster
) -> None:
    client = CacheClient(cluster.endpoint)
    put_numbered(store, "revoked", 3)
    store.at(2, "revoked/part-00001", lambda: store.require("SOMEONE-ELSE"))
    spec = spec_of(store, "revoked", "revoked", target_shard_bytes=1)

    with pytest.raises(LoadError) as caught:
        client.load(spec)

    message = str(caught.value)
    assert re.search(r"s3://lake/revoked/part-0000\d\.parquet", message)
    assert f"access to bucket {BUCKET!r} at {store.endpoint} was refused (403" in message
    assert_no_secret(message)
    assert_no_secret_on_disk(cluster)
    store.require()
    assert client.load(spec).num_rows == 15
    client.drop("revoked")


def test_nothing_shows_or_keeps_the_keys_of_a_dataset_that_is_loaded(
    store: Store, cluster: LocalCluster
) -> None:
    client = CacheClient(cluster.endpoint)
    put_numbered(store, "secret", 3)
    client.load(spec_of(store, "secret", "secret"))

    shown = [repr(client.describe("secret")), repr(client.datasets()), repr(client.nodes())]
    for command in (["ls"], ["describe", "secret"], ["nodes"]):
        for more in ([], ["--json"]):
            result = CliRunner().invoke(
                __main__.app, [*command, "--endpoint", cluster.endpoint, *more]
            )
            assert result.exit_code == 0, result.output
            shown.append(result.output)
    assert_no_secret("".join(shown))
    manifests = [path for path in files_below(cluster.cache_dir) if path.suffix == ".json"]
    assert any("secret" in path.read_text() for path in manifests)  # of this dataset
    for path in manifests:
        json.loads(path.read_text())
    assert_no_secret_on_disk(cluster)
    client.drop("secret")


def test_a_tokenizer_in_the_store_is_pinned_and_read_with_the_keys_of_the_table(
    store: Store, cluster: LocalCluster
) -> None:
    def tokenizer(*words: str) -> bytes:
        model = {
            "type": "WordLevel",
            "unk_token": words[0],
            "vocab": {w: n for n, w in enumerate(words)},
        }
        return json.dumps({"model": model, "pre_tokenizer": {"type": "WhitespaceSplit"}}).encode()

    key = "models/tokenizer.json"
    store.put_many(
        BUCKET,
        {
            "texts/0.parquet": parquet(pa.table({"text": ["a b", "", "b c"]})),
            key: tokenizer("?", "a", "b"),
        },
    )
    client = CacheClient(cluster.endpoint)
    sql = f"SELECT tokenize(text, 's3://{BUCKET}/{key}') AS tokens FROM source"
    client.load(spec_of(store, "tokens", "texts/", sql=sql))
    assert [row["tokens"] for row in cached(client, "tokens")] == [[1, 2], [], [2, 0]]

    store.clear()
    other = tokenizer("?", "b", "a")
    store.at(2, key, lambda: store.put_many(BUCKET, {key: other}))  # when a node reads it
    store.put_many(
        BUCKET,
        {
            "texts/0.parquet": parquet(pa.table({"text": ["a"]})),
            key: tokenizer("?", "a", "b", "c"),
        },
    )
    with pytest.raises(LoadError, match=rf": (source )?file s3://{BUCKET}/{key} changed"):
        client.load(spec_of(store, "changed", "texts/", sql=sql))
    client.load(spec_of(store, "changed", "texts/", sql=sql))
    assert [row["tokens"] for row in cached(client, "changed")] == [[2]]


def test_an_object_that_changes_after_the_plan_fails_the_load_until_it_is_tried_again(
    store: Store, cluster: LocalCluster
) -> None:
    client = CacheClient(cluster.endpoint)
    put_numbered(store, "changing", 40)
    key = "changing/part-00017.parquet"
    new = parquet(numbered_table(7, 1000))
    store.at(2, key, lambda: store.put(BUCKET, key, new))
    spec = spec_of(store, "changing", "changing", target_shard_bytes="1KiB")

    with pytest.raises(LoadError, match=rf"s3://{BUCKET}/{key} changed since the dataset was"):
        client.load(spec)

    info = client.describe("changing")
    assert info.state == "failed" and info.error is not None and key in info.error
    wait_until(lambda: not left_behind(cluster, "changing"), WAIT_S, "nothing is left")
    assert client.describe("changing").state == "failed"
    retried = client.load(spec)
    assert retried.num_rows == 39 * 5 + 7
    assert retried.fingerprint != info.fingerprint
    rows = [row["row"] for row in cached(client, "changing")]
    assert rows == [*range(85), *range(1000, 1007), *range(90, 200)]
    client.drop("changing")


def test_a_small_object_that_is_not_what_its_footer_says_is_named_among_others(
    store: Store, cluster: LocalCluster
) -> None:
    client = CacheClient(cluster.endpoint)
    put_numbered(store, "damaged", 20, rows_each=50)
    data = bytearray(parquet(numbered_table(50, 350), compression="none", use_dictionary=False))
    data[4:400] = bytes(396)  # its first pages
    store.put(BUCKET, "damaged/part-00007.parquet", bytes(data))

    with pytest.raises(LoadError, match=r"cannot load s3://lake/damaged/part-00007\.parquet: "):
        client.load(spec_of(store, "damaged", "damaged"))

    wait_until(lambda: not left_behind(cluster, "damaged"), WAIT_S, "nothing is left")
    client.drop("damaged")


# -- what is read ----------------------------------------------------------------------------------


def test_only_the_columns_that_are_kept_are_fetched_of_a_large_object(
    store: Store, cluster: LocalCluster
) -> None:
    client = CacheClient(cluster.endpoint)
    groups, rows = 6, 60_000
    noise = np.random.default_rng(0).integers(0, 2**62, (6, groups * rows))
    columns = {
        "row": np.arange(groups * rows),
        **{f"x{i}": column for i, column in enumerate(noise)},
    }
    data = parquet(pa.table(columns), row_group_size=rows, compression="none", use_dictionary=False)
    store.put(BUCKET, "large/one.parquet", data)

    info = client.load(
        spec_of(store, "large", "large", columns=["x2", "row"], target_shard_bytes=rows * 16)
    )

    assert info.num_shards > 1
    loaded = client.head("large", 10**9)
    assert loaded.column("row").to_numpy().tolist() == columns["row"].tolist()
    assert loaded.column("x2").to_numpy().tolist() == noise[2].tolist()
    assert store.sent[f"{BUCKET}/large/one.parquet"] < 0.6 * len(data)
    client.drop("large")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "arrow"])
def test_objects_of_other_formats_are_loaded(
    store: Store, cluster: LocalCluster, kind: str
) -> None:
    client = CacheClient(cluster.endpoint)
    tables = [pa.table({"row": [i, i + 1], "text": [f"a{i}", f"b,{i}"]}) for i in (0, 2, 4)]
    for index, table in enumerate(tables):
        store.put(BUCKET, f"of-{kind}/{index}.{kind}", written(table, kind))

    client.load(spec_of(store, f"of-{kind}", f"of-{kind}"))

    rows = [row for table in tables for row in table.to_pylist()]
    assert cached(client, f"of-{kind}") == rows
    client.drop(f"of-{kind}")


def written(table: pa.Table, kind: str) -> bytes:
    sink = io.BytesIO()
    if kind == "csv":
        pa.csv.write_csv(table, sink)
    elif kind == "arrow":
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    else:
        sink.writelines(f"{json.dumps(row)}\n".encode() for row in table.to_pylist())
    return sink.getvalue()


def test_csv_objects_with_quoted_newlines_are_loaded_also_beyond_the_bytes_that_tell_the_columns(
    store: Store, cluster: LocalCluster
) -> None:
    client = CacheClient(cluster.endpoint)
    texts = [f"line {i}\n" + 'second, "line"\r\n' * 400 for i in range(900)]
    tables = [pa.table({"row": range(900), "text": texts}), pa.table({"row": [900], "text": ["a"]})]
    for index, table in enumerate(tables):
        store.put(BUCKET, f"quoted/{index}.csv", written(table, "csv"))
    assert len(written(tables[0], "csv")) > 5_000_000

    client.load(spec_of(store, "quoted", "quoted"))

    assert cached(client, "quoted") == [row for table in tables for row in table.to_pylist()]
    client.drop("quoted")


def test_escapes_of_every_plane_are_loaded_from_objects_of_json(
    store: Store, cluster: LocalCluster
) -> None:
    client = CacheClient(cluster.endpoint)
    rows = [{"row": i, "text": "plain"} for i in range(1000)] + [
        {"row": 1000, "text": "\U00020bb7"}
    ]
    data = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    store.put(BUCKET, "escapes/a.jsonl", data)

    client.load(spec_of(store, "escapes", "escapes"))

    assert b"\\ud842" in data
    assert cached(client, "escapes") == rows
    client.drop("escapes")


def put_partitioned(store: Store, prefix: str) -> list[dict[str, Any]]:
    rows = []
    for day, part in itertools.product(range(4), range(3)):
        first = 100 * day + 10 * part
        table = pa.table({"row": range(first, first + 4)})
        store.put(BUCKET, f"{prefix}/day={day}/{part}.parquet", parquet(table))
        rows += [{"row": first + i, "day": day} for i in range(4)]
    return rows


def test_partition_columns_appear_and_small_objects_of_several_partitions_keep_theirs(
    store: Store, cluster: LocalCluster
) -> None:
    client = CacheClient(cluster.endpoint)
    rows = put_partitioned(store, "days")

    client.load(spec_of(store, "days", "days"))

    assert cached(client, "days") == rows
    client.drop("days")


def test_objects_of_partitions_that_the_filter_leaves_out_are_not_fetched(
    store: Store, cluster: LocalCluster
) -> None:
    client = CacheClient(cluster.endpoint)
    rows = put_partitioned(store, "pruned")

    client.load(spec_of(store, "pruned", "pruned", filter="day = 2 AND row % 2 = 0"))

    assert cached(client, "pruned") == [r for r in rows if r["day"] == 2 and not r["row"] % 2]
    gets = store.gets("pruned/")
    assert {key: n for key, n in gets.items() if n > 1}.keys() == {
        f"{BUCKET}/pruned/day=2/{part}.parquet" for part in range(3)
    }
    client.drop("pruned")


def test_a_public_bucket_needs_no_keys(store: Store, cluster: LocalCluster) -> None:
    client = CacheClient(cluster.endpoint)
    for index in range(2):
        data = parquet(numbered_table(5, 5 * index))
        store.put(BUCKET, f"public/{index}.parquet", data, public=True)
    spec = DatasetSpec(
        "public",
        [f"s3://{BUCKET}/public/{index}.parquet" for index in range(2)],
        storage_options={
            "endpoint": store.endpoint, "region": REGION, "skip_signature": True,
        },
    )  # fmt: skip

    client.load(spec)

    assert cached(client, "public") == numbered_table(10).to_pylist()
    assert {request.access_key_id for request in store.requests} == {""}
    client.drop("public")


def test_ignored_objects_are_not_even_looked_at(store: Store, cluster: LocalCluster) -> None:
    client = CacheClient(cluster.endpoint)
    put_numbered(store, "some", 6)

    info = client.load(spec_of(store, "some", "some", ignore=["*-00002*", "part-0000[45]*"]))

    assert info.num_rows == 15
    assert store.gets("some/").keys() == {object_of("some", i) for i in (0, 1, 3)}
    client.drop("some")


def test_columns_that_some_objects_lack_are_null_where_the_spec_says_so(
    store: Store, cluster: LocalCluster
) -> None:
    client = CacheClient(cluster.endpoint)
    tables = [
        numbered_table(3).select(["row", "text"]),
        numbered_table(3, 3).select(["row"]),
        numbered_table(3, 6).select(["text", "row"]),
    ]
    for index, table in enumerate(tables):
        store.put(BUCKET, f"lacking/{index}.parquet", parquet(table))

    with pytest.raises(LoadError, match=r"lacking/1\.parquet has other columns"):
        client.load(spec_of(store, "lacking", "lacking"))
    client.load(spec_of(store, "lacking", "lacking", missing_columns="null"))

    texts = [f"row {i}" if not 3 <= i < 6 else None for i in range(9)]
    assert cached(client, "lacking") == [{"row": i, "text": texts[i]} for i in range(9)]
    client.drop("lacking")
