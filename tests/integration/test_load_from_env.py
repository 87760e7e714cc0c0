"""``cache-server serve --load-from-env``: nodes as pods of a TrainJob, from start to every end."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from cache_client import CacheClient, CacheIterableDataset, Connection, DatasetNotFoundError
from cache_protocol.datasets.job_options import FILE_VARIABLE, PREFIX
from cache_server import LocalCluster
from tests import forked_python
from tests.conftest import numbered_table, write_numbered
from tests.env_cache import WAIT_S, EnvNode, clean_environ, env_nodes
from tests.object_store import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, Request, S3Server
from tests.waiting import wait_until

NUM_ROWS, FILES = 80, 8
BUCKET = "lake"


class HeldStore(S3Server):
    """Rows of the objects that `hold` names are not sent before `release`; footers are."""

    def __init__(self) -> None:
        super().__init__()
        self._held: re.Pattern[str] | None = None
        self._looks = 1
        self._gate = threading.Event()
        self._asked: dict[str, int] = {}

    def hold(self, pattern: str, *, after: int = 1) -> None:
        """Holds the objects that ``pattern`` finds, after so many GETs of each."""
        self._asked.clear()
        self._gate.clear()
        self._held, self._looks = re.compile(pattern), after

    def release(self) -> None:
        self._held = None
        self._gate.set()

    def answer(
        self, request: Request, environ: dict[str, Any]
    ) -> tuple[str, list[tuple[str, str]], bytes, bool]:
        if request.method == "GET" and self._held is not None and self._held.search(request.key):
            self._asked[request.key] = self._asked.get(request.key, 0) + 1
            if self._asked[request.key] > self._looks:
                self._gate.wait()
        return super().answer(request, environ)


@pytest.fixture(scope="module")
def running_store() -> Iterator[HeldStore]:
    with HeldStore() as store:
        for index in range(FILES):
            sink = io.BytesIO()
            rows = NUM_ROWS // FILES
            pq.write_table(numbered_table(rows, rows * index), sink)
            store.put(BUCKET, f"table/part-{index}.parquet", sink.getvalue())
        yield store


@pytest.fixture
def store(running_store: HeldStore) -> Iterator[HeldStore]:
    running_store.clear()
    yield running_store
    running_store.release()


def of_store(store: S3Server) -> dict[str, str]:
    return {
        "STORAGE_URI": f"s3://{BUCKET}/table/",
        "ENDPOINT": store.endpoint,
        "REGION": REGION,
        "ACCESS_KEY_ID": ACCESS_KEY_ID,
        "SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
        "CACHE_TARGET_SHARD_BYTES": "1",
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_numbered(tmp_path / "table", NUM_ROWS, files=FILES)


def of_folder(source: Path) -> dict[str, str]:
    return {"STORAGE_URI": str(source), "CACHE_TARGET_SHARD_BYTES": "1"}


def rows(node: EnvNode, name: str = "table") -> list[int]:
    found: list[int] = CacheClient(node.endpoint).head(name, 10**6)["row"].to_pylist()
    return found


def shards_done(node: EnvNode) -> int:
    info = CacheClient(node.endpoint).describe("table")
    return sum(bool(held) for held in info.placement.values())


# -- from start to ready ---------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["coordinator first", "coordinator last"])
def test_pods_with_the_same_arguments_load_their_dataset_in_whatever_order_they_start(
    tmp_path: Path, source: Path, order: tuple[int, int]
) -> None:
    with env_nodes(tmp_path, 2, **of_folder(source)) as nodes:
        first, second = (nodes[index] for index in order)
        first.start()
        if first is nodes[0]:
            first.wait_for_log("waiting for nodes joined=1 wanted=2")
            assert CacheClient(first.endpoint).datasets() == []
        else:
            first.wait_for_log("waiting for the coordinator")
            assert "the coordinator at 127.0.0.2:" in first.log()
        assert not first.is_ready()
        second.start()
        for node in nodes:
            node.wait_until_ready()

        assert rows(nodes[0]) == [*range(NUM_ROWS)]
        held = CacheClient(nodes[1].endpoint).describe("table").placement
        assert {node_id for ids in held.values() for node_id in ids} == {n.node_id for n in nodes}
        assert [node.end(signal.SIGTERM)[0] for node in nodes] == [0, 0]


def test_the_coordinator_is_ready_only_once_the_whole_cache_serves_the_dataset(
    tmp_path: Path, store: HeldStore
) -> None:
    store.hold("part-7")
    with env_nodes(tmp_path, 2, "--load-threads", "4", **of_store(store)) as nodes:
        for node in nodes:
            node.start()
        wait_until(lambda: len(CacheClient(nodes[0].endpoint).datasets()) == 1, WAIT_S, "a dataset")
        wait_until(lambda: shards_done(nodes[0]) == FILES - 1, WAIT_S, "all shards but one")
        assert not nodes[0].is_ready()

        store.release()

        nodes[0].wait_until_ready()
        assert CacheClient(nodes[0].endpoint).describe("table").state == "ready"


def test_without_a_dataset_in_the_environment_a_coordinator_is_ready_for_a_later_load(
    tmp_path: Path,
) -> None:
    with env_nodes(tmp_path, 2, SECRET_ACCESS_KEY="of-some-store", STORAGE_URI="") as nodes:
        for node in nodes:
            node.start()
        for node in nodes:
            node.wait_until_ready()

        assert "no dataset in the environment" in nodes[0].log()
        client = CacheClient(nodes[0].endpoint)
        assert (client.datasets(), len(client.nodes())) == ([], 2)


def test_the_shards_get_what_the_container_has_beside_the_process(tmp_path: Path) -> None:
    limit = ("--container-memory-limit", str(8 * 1024**3))
    with env_nodes(tmp_path, 1, *limit) as (node,):
        node.start()
        (info,) = CacheClient(node.endpoint).nodes()

    assert info.memory_limit_bytes == 6 * 1024**3


# -- what is wrong ---------------------------------------------------------------------------------


def test_every_bad_argument_and_variable_is_named_at_once_and_exits_with_78(
    tmp_path: Path,
) -> None:
    bad = ("--load-threads", "0", "--join-timeout-s", "-1")
    variables = {
        "STORAGE_URI": "ftp://host/x",
        "CACHE_REPLICAS": "many",
        "SECRET_ACCESS_KEY": "hush-hush",
    }
    with env_nodes(tmp_path, 1, *bad, **variables) as (node,):
        node.start(listening=False)
        code, line = node.wait_for_exit()

    assert code == 78
    assert line.startswith("cache-server: ConfigError: ")
    for word in ("load_threads", "join_timeout_s", "'ftp://host/x'", "'many'"):
        assert word in line
    assert "hush" not in line and "Traceback" not in node.log()


def test_a_node_that_does_not_coordinate_leaves_the_dataset_to_the_coordinator(
    tmp_path: Path,
) -> None:
    with env_nodes(tmp_path, 2, STORAGE_URI="ftp://host/x") as nodes:
        nodes[1].start()
        nodes[1].wait_for_log("waiting for the coordinator")
        assert nodes[1].end(signal.SIGTERM)[0] == 0


@pytest.mark.parametrize("damage", ["no file", "no Parquet", "bad query"])
def test_a_load_that_fails_exits_with_65_and_the_reason_as_the_last_line(
    tmp_path: Path, source: Path, damage: str
) -> None:
    variables, reason = of_folder(source), str(source / "part-003.parquet")
    if damage == "no file":
        variables["STORAGE_URI"] = reason = "/not/there.parquet"
    elif damage == "no Parquet":
        data = bytearray((source / "part-003.parquet").read_bytes())
        data[4:200] = b"\xff" * 196  # the footer is whole, so that only a node finds it out
        (source / "part-003.parquet").write_bytes(data)
    else:
        variables["CACHE_SQL"] = reason = "SELECT colour FROM source"
    with env_nodes(tmp_path, 1, **variables) as (node,):
        node.start()
        code, line = node.wait_for_exit()

    assert code == 65
    kind = "RequestError" if damage == "bad query" else "LoadError"
    assert line.startswith(f"cache-server: {kind}: ")
    assert reason.partition(" FROM")[0].removeprefix("SELECT ") in line


def test_nodes_that_do_not_join_in_time_are_named_and_the_exit_code_is_1(
    tmp_path: Path, source: Path
) -> None:
    with env_nodes(tmp_path, 2, "--join-timeout-s", "0.5", **of_folder(source)) as nodes:
        nodes[0].start()
        code, line = nodes[0].wait_for_exit()

    assert code == 1
    assert "NodeUnavailableError: only 1 of 2 cache nodes joined within 0.5 s" in line
    assert "grpc://127.0.0.2:" in line


def test_a_dataset_that_is_lost_later_is_whole_again_once_its_node_is_back(
    tmp_path: Path, source: Path
) -> None:
    with env_nodes(tmp_path, 2, "--node-timeout-s", "1", **of_folder(source)) as nodes:
        for node in nodes:
            node.start()
        nodes[0].wait_until_ready()
        shutil.rmtree(source)

        nodes[1].end(signal.SIGKILL)
        nodes[0].wait_for_log("dataset failed")
        nodes[1].start()  # in time: it brings its shards back
        client = CacheClient(nodes[0].endpoint)
        wait_until(lambda: client.describe("table").state == "ready", WAIT_S, "it is whole again")
        assert rows(nodes[0]) == [*range(NUM_ROWS)]


def test_a_dataset_that_is_lost_later_ends_the_coordinator_with_65_if_its_node_stays_away(
    tmp_path: Path, source: Path
) -> None:
    # As long as both may take to join, on a machine that is busy.
    arguments = ("--node-timeout-s", "1", "--join-timeout-s", "8")
    with env_nodes(tmp_path, 2, *arguments, **of_folder(source)) as nodes:
        for node in nodes:
            node.start()
        nodes[0].wait_until_ready()
        shutil.rmtree(source)

        nodes[1].end(signal.SIGKILL)
        code, line = nodes[0].wait_for_exit()

    assert code == 65
    assert line.startswith("cache-server: LoadError: dataset 'table': ")
    assert str(source) in line


def test_a_load_that_does_not_fit_while_a_node_is_away_goes_on_when_it_is_back(
    tmp_path: Path, store: HeldStore
) -> None:
    store.hold("part-")
    arguments = ("--node-timeout-s", "2", "--memory-limit", "16000")  # 5 of 8 shards
    with env_nodes(tmp_path, 2, *arguments, **of_store(store)) as nodes:
        for node in nodes:
            node.start()
        client = CacheClient(nodes[0].endpoint)
        wait_until(lambda: len(client.datasets()) == 1, WAIT_S, "a dataset")
        nodes[1].end(signal.SIGKILL)
        store.release()
        nodes[0].wait_for_log("load waits dataset=table")
        assert "of the memory limit of 16000" in nodes[0].log()

        nodes[1].start()

        nodes[0].wait_until_ready()
        assert rows(nodes[0]) == [*range(NUM_ROWS)]
        assert "load failed" not in nodes[0].log()


# -- signals ---------------------------------------------------------------------------------------


def test_sigterm_ends_a_coordinator_that_waits_for_nodes(tmp_path: Path, source: Path) -> None:
    with env_nodes(tmp_path, 2, **of_folder(source)) as nodes:
        nodes[0].start()
        nodes[0].wait_for_log("waiting for nodes")

        assert nodes[0].end(signal.SIGTERM, 10.0)[0] == 0


@pytest.mark.parametrize("after", [0, 1], ids=["while it plans", "while a shard is read"])
def test_sigterm_ends_a_node_in_time_though_its_source_hangs(
    tmp_path: Path, store: HeldStore, after: int
) -> None:
    store.hold("part-", after=after)
    drain = ("--drain-timeout-s", "1")
    with env_nodes(tmp_path, 1, *drain, **of_store(store)) as (node,):
        node.start()
        wait_until(lambda: max(store._asked.values(), default=0) > after, WAIT_S, "a read hangs")
        begun = time.monotonic()

        code, line = node.end(signal.SIGTERM, 40.0)

    assert time.monotonic() - begun < 28  # a read of the store may take 30
    assert code == 0
    assert "drained=False" in line


# -- restarts in place -----------------------------------------------------------------------------


def test_a_restarted_coordinator_serves_its_dataset_without_reading_the_source_again(
    tmp_path: Path, store: HeldStore
) -> None:
    with env_nodes(tmp_path, 2, "--node-timeout-s", "5", **of_store(store)) as nodes:
        for node in nodes:
            node.start()
        nodes[0].wait_until_ready()
        before = CacheClient(nodes[0].endpoint).describe("table")
        store.clear()

        nodes[0].end(signal.SIGKILL)
        nodes[0].start()
        nodes[0].wait_until_ready()

        assert not store.requests
        assert CacheClient(nodes[0].endpoint).describe("table") == before
        assert rows(nodes[0]) == [*range(NUM_ROWS)]

        # It has the secrets again: what a lost node held is read with them.
        store.require(ACCESS_KEY_ID)
        nodes[1].end(signal.SIGKILL)
        client = CacheClient(nodes[0].endpoint)
        wait_until(
            lambda: {*client.describe("table").placement.values()} == {(nodes[0].node_id,)},
            WAIT_S,
            "every shard is on the node that is left",
        )
        wait_until(lambda: client.describe("table").state == "ready", WAIT_S, "ready")
        assert store.requests
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert SECRET_ACCESS_KEY.encode() not in path.read_bytes()


def test_a_load_that_was_cut_off_goes_on_with_the_shards_that_were_finished(
    tmp_path: Path, store: HeldStore
) -> None:
    store.hold("part-[4567]")
    with env_nodes(tmp_path, 2, "--load-threads", "8", **of_store(store)) as nodes:
        for node in nodes:
            node.start()
        client = CacheClient(nodes[0].endpoint)
        wait_until(lambda: len(client.datasets()) == 1, WAIT_S, "a dataset")
        wait_until(lambda: shards_done(nodes[0]) == 4, WAIT_S, "half of the shards")
        nodes[0].end(signal.SIGKILL)
        files = {
            path: path.stat().st_ino
            for node in nodes
            for path in node.cache_dir.glob("table/*/shard-*.arrow")
        }

        store.release()
        nodes[0].start()
        nodes[0].wait_until_ready()

        assert len(files) == 4
        assert files == {path: path.stat().st_ino for path in files}
        assert rows(nodes[0]) == [*range(NUM_ROWS)]


def test_a_restart_with_another_source_loads_that_under_the_same_name(
    tmp_path: Path, source: Path
) -> None:
    with env_nodes(tmp_path, 1, CACHE_DATASET="mine", **of_folder(source)) as (node,):
        node.start()
        node.wait_until_ready()
        old = CacheClient(node.endpoint).describe("mine").fingerprint
        node.end(signal.SIGTERM)

        node.environ["STORAGE_URI"] = str(write_numbered(tmp_path / "other", 30))
        node.start()
        node.wait_until_ready()

        info = CacheClient(node.endpoint).describe("mine")
        assert (info.state, info.num_rows) == ("ready", 30)
        assert info.fingerprint != old


# -- progress --------------------------------------------------------------------------------------


def test_progress_is_one_line_a_second_until_it_is_ready(tmp_path: Path, store: HeldStore) -> None:
    store.hold("part-7")
    with env_nodes(tmp_path, 1, **of_store(store)) as (node,):
        node.start()
        held = "loading dataset=table rows=70 shards=7/8"
        wait_until(lambda: node.log().count(held) >= 3, WAIT_S, "three lines")
        stamps = [
            int(line[17:19]) for line in node.log().splitlines() if "loading dataset=table" in line
        ]
        store.release()
        node.wait_until_ready()
        node.wait_for_log("rows=80 shards=8/8")
        node.end(signal.SIGTERM)
        assert "percent=87" in node.log() and "percent=100" in node.log()
    assert max(stamps.count(stamp) for stamp in stamps) <= 2


# -- trainers that start with the cache ------------------------------------------------------------


def test_a_trainer_that_starts_before_the_nodes_waits_for_the_load(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHE_READY_DEADLINE_S", str(WAIT_S))
    with (
        env_nodes(tmp_path, 2, **of_folder(source)) as (first, second),
        ThreadPoolExecutor() as pool,
    ):
        first.start()
        first.wait_for_log("waiting for nodes")
        with pytest.raises(DatasetNotFoundError):
            CacheIterableDataset(
                "other", cache=Connection(first.endpoint, deadline_s=1.0), batch_size=8
            )
        trainer = pool.submit(
            CacheIterableDataset,
            "table",
            cache=Connection(first.endpoint, deadline_s=1.0),
            batch_size=8,
        )
        second.start()
        assert trainer.result(WAIT_S).num_rows == NUM_ROWS


# -- annotations of a pod --------------------------------------------------------------------------


def annotated(folder: Path, **options: str) -> dict[str, str]:
    """The variable of a pod with these annotations."""
    path = folder / "annotations"
    lines = [f"{PREFIX}{name}={json.dumps(text)}\n" for name, text in options.items()]
    path.write_text("".join(lines), encoding="utf-8")
    return {FILE_VARIABLE: str(path)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sqll": "SELECT 1"}, "trainer-data-cache/sqll is unknown"),
        ({"nodes": "3"}, "trainer-data-cache/nodes=3: the runtime has 2 cache pods"),
        ({"memory": "9Gi"}, "trainer-data-cache/memory=9Gi: the cache pods of the runtime have"),
    ],
)
def test_a_wrong_annotation_ends_any_node_with_65(
    options: dict[str, str], words: str, tmp_path: Path, source: Path
) -> None:
    arguments = ("--num-nodes=2", "--container-memory-limit=8GiB", "--coordinator=127.0.0.9:50052")
    done = forked_python.run(
        [sys.executable, "-m", "cache_server", "serve", f"--cache-dir={tmp_path / 'cache'}",
         "--load-from-env", *arguments],
        capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
        env=clean_environ(**of_folder(source), **annotated(tmp_path, **options)),
    )  # fmt: skip
    assert done.returncode == 65
    assert words in done.stderr.splitlines()[-1]


def test_annotations_say_what_a_node_loads_and_how_much_memory_it_has(
    tmp_path: Path, source: Path
) -> None:
    options = annotated(tmp_path, filter='"row" < 30', memory="2Gi", nodes="1")
    limit = ("--container-memory-limit", "8GiB")
    with env_nodes(tmp_path, 1, *limit, **of_folder(source), **options) as (node,):
        node.start()
        node.wait_until_ready()
        client = CacheClient(node.endpoint)
        assert client.describe("table").num_rows == 30
        (info,) = client.nodes()
        assert info.memory_limit_bytes == 1 << 30


def test_cachectl_takes_the_annotations_of_its_pod_but_no_size(
    cluster: LocalCluster, dataset_name: str, source: Path, tmp_path: Path
) -> None:
    at = {"CACHE_ENDPOINT": cluster.endpoint, "CACHE_DATASET": dataset_name, **of_folder(source)}
    done = cachectl(**at, **annotated(tmp_path, filter='"row" < 30'))
    assert done.returncode == 0, done.stderr
    assert "rows         30" in done.stdout
    sized = cachectl("--allow-empty", **at, **annotated(tmp_path, nodes="2"))
    assert sized.returncode == 65
    assert "trainer-data-cache/nodes=2: the shared cache has the size" in sized.stderr


# -- cachectl load --from-env ----------------------------------------------------------------------


def cachectl(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    done = forked_python.run(
        [sys.executable, "-m", "cache_client", "load", "--from-env", *arguments],
        capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
        env=clean_environ(**variables),
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return done


def test_cachectl_loads_what_its_environment_asks_for_and_says_how_far_it_is(
    cluster: LocalCluster, dataset_name: str, source: Path
) -> None:
    done = cachectl(
        CACHE_ENDPOINT=cluster.endpoint, CACHE_DATASET=dataset_name, **of_folder(source)
    )

    assert done.returncode == 0, done.stderr
    assert f"loading dataset={dataset_name} " in done.stderr
    assert "shards=8/8" in done.stderr.splitlines()[-1]
    assert "rows         80" in done.stdout
    info = CacheClient(cluster.endpoint).describe(dataset_name)
    assert (info.state, info.num_rows) == ("ready", NUM_ROWS)


def test_cachectl_names_every_bad_setting_at_once(cluster: LocalCluster) -> None:
    done = cachectl(STORAGE_URI="ftp://host/x", CACHE_REPLICAS="many", CACHE_ENDPOINT="nowhere")

    assert done.returncode == 78
    (line,) = done.stderr.splitlines()
    for word in ("'ftp://host/x'", "'many'", "'nowhere'"):
        assert word in line


def test_cachectl_needs_a_dataset_and_takes_it_from_one_place(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    at = ("--endpoint", cluster.endpoint)
    nothing = cachectl(*at)
    both = cachectl(str(tmp_path / "spec.yaml"), *at, STORAGE_URI="/x.parquet")
    half = cachectl("--allow-empty", *at, CACHE_REPLICAS="2")
    none = cachectl("--allow-empty", *at)

    assert (nothing.returncode, both.returncode, half.returncode) == (78, 78, 78)
    assert (none.returncode, none.stderr) == (
        0,
        "nothing to load: no dataset in the environment\n",
    )
    assert "STORAGE_URI is missing" in nothing.stderr
    assert "either a SPEC file or --from-env" in both.stderr


def test_the_exit_codes_of_cachectl_tell_data_from_the_cache(
    cluster: LocalCluster, dataset_name: str, tmp_path: Path, store: HeldStore
) -> None:
    at = {"CACHE_ENDPOINT": cluster.endpoint, "CACHE_DATASET": dataset_name}
    missing = cachectl(**at, STORAGE_URI="/not/there.parquet")
    store.hold("part-7")
    late = cachectl("--timeout-s", "1", **at, **of_store(store))
    store.release()
    with socket.create_server(("127.0.0.1", 0)) as gone:
        nowhere = f"grpc://127.0.0.1:{gone.getsockname()[1]}"
    nobody = cachectl("--endpoint", nowhere, STORAGE_URI="/x.parquet")

    assert (missing.returncode, late.returncode, nobody.returncode) == (65, 1, 1)
    assert "/not/there.parquet" in missing.stderr.splitlines()[-1]
    assert "NotReadyError" in late.stderr.splitlines()[-1]
