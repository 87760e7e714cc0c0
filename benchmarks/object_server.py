"""A read-only S3 server over a folder, for benchmarks: as little between disk and socket as can be.

It lists pages of a thousand (ListObjectsV2), answers HEAD, and GET with a range by `sendfile`. It
looks at no signature, writes nothing and lists no "directories". Keys are the paths of the files
below the folder; their bucket is whatever is asked for.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

from benchmarks.processes import child_process

_PAGE = 1000
_SENDFILE_BYTES = 64 * 1024  # below, a read and a write cost less
_RANGE = re.compile(rb"\r\nrange: *bytes=(\d*)-(\d*)\r\n", re.IGNORECASE)


@contextmanager
def object_server(root: Path) -> Iterator[str]:
    """The endpoint of a server over ``root``, in a separate process."""
    with child_process(_main, root) as pipe:
        yield f"http://127.0.0.1:{pipe.recv()}"


def _main(pipe: Connection, root: Path) -> None:
    asyncio.run(_serve(pipe, _Objects(root)))


async def _serve(pipe: Connection, objects: _Objects) -> None:
    server = await asyncio.start_server(objects.answer_all, "127.0.0.1", 0, backlog=512)
    pipe.send(server.sockets[0].getsockname()[1])
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), over.set)  # it is closed
    await over.wait()


class _Objects:
    """The files below a folder; looked up once, when the server starts."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._headers: dict[str, tuple[int, str]] = {}
        self._listed: dict[str, str] = {}
        for path in sorted(root.glob("**/*")):
            if not path.is_file():
                continue
            key, stat = str(path.relative_to(root)), path.stat()
            etag = f"&quot;{stat.st_size:x}-{stat.st_mtime_ns:x}&quot;"
            modified = formatdate(stat.st_mtime, usegmt=True)
            self._headers[key] = (
                stat.st_size,
                f"ETag: {etag.replace('&quot;', chr(34))}\r\nLast-Modified: {modified}\r\n"
                "Accept-Ranges: bytes\r\n",
            )
            self._listed[key] = (
                f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z"
                f"</LastModified><ETag>{etag}</ETag><Size>{stat.st_size}</Size></Contents>"
            )

    async def answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the requests of one connection, one after the other."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                method, target, _ = head.split(b" ", 2)
                await self._answer(method, target.decode(), _RANGE.search(head), writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            return
        finally:
            writer.close()

    async def _answer(
        self, method: bytes, target: str, span: re.Match[bytes] | None, writer: asyncio.StreamWriter
    ) -> None:
        path, _, query = target.partition("?")
        key = unquote(path).strip("/").partition("/")[2]
        if not key and method == b"GET":
            body = self._list(parse_qs(query)).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        elif method not in (b"GET", b"HEAD") or key not in self._headers:
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        else:
            size, headers = self._headers[key]
            start, stop = _bounds(span, size)
            status = "200 OK" if span is None else "206 Partial Content"
            head = f"HTTP/1.1 {status}\r\n{headers}Content-Length: {stop - start}\r\n"
            if span is not None:
                head += f"Content-Range: bytes {start}-{stop - 1}/{size}\r\n"
            writer.write(f"{head}\r\n".encode())
            if method == b"GET":
                await self._send(key, start, stop - start, writer)
        await writer.drain()

    async def _send(self, key: str, start: int, count: int, writer: asyncio.StreamWriter) -> None:
        with open(self._root / key, "rb") as file:
            if count < _SENDFILE_BYTES:
                file.seek(start)
                writer.write(file.read(count))
            else:
                loop = asyncio.get_running_loop()
                await loop.sendfile(writer.transport, file, start, count)

    def _list(self, query: dict[str, list[str]]) -> str:
        prefix = query.get("prefix", [""])[0]
        after = query.get("continuation-token", query.get("start-after", [""]))[0]
        keys = [key for key in self._listed if key.startswith(prefix) and key > after]
        page = keys[:_PAGE]
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if page else ""
        more = len(keys) > len(page)
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>'
            f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>"
            f"{token if more else ''}{''.join(self._listed[key] for key in page)}"
            "</ListBucketResult>"
        )


def _bounds(span: re.Match[bytes] | None, size: int) -> tuple[int, int]:
    if span is None:
        return 0, size
    first, last = span[1], span[2]
    if not first:  # the last so many
        return max(0, size - int(last)), size
    return int(first), min(size, int(last) + 1) if last else size
