"""Flipped bits in the messages and offsets of a shard file: a read gives rows or a named error."""

from __future__ import annotations

import os
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from cache_protocol.errors import NodeUnavailableError, NotReadyError, RequestError
from cache_protocol.storage.shard_files import MappedShard, Selection
from cache_server.shards.packing import ShardBuilder, logical_schema
from cache_server.shards.resident_rows import ResidentRows
from cache_server.shards.store import ShardStore
from tests.stored_rows import KEY

ROWS = 23
_FLIPS = 120  # of the file's thousands of bytes; once, all were tried
TABLE = pa.record_batch(
    {
        "row": np.arange(ROWS),
        "image": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(3.0 * ROWS)), 3),
        "text": [None if row % 5 == 0 else f"row {row}" for row in range(ROWS)],
        "bytes": pa.array([b"x" * (row % 4) for row in range(ROWS)], pa.large_binary()),
        "tags": [[row] * (row % 3) for row in range(ROWS)],
        "pair": [[row, row] for row in range(ROWS)],
        "names": [[f"{row}"] * (row % 3) for row in range(ROWS)],
        "deep": pa.array(
            [[[row], []] * (row % 2) for row in range(ROWS)], pa.large_list(pa.list_(pa.int64()))
        ),
    }
)


@contextmanager
def sealed(directory: Path) -> Iterator[MappedShard]:
    builder = ShardBuilder(logical_schema(TABLE.schema))
    builder.append(TABLE)
    with ShardStore(directory) as store:
        yield store.seal(KEY, 0, builder.finish())


def in_a_child(run: Callable[[], None]) -> None:
    """Runs in a fork, whose death by a signal fails this test only."""
    child = os.fork()
    if not child:
        try:
            run()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def read_all(shard: MappedShard, damaged: list[MappedShard]) -> Iterator[str]:
    """How each way to read the rows ends."""
    rows = ResidentRows(KEY, shard.layout, ROWS, {0: shard}, damaged.append)
    selection = Selection(shard.layout, [])
    shuffled = np.random.default_rng(0).permutation(ROWS)
    ways: tuple[Callable[[], list[pa.RecordBatch]], ...] = (
        lambda: [*rows.gather(shuffled, selection)],
        lambda: [*rows.gather(np.arange(4, 20), selection)],
        lambda: [*rows.messages(0, ROWS, 64, selection)],
        lambda: [*rows.slices(0, ROWS, 5, selection)],
        lambda: [*rows.lots(0, ROWS, TABLE.schema.names, 64)],
    )
    for way in ways:
        try:
            batches = way()
        except (NotReadyError, RequestError) as error:
            yield type(error).__name__
            continue
        for batch in batches:
            for column in batch.columns:
                pa.concat_arrays([column])  # follows every offset
        yield "rows"


def test_each_flip_in_a_mapped_file_ends_in_rows_or_in_a_named_error(tmp_path: Path) -> None:
    def run() -> None:
        chance, ends, damaged = random.Random(1), Counter[str](), list[MappedShard]()
        with sealed(tmp_path) as shard, shard.path.open("rb") as file:
            data = file.read()
        shard.path.chmod(0o644)
        with shard.path.open("r+b", buffering=0) as file:
            for at in chance.sample(range(len(data)), min(_FLIPS, len(data))):
                file.seek(at)
                file.write(bytes([data[at] ^ 1 << chance.randrange(8)]))
                ends.update(read_all(shard.renamed(shard.sealed, shard.path), damaged))
                file.seek(at)
                file.write(data[at : at + 1])
        assert ends["rows"] and ends["NotReadyError"] and damaged, ends
        assert {*ends} <= {"rows", "NotReadyError", "RequestError"}, ends

    in_a_child(run)


@pytest.mark.parametrize("digests", [True, False], ids=["with digests", "without digests"])
def test_a_file_with_a_flip_is_not_mapped_or_its_reads_end_by_name(
    tmp_path: Path, digests: bool
) -> None:
    def run() -> None:
        chance, ends = random.Random(2), Counter[str]()
        with sealed(tmp_path) as shard:
            data, known = shard.path.read_bytes(), shard.sealed
        if not digests:
            known = type(known)(0, known.num_rows, known.num_bytes, known.checksum)
        copy = tmp_path / "copy"
        for at in chance.sample(range(len(data)), min(_FLIPS, len(data))):
            copy.write_bytes(
                data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
            )
            try:
                mapped = MappedShard(known, copy)
                assert mapped.batch.num_rows == ROWS or not digests
                if mapped.batch.num_rows == ROWS and mapped.layout.schema == shard.layout.schema:
                    ends.update(read_all(mapped, []))
            except (ValueError, OSError, pa.ArrowException) as error:
                ends[type(error).__name__] += 1
        # The whole file is one piece.
        assert (ends["rows"] == 0) is digests, ends

    in_a_child(run)


def test_a_shard_with_an_offset_outside_of_its_column_is_not_sealed(tmp_path: Path) -> None:
    builder = ShardBuilder(logical_schema(TABLE.schema))
    builder.append(TABLE)
    batch = builder.finish()
    index = batch.schema.get_field_index("text")
    offsets = np.frombuffer(batch.column(index).buffers()[1], np.int32).copy()
    offsets[3] = 2**30
    text = batch.column(index).buffers()[2]
    broken = batch.set_column(
        index,
        batch.schema.field(index),
        pa.StringArray.from_buffers(ROWS, pa.py_buffer(offsets), text),
    )
    with ShardStore(tmp_path) as store:
        with pytest.raises(NodeUnavailableError, match="column 'text' lies outside"):
            store.seal(KEY, 0, broken)
        assert store.versions() == {} and not [*tmp_path.rglob("shard-*")]
