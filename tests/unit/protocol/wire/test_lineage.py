"""Events wait in a bounded queue, and are lost without a word too many."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cache_protocol.wire import lineage

RUN = lineage.Run(str(uuid.uuid4()), "load.a", "LOAD")


class Client:
    """Takes events while it may; fails while it is told to."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.may_take = threading.Event()
        self.error: Exception | None = None

    def emit(self, event: Any) -> None:
        assert self.may_take.wait(30)
        if self.error is not None:
            raise self.error
        self.events.append(event)


def test_events_that_too_many_wait_before_are_dropped_and_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = Client()
    sender = lineage.Sender(client)
    for _ in range(lineage._MOST_WAITING + 50):
        sender.send("START", lambda: RUN)
    assert not sender.flush(0.0)
    client.may_take.set()
    assert sender.flush(30)
    assert lineage._MOST_WAITING <= len(client.events) <= lineage._MOST_WAITING + 1
    assert caplog.text.count("lineage events are dropped") == 1


def test_a_collector_that_fails_is_named_once_and_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = Client()
    client.may_take.set()
    client.error = RuntimeError("http://user:secret@collector")
    sender = lineage.Sender(client)
    for _ in range(3):
        sender.send("START", lambda: RUN)
    assert sender.flush(30)
    assert caplog.text.count("lineage events are dropped reason=RuntimeError") == 1
    assert "secret" not in caplog.text


@pytest.mark.parametrize("parent", ["", "x", "airflow/daily/no-uuid"])
def test_a_parent_that_is_none_is_left_out(parent: str) -> None:
    event = lineage.Sender(Client(), "a", parent)._event("START", "2026-01-01T00:00:00Z", RUN, "")
    assert "parent" not in event.run.facets


def test_nested_columns_have_fields() -> None:
    struct = pa.schema({"a": pa.struct({"b": pa.int32()})})
    facet = lineage._facets(lineage.Table("n", "t", schema=struct))["schema"]
    assert [(f.name, [c.name for c in f.fields]) for f in facet.fields] == [("a", ["b"])]


@pytest.mark.parametrize(
    ("environ", "is_on"),
    [
        ({}, False),
        ({"OPENLINEAGE_URL": "http://127.0.0.1:9"}, True),
        ({"OPENLINEAGE_URL": "http://127.0.0.1:9", "OPENLINEAGE_DISABLED": "True"}, False),
        ({"OPENLINEAGE__TRANSPORT__TYPE": "noop"}, True),
        ({"OPENLINEAGE_URL": "no url"}, False),
    ],
)
def test_it_is_on_where_it_is_set_up(
    environ: dict[str, str], is_on: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    # The package copies its URL to other names.
    monkeypatch.setattr(lineage.os, "environ", dict(lineage.os.environ))
    assert (lineage.from_env() is not None) is is_on


def test_a_file_sets_it_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "openlineage.yml").write_text("transport: {type: noop}\n")
    assert lineage.from_env() is not None
