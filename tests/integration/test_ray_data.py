"""Ray Data on two workers: what it writes into a cache, and what it reads."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cache_client import CacheClient
from cache_server import LocalCluster
from tests.waiting import wait_until

ROWS = 1000

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.timeout(300),  # it starts half a dozen processes
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engines.md"

PROGRAM = """
import json, os, signal, sys
from fractions import Fraction
from pathlib import Path
import numpy as np
import pandas as pd
import pyarrow as pa
import ray
from cache_client.engines.ray_data import CacheDatasink, CacheDatasource

endpoint, folder, rows = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])

class SmallTasks(CacheDatasink):
    min_bytes_per_write = 1

class KilledAfterItsPut(SmallTasks):
    def write(self, blocks, ctx):
        ack = super().write(blocks, ctx)
        if ctx.task_idx == 1:
            with (folder / "attempts").open("a") as attempts:
                attempts.write(f"{ack.attempt}\\n")
            if len((folder / "attempts").read_text().split()) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        return ack

class FailsAfterItsPuts(SmallTasks):
    def write(self, blocks, ctx):
        ack = super().write(blocks, ctx)
        if ctx.task_idx == 3:
            raise ValueError("the last task fails")
        return ack

def features(batch):  # lazy, and with other columns than its input
    row = batch["id"]
    return {"row": row, "image": row[:, None, None] + np.zeros((1, 2, 3), np.float32)}

def error_of(action):
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def main():
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    source = ray.data.range(rows, override_num_blocks=4).map_batches(features)
    found = {}

    source.write_datasink(KilledAfterItsPut("killed", endpoint))
    later = source.filter(lambda row: row["row"] >= rows // 2)  # its first blocks are empty
    later.write_datasink(SmallTasks("later", endpoint, replicas=2))
    later.write_datasink(SmallTasks("later", endpoint, append=True))
    source.write_datasink(SmallTasks("kept", endpoint))
    worse = source.map_batches(lambda batch: {"row": -batch["row"]})
    found["failed"] = error_of(lambda: worse.write_datasink(FailsAfterItsPuts("kept", endpoint)))
    found["frames"] = error_of(lambda: ray.data.from_pandas(
        [pd.DataFrame({"row": [0, 1]}), pd.DataFrame({"row": [2.0, 3.5]})]
    ).write_datasink(SmallTasks("frames", endpoint)))
    found["objects"] = error_of(lambda: ray.data.from_items(
        [{"row": Fraction(1, 2)}]
    ).write_datasink(SmallTasks("objects", endpoint)))
    found["empty"] = error_of(lambda: ray.data.from_arrow(pa.table({})).write_datasink(
        SmallTasks("empty", endpoint, schema=pa.schema({"row": pa.int64()}))
    ))
    found["columns"] = error_of(lambda: ray.data.from_arrow(pa.table({})).write_datasink(
        SmallTasks("unknown", endpoint)
    ))

    kept = CacheDatasource("kept", endpoint)
    dataset = ray.data.read_datasource(kept, override_num_blocks=3)
    found["read"] = [row["row"] for row in dataset.select_columns(["row"]).iter_rows()]
    found["blocks"] = dataset.materialize().num_blocks()
    found["image"] = np.stack(dataset.take(5)[4]["image"]).tolist()
    found["attempts"] = (folder / "attempts").read_text().split()
    names = {}
    exec((folder / "page.py").read_text(), names)
    found["page"] = [names["dear"].count(), names["houses"].count()]
    (folder / "found.json").write_text(json.dumps(found))

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=2) as running:
        yield running


@pytest.fixture(scope="module")
def found(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("ray")
    script = folder / "writes.py"
    script.write_text(PROGRAM)
    page = PAGE.read_text(encoding="utf-8").partition("\n## Ray\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    code = "\n".join(blocks).replace("/shared/written", str(folder / "through"))
    (folder / "page.py").write_text(code)
    environment = {
        **os.environ,
        "CACHE_ENDPOINT": cluster.endpoint,
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(script), cluster.endpoint, str(folder), str(ROWS)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-20_000:]
    answers: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return answers


def rows_of(client: CacheClient, name: str) -> list[int]:
    rows: list[int] = client.read(name).read_all()["row"].to_pylist()
    return rows


def test_a_task_killed_after_its_put_is_written_once_by_its_second_attempt(
    found: dict[str, Any], cluster: LocalCluster
) -> None:
    client = CacheClient(cluster.endpoint)
    assert len(set(found["attempts"])) == 2
    assert rows_of(client, "killed") == list(range(ROWS))


def test_empty_blocks_and_lazy_columns_are_written(
    found: dict[str, Any], cluster: LocalCluster
) -> None:
    client = CacheClient(cluster.endpoint)
    info = client.describe("later")
    assert rows_of(client, "later") == [*range(ROWS // 2, ROWS)] * 2  # they were appended again
    assert str(info.schema.field("image").type).count("fixed_size_list") == 2
    assert {len(nodes) for nodes in info.placement.values()} == {2}


def test_a_failed_job_leaves_the_version_before_it_and_no_bytes(
    found: dict[str, Any], cluster: LocalCluster
) -> None:
    client = CacheClient(cluster.endpoint)
    assert "the last task fails" in found["failed"]
    assert rows_of(client, "kept") == list(range(ROWS))
    names = {info.name: info for info in client.datasets()}
    assert names.keys() == {"killed", "later", "kept", "empty", "houses", "houses-kept"}
    expected = sum(info.num_bytes * info.replicas for info in names.values())
    wait_until(
        lambda: sum(node.stored_bytes for node in client.nodes()) == expected,
        20,
        "the nodes hold only what was committed",
    )


def test_a_dataset_without_rows_needs_a_schema(
    found: dict[str, Any], cluster: LocalCluster
) -> None:
    assert found["empty"] is None
    assert CacheClient(cluster.endpoint).describe("empty").num_rows == 0
    assert "give CacheDatasink a schema" in found["columns"]


def test_blocks_that_do_not_fit_are_refused_by_name(found: dict[str, Any]) -> None:
    assert "column 'row' comes as double, which cannot become int64" in found["frames"]
    assert "column 'row' has Python objects" in found["objects"]


def test_ray_reads_each_row_once_in_parts(found: dict[str, Any]) -> None:
    assert found["read"] == list(range(ROWS))
    assert found["blocks"] == 3
    assert found["image"] == [[4.0] * 3] * 2


def test_the_page_about_engines_holds(found: dict[str, Any], cluster: LocalCluster) -> None:
    assert found["page"] == [200, 1000]
    assert rows_of(CacheClient(cluster.endpoint), "houses-kept") == list(range(1000))
