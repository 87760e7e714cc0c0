"""Refuses Arrow files with data that a reader does not see.

Of streams that `cat` joined, readers see only the first one; of files that `cat` joined, only the
one with the last footer, which then points into the first one. The other rows would be lost
silently.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from cache_protocol.errors import LoadError
from cache_server.source.pinned import Split

_MAGIC = b"ARROW1"
_TAIL_BYTES = 4 + len(_MAGIC)  # the length of the footer, and the magic again
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # before the footer of most writers
# Of the footer, a table of Flatbuffers: see Footer and Block in Arrow's File.fbs.
_DICTIONARIES, _RECORD_BATCHES = 2, 3
_BLOCK = np.dtype([("offset", "<i8"), ("metadata", "<i4"), ("", "<i4"), ("body", "<i8")])


def check_end(path: Path, split: Split) -> None:
    """Checks where the messages of an Arrow stream or file end, without their values.

    Args:
        path: of the split's file on this machine.

    Raises:
        LoadError: naming the file and the byte where the unread data begins.
        pa.ArrowInvalid: a message or the footer is damaged.
        OSError: the file cannot be read.
    """
    with pa.memory_map(str(path)) as mapped:
        data = mapped.read_buffer()
        is_file = data[: len(_MAGIC)].to_pybytes() == _MAGIC
        end, stop = _end_of_file(data) if is_file else (_end_of_stream(data), data.size)
        left = np.frombuffer(data, np.uint8)[end:stop]
        if is_file and left[: len(_END_OF_STREAM)].tobytes() == _END_OF_STREAM:
            left = left[len(_END_OF_STREAM) :]
        if left.any():  # zeros may pad the end
            raise LoadError(
                f"cannot load {split}: its rows end at byte {end}, and what follows would not be "
                "read, as where several streams or files were joined by cat; give each a file of "
                "its own"
            )


def open_arrow(
    file: pa.NativeFile, columns: Sequence[str] | None = None
) -> pa.ipc.RecordBatchFileReader | pa.ipc.RecordBatchStreamReader:
    """The reader of an Arrow file or stream.

    Args:
        columns: that are read; None for all.
    """
    is_file = file.read(len(_MAGIC)) == _MAGIC
    opened = pa.ipc.open_file if is_file else pa.ipc.open_stream
    file.seek(0)
    reader = opened(file)
    if columns is None:
        return reader
    file.seek(0)
    wanted = [reader.schema.get_field_index(name) for name in columns]
    return opened(file, options=pa.ipc.IpcReadOptions(included_fields=wanted))


def batches_of(
    reader: pa.ipc.RecordBatchFileReader | pa.ipc.RecordBatchStreamReader,
) -> Iterator[pa.RecordBatch]:
    """Its batches, one at a time."""
    if isinstance(reader, pa.ipc.RecordBatchStreamReader):
        yield from reader
    else:
        yield from map(reader.get_batch, range(reader.num_record_batches))


def _end_of_stream(data: pa.Buffer) -> int:
    source = pa.BufferReader(data)
    for _ in pa.ipc.MessageReader.open_stream(source):
        pass
    return int(source.tell())


def _end_of_file(data: pa.Buffer) -> tuple[int, int]:
    """The end of the last message that the footer names, and where the footer begins."""
    tail = data[-_TAIL_BYTES:].to_pybytes()
    stop = data.size - _TAIL_BYTES - int.from_bytes(tail[:4], "little")
    if not tail.endswith(_MAGIC) or stop < 0:
        raise pa.ArrowInvalid("it has no footer")
    footer = data[stop:-_TAIL_BYTES].to_pybytes()
    try:
        blocks = [*_blocks(footer, _DICTIONARIES), *_blocks(footer, _RECORD_BATCHES)]
    except (struct.error, ValueError):
        raise pa.ArrowInvalid("its footer is damaged") from None
    return max((sum(map(int, block)) for block in blocks), default=stop), stop


def _blocks(footer: bytes, field: int) -> Iterator[tuple[int, int, int]]:
    """Offset, and bytes of metadata and body, of each message in a field of the footer."""
    (root,) = struct.unpack_from("<I", footer)
    vtable = root - struct.unpack_from("<i", footer, root)[0]
    (size,) = struct.unpack_from("<H", footer, vtable)
    if 4 + 2 * field >= size:
        return
    (place,) = struct.unpack_from("<H", footer, vtable + 4 + 2 * field)
    if place:
        start = root + place + struct.unpack_from("<I", footer, root + place)[0]
        (count,) = struct.unpack_from("<I", footer, start)
        for block in np.frombuffer(footer, _BLOCK, count, start + 4):
            yield block["offset"], block["metadata"], block["body"]
