"""The record of callers of a real node with tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cache_client import (
    CacheClient,
    CacheIterableDataset,
    Connection,
    DatasetSpec,
    LoadError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from cache_server.local import LocalNode
from tests.conftest import write_numbered

ROWS = 100


def token(name: str) -> str:
    return f"the-token-of-{name}"


class Recorded:
    """A node with a writer and a reader of team-a, and its record."""

    def __init__(self, node: LocalNode, log: Path) -> None:
        self.node, self.log = node, log

    def client(self, name: str) -> CacheClient:
        return CacheClient(Connection(self.node.endpoint, token=token(name)))

    def read(self, *, local: bool, name: str = "reader") -> None:
        cache = Connection(self.node.endpoint, local=local, token=token(name))
        list(CacheIterableDataset("t", batch_size=10, cache=cache))

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def said(self) -> list[tuple[str, str, str, str]]:
        """Event, principal, dataset and outcome of each line but those of the node itself."""
        return [
            (line["event"], line["principal"], line.get("dataset", ""), line["outcome"])
            for line in self.lines()
            if line.get("principal") != "node"
        ]


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Recorded]:
    principals = [
        {
            "name": role,
            "sha256": hashlib.sha256(token(role).encode()).hexdigest(),
            "namespace": "team-a",
            "roles": [role],
        }
        for role in ("node", "writer", "reader")
    ]
    (tmp_path / "tokens.json").write_text(json.dumps({"principals": principals}))
    (tmp_path / "log").mkdir()
    log = tmp_path / "log" / "callers.jsonl"
    arguments = ["--allow-source", "", "--auth-tokens", str(tmp_path / "tokens.json")]
    arguments += ["--heartbeat-interval-s", "0.1", "--audit-log", str(log)]
    node = LocalNode(tmp_path / "node", arguments, token("node"))
    try:
        node.start()
        yield Recorded(node, log)
    finally:
        node.close()


def test_loads_reads_writes_and_drops_are_recorded_once_each(
    recorded: Recorded, tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "source", ROWS, files=2)
    writer = recorded.client("writer")
    info = writer.load(DatasetSpec("t", source))
    for local in (True, False, True):
        recorded.read(local=local)
    writer.write("w", pa.table({"x": [1, 2]}))
    writer.drop("t")

    assert recorded.said() == [
        ("load", "writer", "team-a/t", "ok"),
        ("read", "reader", "team-a/t", "ok"),
        ("begin write", "writer", "team-a/w", "ok"),
        ("commit write", "writer", "team-a/w", "ok"),
        ("drop", "writer", "team-a/t", "ok"),
    ]
    load, read, begin, commit, _ = recorded.lines()
    assert load["version"] == read["version"] == info.fingerprint
    assert begin["write"] == commit["write"]
    assert load["namespace"] == "team-a" and "127.0.0.1" in read["address"]


def test_refusals_are_recorded_without_the_token(recorded: Recorded) -> None:
    with pytest.raises(PermissionDeniedError):
        recorded.client("reader").drop("t")
    with pytest.raises(UnauthenticatedError):
        recorded.client("nobody").datasets()
    with pytest.raises(UnauthenticatedError):
        recorded.read(local=False, name="nobody")

    by_outcome = {(line["outcome"], line.get("principal", "")) for line in recorded.lines()}
    assert by_outcome == {("PermissionDeniedError", "reader"), ("UnauthenticatedError", "")}
    assert "the-token-of" not in recorded.log.read_text()


def test_a_load_that_fails_is_recorded_with_its_reason_without_secrets(recorded: Recorded) -> None:
    with pytest.raises(LoadError):
        recorded.client("writer").load(DatasetSpec("t", "/no/such/file.parquet"))

    (line,) = recorded.lines()
    assert (line["event"], line["outcome"]) == ("load", "LoadError")
    assert "/no/such/file.parquet" in line["reason"]


def test_a_file_that_was_moved_away_is_made_anew(recorded: Recorded) -> None:
    client = recorded.client("reader")
    with pytest.raises(PermissionDeniedError):
        client.drop("t")
    recorded.log.rename(recorded.log.with_suffix(".1"))
    with pytest.raises(PermissionDeniedError):
        client.drop("t")

    assert len(recorded.lines()) == 1


def test_a_call_succeeds_whose_line_cannot_be_written(recorded: Recorded, tmp_path: Path) -> None:
    recorded.log.parent.rename(recorded.log.parent.with_name("moved"))
    source = write_numbered(tmp_path / "source", ROWS, files=2)

    assert recorded.client("writer").load(DatasetSpec("t", source)).state == "ready"
    assert recorded.node.exit_code is None and "audit log not written" in recorded.node.log_tail()
