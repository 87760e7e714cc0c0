"""A node that moves a table to huge pages while a trainer on its machine reads it."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from cache_client import CacheClient, CacheIterableDataset, Connection, DatasetSpec
from cache_server import LocalCluster
from cache_server.config import NodeConfig
from cache_server.server import CacheServer
from cache_server.shards.huge_pages import HugePages
from tests.http_pages import metric
from tests.waiting import wait_until

WAIT_S = 30.0
ROWS, WIDTH = 50_000, 32


@pytest.mark.parametrize("local", [True, False], ids=["from files", "over Flight"])
def test_a_trainer_reads_on_and_each_row_is_right(tmp_path: Path, local: bool) -> None:
    features = np.random.default_rng(0).standard_normal((ROWS, WIDTH), dtype=np.float32)
    x = pa.FixedSizeListArray.from_arrays(features.ravel(), WIDTH)
    pq.write_table(pa.table({"row": np.arange(ROWS), "x": x}), tmp_path / "table.parquet")
    with LocalCluster(1, insecure=True) as cluster:
        CacheClient(cluster.endpoint).load(DatasetSpec("table", str(tmp_path)))
        node = cluster.nodes[0]
        dataset = CacheIterableDataset(
            "table", cache=Connection(cluster.endpoint, local=local), batch_size=1000, shuffle=True
        )
        seen: list[torch.Tensor] = []
        for number, batch in enumerate(dataset):
            if number == 1:  # its files are mapped, and most rows are still to come
                wait_until(lambda: has_moved(node.page, node.log_tail()), WAIT_S, "pages are moved")
            assert torch.equal(batch["x"], torch.from_numpy(features[batch["row"].numpy()]))
            seen.append(batch["row"])

        assert sorted(torch.cat(seen).tolist()) == list(range(ROWS))


@pytest.mark.parametrize("huge_pages", [True, False])
def test_a_node_looks_for_huge_pages_unless_it_is_told_not_to(
    tmp_path: Path, huge_pages: bool
) -> None:
    config = NodeConfig.build(
        cache_dir=tmp_path, flight_port=0, control_port=0, http_port=0, huge_pages=huge_pages
    )
    with patch.object(HugePages, "_run") as run, CacheServer(config):
        assert run.called is huge_pages


def has_moved(page: str, log: str) -> bool:
    """Skips the test on a machine that cannot."""
    if "no huge pages" in log:
        pytest.skip(log.rpartition("no huge pages")[2])
    return metric(page, "data_cache_huge_page_bytes") > 0
