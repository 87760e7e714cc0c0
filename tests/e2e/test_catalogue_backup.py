"""The catalogue of an elected coordinator is saved and restored as docs/operations.md says."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from cache_client import DatasetSpec
from tests.conftest import numbered_table, write_numbered
from tests.e2e.clusters import Cluster
from tests.elected_nodes import WAIT_S, ElectedNodes
from tests.waiting import wait_until

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text("utf-8")
NUM_ROWS = 1_000


def commands(title: str) -> str:
    """Those of a section that are for an elected coordinator."""
    section = re.split(r"^## ", PAGE.partition(f"## {title}\n")[2], maxsplit=1, flags=re.M)[0]
    blocks = re.findall(r"^```sh\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE)
    (found,) = [block for block in blocks if "kubectl" in block]
    return str(found)


def test_config_maps_that_were_deleted_are_restored(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "source", NUM_ROWS, files=4)
    rows = numbered_table(NUM_ROWS)
    with ElectedNodes(cluster.kubeconfig, namespace, tmp_path / "nodes", count=2) as cache:
        node = cache.nodes[0]

        def run(script: str) -> None:
            script = script.replace("catalogue=data-cache", f"catalogue={cache.lease}")
            script = script.replace("system data-cache\n", f"system {cache.lease}\n")
            script = script.replace("data-cache-system", namespace)
            environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
            command = ["bash", "-euo", "pipefail", "-c", script]
            subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=60)

        def states() -> dict[str, str]:
            return {info.name: info.state for info in cache.client(node).datasets()}

        cache.client(node).load(DatasetSpec("loaded", source, target_shard_bytes=1, replicas=2))
        cache.client(node).write("written", rows, target_shard_bytes=4096, replicas=2)
        run(commands("Save the catalogue"))
        cache.client(node).write("later", rows)
        run(commands("Restore the catalogue"))
        expected = {"loaded": "ready", "written": "ready"}
        wait_until(lambda: states() == expected, WAIT_S, "what was saved is there", poll_s=0.5)
        assert cache.client(node).read("written").read_all().sort_by("row").equals(rows)
        wait_until(
            lambda: "later" in {each.dataset for each in cache.client(node).orphans()},
            WAIT_S,
            "what was written since is an orphan",
        )
        cache.client(node).drop_orphans("later")
        cache.client(node).write("later", rows)
        assert states() == {**expected, "later": "ready"}
