"""What a tenant sends on purpose: options, sources, expressions and reports. From one seed.

The names come from the installed libraries, so that a release with a new name is tried, too:
options from pyiceberg and obstore, functions from DataFusion.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random

import obstore
import pyiceberg.catalog
import pyiceberg.catalog.rest
import pyiceberg.io
from datafusion import SessionConfig, SessionContext

from cache_protocol.v1 import cache_pb2 as pb

_SCHEMES = ("s3", "s3a", "gs", "abfss", "az", "adl", "http", "https", "hf", "file", "postgresql")
_FORMATS = ("", "parquet", "csv", "json", "arrow", "iceberg", "delta", "postgres")
_PROGRAMS = ("subprocess.Popen", "os.system", "builtins.exec", "pyiceberg.io.pyarrow.PyArrowFileIO")
_ARGUMENTS = (
    '"row"', '"text"', '"a"', "NULL", "''", "'%'", "'(a+)+$'", "'🙂'", "-1", "0", "64",
    "2000000000", "9223372036854775807", "1e308", "'NaN'::double", "make_array(\"row\")", "'1 day'",
    "DATE '2024-01-01'", "repeat('x', 1000)", "\"row\" = 1",
)  # fmt: skip


class Listener:
    """Counts the connections to a port of loopback, which no node has a reason to make."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.arrived: list[bytes] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def spellings(self) -> tuple[str, ...]:
        """The address of this listener, in the ways that parsers read differently."""
        at = f"127.0.0.1:{self.port}"
        return (
            f"http://{at}", f"https://{at}", at, f"http:{at}", f"http:/{at}", f"http:\\\\{at}",
            f"http://localhost:{self.port}", f"http://2130706433:{self.port}",
            f"http://127.1:{self.port}", f"http://[::ffff:127.0.0.1]:{self.port}",
            f"http://{at}\\@example.com", f"http://example.com@{at}", f"x@{at}/?",
            f"//{at}", f"http://{at}%2f.example.com",
        )  # fmt: skip

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                with connection:
                    connection.settimeout(0.2)
                    received = b""
                    with suppress(OSError):
                        received = connection.recv(200)
                    self.arrived.append(received)


@cache
def option_names() -> tuple[str, ...]:
    """Every option that pyiceberg and obstore name, with and without the prefixes of a spec."""
    modules = (pyiceberg.io, pyiceberg.catalog, pyiceberg.catalog.rest)
    constants = [value for module in modules for name, value in vars(module).items()
                 if name.isupper() and isinstance(value, str)]  # fmt: skip
    text = "".join(
        path.read_text(encoding="utf-8") for path in Path(obstore.__file__).parent.rglob("*.pyi")
    )
    settings = re.findall(r"^    ([a-z][a-z0-9_]+): ", text, re.MULTILINE)
    names = {*constants, *settings, "py-io-impl", "py-catalog-impl", "proxy_url", "type", "uri"}
    return tuple(sorted(names | {f"catalog.{name}" for name in names}))


@cache
def functions() -> tuple[str, ...]:
    """Every function that DataFusion lists."""
    context = SessionContext(SessionConfig().with_information_schema(True))
    query = "SELECT DISTINCT routine_name FROM information_schema.routines"
    return tuple(sorted(context.sql(query).to_arrow_table().column(0).to_pylist()))


def dataset_spec(chance: Random, listener: Listener) -> pb.DatasetSpec:
    """A load of a source somewhere, with options that name code, addresses and files."""
    addresses = listener.spellings()
    values = (*addresses, *_PROGRAMS, "/etc/passwd", "true", "1", "-1", "", "x" * 3000, "a\nb")
    address = chance.choice(addresses)
    source = chance.choice((f"{chance.choice(_SCHEMES)}://{address.removeprefix('http://')}/a.csv",
                            f"{chance.choice(_SCHEMES)}://bucket/a.parquet", address))  # fmt: skip
    options = {
        chance.choice(option_names()): chance.choice(values) for _ in range(chance.randrange(1, 4))
    }
    table = pb.TableSpec(
        name="source", source=[source], format=chance.choice(_FORMATS), options=options
    )
    return pb.DatasetSpec(name="gone", tables=[table])


def expression(chance: Random, depth: int = 3) -> str:
    """A row expression: functions in each other, with arguments that grow, match or overflow."""
    if not depth or chance.random() < 0.3:
        return chance.choice(_ARGUMENTS)
    count = chance.randrange(4)
    arguments = ", ".join(expression(chance, depth - 1) for _ in range(count))
    return f"{chance.choice(functions())}({arguments})"


def row_expression(chance: Random, num_rows: int) -> pb.RowExpression:
    """A request for values of the rows of a shard."""
    where: Sequence[str] = [expression(chance, 2)] if chance.random() < 0.2 else ()
    rows = pb.RowRange(start=0, stop=chance.choice((1, num_rows)))
    return pb.RowExpression(rows=rows, expression=expression(chance), where=where)
