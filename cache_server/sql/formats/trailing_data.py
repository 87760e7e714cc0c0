"""Refuses Arrow files with data after the end that DataFusion sees.

Of streams that `cat` joined, DataFusion reads only the first one; of files that `cat` joined, only
the one with the last footer. The other rows would be lost silently.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from cache_protocol.errors import LoadError
from cache_server.source.pinned import Split

_MAGIC = b"ARROW1"
_HEAD_BYTES = 512  # the magic and the zeros after it
_TAIL_BYTES = 4 + len(_MAGIC)  # the length of the footer, and the magic again
_ALIGNED = 8  # where messages begin


def check_end(path: Path, split: Split) -> None:
    """Checks the messages of an Arrow stream or file, without their values.

    Args:
        path: of the split's file on this machine.

    Raises:
        LoadError: naming the file and the byte where the unread data begins.
        pa.ArrowInvalid: a message is damaged.
        OSError: the file cannot be read.
    """
    with pa.memory_map(str(path)) as mapped:
        data = mapped.read_buffer()
        start, stop = _messages(data)
        source = pa.BufferReader(data[start:stop])
        for _ in pa.ipc.MessageReader.open_stream(source):
            pass
        end = start + source.tell()
        if np.frombuffer(data, np.uint8)[end:stop].any():  # zeros may pad the end
            raise LoadError(
                f"cannot load {split}: its rows end at byte {end}, and what follows would not be "
                "read, as where several streams or files were joined by cat; give each a file of "
                "its own"
            )


def _messages(data: pa.Buffer) -> tuple[int, int]:
    """Where messages may be: all of a stream; of a file, between its magic and its footer."""
    head, tail = data[:_HEAD_BYTES].to_pybytes(), data[-_TAIL_BYTES:].to_pybytes()
    if not (head.startswith(_MAGIC) and tail.endswith(_MAGIC)):
        return 0, data.size
    padding = head[len(_MAGIC) :]  # some writers align by 64 bytes
    begun = len(head) - len(padding.lstrip(b"\0"))
    footer_bytes = int.from_bytes(tail[:4], "little")
    return begun // _ALIGNED * _ALIGNED, data.size - _TAIL_BYTES - footer_bytes
