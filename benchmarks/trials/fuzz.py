"""Sends malformed calls to every verb of a node with tokens, and checks that only the calls fail.

``make fuzz`` sends a million; ``python -m benchmarks.trials.fuzz --calls 5000 --seed 7`` repeats a
run. The callers have a good token of any role, a wrong one or none. They also send options,
sources, row expressions and reports that mean harm, see `tenant_inputs`; ``--no-tenants`` leaves
these out. The node must not end, write no traceback and reach no listener, its memory and
descriptors must stay flat, and an epoch that is read meanwhile must be exact.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pyarrow.flight as flight
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from benchmarks.trials import tenant_inputs
from cache_client import CacheClient, CacheIterableDataset, Connection, DatasetSpec
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.v1 import cache_pb2_grpc
from cache_server.local import LocalNode
from tests.conftest import write_numbered

NAME, NUM_ROWS = "table", 2000
_ROLES = ("node", "admin", "writer", "reader")  # of a principal each; the token is its name
_TOKENS = (*(f"the-token-of-{role}" for role in _ROLES), "wrong", None)
_TIMEOUT_S = 20.0
_SERVICE = pb.DESCRIPTOR.services_by_name["Coordinator"]
_NUMBERS = (0, 1, 2, 7, NUM_ROWS - 1, NUM_ROWS, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
_TEXTS = ("", NAME, "..", "../x", "/etc/shadow", "\0", "é" * 40, "row", "nope", "x" * 5000, "csv",
          "file:///x", "1", "SELECT", "s3://b/k", "grpc://h:1", "node")  # fmt: skip
_LIMITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


class Fuzzer:
    """Malformed calls from one seed. One thread.

    Args:
        node: to call.
        fingerprint: of the dataset `NAME`.
        listener: what no call may reach; None: no options, expressions and reports are sent.
    """

    def __init__(
        self,
        node: LocalNode,
        fingerprint: str,
        seed: int,
        listener: tenant_inputs.Listener | None = None,
    ) -> None:
        self._random = random.Random(seed)
        self._fingerprint = fingerprint
        self._page = node.page
        schema = pa.schema([("row", pa.int64())])
        writer = CacheClient(Connection(node.endpoint, token=_TOKENS[1]))
        self._write_id = writer.begin_write("gone", schema).write_id
        self._channel = grpc.insecure_channel(node.control_location)
        self._client = flight.FlightClient(node.endpoint)
        self._headers: list[tuple[str, str]] = []
        self._verbs: tuple[Callable[[], object], ...] = (
            self._control, self._control, self._get, self._info, self._schema, self._exchange,
            self._action, self._list, self._put, self._http,
        )  # fmt: skip
        self._listener = listener
        if listener is not None:
            self._verbs += (self._options_of_a_load, self._expression, self._report)

    def close(self) -> None:
        self._client.close()
        self._channel.close()

    def call(self) -> None:
        """One call; it may fail, but not hang."""
        token = self._random.choices(_TOKENS, (3, 3, 3, 3, 1, 1))[0]
        self._headers = [] if token is None else [("authorization", f"Bearer {token}")]
        try:
            self._random.choice(self._verbs)()
        except grpc.RpcError as error:
            _require(error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED, repr(error))
            _require("defect" not in str(error), repr(error))
        except flight.FlightTimedOutError:
            raise
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            _require("defect" not in str(error), repr(error))

    @property
    def _options(self) -> flight.FlightCallOptions:
        headers = [(name.encode(), value.encode()) for name, value in self._headers]
        return flight.FlightCallOptions(timeout=_TIMEOUT_S, headers=headers)

    def _control(self) -> None:
        verb = self._random.choice(_SERVICE.methods)
        send = self._channel.unary_stream if verb.server_streaming else self._channel.unary_unary
        call = send(f"/{_SERVICE.full_name}/{verb.name}", None, None)
        request = self._bytes(getattr(pb, verb.input_type.name)())
        answer = call(request, timeout=_TIMEOUT_S, metadata=self._headers)
        if verb.server_streaming:
            with suppress(StopIteration):
                next(answer)
            answer.cancel()

    def _get(self) -> None:
        reader = self._client.do_get(flight.Ticket(self._bytes(pb.ReadTicket())), self._options)
        for _ in reader:
            return reader.cancel()  # type: ignore[no-any-return]

    def _descriptor(self) -> flight.FlightDescriptor:
        if self._random.random() < 0.5:
            return flight.FlightDescriptor.for_command(self._bytes(pb.ReadRequest()))
        parts = [self._random.choice(_TEXTS) for _ in range(self._random.randrange(5))]
        return flight.FlightDescriptor.for_path(*parts)

    def _info(self) -> None:
        self._client.get_flight_info(self._descriptor(), self._options)

    def _schema(self) -> None:
        self._client.get_schema(self._descriptor(), self._options)

    def _put(self) -> None:
        if self._random.random() < 0.3:
            self._client.do_put(self._descriptor(), pa.schema([]), self._options)[0].close()
            return
        command = flight.FlightDescriptor.for_command(self._bytes(pb.PutRequest()))
        rows = pa.record_batch({"row": pa.array([1] * self._random.randrange(4), pa.int64())})
        writer, reader = self._client.do_put(command, rows.schema, self._options)
        try:
            for _ in range(self._random.randrange(4)):
                writer.write_with_metadata(rows, self._bytes(pb.PutShard()))
            writer.write_metadata(self._bytes(pb.PutEnd()))
            writer.done_writing()
            reader.read()
        finally:
            with suppress(flight.FlightError, pa.ArrowException, OSError):
                writer.close()

    def _exchange(self) -> None:
        command = flight.FlightDescriptor.for_command(self._bytes(pb.GatherRequest()))
        writer, reader = self._client.do_exchange(command, self._options)
        rows = [self._random.choice(_NUMBERS[:-1]) for _ in range(self._random.randrange(4))]
        column = self._random.choice(("row", "rows"))
        kind = self._random.choice((pa.int64(), pa.int64(), pa.uint64(), pa.float64()))
        batch = pa.record_batch({column: pa.array(rows, kind)})
        try:
            writer.begin(batch.schema)
            writer.write_batch(batch)
            writer.done_writing()
            reader.read_all()
        finally:
            with suppress(flight.FlightError, pa.ArrowException, OSError):
                writer.close()

    def _action(self) -> None:
        action = flight.Action(self._random.choice((*_TEXTS, "endpoints")), self._noise())
        list(self._client.do_action(action, self._options))

    def _options_of_a_load(self) -> None:
        assert self._listener is not None
        stub = cache_pb2_grpc.CoordinatorStub(self._channel)
        spec = tenant_inputs.dataset_spec(self._random, self._listener)
        with suppress(grpc.RpcError):  # what the one before it left
            stub.DeleteDataset(
                pb.DeleteDatasetRequest(name=spec.name), timeout=_TIMEOUT_S, metadata=self._headers
            )
        request = pb.CreateDatasetRequest(spec=spec)
        stub.CreateDataset(request, timeout=_TIMEOUT_S, metadata=self._headers)

    def _expression(self) -> None:
        ticket = pb.ReadTicket(
            dataset=NAME,
            fingerprint=self._fingerprint,
            expression=tenant_inputs.row_expression(self._random, NUM_ROWS // 4),
        )
        self._client.do_get(flight.Ticket(ticket.SerializeToString()), self._options).read_all()

    def _report(self) -> None:
        report = pb.ReaderReport()
        self._fill(report, 3)
        report.dataset, report.fingerprint = NAME, self._fingerprint
        action = flight.Action("report", report.SerializeToString())
        list(self._client.do_action(action, self._options))

    def _list(self) -> None:
        list(self._client.list_flights(self._noise(), self._options))

    def _http(self) -> None:
        path = self._random.choice(("", "metrics", "ready", "x", "%00", "../x"))
        request = urllib.request.Request(self._page + path, headers=dict(self._headers))
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            answer.read()

    def _noise(self) -> bytes:
        return self._random.randbytes(self._random.randrange(64))

    def _bytes(self, message: Message) -> bytes:
        """Noise, a message of odd values, or one with some bytes changed."""
        kind = self._random.random()
        if kind < 0.3:
            return self._noise()
        self._fill(message, 3)
        data = bytearray(message.SerializeToString())
        if kind < 0.6:
            for _ in range(self._random.randrange(1, 4)):
                data.insert(self._random.randrange(len(data) + 1), self._random.randrange(256))
        return bytes(data)

    def _fill(self, message: Message, depth: int) -> None:
        for field in message.DESCRIPTOR.fields:
            if self._random.random() < 0.5 or (field.message_type and not depth):
                continue
            if field.message_type is None:
                values = [self._value(message, field) for _ in range(self._random.randrange(1, 3))]
                if field.is_repeated:
                    getattr(message, field.name).extend(values)
                else:
                    setattr(message, field.name, values[0])
            elif field.message_type.GetOptions().map_entry:
                continue
            else:
                held = getattr(message, field.name)
                self._fill(held.add() if field.is_repeated else held, depth - 1)

    def _value(self, message: Message, field: FieldDescriptor) -> Any:
        if field.cpp_type in _LIMITS:
            low, high = _LIMITS[field.cpp_type]
            return min(max(self._random.choice((*_NUMBERS, -1)), low), high)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._noise()
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            if field.name == "write_id" and self._random.random() < 0.7:
                return self._write_id
            is_drop = isinstance(message, pb.DeleteDatasetRequest)
            is_report = isinstance(message, pb.ActualDataset)
            if field.name == "fingerprint" and not is_report and self._random.random() < 0.7:
                return self._fingerprint
            text = self._random.choice(_TEXTS)
            return "gone" if is_drop and text == NAME else text
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            return self._random.random() < 0.5
        if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
            return self._random.randrange(3)
        return self._random.choice((0.0, -1.0, 1e300, float("nan")))


def run(calls: int, seed: int, *, max_growth_bytes_per_call: float, tenants: bool = False) -> str:
    """Sends calls to a node; returns a line of numbers.

    Args:
        tenants: also send options, expressions and reports of `benchmarks.trials.tenant_inputs`.

    Raises:
        AssertionError: a call hung, or the node wrote a traceback, grew or gave wrong rows.
    """
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        source = write_numbered(Path(directory, "source"), NUM_ROWS, files=4)
        principals = [
            {"name": role, "sha256": hashlib.sha256(token.encode()).hexdigest(), "roles": [role]}
            for role, token in zip(_ROLES, _TOKENS, strict=False)
            if token is not None
        ]
        tokens = Path(directory, "tokens.yaml")
        tokens.write_text(json.dumps({"principals": principals}), encoding="utf-8")
        arguments = ["--allow-source", f"{source}/", "--auth-tokens", str(tokens)]
        node = LocalNode(Path(directory, "node"), arguments, _TOKENS[0])
        listener = tenant_inputs.Listener() if tenants else None
        try:
            node.start()
            return _run(node, source, calls, seed, max_growth_bytes_per_call, listener)
        finally:
            node.close()
            if listener is not None:
                listener.close()


def _run(
    node: LocalNode,
    source: Path,
    calls: int,
    seed: int,
    max_growth: float,
    listener: tenant_inputs.Listener | None,
) -> str:
    spec = DatasetSpec(NAME, source, target_shard_bytes=1)
    fingerprint = CacheClient(Connection(node.endpoint, token=_TOKENS[1])).load(spec).fingerprint
    stop, epochs, wrong = threading.Event(), [0], list[str]()

    def read() -> None:
        dataset = CacheIterableDataset(
            NAME,
            batch_size=100,
            cache=Connection(node.endpoint, local=False, token=_TOKENS[3]),
            columns=["row"],
        )
        while not stop.is_set() and not wrong:
            rows = [row for batch in dataset for row in batch["row"].tolist()]
            if rows != list(range(NUM_ROWS)):
                wrong.append(f"{len(rows)} rows in another order")
            epochs[0] += 1
            stop.wait(0.2)

    reader = threading.Thread(target=read)
    reader.start()
    start = time.monotonic()
    fuzzer = Fuzzer(node, fingerprint, seed, listener)
    try:
        for _ in range(calls // 4):  # what is imported and kept at first use
            fuzzer.call()
        before = _memory(node.pid)
        for number in range(calls - calls // 4):
            fuzzer.call()
            _require(node.exit_code is None, f"the node ended with {node.exit_code}: {number}")
            _require(not (listener and listener.arrived), f"call {number} reached a listener")
            if not number % 10_000 and number:
                print(f"{number} calls, {_memory(node.pid)}", file=sys.stderr, flush=True)
        after = _memory(node.pid)
    finally:
        fuzzer.close()
        stop.set()
        reader.join()
    log = node.log_tail(10**9)
    growth = (after[0] - before[0]) / (calls - calls // 4)
    text = (
        f"{calls} calls, seed {seed}, {time.monotonic() - start:.0f} s, {epochs[0]} exact epochs, "
        f"memory {before[0]} -> {after[0]}, {growth:.0f} bytes a call, "
        f"descriptors {before[1]} -> {after[1]}, log {len(log)} bytes"
    )
    _require(not wrong, f"{wrong}: {text}")
    _require("Traceback" not in log and "defect" not in log, f"{text}\n{log[-8000:]}")
    _require(growth <= max_growth, text)
    _require(after[1] <= before[1] + 50, text)
    return text


def _memory(pid: int) -> tuple[int, int]:
    """Resident bytes without the mapped shards, and open descriptors."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    anonymous = next(line for line in lines if line.startswith("RssAnon"))
    return int(anonymous.split()[1]) * 1024, len(os.listdir(f"/proc/{pid}/fd"))


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def _arguments() -> Iterator[int]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--tenants", action=argparse.BooleanOptionalAction, default=True)
    found = parser.parse_args()
    yield from (found.calls, found.seed, found.tenants)


if __name__ == "__main__":
    _calls, _seed, _tenants = _arguments()
    print(f"seed {_seed}", flush=True)
    print(run(_calls, _seed, max_growth_bytes_per_call=50.0, tenants=bool(_tenants)))
