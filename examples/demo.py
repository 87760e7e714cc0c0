"""Run everything on one machine: a real table, two cache nodes, two training processes.

Writes TPC-H ``lineitem`` as Parquet, starts two cache nodes, loads the table through DataFusion
with a SQL query, and trains with DistributedDataParallel, each rank streaming its own rows.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from cache_client import CacheClient, DatasetSpec
from cache_server import LocalCluster

HERE = Path(__file__).resolve().parent
SQL = """
    SELECT l_orderkey * 8 + l_linenumber         AS row_key,
           CAST(l_quantity AS FLOAT) / 50        AS quantity,
           CAST(l_discount AS FLOAT) * 10        AS discount,
           CAST(l_tax AS FLOAT) * 10             AS tax,
           CAST(l_partkey % 1000 AS FLOAT) / 1000 AS part,
           CAST(l_extendedprice AS FLOAT) / 50000 AS price
    FROM source
"""


def main() -> None:
    """Runs the demo; exits with the exit code of the training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=HERE.parent / ".data")
    parser.add_argument("--scale-factor", type=float, default=1.0, help="1 is six million rows")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=2)
    arguments = parser.parse_args()

    table = write_lineitem(arguments.data_dir, arguments.scale_factor)
    print(f"cache: starting {count(arguments.nodes, 'node')}", flush=True)
    with LocalCluster(nodes=arguments.nodes) as cluster:
        client = CacheClient(cluster.endpoint)
        info = client.load(DatasetSpec("lineitem", table, sql=SQL), progress=True)
        per_node = [
            count(sum(node.node_id in homes for homes in info.placement.values()), "shard")
            for node in cluster.nodes
        ]
        print(
            f"cache: {info.num_rows:,} rows, {info.num_bytes / 2**20:,.0f} MiB "
            f"in memory on {count(arguments.nodes, 'node')} ({', '.join(per_node)})",
            flush=True,
        )
        training = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(arguments.ranks),
            str(HERE / "train_ddp.py"), "--epochs", str(arguments.epochs),
        ]  # fmt: skip
        environment = {
            **os.environ,
            "CACHE_ENDPOINT": cluster.endpoint,
            "OMP_NUM_THREADS": "1",
        }
        code = subprocess.run(training, env=environment, check=False).returncode
    if code:
        raise SystemExit(f"the training failed with exit code {code}")
    each = f"each of {arguments.epochs} epochs" if arguments.epochs > 1 else "the epoch"
    print(f"demo: every row was seen exactly once in {each}")


def count(number: int, what: str) -> str:
    """Returns a number with its noun, in the plural if needed."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def write_lineitem(data_dir: Path, scale_factor: float) -> Path:
    """Returns the folder of TPC-H lineitem, four Parquet files; writes it if it is missing."""
    target = data_dir / f"tpch-sf{scale_factor:g}" / "lineitem"
    if target.exists():
        print(f"data: using {target}", flush=True)
        return target
    print(f"data: writing TPC-H lineitem, scale factor {scale_factor:g}, to {target}", flush=True)
    partial = data_dir / f".tpch-sf{scale_factor:g}.partial"
    subprocess.run(
        [
            str(Path(sysconfig.get_path("scripts")) / "tpchgen-cli"), "parquet",
            "-s", f"{scale_factor:g}", "--tables", "lineitem", "--parts", "4",
            "--output-dir", str(partial),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    if sys.stderr.isatty():  # its progress ends without a newline
        print(file=sys.stderr, flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    (partial / "lineitem").rename(target)
    partial.rmdir()
    return target


if __name__ == "__main__":
    main()
