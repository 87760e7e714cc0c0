"""A bucket of an object store, through obstore, which wraps DataFusion's object_store library.

Turns its objects and failures into ours. `objects` knows which objects make a table, `connections`
how to reach a bucket.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import obstore
from obstore import exceptions

from cache_protocol.errors import CacheError, LoadError, TransientLoadError
from cache_protocol.wire.channels import pause_s
from cache_server.egress.addresses import KINDS, parse_source
from cache_server.object_stores.errors import NO_LENGTH, Place, store_error
from cache_server.source.outages import load_error
from cache_server.source.pinned import SourceFile

_PLAIN = "/!$&'()*+,;=:@~"  # stand for themselves in the path of a URL
_LISTED_AT_ONCE = 1000
_CHUNK_BYTES = 256 * 1024  # small enough to stay in the processor's cache
_FAILURES = (exceptions.BaseError, OSError, ValueError)
_NO_HEAD = ("status code: 501", NO_LENGTH)
_NO_PASS = "status code: 407"
_COMPRESSED = ("gzip", "x-gzip", "deflate", "br", "zstd")
_REFUSALS = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)


def kind_of(uri: str) -> str:
    """``s3``, ``gs``, ``az`` or ``http``; empty for anything else, such as a path."""
    scheme, found, _ = uri.partition("://")
    return KINDS.get(scheme.lower(), "") if found else ""


def _may_answer_get(error: Exception) -> bool:
    """Whether a web server that refused a HEAD may answer a GET."""
    # Some refuse a HEAD with 403, 404, 405 or 501, or do not say how long the answer would be.
    known = (FileNotFoundError, *_REFUSALS)
    return isinstance(error, known) or any(sign in str(error) for sign in _NO_HEAD)


def _is_missing(error: Exception) -> bool:
    """Whether there is no such object."""
    # obstore reports a refusal of a web server in the same way.
    return isinstance(error, FileNotFoundError) and "status code: 405" not in str(error)


class Patience(NamedTuple):
    """How long requests to a failing store are retried.

    Attributes:
        max_retries: of one request.
        timeout_s: since the request began, or since the last byte of a broken body.
        first_pause_s: the longest pause before the first retry; it doubles with each retry.
        max_pause_s: the limit of a pause.
    """

    max_retries: int
    timeout_s: float
    first_pause_s: float
    max_pause_s: float


class RangesNotServedError(Exception):
    """The server ignores ranges: it answers with the whole object."""


class Location(NamedTuple):
    """The parts of a URI: ``base`` and ``key`` together are its normal form.

    Attributes:
        kind: ``s3``, ``gs``, ``az``, ``http``.
        base: with the slash after the bucket or the host.
        bucket: and, for Azure, the account where the URI names it; for HTTP the host.
        key: not escaped; for HTTP, the path without escapes.
    """

    kind: str
    base: str
    bucket: str
    key: str

    @classmethod
    def of(cls, uri: str) -> Location:
        """The parts of ``uri``.

        Raises:
            RequestError: as `parse_source`.
        """
        source = parse_source(uri)
        kind = KINDS[source.scheme]
        key = unquote(source.key) if kind == "http" else source.key
        scheme = {"s3a": "s3", "gcs": "gs"}.get(source.scheme, source.scheme)
        return cls(kind, f"{scheme}://{source.authority}/", source.authority, key)

    @property
    def host(self) -> str:
        """Of the account of Azure, if the URI names it; else empty."""
        return self.bucket.partition("@")[2] if self.kind == "az" else ""


class ObjectClient:
    """Reads one bucket, or the objects of one HTTP server. Thread-safe.

    Args:
        unreachable: says why the last connection could not be made, if it is known.

    Attributes:
        lists: whether the server can say which objects it has.
    """

    def __init__(
        self,
        location: Location,
        store: Any,
        place: Place,
        secret: frozenset[str],
        patience: Patience,
        unreachable: Callable[[], CacheError | None] = lambda: None,
    ) -> None:
        self.lists = location.kind != "http"
        self._base = location.base
        self._escaped = location.kind == "http"
        self._store = store
        self._place = place
        self._secret = secret
        self._patience = patience
        self._unreachable = unreachable

    def __repr__(self) -> str:
        return f"ObjectClient({self._base!r})"

    def head(self, key: str) -> SourceFile | None:
        """The object with that key; None if there is none."""
        try:
            try:
                return self._file(obstore.head(self._store, key))
            except _FAILURES as error:
                if self.lists or not _may_answer_get(error):
                    raise
                return self._file(self._begun(key))
        except _FAILURES as error:
            if _is_missing(error):
                return None
            raise self._failure(error, self._uri(key)) from None

    def found(self, key: str) -> SourceFile:
        """The object with that key.

        Raises:
            LoadError: also when there is none.
        """
        if (file := self.head(key)) is None:
            raise LoadError(f"source {self._uri(key)} does not exist in {self._place}")
        return file

    def _begun(self, key: str) -> Any:
        """The metadata of an object, from a GET whose body is not read."""
        try:
            result = obstore.get(self._store, key, options={"range": (0, 1)})
        except exceptions.NotSupportedError:
            result = obstore.get(self._store, key)
        self._check_encoding(self._uri(key), result.attributes)
        return result.meta

    def _check_encoding(self, uri: str, attributes: Mapping[Any, Any]) -> None:
        """Raises a `LoadError` if a web server encodes the bytes of the object.

        In an object store the attribute is only what the object was uploaded with.
        """
        encoding = str(attributes.get("Content-Encoding", "identity")).lower()
        if not self.lists and encoding in _COMPRESSED:
            raise LoadError(
                f"cannot read {uri}: {self._place} sends it with Content-Encoding: {encoding}, "
                "though asked for the bytes as they are"
            )

    def walk(self, prefix: str, *, deep: bool) -> Iterator[SourceFile]:
        """The objects below ``prefix``, in no order.

        Args:
            prefix: ends with a slash, or is empty.
            deep: includes the "directories" below it.
        """
        try:
            if deep:
                for page in obstore.list(self._store, prefix or None, chunk_size=_LISTED_AT_ONCE):
                    yield from map(self._file, page)
            else:
                found = obstore.list_with_delimiter(self._store, prefix or None)
                yield from map(self._file, found["objects"])
        except _FAILURES as error:
            raise self._failure(error, self._uri(prefix)) from None

    def read(self, file: SourceFile, span: tuple[int, int] | None) -> Iterator[Any]:
        """The bytes of ``file``, or of a half-open range of it, in pieces of a few MiB.

        One request; after a break the body resumes at the next byte.

        Raises:
            LoadError: also when the object is not the one that was planned.
            RangesNotServedError: before the first piece.
        """
        began = time.monotonic()
        return self._pieces(self._stream(file, span), file, span or (0, file.size), began)

    def _stream(self, file: SourceFile, span: tuple[int, int] | None) -> Iterable[Any]:
        try:
            result = obstore.get(
                self._store, self._key(file), options={"range": span} if span else None
            )
            self._check_encoding(file.path, result.attributes)
            check_unchanged(file, self._file(result.meta))
            return result.stream(min_chunk_size=_CHUNK_BYTES)
        except exceptions.NotSupportedError:
            raise RangesNotServedError from None
        except _FAILURES as error:
            raise self._failure(error, file.path) from None

    def _pieces(
        self, stream: Iterable[Any], file: SourceFile, span: tuple[int, int], began: float
    ) -> Iterator[Any]:
        """The pieces of a body, and of the bodies that resume it after a break.

        Args:
            began: when it was requested.
        """
        start, stop = span
        last = began  # when a byte came
        for breaks in itertools.count(1):
            try:
                for piece in stream:
                    last = time.monotonic()
                    start += len(piece)
                    yield piece
                return
            except _FAILURES as error:
                now = time.monotonic()
                if (
                    self._was_retried(file, now - began)
                    or not (file.etag or file.mtime_ns)  # another object could not be told apart
                    or breaks > self._patience.max_retries
                    or now - last >= self._patience.timeout_s
                ):
                    # obstore stops at another object, but does not report it.
                    if (found := self.head(self._key(file))) is not None:
                        check_unchanged(file, found)
                    raise self._failure(error, file.path) from None
            time.sleep(pause_s(breaks, self._patience.first_pause_s, self._patience.max_pause_s))
            began = time.monotonic()
            try:
                stream = self._stream(file, (start, stop))
            except RangesNotServedError:
                stream = _between(self._stream(file, None), start, stop)

    def _was_retried(self, file: SourceFile, lasted_s: float) -> bool:
        """Whether obstore resumed a broken body itself.

        It does so only with an etag, and only within its time limit, which begins with the request.
        A long body may exceed that before it breaks.
        """
        return bool(file.etag) and lasted_s < self._patience.timeout_s

    def _file(self, meta: Any) -> SourceFile:
        # Some servers list times with fractions of seconds, and etags without quotes.
        seconds = int(meta["last_modified"].timestamp())
        etag = (meta["e_tag"] or "").strip('"')
        return SourceFile(self._uri(meta["path"]), meta["size"], seconds * 10**9, etag)

    def _uri(self, key: str) -> str:
        return self._base + (quote(key, safe=_PLAIN) if self._escaped else key)

    def _key(self, file: SourceFile) -> str:
        key = file.path.removeprefix(self._base)
        return unquote(key) if self._escaped else key

    def _failure(self, error: Exception, uri: str) -> LoadError:
        if (unreachable := self._unreachable()) is not None:
            return load_error(f"cannot read {uri}: {unreachable}", unreachable)
        if _NO_PASS in str(error):  # obstore forgets its password for the proxy
            return LoadError(
                f"cannot read {uri}: {self._place} redirects to another host by plain HTTP, which "
                "this cache does not follow: name the place that it redirects to, or use https"
            )
        if _is_missing(error):
            return LoadError(f"source {uri} does not exist in {self._place}")
        refused = isinstance(error, _REFUSALS)
        return store_error(error, uri, self._place, self._secret, refused=refused)


def _between(stream: Iterable[Any], start: int, stop: int) -> Iterator[Any]:
    """The bytes of a half-open range of ``stream``, which begins at 0."""
    at = 0
    for piece in stream:
        wanted = memoryview(piece)[max(start - at, 0) : max(stop - at, 0)]
        at += len(piece)
        if wanted:
            yield wanted


def check_unchanged(planned: SourceFile, now: SourceFile) -> None:
    """Raises a `LoadError` if ``now`` is not the planned object."""
    if planned.size == now.size:
        if planned.etag and now.etag:
            if planned.etag == now.etag:
                return
        elif planned.mtime_ns == now.mtime_ns:
            return
    # Not for good: the next load plans the object that is there then.
    raise TransientLoadError(
        f"source file {planned.path} changed since the dataset was planned: it had "
        f"{_state(planned)}, now {_state(now)}"
    )


def _state(file: SourceFile) -> str:
    return f"{file.size} bytes and " + (
        f"etag {file.etag}" if file.etag else f"mtime {file.mtime_ns} ns"
    )
