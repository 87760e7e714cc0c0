"""The answers to heartbeats, decoded once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import InvalidTicketError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.node.desired import DesiredShard, DesiredVersion, LoadPlan, ShardCopy
from cache_server.node.links import heartbeat_messages
from cache_server.node.links.heartbeat_messages import DesiredDecoder, ReportEncoder, encode_secrets
from cache_server.node.reconcile import ActualVersion
from cache_server.plan.pinned_version import PinnedVersion, plan_version, split_to_proto
from cache_server.shards.version_key import VersionKey
from tests.conftest import write_numbered

VERSION = ActualVersion(
    desired=DesiredVersion(
        LoadPlan(VersionKey("table", "f"), 0, "", (), pa.schema([]), 0, True, False)
    )
)


@pytest.fixture
def pinned(tmp_path: Path) -> PinnedVersion:
    source = write_numbered(tmp_path, 20, files=2)
    return plan_version(DatasetSpec("table", source, target_shard_bytes=1)).version


@pytest.fixture
def answer(pinned: PinnedVersion) -> pb.HeartbeatResponse:
    """A shard to read, one to copy and one to keep."""
    assert pinned.shards is not None
    response = pb.HeartbeatResponse(room_may_come=True)
    response.gone.add(dataset="old", fingerprint="f00")
    response.orphans.add(dataset="odd", fingerprint="f01")
    desired = response.datasets.add(plan=pinned.to_load_plan(3), rows_fixed=True, num_rows=30)
    desired.secrets.tables["source"].values["token"] = "hush"
    desired.shards.add(index=0, splits=map(split_to_proto, pinned.shards[0].splits))
    copy = ["grpc://a:1", "grpc://b:1"]
    desired.shards.add(
        index=1, row_start=10, copy_from=copy, num_rows=10, num_bytes=80, checksum="s"
    )
    desired.shards.add(index=2, row_start=20)
    return response


def only(decoder: DesiredDecoder, response: pb.HeartbeatResponse) -> DesiredVersion:
    again = pb.HeartbeatResponse.FromString(response.SerializeToString())
    (version,) = decoder.decode(again).versions.values()
    return version


def test_an_answer_says_what_a_node_should_hold(
    answer: pb.HeartbeatResponse, pinned: PinnedVersion
) -> None:
    assert pinned.shards is not None

    state = DesiredDecoder().decode(answer)

    assert state.gone == {VersionKey("old", "f00")} and state.retry_no_room
    assert state.orphans == {VersionKey("odd", "f01")}
    version = state.versions[pinned.key]
    assert version.shards == {
        0: DesiredShard(0, splits=pinned.shards[0].splits),
        1: DesiredShard(1, 10, copy=ShardCopy(("grpc://a:1", "grpc://b:1"), 10, 80, "s")),
        2: DesiredShard(2, 20),
    }
    assert version.obtainable == (version.shards[0], version.shards[1])
    assert (version.rows_fixed, version.num_rows, version.num_shards) == (True, 30, None)
    plan = version.plan
    assert (plan.key, plan.attempt, plan.sql, plan.tables) == (
        pinned.key, 3, pinned.sql, pinned.tables,
    )  # fmt: skip
    assert plan.logical.equals(pinned.logical) and plan.keeps_every_row and not plan.joined
    assert plan.secrets == {"source": {"token": "hush"}} and "hush" not in repr(plan)
    assert encode_secrets(plan.secrets) == answer.datasets[0].secrets


def test_a_whole_query_says_which_shards_are_missing(answer: pb.HeartbeatResponse) -> None:
    answer.datasets[0].run_whole = True
    answer.datasets[0].missing.extend([1, 2])
    answer.datasets[0].num_shards = 3

    version = only(DesiredDecoder(), answer)

    assert version.run_whole and version.missing == {1, 2} and version.num_shards == 3


def test_splits_are_decoded_once_until_something_changes(
    answer: pb.HeartbeatResponse, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []
    decode = heartbeat_messages.split_from_proto
    monkeypatch.setattr(
        heartbeat_messages, "split_from_proto", lambda split: decoded.append(split) or decode(split)
    )
    decoder = DesiredDecoder()

    before = only(decoder, answer)
    assert only(decoder, answer) is before
    assert len(decoded) == 1

    answer.datasets[0].num_rows = 40
    after = only(decoder, answer)
    assert after is not before and after.plan is before.plan
    answer.datasets[0].secrets.Clear()
    assert only(decoder, answer).plan.secrets == {}


def test_a_report_names_the_versions_that_the_coordinator_has_and_sends_the_others() -> None:
    kept, changing = VersionKey("kept", "f0"), VersionKey("changing", "f1")
    encoder, node = ReportEncoder(), pb.Node(id="one")

    def report(rows_loaded: int, idle_s: float = 1.0) -> tuple[pb.HeartbeatRequest, list[str]]:
        request = encoder.encode(
            node,
            {
                kept: replace(VERSION, idle_s=idle_s),
                changing: replace(VERSION, loading={0: rows_loaded}),
            },
            {},
        )
        return request, [each.dataset for each in request.datasets if each.unchanged]

    first, unchanged = report(1)
    assert (first.report, first.since, unchanged) == (1, 0, [])
    encoder.apply(pb.HeartbeatResponse(report=1))
    second, unchanged = report(2, idle_s=2.0)
    assert (second.since, unchanged) == (1, ["kept"])
    assert second.datasets[0].idle_s == 2.0 and not second.datasets[0].HasField("attempt")
    encoder.apply(pb.HeartbeatResponse(report=2))
    assert report(2)[1] == ["kept", "changing"]
    # The answer is lost: the coordinator is asked to go on from the report that it had for certain.
    fourth, unchanged = report(3)
    assert (fourth.report, fourth.since, unchanged) == (4, 2, ["kept"])
    encoder.apply(pb.HeartbeatResponse(resend=True))
    assert report(3)[0].since == 0
    assert report(3)[1] == []
    encoder.apply(pb.HeartbeatResponse())  # of an older coordinator
    assert report(3)[1] == []


def test_an_answer_without_news_is_the_one_before(answer: pb.HeartbeatResponse) -> None:
    decoder = DesiredDecoder()
    answer.answer = 7
    state = decoder.decode(answer)
    assert decoder.answer == 7
    assert decoder.decode(pb.HeartbeatResponse(answer=7, unchanged=True)) is state
    with pytest.raises(InvalidTicketError, match="answer 8"):
        decoder.decode(pb.HeartbeatResponse(answer=8, unchanged=True))


def _set(path: str, value: object) -> Callable[[pb.HeartbeatResponse], None]:
    """Sets one field of the dataset of an answer."""

    def change(answer: pb.HeartbeatResponse) -> None:
        *parts, name = path.split(".")
        message: Any = answer
        for part in parts:
            message = message[int(part)] if part.isdigit() else getattr(message, part)
        if isinstance(value, list):
            del getattr(message, name)[:]
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)

    return change


@pytest.mark.parametrize(
    "name", ["../victim", "/etc", "", ".", "..", "a/../../b", "a\0", "a" * 129]
)
@pytest.mark.parametrize(
    "path", ["datasets.0.plan.dataset", "datasets.0.plan.fingerprint", "gone.0.dataset",
             "gone.0.fingerprint", "datasets.0.shards.1.checksum"],
)  # fmt: skip
def test_a_name_that_is_no_name_refuses_the_whole_answer(
    answer: pb.HeartbeatResponse, path: str, name: str
) -> None:
    _set(path, name)(answer)
    with pytest.raises(InvalidTicketError, match="not a "):
        DesiredDecoder().decode(answer)


@pytest.mark.parametrize(
    "change",
    [
        _set("datasets.0.shards.1.copy_from", ["http://169.254.169.254/latest"]),
        _set("datasets.0.shards.1.copy_from", ["grpc+unix:///run/docker.sock"]),
        _set("datasets.0.shards.1.index", 4_000_000_000),
        _set("datasets.0.num_shards", 4_000_000_000),
        _set("datasets.0.missing", [4_000_000_000]),
        _set("datasets.0.plan.logical_schema", b"no schema"),
    ],
)
def test_what_no_coordinator_tells_refuses_the_whole_answer(
    answer: pb.HeartbeatResponse, change: Callable[[pb.HeartbeatResponse], None]
) -> None:
    change(answer)
    with pytest.raises(InvalidTicketError):
        DesiredDecoder().decode(answer)
