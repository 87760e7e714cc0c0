"""Planning threads are shared among the hosts of the sources."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from cache_protocol.errors import NodeUnavailableError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.rpc import planning_slots
from cache_server.rpc.planning_slots import PlanningSlots, hosts_of


def spec(*sources: str, **options: str) -> pb.DatasetSpec:
    return pb.DatasetSpec(tables=[pb.TableSpec(source=sources, options=options)])


def test_the_host_of_a_source_is_its_server_or_its_bucket() -> None:
    assert hosts_of(spec("/data")) == {""}
    assert hosts_of(spec("s3://bucket/x", "https://u:p@Host:1/x")) == {"bucket", "host:1"}
    assert hosts_of(spec("s3://bucket/x", endpoint="http://store:9000")) == {"bucket", "store:9000"}


def test_a_host_takes_no_more_than_its_slots_and_others_have_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning_slots, "_RUNNING", 2)
    monkeypatch.setattr(planning_slots, "_WAIT_S", 0.01)
    slots = PlanningSlots()
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(slots.hold(spec("http://slow/x")))
        with (
            pytest.raises(NodeUnavailableError, match=r"2 loads from 'slow'.*within 0\.01 s"),
            slots.hold(spec("s3://bucket/x", endpoint="http://slow")),
        ):
            pass
        with slots.hold(spec("http://other/x")), slots.hold(spec("s3://bucket/x")):
            pass
    monkeypatch.setattr(planning_slots, "_WAITING", 0)
    with slots.hold(spec("http://slow/x")):
        pass
