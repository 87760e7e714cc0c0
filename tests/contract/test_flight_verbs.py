"""The Flight verbs as any Flight client meets them: pyarrow and the messages, nothing of ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from cache_client import CacheClient, DatasetInfo, DatasetSpec
from cache_protocol.errors import (
    CacheError,
    DatasetNotFoundError,
    InvalidRowsError,
    InvalidTicketError,
    LoadError,
    NotReadyError,
    RequestError,
    StaleVersionError,
    from_proto,
)
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.credentials import find_token
from cache_server import LocalCluster
from tests.conftest import numbered_table, write_numbered
from tests.flight_clients import connect
from tests.waiting import wait_until

REPLICAS = 2  # of every shard
NUM_ROWS, FILES = 1000, 4  # a file becomes a shard, and 250 rows are none of its row groups
TIMEOUT = flight.FlightCallOptions(timeout=60)
ROW_SCHEMA = pa.schema([pa.field("row", pa.int64())])


@dataclass(frozen=True)
class Served:
    """A dataset that is ready, and a plain Flight client of its coordinator."""

    info: DatasetInfo
    flight: flight.FlightClient
    cluster: LocalCluster

    def command(self, fingerprint: str = "", columns: tuple[str, ...] = ()) -> bytes:
        return pb.ReadRequest(
            dataset=self.info.name, fingerprint=fingerprint, columns=columns
        ).SerializeToString()

    def describe(self, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        return self.flight.get_flight_info(descriptor, TIMEOUT)

    def path(self, *parts: str) -> flight.FlightInfo:
        return self.describe(flight.FlightDescriptor.for_path(*parts))

    def ticket(self, start: int, stop: int, **changes: object) -> pb.ReadTicket:
        fields: dict[str, object] = {
            "dataset": self.info.name,
            "fingerprint": self.info.fingerprint,
            "rows": pb.RowRange(start=start, stop=stop),
        }
        return pb.ReadTicket(**{**fields, **changes})

    def home_of(self, row: int) -> str:
        """Location of a node that holds this row."""
        for endpoint in self.path(self.info.name).endpoints:
            rows = placement(endpoint).rows
            if rows.start <= row < rows.stop:
                return str(endpoint.locations[0].uri.decode())
        raise AssertionError(f"row {row} is nowhere")

    def serves(self) -> bool:
        """Whether a read of the whole dataset still brings every row."""
        return read_all(self.path(self.info.name)).column("row").to_pylist() == [*range(NUM_ROWS)]


@pytest.fixture(scope="module")
def served(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    source = write_numbered(tmp_path_factory.mktemp("flight"), NUM_ROWS, files=FILES)
    client = CacheClient(cluster.endpoint)
    info = client.load(DatasetSpec("flight-verbs", source, target_shard_bytes=1, replicas=2))
    # Ready means that every shard is somewhere; these tests want every replica.
    wait_until(
        lambda: all(len(nodes) == 2 for nodes in client.describe(info.name).placement.values()),
        20,
        "two replicas of each shard",
    )
    with connect(cluster.endpoint) as connection:
        yield Served(info, connection, cluster)
    client.drop(info.name)


def placement(endpoint: flight.FlightEndpoint) -> pb.ShardPlacement:
    return pb.ShardPlacement.FromString(bytes(endpoint.app_metadata))


def ranges(info: flight.FlightInfo) -> list[tuple[int, int]]:
    return [(placement(e).rows.start, placement(e).rows.stop) for e in info.endpoints]


def read_all(info: flight.FlightInfo, replica: int = 0) -> pa.Table:
    """What a client reads that takes the endpoints in order, from one location of each."""
    tables = []
    for endpoint in info.endpoints:
        with connect(endpoint.locations[replica]) as node:
            tables.append(node.do_get(endpoint.ticket, TIMEOUT).read_all())
    return pa.concat_tables(tables) if tables else info.schema.empty_table()


def expected_rows(start: int, stop: int) -> pa.Table:
    return numbered_table(stop - start, start)


def refusal(error: flight.FlightError) -> CacheError:
    """The named error that travelled with a Flight error; its text holds no traceback."""
    assert error.extra_info, f"no code in {error!r}"
    for sign in ("Traceback", ".py", 'File "'):
        assert sign not in str(error)
    return from_proto(pb.Error.FromString(bytes(error.extra_info)))


def refused(call: Callable[[], object]) -> CacheError:
    with pytest.raises(flight.FlightError) as caught:
        call()
    return refusal(caught.value)


# -- GetFlightInfo ---------------------------------------------------------------------------------


def test_a_command_describes_the_dataset_exactly(served: Served) -> None:
    info = served.describe(flight.FlightDescriptor.for_command(served.command()))

    assert info.total_records == NUM_ROWS
    files = [*served.cluster.nodes[0].cache_dir.glob("flight-verbs/*/shard-*.arrow")]
    assert len(files) == FILES  # two nodes and two replicas: each node holds every shard
    assert info.total_bytes == sum(file.stat().st_size for file in files) == served.info.num_bytes
    assert info.ordered
    assert info.schema.equals(served.info.schema)
    assert info.schema.names == numbered_table(0).schema.names
    assert info.schema.types == numbered_table(0).schema.types
    plan = pb.ReadPlan.FromString(bytes(info.app_metadata))
    assert (plan.dataset, plan.fingerprint) == (served.info.name, served.info.fingerprint)


def test_a_command_gives_one_endpoint_a_shard_in_row_order_with_its_rows_and_checksum(
    served: Served,
) -> None:
    info = served.describe(flight.FlightDescriptor.for_command(served.command()))

    assert ranges(info) == [(0, 250), (250, 500), (500, 750), (750, 1000)]
    placements = [placement(endpoint) for endpoint in info.endpoints]
    assert [p.index for p in placements] == [0, 1, 2, 3]
    assert sum(p.num_bytes for p in placements) == info.total_bytes
    assert len({p.checksum for p in placements}) == FILES and all(p.checksum for p in placements)


def test_replicas_are_locations_of_one_endpoint_that_hold_the_same_rows(served: Served) -> None:
    info = served.describe(flight.FlightDescriptor.for_command(served.command()))

    known = {node.node_id: node.endpoint for node in served.cluster.nodes}
    for endpoint in info.endpoints:
        locations = [location.uri.decode() for location in endpoint.locations][:REPLICAS]
        assert locations == [known[node_id] for node_id in placement(endpoint).node_ids]
        assert sorted(locations) == sorted(known.values())
    assert read_all(info, 0).equals(read_all(info, 1))


def test_after_the_nodes_come_the_files_of_the_shard_in_the_same_order(served: Served) -> None:
    info = served.describe(flight.FlightDescriptor.for_command(served.command()))

    directories = {node.node_id: node.cache_dir for node in served.cluster.nodes}
    for endpoint in info.endpoints:
        about = placement(endpoint)
        files = [location.uri.decode() for location in endpoint.locations][REPLICAS:]
        version = f"{served.info.name}/{served.info.fingerprint}"
        assert files == [
            f"file://{directories[node_id]}/{version}/shard-{about.index:05d}.arrow"
            for node_id in about.node_ids
        ]
        for file in files:
            with pa.memory_map(file.removeprefix("file://")) as mapped:
                assert mapped.size() == about.num_bytes
                rows = pa.ipc.open_file(mapped).get_batch(0).num_rows
            assert rows == about.rows.stop - about.rows.start


def test_a_command_for_columns_describes_and_reads_only_those_in_that_order(
    served: Served,
) -> None:
    info = served.describe(
        flight.FlightDescriptor.for_command(served.command(columns=("text", "b", "row")))
    )

    assert info.schema.names == ["text", "b", "row"]
    assert info.total_records == NUM_ROWS
    assert read_all(info).equals(
        expected_rows(0, NUM_ROWS).select(["text", "b", "row"]).cast(info.schema)
    )


@pytest.mark.parametrize("columns", [("row",), ("label", "b", "row")])
def test_the_bytes_of_columns_of_fixed_width_are_those_of_their_values(
    served: Served, columns: tuple[str, ...]
) -> None:
    info = served.describe(flight.FlightDescriptor.for_command(served.command(columns=columns)))

    assert info.total_bytes == expected_rows(0, NUM_ROWS).select(columns).nbytes
    assert info.total_bytes == read_all(info).nbytes


def test_the_bytes_of_a_part_are_those_of_its_values(
    served: Served, client: CacheClient, dataset_name: str, tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "fixed", 10)
    client.load(DatasetSpec(dataset_name, source, columns=["row", "label"]))

    info = served.path(dataset_name, "0", "3")

    assert (info.total_records, info.total_bytes) == (3, read_all(info).nbytes)
    assert served.path(dataset_name, "0", "11").total_bytes == 0
    assert (
        served.path(dataset_name, "0", "1").total_bytes == client.describe(dataset_name).num_bytes
    )


def test_the_bytes_of_some_strings_are_not_known(served: Served) -> None:
    by_column = flight.FlightDescriptor.for_command(served.command(columns=("row", "text")))

    assert served.describe(by_column).total_bytes == -1
    assert served.path(served.info.name, "0", "2").total_bytes == -1
    assert served.path(served.info.name, "0", "1003").total_bytes == 0


def test_a_path_of_the_name_is_the_same_as_the_command(served: Served) -> None:
    by_path = served.path(served.info.name)
    by_command = served.describe(flight.FlightDescriptor.for_command(served.command()))

    assert by_path.schema.equals(by_command.schema)
    assert (by_path.total_records, by_path.total_bytes, by_path.ordered) == (
        by_command.total_records,
        by_command.total_bytes,
        by_command.ordered,
    )
    assert by_path.endpoints == by_command.endpoints


def test_any_flight_client_reads_the_source_rows_in_order(served: Served) -> None:
    table = read_all(served.path(served.info.name))

    assert table.equals(expected_rows(0, NUM_ROWS).cast(served.info.schema))


@pytest.mark.parametrize("total", [1, 2, 3, 7, 999, 1000, 1003])
def test_parts_of_a_dataset_hold_each_row_exactly_once(served: Served, total: int) -> None:
    wanted = range(total) if total < 10 else [0, 1, total // 2, total - 1]
    for index in wanted:
        info = served.path(served.info.name, str(index), str(total))

        start, stop = NUM_ROWS * index // total, NUM_ROWS * (index + 1) // total
        assert info.total_records == stop - start
        assert all(len(endpoint.locations) == 1 for endpoint in info.endpoints)
        bounds = [start, *(b for b in (250, 500, 750) if start < b < stop), stop]
        assert ranges(info) == [(a, b) for a, b in pairwise(bounds) if a < b]
        assert read_all(info).equals(expected_rows(start, stop).cast(info.schema))


def test_a_part_of_more_parts_than_rows_may_be_empty(served: Served) -> None:
    info = served.path(served.info.name, "0", "1003")

    assert (info.total_records, info.endpoints) == (0, [])


def test_every_node_describes_datasets_not_only_the_coordinator(served: Served) -> None:
    with connect(served.cluster.nodes[1].endpoint) as other:
        info = other.get_flight_info(flight.FlightDescriptor.for_path(served.info.name), TIMEOUT)

    assert info.endpoints == served.path(served.info.name).endpoints


# -- ListFlights, GetSchema, DoAction --------------------------------------------------------------


def test_list_flights_lists_ready_datasets_and_criteria_are_the_beginning_of_a_name(
    served: Served,
) -> None:
    def names(criteria: bytes) -> list[str]:
        return [
            info.descriptor.path[0].decode()
            for info in served.flight.list_flights(criteria, TIMEOUT)
        ]

    assert served.info.name in names(b"")
    assert names(b"flight-v") == [served.info.name]
    assert names(b"verbs") == []
    assert names(b"\xff\xfe") == []


def test_a_listed_flight_can_be_read_as_it_is(served: Served) -> None:
    (info,) = served.flight.list_flights(served.info.name.encode(), TIMEOUT)

    assert info.total_records == NUM_ROWS
    assert read_all(info).column("row").to_pylist() == [*range(NUM_ROWS)]


def test_get_schema_gives_the_logical_schema_by_command_and_by_path(served: Served) -> None:
    by_path = served.flight.get_schema(flight.FlightDescriptor.for_path(served.info.name), TIMEOUT)
    by_command = served.flight.get_schema(
        flight.FlightDescriptor.for_command(served.command(columns=("label", "a"))), TIMEOUT
    )

    assert by_path.schema.equals(served.info.schema)
    assert by_command.schema.names == ["label", "a"]


def test_get_schema_answers_for_a_failed_dataset_and_get_flight_info_says_why(
    served: Served, client: CacheClient, dataset_name: str, tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "nulls", 10)
    with pytest.raises(LoadError):
        client.load(
            DatasetSpec(dataset_name, source, sql="SELECT 1 / (label - 3) AS label FROM source")
        )

    schema = served.flight.get_schema(flight.FlightDescriptor.for_path(dataset_name), TIMEOUT)
    error = refused(lambda: served.path(dataset_name))

    assert schema.schema.names == ["label"]
    assert isinstance(error, LoadError) and "Divide by zero" in str(error)


def test_the_endpoints_action_of_every_node_says_where_the_coordinator_is(served: Served) -> None:
    for node in served.cluster.nodes:
        with connect(node.endpoint) as connection:
            (result,) = connection.do_action("endpoints", TIMEOUT)
            actions = [action.type for action in connection.list_actions(TIMEOUT)]
            assert actions == ["endpoints", "report", "announce", "held-shards", "find-rows"]
        endpoints = pb.CoordinatorEndpoints.FromString(result.body.to_pybytes())
        assert endpoints.flight_location == served.cluster.endpoint
        assert endpoints.control_location == served.cluster.nodes[0].control_location


def test_a_report_is_taken_by_every_node_and_a_bad_one_is_refused(served: Served) -> None:
    report = pb.ReaderReport(
        job="contract",
        dataset=served.info.name,
        fingerprint="f",
        rank=0,
        world_size=1,
        run="r",
        expires_s=9,
    )
    for node in served.cluster.nodes:
        with connect(node.endpoint) as connection:
            action = flight.Action("report", report.SerializeToString())
            assert list(connection.do_action(action, TIMEOUT)) == []
            report.world_size = 0
            with pytest.raises(flight.FlightError, match="rank 0 of 0"):
                list(connection.do_action(("report", report.SerializeToString()), TIMEOUT))
            report.world_size = 1


# -- DoGet -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "columns", [(), ("row",), ("b", "a"), ("text",), ("label", "text", "row", "b", "a")]
)
def test_do_get_reads_a_range_over_shards_in_the_columns_asked_for(
    served: Served, columns: tuple[str, ...]
) -> None:
    ticket = served.ticket(240, 510, columns=columns)

    table = served.flight.do_get(flight.Ticket(ticket.SerializeToString()), TIMEOUT).read_all()

    expected = expected_rows(240, 510)
    assert table.equals(expected.select(columns or expected.column_names).cast(table.schema))


def test_do_get_of_no_rows_is_an_empty_table_of_the_right_schema(served: Served) -> None:
    for at in (0, 250, NUM_ROWS):
        ticket = served.ticket(at, at).SerializeToString()
        table = served.flight.do_get(flight.Ticket(ticket), TIMEOUT).read_all()
        assert table.num_rows == 0
        assert table.schema.equals(served.info.schema)


def computed(start: int, stop: int, expression: str, *where: str) -> dict[str, object]:
    """Of a ticket: values computed from these rows."""
    rows = pb.RowRange(start=start, stop=stop)
    return {"expression": pb.RowExpression(rows=rows, expression=expression, where=where)}


def test_do_get_computes_values_of_rows_and_finds_the_rows_of_conditions(served: Served) -> None:
    def ask(*asked: object) -> pa.Table:
        ticket = served.ticket(0, 0, **computed(*asked))  # type: ignore[arg-type]
        return served.flight.do_get(flight.Ticket(ticket.SerializeToString()), TIMEOUT).read_all()

    values = ask(300, 400, "label * 10 + row % 2", "a > 160", "text <> 'row 399'")
    assert values.column_names == ["value"]
    assert values.column(0).to_pylist() == [n % 7 * 10 + n % 2 for n in range(321, 399)]
    numbers = ask(300, 400, "", "row % 50 = 7")
    assert numbers.schema == pa.schema([("row", pa.uint32())])
    assert numbers.column(0).to_pylist() == [7, 57]
    assert ask(300, 400, "", "row < 0").num_rows == 0


# -- DoExchange ------------------------------------------------------------------------------------


class Exchange:
    """A raw DoExchange stream."""

    def __init__(
        self,
        connection: flight.FlightClient,
        request: flight.FlightDescriptor | pb.GatherRequest,
        schema: pa.Schema = ROW_SCHEMA,
    ) -> None:
        if isinstance(request, pb.GatherRequest):
            request = command(request.SerializeToString())
        self.writer, self.reader = connection.do_exchange(request, TIMEOUT)
        self.schema = schema
        self.begun = False

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(flight.FlightError):  # a refused stream says so again
            self.writer.close()

    def ask(self, request: object) -> None:
        """Sends row ids, or a batch as it is."""
        if not self.begun:
            self.writer.begin(self.schema)
            self.begun = True
        if not isinstance(request, pa.RecordBatch):
            ids = pa.array(request, pa.int64())
            request = pa.RecordBatch.from_arrays([ids], schema=ROW_SCHEMA)
        self.writer.write_batch(request)

    def answer(self) -> pa.RecordBatch:
        return self.reader.read_chunk().data

    def refusal(self, request: object) -> CacheError:
        """The error that a request meets: when it is sent, or when its answer is read."""

        def ask() -> None:
            self.ask(request)
            self.answer()

        return refused(ask)


def gather_request(served: Served, **changes: object) -> pb.GatherRequest:
    fields: dict[str, object] = {
        "dataset": served.info.name,
        "fingerprint": served.info.fingerprint,
    }
    return pb.GatherRequest(**{**fields, **changes})


def unpacked(batch: pa.RecordBatch, name: str) -> list[object]:
    """A logical column out of a packed batch, by what its own metadata says."""
    for field, column in zip(batch.schema, batch.columns, strict=True):
        names = (field.metadata or {}).get(b"cache.columns")
        if names is None and field.name == name:
            return list(column.to_pylist())
        if names is not None and name in (listed := json.loads(names)):
            return [row[listed.index(name)] for row in column.to_pylist()]
    raise AssertionError(f"no column {name} in {batch.schema}")


def test_do_exchange_answers_row_ids_with_packed_rows_in_that_order_repeats_too(
    served: Served,
) -> None:
    ids = [999, 0, 0, 500, 251, 250, 249, 999, 3]
    with Exchange(served.flight, gather_request(served)) as exchange:
        exchange.ask(ids)
        batch = exchange.answer()

    assert [str(field.type) for field in batch.schema] == [
        "fixed_size_list<item: int64 not null>[1]",
        "fixed_size_list<item: float not null>[2]",
        "fixed_size_list<item: int32 not null>[1]",
        "string",
    ]
    expected = numbered_table(NUM_ROWS).take(ids)
    for name in expected.column_names:
        assert unpacked(batch, name) == expected.column(name).to_pylist()


@pytest.mark.parametrize(
    ("columns", "stored"), [(["b"], 1), (["text", "a", "b"], 2), (["b", "a"], 1)]
)
def test_do_exchange_sends_only_the_columns_asked_for(
    served: Served, columns: list[str], stored: int
) -> None:
    with Exchange(served.flight, gather_request(served, columns=columns)) as exchange:
        exchange.ask([7, 700])
        batch = exchange.answer()

    assert batch.num_columns == stored
    expected = numbered_table(NUM_ROWS).take([7, 700])
    for name in columns:
        assert unpacked(batch, name) == expected.column(name).to_pylist()


@pytest.mark.parametrize("ids", [[999, 0, 500, 251, 250, 3, 249], list(range(240, 260))])
def test_do_exchange_cuts_an_answer_into_messages_where_it_is_asked_to(
    served: Served, ids: list[int]
) -> None:
    with Exchange(served.flight, gather_request(served, rows_per_message=3)) as exchange:
        exchange.ask(ids)
        batches: list[pa.RecordBatch] = []
        while sum(batch.num_rows for batch in batches) < len(ids):
            batches.append(exchange.answer())

    assert max(batch.num_rows for batch in batches) == 3
    assert [row for batch in batches for row in unpacked(batch, "row")] == ids


@pytest.mark.parametrize("count", [30_000, 60_000, 100_000, 200_000])
def test_numbers_of_a_long_answer_lie_where_they_can_be_computed_with(
    served: Served, count: int
) -> None:
    """Whatever its length, which moves what stands before them; of short ones gRPC decides."""
    ids = np.random.default_rng(0).integers(0, NUM_ROWS, count)
    with Exchange(served.flight, gather_request(served)) as exchange:
        exchange.ask(ids)
        batch = exchange.answer()

    numbers = [column.values for column in batch.columns if column.type != pa.string()]
    assert [array.buffers()[1].address % 8 for array in numbers] == [0, 0, 0]
    assert unpacked(batch, "row") == ids.tolist()


def test_several_requests_may_be_under_way_on_one_stream_and_are_answered_in_turn(
    served: Served,
) -> None:
    rng = np.random.default_rng(0)
    requests = [rng.integers(0, NUM_ROWS, size) for size in (1, 300, 0, 17, 1000)]
    with Exchange(served.flight, gather_request(served, columns=["row"])) as exchange:
        for ids in requests:
            exchange.ask(ids)
        exchange.writer.done_writing()
        answers = [unpacked(exchange.answer(), "row") for _ in requests]
        with pytest.raises(StopIteration):
            exchange.answer()

    assert answers == [ids.tolist() for ids in requests]


def test_a_stream_without_a_request_ends_without_an_answer(served: Served) -> None:
    with Exchange(served.flight, gather_request(served)) as exchange:
        exchange.writer.done_writing()
        with pytest.raises(StopIteration):
            exchange.answer()
    assert served.serves()


def stored_rows(node: flight.FlightClient, ticket: pb.ReadTicket) -> list[list[object]]:
    """The rows in each message, by their numbers."""
    reader = node.do_get(flight.Ticket(ticket.SerializeToString()), TIMEOUT)
    return [unpacked(chunk.data, "row") for chunk in reader]


def test_do_get_sends_stored_rows_or_runs_of_them_in_messages_as_long_as_asked_for(
    served: Served,
) -> None:
    whole = pb.StoredRows(rows_per_message=400)
    messages = stored_rows(served.flight, served.ticket(10, 1000, stored=whole))
    assert [row for message in messages for row in message] == [*range(10, 1000)]
    assert max(map(len, messages)) <= 400
    runs = pb.StoredRows(rows_per_message=90, run_rows=3, stride=10)
    messages = stored_rows(served.flight, served.ticket(5, 1000, stored=runs))
    assert [row for message in messages for row in message] == [
        row for first in range(5, 1000, 10) for row in range(first, first + 3) if row < 1000
    ]
    assert len(messages[0]) == 90  # short runs come together


# -- errors ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bad:
    """A bad descriptor or ticket: the error it must give and what the message must quote."""

    kind: type[CacheError]
    quotes: tuple[str, ...]


def command(data: bytes) -> flight.FlightDescriptor:
    return flight.FlightDescriptor.for_command(data)


def path(*parts: str) -> flight.FlightDescriptor:
    return flight.FlightDescriptor.for_path(*parts)


BAD_DESCRIPTORS: dict[str, tuple[Callable[[Served], flight.FlightDescriptor], Bad]] = {
    "garbage command": (
        lambda s: command(b"\xff\x00 not a message"),
        Bad(InvalidTicketError, ("\\xff\\x00 not a message",)),
    ),
    "empty command": (lambda s: command(b""), Bad(InvalidTicketError, ("names no dataset",))),
    "no name in the command": (
        lambda s: command(pb.ReadRequest(fingerprint="f00d").SerializeToString()),
        Bad(InvalidTicketError, ("names no dataset", "f00d")),
    ),
    "unknown dataset by command": (
        lambda s: command(pb.ReadRequest(dataset="nope").SerializeToString()),
        Bad(DatasetNotFoundError, ("'nope'", "flight-verbs")),
    ),
    "unknown dataset by path": (
        lambda s: path("nope"),
        Bad(DatasetNotFoundError, ("'nope'", "flight-verbs")),
    ),
    "unknown dataset by part": (
        lambda s: path("nope", "0", "2"),
        Bad(DatasetNotFoundError, ("'nope'", "flight-verbs")),
    ),
    "wrong fingerprint": (
        lambda s: command(s.command(fingerprint="f00d")),
        Bad(StaleVersionError, ("f00d", "flight-verbs")),
    ),
    "unknown column": (
        lambda s: command(s.command(columns=("row", "colour"))),
        Bad(RequestError, ("'colour'", "row, a, b, label and 1 more")),
    ),
    "repeated column": (
        lambda s: command(s.command(columns=("row", "row"))),
        Bad(RequestError, ("['row', 'row']",)),
    ),
    "no path": (lambda s: path(), Bad(InvalidTicketError, ("[]",))),
    "path of four": (
        lambda s: path("flight-verbs", "0", "2", "extra"),
        Bad(InvalidTicketError, ("'extra'", "[dataset, index, total]")),
    ),
    "index that is no number": (
        lambda s: path("flight-verbs", "one", "2"),
        Bad(InvalidTicketError, ("'one'", "'2'")),
    ),
    "total that is no number": (
        lambda s: path("flight-verbs", "0", "2.5"),
        Bad(InvalidTicketError, ("'2.5'",)),
    ),
    "index as large as total": (
        lambda s: path("flight-verbs", "2", "2"),
        Bad(InvalidTicketError, ("got 2 of 2",)),
    ),
    "negative index": (
        lambda s: path("flight-verbs", "-1", "2"),
        Bad(InvalidTicketError, ("got -1 of 2",)),
    ),
    "total of nothing": (
        lambda s: path("flight-verbs", "0", "0"),
        Bad(InvalidTicketError, ("got 0 of 0",)),
    ),
    "index too long to be a number": (
        lambda s: path("flight-verbs", "9" * 5000, "2"),
        Bad(InvalidTicketError, ("999",)),
    ),
}


@pytest.mark.parametrize("case", BAD_DESCRIPTORS)
def test_a_bad_descriptor_is_refused_by_name_and_the_node_serves_on(
    served: Served, case: str
) -> None:
    make, expected = BAD_DESCRIPTORS[case]

    error = refused(lambda: served.describe(make(served)))

    assert type(error) is expected.kind
    for quote in expected.quotes:
        assert quote in str(error)
    assert len(str(error)) < 1000
    assert served.serves()


@pytest.mark.parametrize("case", BAD_DESCRIPTORS)
def test_get_schema_of_a_bad_descriptor_says_why_and_the_node_serves_on(
    served: Served, case: str
) -> None:
    make, expected = BAD_DESCRIPTORS[case]

    with pytest.raises(pa.ArrowException) as caught:  # without a code: pyarrow carries none here
        served.flight.get_schema(make(served), TIMEOUT)

    for quote in expected.quotes:
        assert quote in str(caught.value)
    for sign in ("Traceback", ".py", 'File "'):
        assert sign not in str(caught.value)
    assert served.serves()


BAD_TICKETS: dict[str, tuple[Callable[[Served], bytes], Bad]] = {
    "20,000 conditions": (
        lambda s: _computed(s, "", *["a > 0"] * 20_000),
        Bad(RequestError, ("where must have at most 4096 characters", "got 100000")),
    ),
    "a dictionary": (
        lambda s: _computed(s, "arrow_cast(text, 'Dictionary(Int32, Utf8)')"),
        Bad(RequestError, ("arrow_cast(text", "it is of dictionary")),
    ),
    "runs longer than their stride": (
        lambda s: s.ticket(0, 10, stored=pb.StoredRows(run_rows=3, stride=2)).SerializeToString(),
        Bad(InvalidRowsError, ("3 rows of every 2",)),
    ),
    "garbage": (
        lambda s: b"\xffrandom bytes",
        Bad(InvalidTicketError, ("\\xffrandom bytes",)),
    ),
    "empty": (lambda s: b"", Bad(InvalidTicketError, ("names no dataset",))),
    "long garbage": (lambda s: b"\xff" * 100_000, Bad(InvalidTicketError, ("\\xff\\xff",))),
    "unknown dataset": (
        lambda s: s.ticket(0, 1, dataset="nope").SerializeToString(),
        Bad(DatasetNotFoundError, ("'nope'", "flight-verbs")),
    ),
    "wrong fingerprint": (
        lambda s: s.ticket(0, 1, fingerprint="f00d").SerializeToString(),
        Bad(StaleVersionError, ("f00d", "flight-verbs")),
    ),
    "unknown column": (
        lambda s: s.ticket(0, 1, columns=["colour"]).SerializeToString(),
        Bad(RequestError, ("'colour'", "row, a, b, label and 1 more")),
    ),
    "rows past the end": (
        lambda s: s.ticket(990, 1001).SerializeToString(),
        Bad(InvalidRowsError, ("[990, 1001)", "[0, 1000)")),
    ),
    "rows far outside": (
        lambda s: s.ticket(2**63, 2**64 - 1).SerializeToString(),
        Bad(InvalidRowsError, (f"[{2**63}, {2**64 - 1})",)),
    ),
    "rows backwards": (
        lambda s: s.ticket(20, 10).SerializeToString(),
        Bad(InvalidRowsError, ("[20, 10)",)),
    ),
    "values of rows of two shards": (
        lambda s: s.ticket(0, 0, **computed(200, 300, "row")).SerializeToString(),
        Bad(InvalidRowsError, ("[200, 300)", "one shard")),
    ),
    "values of rows that do not exist": (
        lambda s: s.ticket(0, 0, **computed(2**63, 2**64 - 1, "row")).SerializeToString(),
        Bad(InvalidRowsError, (f"[{2**63}, {2**64 - 1})",)),
    ),
    "neither an expression nor a condition": (
        lambda s: s.ticket(0, 0, **computed(0, 9, "")).SerializeToString(),
        Bad(RequestError, ("neither",)),
    ),
    "an aggregate of values": (
        lambda s: s.ticket(0, 0, **computed(0, 9, "", "sum(row) > 1")).SerializeToString(),
        Bad(RequestError, ("where 'sum(row) > 1'", "an aggregate")),
    ),
    "a division by zero": (
        lambda s: s.ticket(0, 0, **computed(0, 9, "1 / row")).SerializeToString(),
        Bad(RequestError, ("'1 / row'", "Divide by zero")),
    ),
}


def _computed(served: Served, expression: str, *where: str) -> bytes:
    wanted = pb.RowExpression(rows=pb.RowRange(start=0, stop=1), expression=expression, where=where)
    return served.ticket(0, 1, expression=wanted).SerializeToString()


@pytest.mark.parametrize("case", BAD_TICKETS)
def test_a_bad_ticket_is_refused_before_the_first_batch_and_the_node_serves_on(
    served: Served, case: str
) -> None:
    make, expected = BAD_TICKETS[case]

    error = refused(lambda: served.flight.do_get(flight.Ticket(make(served)), TIMEOUT).read_all())

    assert type(error) is expected.kind
    for quote in expected.quotes:
        assert quote in str(error)
    assert len(str(error)) < 1000
    assert served.serves()


def _batch(array: pa.Array, name: str = "row") -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([array], [name])


BAD_ROW_IDS: dict[str, tuple[pa.RecordBatch, tuple[str, ...]]] = {
    "negative": (_batch(pa.array([5, -1], pa.int64())), ("row id -1", "[0, 1000)")),
    "too large": (_batch(pa.array([5, 1000], pa.int64())), ("row id 1000", "[0, 1000)")),
    "far too large": (_batch(pa.array([2**63 - 1], pa.int64())), (f"row id {2**63 - 1}",)),
    "null": (_batch(pa.array([1, None], pa.int64())), ("without nulls", "1 null")),
    "of another type": (_batch(pa.array([1, 2], pa.int32())), ("one int64 column", "int32")),
    "of another name": (_batch(pa.array([1, 2], pa.int64()), "id"), ("'row'", "id: int64")),
    "as text": (_batch(pa.array(["1"])), ("one int64 column", "string")),
    "in two columns": (
        pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], ["row", "other"]),
        ("one int64 column", "other: int64"),
    ),
}


@pytest.mark.parametrize("case", BAD_ROW_IDS)
def test_row_ids_that_are_none_are_refused_with_the_value_and_the_node_serves_on(
    served: Served, case: str
) -> None:
    batch, quotes = BAD_ROW_IDS[case]
    with Exchange(served.flight, gather_request(served), batch.schema) as exchange:
        error = exchange.refusal(batch)

    assert type(error) is InvalidRowsError
    for quote in quotes:
        assert quote in str(error)
    assert served.serves()


BAD_GATHERS: dict[str, tuple[Callable[[Served], flight.FlightDescriptor], Bad]] = {
    "garbage": (lambda s: command(b"\xff\xfe"), Bad(InvalidTicketError, ("\\xff\\xfe",))),
    "a path": (lambda s: path("flight-verbs"), Bad(InvalidTicketError, ("GatherRequest",))),
    "unknown dataset": (
        lambda s: command(gather_request(s, dataset="nope").SerializeToString()),
        Bad(DatasetNotFoundError, ("'nope'", "flight-verbs")),
    ),
    "wrong fingerprint": (
        lambda s: command(gather_request(s, fingerprint="f00d").SerializeToString()),
        Bad(StaleVersionError, ("f00d",)),
    ),
    "unknown column": (
        lambda s: command(gather_request(s, columns=["colour"]).SerializeToString()),
        Bad(RequestError, ("'colour'", "row, a, b, label and 1 more")),
    ),
}


@pytest.mark.parametrize("case", BAD_GATHERS)
def test_a_bad_gather_request_is_refused_by_name_and_the_node_serves_on(
    served: Served, case: str
) -> None:
    make, expected = BAD_GATHERS[case]

    with Exchange(served.flight, make(served)) as exchange:
        error = exchange.refusal([0])

    assert type(error) is expected.kind
    for quote in expected.quotes:
        assert quote in str(error)
    assert served.serves()


def test_an_error_in_the_middle_of_a_stream_keeps_the_answers_before_it(served: Served) -> None:
    with Exchange(served.flight, gather_request(served, columns=["row"])) as exchange:
        exchange.ask([1, 2])
        assert unpacked(exchange.answer(), "row") == [1, 2]
        error = exchange.refusal([4000])

    assert type(error) is InvalidRowsError and "4000" in str(error)
    assert served.serves()


def test_a_request_that_is_no_arrow_stream_is_refused_by_name(served: Served) -> None:
    header = ROW_SCHEMA.serialize().to_pybytes()[8:]
    descriptor = command(gather_request(served).SerializeToString()).serialize()
    messages = [_of_length(1, descriptor) + _of_length(2, header), _of_length(2, b"garbage" * 9)]
    token = find_token(served.cluster.endpoint)
    with grpc.insecure_channel(served.cluster.endpoint.removeprefix("grpc://")) as channel:
        call = channel.stream_stream("/arrow.flight.protocol.FlightService/DoExchange", None, None)
        with pytest.raises(grpc.RpcError) as caught:
            list(call(iter(messages), timeout=20, metadata=[("authorization", f"Bearer {token}")]))

    assert str(caught.value.details()).startswith("the request is no Arrow stream: ")
    assert "Traceback" not in str(caught.value.details())


def _of_length(number: int, data: bytes) -> bytes:
    """A field of a protobuf message."""
    return bytes([number << 3 | 2, len(data) & 127 | 128, len(data) >> 7]) + data


def test_a_row_of_another_node_is_not_ready_here_and_says_which(
    served: Served, client: CacheClient, dataset_name: str, tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "split", 40, files=8)
    info = client.load(DatasetSpec(dataset_name, source, target_shard_bytes=1))
    away = [shard for shard, nodes in info.placement.items() if nodes != info.placement[0]]
    assert away, "eight shards lie on one node"
    row = away[0] * 5
    (home,) = [n for n in served.cluster.nodes if n.node_id == info.placement[0][0]]
    ticket = pb.ReadTicket(
        dataset=info.name, fingerprint=info.fingerprint, rows=pb.RowRange(start=row, stop=row + 1)
    )

    with connect(home.endpoint) as connection:
        by_range = refused(
            lambda: connection.do_get(flight.Ticket(ticket.SerializeToString()), TIMEOUT)
        )
        request = pb.GatherRequest(dataset=info.name, fingerprint=info.fingerprint)
        with Exchange(connection, request) as exchange:
            by_id = exchange.refusal([0, row])

    for error in (by_range, by_id):
        assert type(error) is NotReadyError
        assert f"row {row} " in str(error)


def test_index_and_total_without_a_name_list_the_datasets_when_there_are_several(
    served: Served, client: CacheClient, dataset_name: str, tmp_path: Path
) -> None:
    client.load(DatasetSpec(dataset_name, write_numbered(tmp_path / "other", 3)))

    error = refused(lambda: served.path("0", "2"))

    assert type(error) is RequestError
    assert dataset_name in str(error) and served.info.name in str(error)


def test_an_unknown_action_is_refused_with_the_list_of_those_there_are(served: Served) -> None:
    error = refused(lambda: list(served.flight.do_action("reboot", TIMEOUT)))

    assert type(error) is RequestError
    assert "'reboot'" in str(error) and "endpoints" in str(error)
    assert served.serves()


def test_a_put_without_a_write_is_refused_without_a_traceback(served: Served) -> None:
    def put() -> None:
        writer, _ = served.flight.do_put(path(served.info.name), ROW_SCHEMA, TIMEOUT)
        writer.write_batch(_batch(pa.array([1], pa.int64())))
        writer.close()

    error = refused(put)

    assert type(error) is InvalidTicketError
    assert "BeginWrite" in str(error)
    assert served.serves()


# Arrow trusts the offsets of a message, so the first two would end the node.
BROKEN_TEXTS = {
    "offsets behind the text": ([0, 2**30, 2], b"xy"),
    "offsets that descend": ([0, -(2**20), 2], b"xy"),
    "no text": ([0, 1, 2], b"\xff\xff"),
}


@pytest.mark.parametrize("broken", BROKEN_TEXTS)
def test_rows_of_a_writer_whose_texts_are_broken_are_refused_by_name(
    served: Served, dataset_name: str, broken: str
) -> None:
    wrong, text = BROKEN_TEXTS[broken]
    offsets = np.array([0, 1, 2], np.int32)
    texts = pa.StringArray.from_buffers(2, pa.py_buffer(offsets), pa.py_buffer(text))
    offsets[:] = wrong  # Arrow has looked at the right ones
    batch = pa.record_batch({"value": texts})
    write = CacheClient(served.cluster.endpoint).begin_write(dataset_name, batch.schema)
    request = pb.PutRequest(dataset=dataset_name, write_id=write.write_id)

    def put() -> None:
        writer, reader = served.flight.do_put(
            command(request.SerializeToString()), batch.schema, TIMEOUT
        )
        with suppress(flight.FlightError):
            shard = pb.PutShard(num_rows=2).SerializeToString()
            writer.write_with_metadata(batch, pa.py_buffer(shard))
            writer.write_metadata(pb.PutEnd(num_rows=2).SerializeToString())
            writer.done_writing()
        reader.read()
        writer.close()

    error = refused(put)

    assert type(error) is RequestError
    assert "no valid Arrow batch" in str(error)
    assert served.serves()
