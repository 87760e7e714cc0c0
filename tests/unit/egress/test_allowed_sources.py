"""Sources that a node may touch."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import ConfigError, RequestError
from cache_server.egress.allowed_sources import AllowedSources
from cache_server.plan.pinned_version import plan_version
from tests.conftest import write_numbered

ADDRESSES = {
    "store.example": "93.184.216.34",
    "minio.team.svc": "10.0.0.7",
    "evil.example": "127.0.0.1",
    "metadata.google.internal": "169.254.169.254",
}


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name service without a network; numbers resolve as usual."""
    resolve = socket.getaddrinfo

    def known(host: str, *arguments: Any, **options: Any) -> Any:
        return resolve(ADDRESSES.get(host, host), *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", known)


def spec(source: str, **options: Any) -> DatasetSpec:
    return DatasetSpec("t", source, format="csv" if "postgres" not in source else None, **options)


@pytest.mark.parametrize(
    "source",
    ["s3://bucket/x", "gs://bucket/x", "hf://datasets/a/b", "https://store.example/x.csv",
     "abfss://c@account.dfs.core.windows.net/x", "postgresql://store.example/db?table=t",
     "https://unknown.invalid/x.csv"],
)  # fmt: skip
def test_stores_of_the_network_are_allowed_by_default(source: str) -> None:
    AllowedSources(None).check_spec(spec(source))


@pytest.mark.parametrize(
    "source",
    ["/etc/shadow", "relative/x.csv", "file:///etc/shadow", "~/x.csv",
     "http://127.0.0.1/x.csv", "http://[::1]:80/x.csv",
     "http://[::ffff:127.0.0.1]/x.csv", "http://0.0.0.0/x.csv", "http://localhost/x.csv",
     "http://169.254.169.254/latest/meta-data/x.csv", "https://evil.example/x.csv",
     "http://metadata.google.internal/x.csv", "http://user@127.0.0.1/x.csv",
     "http://100.100.100.200/x.csv", "https://store.example/../x.csv",
     "postgresql:///db?table=t", "postgresql://127.0.0.1/db?table=t",
     "postgresql://minio.team.svc/db?table=t&host=127.0.0.1",
     "postgresql://minio.team.svc,127.0.0.1/db?table=t",
     "postgresql://%2Fvar%2Frun/db?table=t", "postgresql://store.example/db?table=t&hostaddr=::1",
     "http://minio.team.svc:9000/x.csv", "postgresql://minio.team.svc/db?table=t",
     "http://100.64.0.1/x.csv", "http://[fd00::1]/x.csv", "http://[64:ff9b::7f00:1]/x.csv",
     "http://[2002:7f00:1::]/x.csv", "http://224.0.0.1/x.csv", "http://168.63.129.16/x.csv"],
)  # fmt: skip
def test_what_is_the_nodes_own_is_refused_by_default(source: str) -> None:
    with pytest.raises(RequestError, match=r"this cache may not read .*--allow-source"):
        AllowedSources(None).check_spec(spec(source))


@pytest.mark.parametrize(
    ("option", "value"),
    [("endpoint", "http://127.0.0.1:9000"), ("endpoint", "http://evil.example"),
     ("aws_metadata_endpoint", "http://169.254.169.254"), ("proxy_url", "http://localhost:1"),
     ("endpoint", "http://minio.team.svc:9000")],
)  # fmt: skip
def test_options_lead_no_further_than_sources(option: str, value: str) -> None:
    with pytest.raises(RequestError, match="this cache may not read"):
        AllowedSources(None).check_spec(spec("s3://bucket/x", storage_options={option: value}))
    AllowedSources(["s3://bucket/", value]).check_spec(
        spec("s3://bucket/x", storage_options={option: value})
    )


def test_prefixes_replace_the_default_and_links_are_followed(tmp_path: Path) -> None:
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    write_numbered(allowed, 10)
    write_numbered(other, 10)
    (allowed / "link.parquet").symlink_to(other / "part-000.parquet")
    sources = AllowedSources([f"{allowed}/", "https://store.example/team/"])

    sources.check_spec(DatasetSpec("t", allowed))
    sources.check_spec(DatasetSpec("t", allowed / "*.parquet"))
    sources.check_spec(DatasetSpec("t", "https://store.example/team/x.parquet"))
    for refused in (
        str(other / "x.parquet"), f"{allowed}/../other/x.parquet", f"{allowed}-too/x.parquet",
        str(allowed / "link.parquet"), "https://store.example/x.parquet", "s3://bucket/x.parquet",
    ):  # fmt: skip
        with pytest.raises(RequestError, match="it begins with no prefix of --allow-source"):
            sources.check_spec(DatasetSpec("t", refused))

    planned = plan_version(DatasetSpec("t", allowed)).version
    assert planned.shards is not None
    tables, (shard,) = planned.tables, planned.shards
    with pytest.raises(RequestError, match=r"link\.parquet"):  # it was found in a folder
        sources.check_splits(tables, shard.splits, {})
    first = shard.splits[0]
    assert first.file.path.endswith("link.parquet")
    sources.check_splits(tables, shard.splits[1:], {})
    AllowedSources([""]).check_splits(tables, shard.splits, {})
    with pytest.raises(RequestError, match="shadow"):
        split = replace(first, file=replace(first.file, path="/etc/shadow"))
        AllowedSources(None).check_splits(tables, [split], {})


def test_a_prefix_names_a_whole_host_which_may_then_be_private() -> None:
    sources = AllowedSources(
        ["http://minio.team.svc:9000/lake", "postgresql://db.team.svc/", "https://Evil.example",
         "s3://team-"],
    )  # fmt: skip
    for source in (
        "http://minio.team.svc:9000/lake/x.csv", "postgresql://u@DB.team.svc:5432/db?table=t",
        "https://evil.example:443/x.csv", "s3://team-a/x.csv",
    ):  # fmt: skip
        sources.check_spec(spec(source))
    for source in (
        "http://minio.team.svc:9000/x.csv", "http://minio.team.svc/lake/x.csv",
        "postgresql://db.team.svc:5433/db?table=t", "postgresql://db.team.svc.evil/db?table=t",
        "postgresql://db.team.svc,other/db?table=t", "https://evil.example.com/x.csv",
        "postgresql://db.team.svc/db?table=t&host=evil.example", "s3://other/x.csv",
        "https://evil.example@store.example/x.csv",
    ):  # fmt: skip
        with pytest.raises(RequestError, match="it begins with no prefix of --allow-source"):
            sources.check_spec(spec(source))
    with pytest.raises(ConfigError, match="--allow-source: the prefix is not right"):
        AllowedSources(["http://127.1/"])
