"""Iceberg on S3 by the settings of the ancestor and of the SDK, to the ancestor's own request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from pyiceberg.catalog.sql import SqlCatalog

from tests import forked_python
from tests.lake_tables import ACCESS_KEY_ID, BUCKET, SECRET, lake_bucket

NUM_ROWS = 100


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with lake_bucket() as running:
        yield running


@pytest.fixture(scope="module")
def metadata_location(endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    catalog = SqlCatalog(
        "default",
        **{
            "uri": f"sqlite:///{tmp_path_factory.mktemp('catalogue') / 'c.db'}",
            "warehouse": f"s3://{BUCKET}/warehouse",
            "s3.endpoint": endpoint,
            "s3.access-key-id": ACCESS_KEY_ID,
            "s3.secret-access-key": SECRET,
            "s3.region": "us-east-1",
        },
    )
    rows = pa.table({"id": range(NUM_ROWS), "price": [n / 2 for n in range(NUM_ROWS)]})
    catalog.create_namespace("shop")
    table = catalog.create_table("shop.orders", rows.schema)
    table.append(rows)
    catalog.close()
    return table.metadata_location.replace("s3://", "s3a://")


@contextmanager
def local_cache(**settings: str) -> Iterator[subprocess.Popen[str]]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "CACHE_"))}
    arguments = ["--nodes", "2", "--insecure", "--load-from-env"]
    process = forked_python.Popen(
        [sys.executable, "-m", "cache_server", "local", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**environ, **settings, "FORKED_PYTHON": forked_python.executable()},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_the_ancestors_client_reads_an_iceberg_table_of_s3_by_the_ancestors_settings(
    endpoint: str, metadata_location: str
) -> None:
    settings = {
        "STORAGE_URI": "cache://shop/orders",
        "METADATA_LOC": metadata_location,
        "ENDPOINT": endpoint,
        "ACCESS_KEY_ID": ACCESS_KEY_ID,
        "SECRET_ACCESS_KEY": SECRET,
        "REGION": "us-east-1",
    }
    with local_cache(**settings) as process:
        assert process.stdout is not None
        listening = json.loads(process.stdout.readline())
        ids: list[int] = []
        for index in range(3):
            with flight.FlightClient(listening["endpoint"]) as client:
                part = flight.FlightDescriptor.for_path(str(index), "3")
                for at in client.get_flight_info(part).endpoints:
                    (location,) = at.locations
                    with flight.FlightClient(location) as node:
                        ids += node.do_get(at.ticket).read_all()["id"].to_pylist()

    assert ids == [*range(NUM_ROWS)]


def test_bad_settings_are_all_named_at_once_and_no_secret_is(tmp_path: Path) -> None:
    settings = {
        "STORAGE_URI": "cache://shop/orders",
        "ACCESS_KEY_ID": "my-key-id",
        "CACHE_REPLICAS": "many",
    }
    with local_cache(**settings) as process:
        _, errors = process.communicate(timeout=60)

    assert process.returncode == 78
    for word in ("METADATA_LOC", "SECRET_ACCESS_KEY", "CACHE_REPLICAS", "'many'"):
        assert word in errors
    assert "my-key-id" not in errors
