"""Arrow files that go on behind the end of what DataFusion reads of them.

Several streams in one file, as `cat` makes it, are read up to the end of the first one; of several
files, the footer of the last one is taken for that of them all. The rest would be lost without a
word.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from cache_protocol.errors import LoadError
from cache_server.source.pinned import Split

_MAGIC = b"ARROW1"
_HEAD_BYTES = 512  # hold the magic and the zeros behind it
_TAIL_BYTES = 4 + len(_MAGIC)  # the length of the footer, and the magic again
_ALIGNED = 8  # where messages begin


def check_end(path: Path, split: Split) -> None:
    """Looks through the messages of an Arrow stream or file, not at the values in them.

    Args:
        path: of the split's file on this machine.

    Raises:
        LoadError: naming the file and the byte at which something follows that is not read.
        pa.ArrowInvalid: there is a damaged message.
        OSError: the file cannot be read.
    """
    with pa.memory_map(str(path)) as mapped:
        data = mapped.read_buffer()
        start, stop = _messages(data)
        source = pa.BufferReader(data[start:stop])
        for _ in pa.ipc.MessageReader.open_stream(source):
            pass
        end = start + source.tell()
        if np.frombuffer(data, np.uint8)[end:stop].any():  # zeros may fill it up
            raise LoadError(
                f"cannot load {split}: its rows end at byte {end}, and what follows would not be "
                "read, as where several streams or files were joined by cat; give each a file of "
                "its own"
            )


def _messages(data: pa.Buffer) -> tuple[int, int]:
    """Where messages may stand: all of a stream; of a file, between its magic and its footer."""
    head, tail = data[:_HEAD_BYTES].to_pybytes(), data[-_TAIL_BYTES:].to_pybytes()
    if not (head.startswith(_MAGIC) and tail.endswith(_MAGIC)):
        return 0, data.size
    padding = head[len(_MAGIC) :]  # some writers align by 64 bytes
    begun = len(head) - len(padding.lstrip(b"\0"))
    footer_bytes = int.from_bytes(tail[:4], "little")
    return begun // _ALIGNED * _ALIGNED, data.size - _TAIL_BYTES - footer_bytes
