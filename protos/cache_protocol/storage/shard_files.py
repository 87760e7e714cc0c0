"""Sealed shard files, for nodes and for clients on the same machine.

    <cache_dir>/.node-id                                      the permanent id of the node
    <cache_dir>/<dataset>/<fingerprint>/shard-00007.arrow     one Arrow IPC file, one record batch
    <cache_dir>/<dataset>/<fingerprint>/manifest.jsonl        two lines for each sealed shard

The checksum of a file is XXH3-128 of the digests of its pieces of 1 MiB, in order. So a part of a
file can be checked against the checksum of the whole.

Only files in the manifest count. This module only reads; `cache_server.shards.store` writes.
"""

from __future__ import annotations

import base64
import copy
import json
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from cache_protocol.errors import NotReadyError
from cache_protocol.storage.layout import Layout, Matrix, as_matrix, equal_lists, pool_matrix
from cache_protocol.storage.null_bits import BitMatrix, NullBits
from cache_protocol.storage.offsets import Level, levels_of, rows_are_sound, run_is_sound
from cache_protocol.storage.row_index import Ids
from cache_protocol.storage.virtual_memory import MappedFile, bring_run

logger = logging.getLogger(__name__)

MANIFEST = "manifest.jsonl"
NODE_ID_FILE = ".node-id"
_DIGESTS, _LINE = "digests", "line"
PIECE_BYTES = 1024 * 1024
DIGEST_BYTES = 16


def piece_digest(piece: Any) -> bytes:
    """The digest of a piece, a buffer of at most `PIECE_BYTES`."""
    return xxhash.xxh3_128_digest(piece)


def checksum_of(digests: bytes) -> str:
    """The checksum of a file, in hexadecimal digits.

    Args:
        digests: of its pieces, joined.
    """
    return xxhash.xxh3_128_hexdigest(digests)


