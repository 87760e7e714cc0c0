"""Reads Parquet footers in a process that may abort: a program, started by `footers`.

Some damaged or encrypted footers end the process that looks at their columns: pyarrow does not
catch these exceptions of Arrow. Standard input is a socket. A request is the end of a Parquet file,
the answer is empty, or the reason why the footer cannot be read. Both have their length before
them. The program ends with its standard input.

It imports nothing of this project and no numpy, so it starts in a tenth of a second.
"""

from __future__ import annotations

import base64
import resource
import socket
import sys
from contextlib import suppress

LENGTH_BYTES = 8  # before each request and each answer, little-endian
_SIGNED_BYTES = 28 + 8  # the signature of a file with encrypted columns; length and "PAR1"


def main() -> None:
    """Answers until the other end closes the socket."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dump for an expected end
    with socket.socket(fileno=0) as connection, connection.makefile("rwb") as stream:
        while header := stream.read(LENGTH_BYTES):
            answer = _reason(stream.read(int.from_bytes(header, "little"))).encode(errors="replace")
            stream.write(len(answer).to_bytes(LENGTH_BYTES, "little") + answer)
            stream.flush()


def _reason(tail: bytes) -> str:
    """Why a footer cannot be read; empty if it can."""
    import pyarrow as pa
    from pyarrow import _parquet

    try:
        reader = _parquet.ParquetReader()
        reader.open(pa.BufferReader(tail))
        footer = reader.metadata
        if len(tail) - footer.serialized_size == _SIGNED_BYTES:
            return "it is encrypted"
        for group in map(footer.row_group, range(footer.num_row_groups)):
            if group.num_columns != footer.num_columns:
                return f"a row group has {group.num_columns} of {footer.num_columns} columns"
            for chunk in map(group.column, range(group.num_columns)):
                if not 0 <= group.num_rows <= chunk.num_values:
                    return f"a row group of {group.num_rows} rows has {chunk.num_values} values"
                if (statistics := chunk.statistics) is not None and statistics.has_min_max:
                    _ = statistics.min_raw, statistics.max_raw, statistics.logical_type.to_json()
                    with suppress(Exception):  # Python lacks some dates
                        _ = statistics.min, statistics.max
        footer.write_metadata_file(pa.BufferOutputStream())
        _ = footer.schema.to_arrow_schema().names
        if hint := (footer.metadata or {}).get(b"ARROW:schema"):
            _ = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(hint))).names
        _ = [footer.schema.column(leaf).path for leaf in range(footer.num_columns)]
    except Exception as error:  # any of Arrow, or of Python while it decodes text
        return str(error) or type(error).__name__
    return ""


if __name__ == "__main__":
    sys.modules["numpy"] = None  # type: ignore[assignment]  # pyarrow works without it
    main()
