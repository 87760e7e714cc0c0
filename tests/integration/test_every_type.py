"""Every type of the guide, with the values at its ends, by every way to read it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pyarrow.parquet as pq
import pytest
import torch

from cache_client import CacheClient, CacheDataset, CacheIterableDataset, DatasetSpec, Reading
from cache_client.order import order as ordering
from cache_server import LocalCluster
from tests.flight_clients import connect
from tests.job_arguments import grouped

ROWS, FILES, NAME = 90, 3, "every-type"
TIMES = [pa.date32(), pa.time32("ms"), pa.time64("ns"), pa.duration("ms"), pa.timestamp("us")]
ZONED = pa.timestamp("ns", "Europe/Berlin")
TEXTS: list[Any] = ["", "a\0b", None, "日本", "x" * 300]
BINARIES: list[Any] = [b"", None, b"\xff\0", b"x" * 99]


def cycled(values: list[Any], dtype: pa.DataType) -> pa.Array:
    return pa.array([values[row % len(values)] for row in range(ROWS)], dtype)


FLAG = "Flag 'of' \"é\".x"


def columns() -> dict[str, tuple[pa.Array, list[Any]]]:
    """Name -> what is written, and the value of each row as the guide says that it is stored."""
    found: dict[str, tuple[pa.Array, list[Any]]] = {}

    def add(name: str, array: pa.Array, stored: list[Any] | None = None) -> None:
        found[name] = array, array.to_pylist() if stored is None else stored

    for bits in (8, 16, 32, 64):
        for dtype in (np.dtype(f"int{bits}"), np.dtype(f"uint{bits}")):
            ends = np.iinfo(dtype)
            add(f"{dtype}", cycled([int(ends.min), int(ends.max), 1], pa.from_numpy_dtype(dtype)))
    for bits in (16, 32, 64):
        number = np.finfo(f"float{bits}")
        least, most = float(number.smallest_subnormal), float(number.max)
        values = [-0.0, 0.1, least, most, math.inf, -math.inf, math.nan, None]
        array = cycled(values, pa.from_numpy_dtype(number.dtype))
        add(f"float{bits}", array, [math.nan if v is None else v for v in array.to_pylist()])
    prices = cycled([Decimal("0.57"), Decimal("-999.99"), None], pa.decimal128(5, 2))
    add("decimal", prices, [math.nan if v is None else float(v) for v in prices.to_pylist()])
    for dtype in [*TIMES, ZONED]:
        integer = pa.int32() if dtype.bit_width == 32 else pa.int64()
        array = cycled([0, 1, 86_399], integer)
        add(f"{dtype}", array.view(dtype), array.to_pylist())
    flags = cycled([True, False, False], pa.bool_())
    add(FLAG, flags, [int(flag) for flag in flags.to_pylist()])
    add("batch", cycled(TEXTS, pa.string()))
    add("packed_double", cycled(TEXTS, pa.large_string()))
    add("view", cycled(TEXTS, pa.string_view()))
    add("binary", cycled(BINARIES, pa.binary()))
    add("fixed_size_binary", cycled([b"ab", b"\0\0", None], pa.binary(2)))
    words = cycled(TEXTS, pa.string())
    add("dictionary", words.dictionary_encode(), words.to_pylist())
    add("floats", cycled([[], [0.5], None, [-0.0, 2.0], [1.0, None]], pa.list_(pa.float32())))
    add("large", cycled([[2**63 - 1], [], None], pa.large_list(pa.int64())))
    add("texts", cycled([["", None], [], None, ["x" * 99]], pa.list_(pa.string())))
    add("lists", cycled([[[1], []], [], None, [None]], pa.list_(pa.list_(pa.int16()))))
    add("vector", cycled([[1.5, -0.0], [0.25, 3.0]], pa.list_(pa.float32(), 2)))
    add("matrix", cycled([[[1, 2, 3], [4, 5, 6]]], pa.list_(pa.list_(pa.uint8(), 3), 2)))
    return found


COLUMNS = columns()
DTYPES = [name for name in COLUMNS if name[-1].isdigit()]
STORED = {name: stored for name, (_, stored) in COLUMNS.items()}


@pytest.fixture(scope="module")
def endpoint(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("every-type")
    table = pa.table({name: array for name, (array, _) in COLUMNS.items()})
    for index in range(FILES):
        part = table.slice(index * ROWS // FILES, ROWS // FILES)
        pq.write_table(part, folder / f"{index}.parquet", row_group_size=7)
    client = CacheClient(cluster.endpoint)
    client.load(DatasetSpec(NAME, folder, target_shard_bytes=1))
    yield cluster.endpoint
    client.drop(NAME)


def plain(value: Any) -> Any:
    """In Python's own values."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return plain(value.tolist())
    return [plain(item) for item in value] if isinstance(value, list) else value


def check(values: Any, name: str, row_ids: list[int]) -> None:
    # As texts: they tell zeros by their signs, integers from floats, and NaN is NaN.
    assert repr(plain(values)) == repr([STORED[name][row] for row in row_ids]), name


@pytest.mark.parametrize("local", [True, False], ids=["local", "flight"])
@pytest.mark.parametrize("batch_format", ["torch", "numpy", "arrow"])
@pytest.mark.parametrize("names", [list(STORED), list(STORED)[::-3]], ids=["all", "some"])
def test_what_a_loop_gets_is_what_the_table_holds(
    endpoint: str, names: list[str], batch_format: Any, local: bool
) -> None:
    ways = {"endpoint": endpoint, "columns": names, "batch_format": batch_format, "local": local}
    dataset = CacheIterableDataset(
        NAME, **grouped(batch_size=13, shuffle=True, reading=Reading(message_bytes=500), **ways)
    )
    order = (
        ordering.EpochOrder(ROWS, shuffle=True, seed=0, epoch=0).row_ids(np.arange(ROWS)).tolist()
    )
    batches = [(batch, order[step * 13 : step * 13 + 13]) for step, batch in enumerate(dataset)]
    with CacheDataset(NAME, **grouped(**ways)) as rows:
        batches += [(rows.fetch(some), some) for some in ([], [5], [88, 0, 88, 3], [40, 41, 42])]

    for batch, row_ids in batches:
        assert list(batch.schema.names if batch_format == "arrow" else batch) == names
        for name in names:
            values = batch[name].to_pylist() if batch_format == "arrow" else batch[name]
            if batch_format != "arrow" and name == FLAG:
                assert str(values.dtype).removeprefix("torch.") == "bool"
                values = [int(flag) for flag in values.tolist()]
            check(values, name, row_ids)
            if batch_format != "arrow" and name in DTYPES:
                assert str(values.dtype).removeprefix("torch.") == name


def test_a_client_of_flight_gets_what_the_table_holds(endpoint: str) -> None:
    with connect(endpoint) as client:
        info = client.get_flight_info(flight.FlightDescriptor.for_path(NAME))
        tables = [
            connect(part.locations[0]).do_get(part.ticket).read_all() for part in info.endpoints
        ]
    table = pa.concat_tables(tables)

    assert table.schema.equals(info.schema) and info.total_records == ROWS
    for name in STORED:
        check(table[name].to_pylist(), name, list(range(ROWS)))
