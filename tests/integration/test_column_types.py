"""`types` of a spec through real nodes: from a refusal to rows of the type that it names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from cache_client import CacheClient, DatasetSpec
from cache_protocol.errors import LoadError, RequestError
from cache_server import LocalCluster
from tests import forked_python

ROWS = 3000
WAIT_S = 30.0


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(2, tmp_path_factory.mktemp("cache")) as running:
        yield running


@pytest.fixture(params=["csv", "json"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Codes with leading zeros, prices of which only the last one has a fraction, times."""
    found = tmp_path / f"sales.{request.param}"
    prices = [f"{row}" for row in range(ROWS - 1)] + ["2999.5"]
    if request.param == "csv":
        lines = [f"{row:05d},{price},2024-01-01" for row, price in enumerate(prices)]
        found.write_text("\n".join(["zip,price,at", *lines]))
    else:
        rows = [
            f'{{"zip": "{row:05d}", "price": {price}, "at": "2024-01-01"}}'
            for row, price in enumerate(prices)
        ]
        found.write_text("\n".join([rows[0] + " " * 2**22, *rows[1:]]))  # rows[0] tells the types
    return found


def test_a_refused_file_is_loaded_with_the_types_that_the_refusal_names(
    nodes: LocalCluster, path: Path
) -> None:
    client = CacheClient(nodes.endpoint)
    with pytest.raises(LoadError, match=r"column 'price' holds '?2999.5") as caught:
        client.load(DatasetSpec("sales", path), timeout_s=WAIT_S)
    (wider,) = re.findall(r"set types: \{price: (\w+)\}", str(caught.value))
    types = {"price": wider, "zip": "string", "at": "timestamp[ms]"}

    for target_shard_bytes in ("64MiB", "64KiB"):  # JSON is cut into several splits
        spec = DatasetSpec("sales", path, types=types, target_shard_bytes=target_shard_bytes)
        info = client.load(spec, timeout_s=WAIT_S)

        rows = client.head("sales", ROWS)
        assert rows["zip"].to_pylist() == [f"{row:05d}" for row in range(ROWS)]
        assert rows["price"].to_pylist() == [*np.arange(ROWS - 1.0), 2999.5]
        assert info.schema.field("at").type == pa.timestamp("ms")
        assert client.load(spec, timeout_s=WAIT_S).fingerprint == info.fingerprint
    client.drop("sales")


def test_a_query_and_a_filter_use_the_given_types(nodes: LocalCluster, path: Path) -> None:
    client = CacheClient(nodes.endpoint)
    types = {"price": "decimal128(10, 2)", "zip": "string", "at": "timestamp[us]"}
    table = {"source": path, "types": types}
    spec = DatasetSpec(
        "sales",
        sources={"a": table, "b": table},
        sql="SELECT a.zip, arrow_typeof(b.price) AS type FROM a JOIN b ON a.zip = b.zip "
        "WHERE a.at < TIMESTAMP '2024-01-01T00:00:01' AND a.price > 2998.99 ORDER BY a.zip",
    )

    client.load(spec, timeout_s=WAIT_S)

    assert client.head("sales", 9).to_pylist() == [{"zip": "02999", "type": "Decimal128(10, 2)"}]
    client.drop("sales")


def test_a_load_says_once_which_column_lost_leading_zeros(
    nodes: LocalCluster, path: Path, tmp_path: Path
) -> None:
    client = CacheClient(nodes.endpoint)
    path.rename(tmp_path / f"a{path.suffix}")
    (tmp_path / f"b{path.suffix}").write_bytes((tmp_path / f"a{path.suffix}").read_bytes())
    types, table = {"price": "float64"}, {"source": tmp_path, "format": path.suffix[1:]}

    lost = client.load(DatasetSpec("sales", types=types, **table), timeout_s=WAIT_S)
    kept = client.load(
        DatasetSpec("sales", types={**types, "zip": "string"}, **table), timeout_s=WAIT_S
    )

    note = (
        "column 'zip' lost leading zeros, because it is of int64: set types: {zip: string} to keep "
        "them"
    )
    assert lost.notes == ((note,) if path.suffix == ".csv" else ())
    assert kept.notes == ()
    assert (note in repr(lost)) == (path.suffix == ".csv")
    client.drop("sales")


def test_bad_types_and_bad_values_are_refused_by_name(nodes: LocalCluster, path: Path) -> None:
    client = CacheClient(nodes.endpoint)
    if path.suffix == ".csv":  # later rows of JSON may have further keys
        with pytest.raises(RequestError, match="types names the column 'cost', which the first"):
            client.load(DatasetSpec("sales", path, types={"cost": "string"}), timeout_s=WAIT_S)
    with pytest.raises(LoadError, match=f"{path}.*'price' holds '?2999.5.*in the spec is int32"):
        client.load(DatasetSpec("sales", path, types={"price": "int32"}), timeout_s=WAIT_S)
    client.drop("sales")


def test_cachectl_loads_and_plans_a_spec_with_types(
    nodes: LocalCluster, path: Path, tmp_path: Path
) -> None:
    spec = tmp_path / "sales.yaml"
    spec.write_text(f"name: sales\nsource: {path}\ntypes: {{price: float32, zip: string}}\n")

    for command in (["plan", spec], ["load", spec], ["describe", "sales"]):
        done = forked_python.run(
            [sys.executable, "-m", "cache_client", *command,
             "--endpoint", nodes.endpoint, "--json"],
            capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["columns"]["price"] == "float32"
    CacheClient(nodes.endpoint).drop("sales")
