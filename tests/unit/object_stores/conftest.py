"""What the tests of the stores share: a server that counts, and a machine without credentials."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_server.object_stores import expand
from cache_server.source.pinned import SourceFile
from tests.object_store import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server

PARQUET = (".parquet", ".pq")
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def running() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def s3(running: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> S3Server:
    """The server, with nothing left of other tests, and a machine without credentials."""
    running.clear()
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    return running


def found(s3: S3Server, source: str, suffixes: tuple[str, ...] = PARQUET) -> list[str]:
    files = expand(source, suffixes, s3.options, s3.secrets)
    return [file.path for file in files]


def one(s3: S3Server, source: str) -> SourceFile:
    (file,) = expand(source, PARQUET, s3.options, s3.secrets)
    return file


def assert_no_secret(text: str) -> None:
    for secret in (ACCESS_KEY_ID, SECRET_ACCESS_KEY, "AKIA", "ASIA"):
        assert secret not in text
