"""Unexpected errors: the caller sees their name at once, and nothing hangs."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, NoReturn
from urllib.parse import quote

import grpc
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import CacheError, RequestError, from_proto
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.v1.cache_pb2_grpc import CoordinatorStub
from cache_server.coordination.environment_load import EnvironmentLoad
from cache_server.node.traffic import Traffic
from cache_server.rpc.control_service import ControlService
from cache_server.rpc.flight_service import FlightService
from tests.object_store import ACCESS_KEY_ID

TIMEOUT_S = 60.0
KEY, SECRET = "secret_access_key", "open, sesame!"
ADDRESS = "postgresql://u:p%40ss@db"


class Panic(BaseException):
    """As pyo3's: no Exception."""


@pytest.fixture(params=[Panic, ZeroDivisionError])
def broken(request: pytest.FixtureRequest) -> Any:
    """A coordinator and a node whose calls all fail."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise request.param(f"by a defect, {ACCESS_KEY_ID} at {ADDRESS}/{quote(SECRET)}")

    verbs = dict.fromkeys(("attach", "create", "get", "describe"), fail)
    return SimpleNamespace(**verbs, watch_backlog=lambda *backlog: None)


def assert_named(error: CacheError, log: str) -> None:
    assert type(error) is CacheError
    assert str(error).startswith("defect in the cache node: ")
    assert "Traceback" not in str(error) and "Traceback" in log
    for text in (str(error), log):
        assert "('by a defect, *** at postgresql://u:***@db/" in text.replace(": by", "('by")
        assert ACCESS_KEY_ID not in text and "p%40ss" not in text


def test_a_defect_in_a_grpc_verb_is_named_without_a_secret(
    broken: Any, caplog: pytest.LogCaptureFixture
) -> None:
    service = ControlService("127.0.0.1", 0)
    service.start(lambda: broken)
    spec = DatasetSpec("table", "s3://lake/a.parquet", storage_options={KEY: SECRET})
    request = pb.CreateDatasetRequest(spec=spec.to_proto(), secrets=spec.secrets_to_proto())
    try:
        channel = grpc.insecure_channel(f"127.0.0.1:{service.port}")
        with channel, pytest.raises(grpc.RpcError) as caught:
            CoordinatorStub(channel).CreateDataset(request, timeout=TIMEOUT_S)
    finally:
        service.stop(grace_s=0.0)

    assert caught.value.code() == grpc.StatusCode.INTERNAL
    trailers = dict(caught.value.trailing_metadata())
    assert_named(from_proto(pb.Error.FromString(trailers["cache-error-bin"])), caplog.text)
    assert quote(SECRET) not in caplog.text + caught.value.details()


def test_a_defect_in_a_flight_verb_is_named_without_a_secret(
    broken: Any, caplog: pytest.LogCaptureFixture
) -> None:
    options = flight.FlightCallOptions(timeout=TIMEOUT_S)
    with FlightService("127.0.0.1", 0, Traffic()) as service:
        service.attach(broken)
        client = flight.FlightClient(f"grpc://127.0.0.1:{service.port}")
        with client, pytest.raises(flight.FlightError) as caught:
            client.get_flight_info(flight.FlightDescriptor.for_path("table"), options)

    assert_named(from_proto(pb.Error.FromString(caught.value.extra_info)), caplog.text)


def test_an_error_of_arrow_in_a_flight_verb_has_no_traceback() -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise pa.ArrowInvalid("a bad schema")

    node: Any = SimpleNamespace(describe=fail, rows=fail)
    table, options = (
        flight.FlightDescriptor.for_path("table"),
        flight.FlightCallOptions(timeout=TIMEOUT_S),
    )
    ticket = flight.Ticket(pb.ReadTicket(dataset="table").SerializeToString())
    with FlightService("127.0.0.1", 0, Traffic()) as service:
        service.attach(node)
        with flight.FlightClient(f"grpc://127.0.0.1:{service.port}") as client:
            for call in (
                lambda: client.get_flight_info(table, options),
                lambda: client.do_get(ticket, options).read_all(),
            ):
                with pytest.raises(
                    flight.FlightServerError, match=r"^ArrowInvalid: a bad"
                ) as named:
                    call()
                error = from_proto(pb.Error.FromString(named.value.extra_info))
                assert type(error) is RequestError
            with pytest.raises(pa.ArrowException) as unnamed:  # pyarrow carries no kind here
                client.get_schema(table, options)
    assert "FlightServerError: ArrowInvalid: a bad schema" in str(unnamed.value)
    assert "Traceback" not in str(unnamed.value)


def test_a_defect_in_the_load_of_an_environment_ends_the_process(
    broken: Any, caplog: pytest.LogCaptureFixture
) -> None:
    failed = threading.Event()
    reasons: list[CacheError] = []

    def on_failure(error: CacheError) -> None:
        reasons.append(error)
        failed.set()

    load = EnvironmentLoad(
        broken,
        DatasetSpec("table", "s3://lake/a.parquet", storage_options={KEY: SECRET}),
        num_nodes=1,
        join_timeout_s=TIMEOUT_S,
        on_ready=lambda: None,
        on_failure=on_failure,
    )
    load.start()

    assert failed.wait(TIMEOUT_S)
    assert load.close(TIMEOUT_S)
    assert_named(reasons[0], caplog.text)
    assert quote(SECRET) not in caplog.text + str(reasons[0])
