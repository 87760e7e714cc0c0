"""Sealed shard files, as a node and a client on the same machine read them.

    <cache_dir>/.node-id                                      the lasting name of the node
    <cache_dir>/<dataset>/<fingerprint>/shard-00007.arrow     one Arrow IPC file, one record batch
    <cache_dir>/<dataset>/<fingerprint>/manifest.jsonl        a line for each sealed shard

A file counts only as the manifest names it. Rows are gathered from mapped files by numpy and Arrow
kernels, which release the GIL: one short run of bytes a row for packed columns. Nothing is written
here; `cache_server.store` does that.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from protos.layout import Layout, Matrix, as_matrix, from_matrix, pool_matrix
from protos.row_index import Ids

logger = logging.getLogger(__name__)

MANIFEST = "manifest.jsonl"
NODE_ID_FILE = ".node-id"

_MOST_SCRATCH = 64  # times what is asked for


@dataclass(frozen=True)
class SealedShard:
    """A line of the manifest. ``num_bytes`` is the size of the file."""

    index: int
    num_rows: int
    num_bytes: int
    checksum: str


class MappedShard:
    """A sealed shard, mapped: its columns without a copy. Immutable, any thread."""

    def __init__(self, sealed: SealedShard, path: Path) -> None:
        self.sealed = sealed
        self.path = path
        with pa.memory_map(str(path)) as file:  # the pages stay mapped without a file descriptor
            self.file_bytes: int = file.size()
            self.batch: pa.RecordBatch = pa.ipc.open_file(file).get_batch(0)
        self.layout = Layout.of_stored(self.batch.schema)
        self.matrices: dict[int, Matrix] = {
            index: as_matrix(self.batch.column(index))
            for index, column in enumerate(self.layout.columns)
            if column.kind != "plain"
        }


class Selection:
    """Which stored columns, and which positions in them, give the wanted logical columns."""

    def __init__(self, stored: Layout, columns: Sequence[str]) -> None:
        self.layout = stored.select(columns)
        self.picks: list[tuple[int, list[int] | None]] = []
        for column in self.layout.columns:
            index = stored.place(column.names[0])[0]
            positions = [stored.place(name)[1] for name in column.names]
            whole = positions == list(range(len(stored.columns[index].names)))
            self.picks.append((index, None if whole else positions))

    def narrow(self, pick: int, matrix: Matrix) -> Matrix:
        """The wanted columns of rows of stored column ``pick``; contiguous."""
        positions = self.picks[pick][1]
        if positions is None:
            return matrix
        narrow = pool_matrix(len(matrix), len(positions), matrix.dtype)
        np.take(matrix, positions, axis=1, out=narrow, mode="clip")
        return narrow


@dataclass(frozen=True)
class Run:
    """Rows ``[start, stop)`` of a request, which are all of one shard.

    Attributes:
        first_row: of the shard in its version.
    """

    shard: MappedShard
    first_row: int
    start: int
    stop: int


def gather(
    runs: Sequence[Run],
    rows: Ids,
    selection: Selection,
    inverse: npt.NDArray[np.intp] | None = None,
) -> pa.RecordBatch:
    """Rows of one or more shards as one stored batch, in memory of its own but for plain columns.

    Args:
        runs: at least one, in order, without a gap.
        rows: ids of the version, each inside the shard of its run; checked by the caller.
        inverse: the order that the rows are wanted in; None: as they come.
    """
    local = np.empty_like(rows)
    for run in runs:
        np.subtract(rows[run.start : run.stop], run.first_row, out=local[run.start : run.stop])
    arrays: list[pa.Array] = []
    for pick, (index, _) in enumerate(selection.picks):
        column = selection.layout.columns[pick]
        if column.kind == "plain":
            parts = [
                r.shard.batch.column(index).take(pa.array(local[r.start : r.stop])) for r in runs
            ]
            joined = parts[0] if len(parts) == 1 else pa.concat_arrays(parts)
            arrays.append(joined if inverse is None else joined.take(pa.array(inverse)))
            continue
        first = runs[0].shard.matrices[index]
        make = pool_matrix if inverse is None else scratch_matrix
        out = make(len(local), first.shape[1], first.dtype)
        for run in runs:
            # mode="clip" spares a hidden copy.
            wanted, target = local[run.start : run.stop], out[run.start : run.stop]
            np.take(run.shard.matrices[index], wanted, axis=0, out=target, mode="clip")
        if inverse is not None:
            ordered = pool_matrix(len(local), out.shape[1], out.dtype)
            np.take(out, inverse, axis=0, out=ordered, mode="clip")
            out = ordered
        arrays.append(from_matrix(selection.narrow(pick, out), column.field))
    return pa.RecordBatch.from_arrays(arrays, schema=selection.layout.schema)


_scratches = threading.local()


def scratch_matrix(rows: int, width: int, dtype: np.dtype[np.generic]) -> Matrix:
    """An uninitialised array that lives until this thread asks for the next one.

    Fresh memory would cost as much as filling it.
    """
    size = rows * width * dtype.itemsize
    block: npt.NDArray[np.uint8] | None = getattr(_scratches, "block", None)
    if block is None or not size <= len(block) <= _MOST_SCRATCH * max(1, size):
        block = _scratches.block = np.empty(size, np.uint8)
    return block[:size].view(dtype).reshape(rows, width)


def _take(array: pa.Array, rows: Ids) -> pa.Array:
    """These rows of a plain column; consecutive ones are a view, since nobody can write to it."""
    if are_consecutive(rows):
        return array.slice(rows[0], len(rows))
    return array.take(pa.array(rows))


def are_consecutive(rows: Ids) -> bool:
    """Whether each of these numbers, of which there is at least one, is the one before plus 1."""
    return bool(rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all())


def shard_file_name(index: int) -> str:
    """The file name of shard ``index`` in its version's directory."""
    return f"shard-{index:05d}.arrow"


def empty_batch(layout: Layout) -> pa.RecordBatch:
    """No rows of a layout."""
    return pa.RecordBatch.from_arrays(
        [pa.array([], field.type) for field in layout.schema], schema=layout.schema
    )


def read_manifest(path: Path) -> list[SealedShard]:
    """The last line of each shard; a torn line is a shard that was never sealed."""
    found: dict[int, SealedShard] = {}
    if not path.exists():
        return []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            sealed = SealedShard(**json.loads(line))
        except (ValueError, TypeError):
            logger.warning("manifest line ignored path=%s line=%r", path, line)
            continue
        found[sealed.index] = sealed
    return list(found.values())


def manifest_line(sealed: SealedShard) -> str:
    """The line of a manifest that names a shard."""
    return json.dumps(asdict(sealed)) + "\n"
