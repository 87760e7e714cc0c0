"""Which failures of sources a later load may not meet."""

from __future__ import annotations

import errno
import os
import socket
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import LoadError, TransientLoadError, exit_code, from_proto, to_proto
from cache_server.plan import pinned_version
from cache_server.source.outages import may_pass
from cache_server.source.pinned import SourceFile
from cache_server.tables import local_files
from tests.free_ports import free_port
from tests.store_stubs import Served

KEYS = {"access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}
QUICK = {"max_retries": "0", "retry_timeout_s": "1"}


def spec(kind: str, host: str, port: int, tmp_path: Path) -> DatasetSpec:
    """A dataset of a kind of source, at a server of this machine."""
    url = f"http://{host}:{port}"
    tables: dict[str, dict[str, Any]] = {
        "s3": {"source": "s3://bucket/a.parquet", "options": {"endpoint": url, **QUICK}, **_keys()},
        "gs": {
            "source": "gs://bucket/a.parquet",
            "options": {"base_url": url, "skip_signature": "true", **QUICK},
        },
        "az": {
            "source": "az://box/a.parquet",
            "options": {"endpoint": url, "account_name": "a", "skip_signature": "true", **QUICK},
        },
        "http": {"source": f"{url}/a.parquet", "options": QUICK},
        "hf": {"source": "hf://datasets/o/n/a.parquet", "options": {"endpoint": url, **QUICK}},
        "delta": {
            "source": "s3://bucket/table",
            "format": "delta",
            "options": {"endpoint": url, "allow_http": "true", **QUICK},
            **_keys(),
        },
        "iceberg": {
            "source": "s3://bucket/v1.metadata.json",
            "options": {"endpoint": url, **QUICK},
            **_keys(),
        },
        "catalogue": {
            "source": "a.b",
            "format": "iceberg",
            "options": {"catalog.type": "rest", "catalog.uri": url},
        },
        "postgres": {"source": f"postgresql://user@{host}:{port}/db?table=t"},
    }
    made = tables[kind]
    options = made.pop("options", {}) | made.pop("keys", {})
    return DatasetSpec(name="d", storage_options=options, **made)


def _keys() -> dict[str, Any]:
    return {"keys": KEYS}


SOURCES = ("s3", "gs", "az", "http", "hf", "delta", "iceberg", "catalogue", "postgres")
ANSWERS = {503: TransientLoadError, 403: LoadError, 404: LoadError}


def failure(made: DatasetSpec) -> LoadError:
    with pytest.raises(LoadError) as caught:
        pinned_version.plan_version(made)
    return caught.value


@pytest.mark.parametrize("kind", SOURCES)
def test_a_source_that_nobody_serves_may_be_served_later(kind: str, tmp_path: Path) -> None:
    error = failure(spec(kind, "127.0.0.1", free_port(), tmp_path))
    assert (type(error), exit_code(error)) == (TransientLoadError, 75), error


@pytest.mark.parametrize("kind", SOURCES)
def test_a_host_without_an_address_may_have_one_later(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = failure(spec(kind, "absent.invalid", 80, tmp_path))
    assert (type(error), exit_code(error)) == (TransientLoadError, 75), error


@pytest.mark.parametrize("kind", [each for each in SOURCES if each != "postgres"])
@pytest.mark.parametrize("status", ANSWERS)
def test_the_answer_of_a_store_tells_whether_it_may_be_another_one_later(
    kind: str, status: int, tmp_path: Path
) -> None:
    with Served(_answering(status)) as url:
        error = failure(spec(kind, "127.0.0.1", int(url.rpartition(":")[2]), tmp_path))
    assert (type(error) is TransientLoadError) == (status == 503), error
    assert exit_code(error) == (75 if status == 503 else 65)


def _answering(status: int) -> Any:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_POST = do_PUT = do_GET

        def log_message(self, *_: object) -> None: ...

    return Answer


class Postgres(Exception):
    """As those of ADBC: a text and a state."""

    def __init__(self, text: str, sqlstate: str | None = None) -> None:
        super().__init__(text)
        self.sqlstate = sqlstate


PASSING = [
    Postgres("FATAL: the database system is starting up", "57P03"),
    Postgres("[libpq] Failed to connect: FATAL:  the database system is shutting down"),
    Postgres("FATAL: sorry, too many clients already", "53300"),
    Postgres("terminating connection due to administrator command", "57P01"),
    Postgres("connection to server failed: timeout expired"),
    OSError(errno.ESTALE, os.strerror(errno.ESTALE)),
    OSError(errno.EIO, os.strerror(errno.EIO)),
    socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
    TimeoutError(),
    OSError("AWS Error NETWORK_CONNECTION during HeadObject: curlCode: 7, Couldn't connect"),
    OSError("Generic S3 error, after 3 retries: status code: 429 slow down"),
]
LASTING = [
    Postgres("password authentication failed for user", "28P01"),
    Postgres('FATAL:  password authentication failed for user "a", starting up'),
    Postgres('database "x" does not exist', "3D000"),
    Postgres("permission denied for table t", "42501"),
    FileNotFoundError(errno.ENOENT, "No such file", "/data/timed out.csv"),
    PermissionError(errno.EACCES, "Permission denied"),
    IsADirectoryError(errno.EISDIR, "Is a directory"),
    OSError("error sending request: invalid peer certificate: UnknownIssuer"),
    OSError("status code: 501 the connection timed out"),
    OSError("status code: 400 bad request"),
    ValueError("Parquet magic bytes not found in footer"),
    LoadError("cannot read a: the connection timed out"),
]


@pytest.mark.parametrize("error", PASSING, ids=str)
def test_an_outage_may_pass(error: Exception) -> None:
    assert may_pass(error)


@pytest.mark.parametrize("error", LASTING, ids=str)
def test_what_is_missing_refused_or_damaged_stays_so(error: Exception) -> None:
    assert not may_pass(error)


def test_the_cause_of_an_error_counts() -> None:
    error = RuntimeError("the library failed")
    error.__cause__ = ConnectionResetError("by peer")
    assert may_pass(error)


def test_a_missing_file_stays_missing_and_a_changed_one_is_planned_anew(tmp_path: Path) -> None:
    error = failure(DatasetSpec(name="d", source=str(tmp_path / "absent.csv")))
    assert (type(error), exit_code(error)) == (LoadError, 65)
    (path := tmp_path / "rows.csv").write_text("a\n1\n")
    size, mtime_ns = path.stat().st_size, path.stat().st_mtime_ns
    with pytest.raises(TransientLoadError, match="changed since"):
        local_files.check_unchanged(SourceFile(str(path), size + 1, mtime_ns))


def test_the_class_survives_the_wire_and_older_peers_see_a_load_error() -> None:
    sent = to_proto(TransientLoadError("no answer"))
    assert type(from_proto(sent)) is TransientLoadError
    sent.ClearField("may_pass")
    assert type(from_proto(sent)) is LoadError


def test_a_source_that_takes_long_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pinned_version, "_SILENT_S", 0.0)
    failure(spec("http", "127.0.0.1", free_port(), tmp_path))
    assert "still waiting for source=http://127.0.0.1:" in caplog.text
