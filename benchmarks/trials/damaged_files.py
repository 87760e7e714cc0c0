"""Loads damaged files: each is read, or refused by an error that names it, and no process ends.

    python -m benchmarks.trials.damaged_files [--cases 20000] [--first 0] [--seed 0]

Changes one to three bytes, cuts the end off or repeats a piece, in the metadata or anywhere: of
Parquet and Arrow files, on this machine and in S3, and of the metadata of an Iceberg table, which
is Avro and JSON. The suite tries some hundred cases; `make damage` tries thousands. It ends with 1
if a case did anything else.
"""

from __future__ import annotations

import argparse
import io
import mmap
import os
import random
import re
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.manifest import clear_manifest_cache

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import CacheError, RequestError
from tests.iceberg_tables import opened_catalog
from tests.load_here import load_here
from tests.object_store import S3Server

ROWS = 30
OF_QUERY = re.compile("[Nn]o field named|not found in struct|of these types cannot be stored")
FILTER = "number >= 0 OR words LIKE 'a%'"
NESTED = "SELECT number, pairs['a'] AS a, pairs['b'] AS b, lists[1] IS NULL AS c FROM source"


def table(rows: int = ROWS) -> pa.Table:
    """Columns of every kind, with nulls."""
    return pa.table(
        {
            "number": pa.array(range(rows), pa.uint32()),
            "real": [index / 4 for index in range(rows)],
            "words": [None if index % 5 == 0 else f"a word {index}" for index in range(rows)],
            "kinds": pa.array(["u", "v", "w"] * (rows // 3)).dictionary_encode(),
            "flag": [bool(index % 2) for index in range(rows)],
            "price": [Decimal(index) / 4 for index in range(rows)],
            "time": [datetime(2024, 1, 1, index % 24, tzinfo=UTC) for index in range(rows)],
            "lists": [None if index % 7 == 0 else list(range(index % 4)) for index in range(rows)],
            "pairs": [
                None if index % 6 == 0 else {"a": index / 2, "b": "x" * (index % 3)}
                for index in range(rows)
            ],
        }
    )


def sound_files(rows: pa.Table) -> dict[str, list[tuple[bytes, int]]]:
    """Format -> files, each with the byte where its metadata begins."""
    found: dict[str, list[tuple[bytes, int]]] = {"parquet": [], "arrow": []}
    for options in ({}, {"row_group_size": 10}, {"use_dictionary": False, "compression": "none"}):
        sink = io.BytesIO()
        pq.write_table(rows, sink, **options)  # type: ignore[arg-type]
        data = sink.getvalue()
        found["parquet"].append((data, len(data) - 8 - int.from_bytes(data[-8:-4], "little")))
    for compression in (None, "zstd"):
        for make in (pa.ipc.new_file, pa.ipc.new_stream):
            sink = io.BytesIO()
            with make(
                sink, rows.schema, options=pa.ipc.IpcWriteOptions(compression=compression)
            ) as w:
                w.write_table(rows, max_chunksize=20)
            data = sink.getvalue()
            found["arrow"].append((data, len(data) * 2 // 3 if make is pa.ipc.new_file else 0))
    return found


def damaged(data: bytes, metadata: int, draw: random.Random) -> bytes:
    """The file with a fault.

    Args:
        metadata: where it begins; half of the faults are there.
    """
    start = metadata if draw.random() < 0.7 else 0
    kind = draw.random()
    if kind < 0.05:
        return data[: draw.randrange(len(data))]
    if kind < 0.1:
        at, size = draw.randrange(start, len(data)), draw.randrange(1, 64)
        return data[: at + size] + data[at:]
    changed = bytearray(data)
    for _ in range(draw.randint(1, 3)):
        changed[draw.randrange(start, len(data))] = draw.randrange(256)
    return bytes(changed)


class Lake:
    """An Iceberg table; damages one file of its metadata at a time."""

    def __init__(self, directory: Path) -> None:
        flat = table().drop_columns(["pairs", "kinds"])
        with opened_catalog(directory) as catalog:
            made = catalog.create_table("ns.t", flat.schema)
            made.append(flat.slice(0, 10))
            made.append(flat.slice(10))
            self.metadata = made.metadata_location.removeprefix("file://")
        folder = Path(self.metadata).parent
        self.files = [Path(self.metadata), *sorted(folder.glob("*.avro"))]

    def case(self, draw: random.Random, directory: Path) -> Counter[str]:
        path = draw.choice(self.files)
        before = path.read_bytes()
        path.write_bytes(damaged(before, 0, draw))
        clear_manifest_cache()
        try:
            return outcome(DatasetSpec("t", self.metadata), directory, self.metadata)
        finally:
            path.write_bytes(before)


def outcome(spec: DatasetSpec, directory: Path, name: str) -> Counter[str]:
    """What a load came to; anything but rows or an error with ``name`` is raised."""
    try:
        load_here(spec, directory)
    except CacheError as error:
        # The name or the type of a column may be damaged: then the query is refused.
        is_of_query = isinstance(error, RequestError) and OF_QUERY.search(str(error))
        assert name in str(error) or is_of_query, f"no {name!r} in {error}"
        return Counter(["refused"])
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return Counter(["read"])


def run(
    cases: Iterable[int], seed: int, directory: Path, *, store: S3Server | None
) -> Counter[str]:
    """Tries some cases.

    Returns:
        how many were read, and how many refused.

    Raises:
        AssertionError: naming the first case with another end.
    """
    flat, lake = sound_files(table().drop_columns(["pairs"])), Lake(directory)
    nested = sound_files(table())
    counts: Counter[str] = Counter()
    for case in cases:
        draw = random.Random(f"{seed}/{case}")
        try:
            if case % 8 == 0:
                counts += lake.case(draw, directory / "cache")
                continue
            format = "arrow" if case % 8 > 5 else "parquet"
            options: dict[str, Any] = draw.choice([{}, {"filter": FILTER}, {"sql": NESTED}]).copy()
            sound = nested if "sql" in options else flat
            data = damaged(*draw.choice(sound[format]), draw)
            path = directory / f"t.{format}"
            if store is not None and case % 8 in (1, 6):
                store.put("bucket", f"t.{format}", data)
                options["storage_options"] = store.storage_options
                source = f"s3://bucket/t.{format}"
            else:
                path.write_bytes(data)
                source = str(path)
            counts += outcome(DatasetSpec("t", source, **options), directory / "cache", source)
        except BaseException as error:
            error.add_note(f"case {case} of seed {seed}")
            raise
    return counts


def main() -> None:
    """Tries the cases in a fork; after a finding, the cases behind it in another fork."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}, {arguments.cases} cases", flush=True)
    now = mmap.mmap(-1, 8)
    case, stop, findings = arguments.first, arguments.first + arguments.cases, 0
    while case < stop:
        if (pid := os.fork()) == 0:
            os._exit(_tried(range(case, stop), arguments.seed, now))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code == 0:
            break
        case = int.from_bytes(now[:8], "little")
        if code < 0:
            print(f"the process ended by signal {-code} in case {case}", flush=True)
        findings += 1
        case += 1
    print(f"{findings} findings")
    sys.exit(1 if findings else 0)


def _tried(cases: Iterable[int], seed: int, now: mmap.mmap) -> int:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="damage-")))
        store = stack.enter_context(S3Server())

        def noted() -> Iterator[int]:
            for case in cases:
                now[:8] = case.to_bytes(8, "little")
                yield case

        try:
            counts = run(noted(), seed, directory, store=store)
        except BaseException:
            traceback.print_exc()
            return 1
    print(dict(counts), flush=True)
    return 0


if __name__ == "__main__":
    main()
