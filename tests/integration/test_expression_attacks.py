"""Row expressions and load SQL of tenants that try to end a node or to delay another team."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.flight as flight
import pyarrow.parquet as pq
import pytest

from cache_client import CacheClient, Connection, DatasetSpec, LoadError, RequestError
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.local import LocalNode
from cache_server.node import row_values
from tests.conftest import nodes_executed
from tests.waiting import wait_until

ROWS, WAIT_S = 400, 60.0
ALLOWED_BYTES = 128 << 20  # more than before; the attacks would take gigabytes
# Some minutes of one processor, without much memory.
COSTLY = " + ".join(["levenshtein(text, concat(text, 'x'))"] * 20)
GROWING = [
    "length(lpad(text, 2000000000))",
    "length(rpad(text, 2000000000))",
    "length(repeat(text, 100000))",
    "length(repeat('x', 2000000000))",
    "array_length(array_resize([1], 1000000000))",
    "array_length(array_repeat(text, 1000000000))",
    "array_length(range(0, 1000000000 + row))",
    "array_length(generate_series(0, 1000000000 + row))",
    "length(replace(replace(text, 't', text), 't', text))",
    "length(regexp_replace(text, '(t)', text, 'g'))",
    "length(concat_ws(text, '', '', '', '', '', '', ''))",
    "length(encode(encode(text::bytea, 'hex')::bytea, 'hex'))",
    "arrow_cast([row], 'FixedSizeList(1000000000, Int64)')[1]",
    "arrow_cast(text, 'FixedSizeBinary(2147483647)')",
    "row IN (SELECT value FROM range(length(repeat('x', 2000000000))))",
]


@dataclass(frozen=True)
class Cache:
    """A node with tokens of two teams, each with the dataset ``t``."""

    node: LocalNode

    def client(self, team: str) -> CacheClient:
        return CacheClient(Connection(self.node.endpoint, token=f"the-token-of-{team}"))

    def ask(self, team: str, expression: str, timeout_s: float = WAIT_S) -> pa.Table:
        """The values of an expression for the rows of the first shard."""
        info = self.client(team).describe("t")
        wanted = pb.RowExpression(rows=pb.RowRange(start=0, stop=ROWS), expression=expression)
        ticket = pb.ReadTicket(dataset="t", fingerprint=info.fingerprint, expression=wanted)
        token = (b"authorization", f"Bearer the-token-of-{team}".encode())
        options = flight.FlightCallOptions(timeout=timeout_s, headers=[token])
        with flight.connect(self.node.endpoint) as connection:
            return connection.do_get(flight.Ticket(ticket.SerializeToString()), options).read_all()

    def process(self) -> psutil.Process:
        return psutil.Process(self.node.pid)

    def busy(self) -> list[psutil.Process]:
        """The processes of SQL that compute now."""

        def cpu_s(process: psutil.Process) -> float:
            try:
                return float(sum(process.cpu_times()[:2]))
            except psutil.NoSuchProcess:
                return 0.0

        before = {process: cpu_s(process) for process in self.process().children()}
        threading.Event().wait(0.2)
        return [process for process, seen in before.items() if cpu_s(process) > seen + 0.01]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cache]:
    directory = tmp_path_factory.mktemp("expressions")
    source = directory / "t.parquet"
    text = ["t" * 4000 + str(row) for row in range(ROWS)]
    pq.write_table(pa.table({"row": range(ROWS), "text": text}), source)
    principals = [
        {"name": name, "sha256": hashlib.sha256(f"the-token-of-{name}".encode()).hexdigest(),
         "namespace": name, "roles": [role]}
        for name, role in (("node", "node"), ("evil", "writer"), ("good", "writer"))
    ]  # fmt: skip
    tokens = directory / "tokens.json"
    tokens.write_text(json.dumps({"principals": principals}))
    arguments = ["--allow-source", f"{directory}/", "--auth-tokens", str(tokens)]
    arguments += ["--load-threads", "2", "--heartbeat-interval-s", "0.1"]
    node = LocalNode(directory / "node", arguments, "the-token-of-node")
    try:
        with nodes_executed():  # whose children are seen
            node.start()
        cache = Cache(node)
        for team in ("evil", "good"):
            cache.client(team).load(DatasetSpec("t", str(source)))
        yield cache
    finally:
        node.close()


def test_expressions_that_grow_are_refused_by_name_and_take_no_memory(cache: Cache) -> None:
    assert cache.ask("evil", "row + 1").num_rows == ROWS
    before = cache.process().memory_info().rss

    for expression in GROWING:
        with pytest.raises(flight.FlightServerError, match="must not use"):
            cache.ask("evil", expression)

    assert cache.process().memory_info().rss < before + ALLOWED_BYTES
    assert cache.ask("evil", "row + 1").num_rows == ROWS


def test_expressions_of_another_team_answer_while_one_floods_the_node(cache: Cache) -> None:
    def answer_s() -> float:
        """The median of five answers."""
        took = []
        for number in range(5):
            begun = time.monotonic()
            assert cache.ask("good", f"row + {number}")["value"][1].as_py() == 1 + number
            took.append(time.monotonic() - begun)
        return sorted(took)[2]

    usual_s, stop = answer_s(), threading.Event()

    def flood() -> None:
        while not stop.is_set():
            with pytest.raises(flight.FlightError):
                cache.ask("evil", COSTLY, timeout_s=5)

    with ThreadPoolExecutor(6) as pool:
        floods = [pool.submit(flood) for _ in range(6)]
        try:
            wait_until(lambda: len(cache.busy()) >= 2, WAIT_S, "both turns of the first team")
            assert answer_s() < 2 + 20 * usual_s
        finally:
            stop.set()
        for flooded in floods:
            flooded.result()


def test_a_computation_ends_when_its_client_is_gone(cache: Cache) -> None:
    with pytest.raises(flight.FlightTimedOutError):
        cache.ask("evil", COSTLY, timeout_s=2)

    ended = time.monotonic()
    wait_until(lambda: not cache.busy(), WAIT_S, "nobody to compute")
    # Within a second where the machine is not busy.
    assert time.monotonic() - ended < row_values.MAX_TURN_S - 2


def test_load_sql_that_grows_fails_by_name_and_the_node_stays(cache: Cache, tmp_path: Path) -> None:
    source, client = str(cache.node.cache_dir.parent / "t.parquet"), cache.client("evil")
    before = cache.process().memory_info().rss

    with pytest.raises(RequestError, match=r"needed more than 1.0 GiB of memory while it was plan"):
        client.load(DatasetSpec("p", source, sql="SELECT repeat('x', 2000000000) AS a FROM source"))
    sql = "SELECT length(repeat(text, 100000)) AS n FROM source"
    with pytest.raises(LoadError, match=r"the query (needed more than|ended)"):
        client.load(DatasetSpec("q", source, sql=sql))
    client.load(DatasetSpec("r", source, sql="SELECT row, rpad(text, 5000) AS t FROM source"))

    assert client.describe("r").num_rows == ROWS
    assert cache.process().memory_info().rss < before + ALLOWED_BYTES