def num_pieces(num_bytes: int) -> int:
    """How many pieces a file of ``num_bytes`` has."""
    return -(-num_bytes // PIECE_BYTES)


@dataclass(frozen=True)
class SealedShard:
    """A line of the manifest.

    Attributes:
        num_bytes: size of the file.
        nulls: unit of null bits -> its nulls, if there are any: see `flat_columns`.
        erased: a row set of the rows whose bytes are erased, in base64: see `row_sets`.
        digests: of the pieces of the file, joined; in a line above, which older releases ignore,
            with a digest of this line. Empty: unknown.
    """

    index: int
    num_rows: int
    num_bytes: int
    checksum: str
    nulls: Mapping[str, int] = field(default_factory=dict, hash=False)
    digests: bytes = field(default=b"", repr=False, compare=False)
    erased: str = field(default="", repr=False)


MAPS_PER_SHARD = 2  # of a `MappedShard`
_MAGIC_BYTES = 8  # at the beginning of an Arrow file, padded
MARK = slice(6, 8)  # of a file, in its padding: changes when rows are erased in it
_END_BYTES = 10  # of an Arrow file: the length of the footer, and the magic bytes


class DamagedShardError(ValueError):
    """The bytes of a mapped shard are not as they were sealed.

    Attributes:
        shard: the damaged one.
    """

    def __init__(self, shard: MappedShard, reason: str) -> None:
        super().__init__(f"{shard.path} is damaged: {reason}")
        self.shard = shard


class MappedShard:
    """A mapped shard file, without a copy. Immutable, any thread.

    It is mapped twice: by Arrow, so that gRPC's threads can release slices without the GIL, and as
    a `MappedFile`, whose pages can be mapped side by side with those of other shards.

    Args:
        path: of the file; it may be removed afterwards.

    Attributes:
        batch: all rows, as stored.
        layout: of the batch.
        matrices: stored column -> ``[rows, width]`` view, for packed and matrix columns.
        file: the second mapping.
        address: of the first byte of the file in memory.

    Raises:
        OSError: there is no such file, or it cannot be mapped.
        ValueError, pa.ArrowException: it has no stored batch, or its messages are damaged. Arrow
            reads them only if their digests, where these are known, are right.
    """

    def __init__(self, sealed: SealedShard, path: Path) -> None:
        self.sealed = sealed
        self.path = path
        with pa.memory_map(str(path)) as file:  # the pages stay mapped without a file descriptor
            self.file = MappedFile(file.fileno())
            self._stamp = _stamp(os.fstat(file.fileno()))
            self._bytes = file.read_buffer(self.file.size)
            self._mark = self._bytes[MARK].to_pybytes()
            address: int = self._bytes.address
            self.address = address
            self._check_messages()
            self.batch: pa.RecordBatch = pa.ipc.open_file(file).get_batch(0)
        self.batch.validate()  # the sizes of all buffers
        self.layout = Layout.of_stored(self.batch.schema)
        self.matrices: dict[int, Matrix] = {
            index: as_matrix(self.batch.column(index))
            for index, column in enumerate(self.layout.columns)
            if column.kind != "plain"
        }
        self._equal_lists: dict[int, Matrix | None] = {}
        self._plain_bytes: dict[int, int] = {}
        self._levels: dict[int, tuple[Level, ...]] = {
            index: levels_of(self.batch.column(index))
            for index, column in enumerate(self.layout.columns)
            if column.kind == "plain"
        }
        self._offsets = {
            index: int(matrix.ctypes.data) - address for index, matrix in self.matrices.items()
        }

    @property
    def erased(self) -> bytes:
        """A row set of the rows whose bytes are erased."""
        return base64.b64decode(self.sealed.erased)

    def renamed(self, sealed: SealedShard, path: Path) -> MappedShard:
        """The same mapping for another name of the file; much faster than a second one."""
        other = copy.copy(self)
        other.sealed, other.path = sealed, path
        return other

    @property
    def inode(self) -> tuple[int, int]:
        """Device and inode: versions that share a file have the same."""
        return self._stamp[:2]

    def is_unchanged(self) -> bool:
        """Whether no row was erased, and nothing written, in the file since it was mapped.

        A removed or replaced file is unchanged: its mapped pages stay. Another version may have it,
        too, and erase rows in it, which its mark says. A mapped file that becomes shorter ends the
        process that reads its lost pages (SIGBUS).
        """
        try:
            now = _stamp(os.stat(self.path))
        except OSError:
            now = self._stamp
        is_same = now == self._stamp or now[:2] != self._stamp[:2]
        return is_same and self._bytes[MARK].to_pybytes() == self._mark

    def equal_lists(self, index: int) -> Matrix | None:
        """The rows of plain column ``index`` as a matrix: see `layout.equal_lists`.

        The first call looks at the length of each list.
        """
        if index not in self._equal_lists:
            self._equal_lists[index] = equal_lists(self.batch.column(index))
        return self._equal_lists[index]

    def levels(self, index: int) -> tuple[Level, ...]:
        """The offsets of plain column ``index``, see `offsets`."""
        return self._levels[index]

    def plain_bytes(self, index: int) -> int:
        """About the bytes of plain column ``index``; the first call looks at its offsets."""
        if index not in self._plain_bytes:
            self.check_run(index, 0, self.batch.num_rows)
            self._plain_bytes[index] = self.batch.column(index).nbytes
        return self._plain_bytes[index]

    def null_bits(self, nulls: NullBits, rows: slice) -> BitMatrix | None:
        """The null bits of some rows, in these units; None if the shard has no nulls."""
        index = self.layout.null_index
        if index is None:
            return None
        return nulls.of(self.layout.nulls, self.matrices[index].view(np.uint8)[rows])

    def check_run(self, index: int, start: int, stop: int) -> None:
        """Checks the offsets of consecutive rows of column ``index``, if it is a plain one.

        Raises:
            DamagedShardError: one lies outside of its column.
        """
        if not run_is_sound(self._levels.get(index, ()), start, stop):
            raise self._damaged_column(index)

    def check_rows(self, index: int, rows: Ids | slice) -> None:
        """Checks the offsets of some rows of column ``index``, as `check_run`."""
        if isinstance(rows, slice):
            self.check_run(index, rows.start, rows.stop)
        elif not rows_are_sound(self._levels.get(index, ()), rows):
            raise self._damaged_column(index)

    def check_all(self) -> None:
        """Checks all offsets, as `check_run`."""
        for index in self._levels:
            self.check_run(index, 0, self.batch.num_rows)

    def _damaged_column(self, index: int) -> DamagedShardError:
        name = self.layout.columns[index].names[0]
        return DamagedShardError(self, f"an offset of column {name!r} lies outside of the column")

    def _check_messages(self) -> None:
        """Compares the pieces that hold Arrow's messages with their digests, if these are known.

        Raises:
            ValueError: one has another digest.
        """
        size = self.file.size
        if not self.sealed.digests or size < _MAGIC_BYTES + _END_BYTES:
            return
        self._check_pieces(size - _END_BYTES, size)
        footer = int.from_bytes(memoryview(self._bytes)[size - _END_BYTES :][:4], "little")
        self._check_pieces(max(0, size - _END_BYTES - footer), size)
        start = _MAGIC_BYTES
        for _ in ("schema", "batch"):
            self._check_pieces(start, start + 8)
            head = memoryview(self._bytes)[start + 4 : start + 8]
            stop = start + 8 + int.from_bytes(head, "little")
            self._check_pieces(start, stop)
            start = stop

    def _check_pieces(self, start: int, stop: int) -> None:
        """Compares the pieces that hold some bytes of the file."""
        size = DIGEST_BYTES
        stop = min(stop, self.file.size)
        for index in range(start // PIECE_BYTES, num_pieces(stop)):
            known = self.sealed.digests[index * size : (index + 1) * size]
            if piece_digest(self.piece(index)) != known:
                raise ValueError(f"piece {index} has another checksum")

    def piece(self, index: int) -> memoryview:
        """A piece of the file, read without its neighbours; see `piece_digest`."""
        start = index * PIECE_BYTES
        bring_run(self.address + start, min(PIECE_BYTES, self.file.size - start))
        return memoryview(self._bytes)[start : start + PIECE_BYTES]

    def offset(self, index: int) -> int:
        """The byte offset in the file of the rows of packed or matrix column ``index``."""
        return self._offsets[index]


def _stamp(found: os.stat_result) -> tuple[int, int, int, int]:
    """Device, inode, size and time of the last write."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class Selection:
    """The stored columns, and the positions in them, of the requested logical columns.

    Args:
        stored: of the rows.
        columns: or fields of structs; empty means all.
        null_names: units of null bits to give; default: those of the columns.

    Attributes:
        layout: of the selected rows.
        picks: for each of its columns the index in ``stored``, and the positions of flat columns in
            it, None for all in order. Null bits have no index if there are none.

    Raises:
        RequestError: names an unknown or repeated column.
        NotReadyError: other columns have nulls too.
    """

    def __init__(
        self, stored: Layout, columns: Sequence[str], null_names: Collection[str] | None = None
    ) -> None:
        self.layout = stored.select(columns)
        self._stored = stored.nulls
        if null_names is not None:
            if unknown := self.layout.nulls.units.keys() - set(null_names):
                raise NotReadyError(
                    f"column {min(unknown)!r} has nulls that the reader does not expect: the rows "
                    "are still being loaded, or the reader asked with an old map of the shards"
                )
            self.layout = self.layout.with_nulls(null_names)
        self.picks: list[tuple[int | None, list[int] | None]] = []
        for column in self.layout.columns:
            if column.kind == "nulls":
                self.picks.append((stored.null_index, None))
                continue
            index = stored.place(column.names[0])[0]
            positions = [stored.place(name)[1] for name in column.names]
            whole = positions == list(range(len(stored.columns[index].names)))
            self.picks.append((index, None if whole else positions))

    def narrow(self, pick: int, matrix: Matrix) -> Matrix:
        """The requested columns from rows of stored column ``pick``; contiguous."""
        if self.layout.columns[pick].kind == "nulls":
            return self.layout.nulls.of(self._stored, matrix.view(np.uint8))
        positions = self.picks[pick][1]
        if positions is None:
            return matrix
        narrow = pool_matrix(len(matrix), len(positions), matrix.dtype)
        np.take(matrix, positions, axis=1, out=narrow, mode="clip")
        return narrow

    def no_nulls(self, num_rows: int) -> Matrix:
        """The null bits of rows without nulls."""
        bits = pool_matrix(num_rows, self.layout.nulls.width, np.dtype(np.uint8))
        bits[:] = 0
        return bits


def are_consecutive(rows: Ids) -> bool:
    """Whether one or more row ids ascend by 1."""
    return bool(rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all())


def shard_file_name(index: int) -> str:
    """The file name of shard ``index`` in its version's directory."""
    return f"shard-{index:05d}.arrow"


def empty_batch(layout: Layout) -> pa.RecordBatch:
    """A stored batch without rows."""
    return pa.RecordBatch.from_arrays(
        [pa.array([], field.type) for field in layout.schema], schema=layout.schema
    )


def read_manifest(path: Path) -> list[SealedShard]:
    """The last line of each shard; ignores torn and damaged lines, whose shards do not count."""
    found: dict[int, SealedShard] = {}
    digests: dict[int, bytes] = {}
    if not path.exists():
        return []
    line_digest = ""  # of the next line; empty: unknown
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        expected, line_digest = line_digest, ""
        try:
            if expected and expected != _line_digest(line):
                raise ValueError("another digest")
            content = json.loads(line)
            if _DIGESTS in content:
                digests[content["index"]] = base64.b64decode(content[_DIGESTS], validate=True)
                line_digest = str(content.get(_LINE, ""))
                continue
            sealed = SealedShard(**content)
            if not _is_valid(sealed):
                raise ValueError("a value of another type")
        except (ValueError, TypeError, KeyError, RecursionError):
            logger.warning("manifest line ignored path=%s line=%r", path, line[:200])
            continue
        found[sealed.index] = sealed
    return [replace(sealed, digests=digests.get(sealed.index, b"")) for sealed in found.values()]


def _is_valid(sealed: SealedShard) -> bool:
    numbers = (sealed.index, sealed.num_rows, sealed.num_bytes)
    return (
        all(isinstance(number, int) and number >= 0 for number in numbers)
        and isinstance(sealed.checksum, str)
        and isinstance(sealed.nulls, dict)
        and isinstance(sealed.erased, str)
    )


def manifest_lines(sealed: SealedShard) -> str:
    """The manifest lines of a shard."""
    content = {key: value for key, value in asdict(sealed).items() if value not in ({}, "")}
    digests = base64.b64encode(content.pop(_DIGESTS)).decode()
    line = json.dumps(content)
    if not digests:
        return f"{line}\n"
    above = {"index": sealed.index, _DIGESTS: digests, _LINE: _line_digest(line)}
    return f"{json.dumps(above)}\n{line}\n"


def _line_digest(line: str) -> str:
    return xxhash.xxh3_64_hexdigest(line.encode())
