"""Flight objects that any thread may use, and the errors of calls."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from cache_client.flight.forks import fork_gate
from cache_protocol.errors import (
    CacheError,
    ConfigError,
    NodeUnavailableError,
    from_proto,
    without_middle,
)
from cache_protocol.v1 import cache_pb2 as pb

# gRPC's words for a server that answers in HTTP/1, and for an HTTPS server without HTTP/2.
_NO_REASON = re.compile(r"\. (?:Additionally, could not finish writing|(?:gRPC c|C)lient )")
_NO_FLIGHT = ("Expected SETTINGS frame", "http1.x server", "missing selected ALPN property")


class ConnectionClosedError(NodeUnavailableError):
    """This process closed the connection, for example before a fork; the node did not fail."""


class StreamEndedError(ConnectionClosedError):
    """The node ended a stream of rows early. The next request gets the reason."""


class SharedHandle:
    """A Flight object that any thread may use or close; Flight itself does not allow that.

    Closing blocks new uses and cancels running ones where that is possible. The last use releases
    the object.

    Args:
        value: the object. Do not assign it to a variable, not even to a local one: the traceback of
            an error that is kept would keep the object, and gRPC, alive.
        release: ends ``value`` when nothing uses it any more.
        cancel: ends the running uses of ``value`` from another thread.
    """

    def __init__(
        self, value: Any, *, release: Callable[[Any], None], cancel: Callable[[Any], None] | None
    ) -> None:
        self.value: Any = value
        self._cancel = cancel
        self._release = release
        self._lock = threading.Lock()
        self._uses = 0
        self.is_closed = False

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Surrounds every use of ``value``; the error names it when it is closed already."""
        with self._lock:
            if self.is_closed:
                raise ConnectionClosedError(f"{name} was closed")
            self._uses += 1
        try:
            yield
        finally:
            with self._lock:
                self._uses -= 1
                last = self.is_closed and not self._uses
            if last:
                self._release_value()

    def close(self) -> None:
        """Releases the value now, or when its last use ends."""
        with fork_gate.closing():
            with self._lock:
                if self.is_closed:
                    return
                self.is_closed = True
                unused = not self._uses
                if self._cancel is not None:
                    self._cancel(self.value)
            if unused:
                self._release_value()

    def _release_value(self) -> None:
        value, self.value = self.value, None
        with suppress(pa.ArrowException, OSError):  # Flight reports the cancellation
            self._release(value)


@contextmanager
def flight_call(location: str) -> Iterator[None]:
    """Surrounds every call into Flight: keeps forks out, and translates errors."""
    with fork_gate.call():
        try:
            yield
        except flight.FlightError as error:
            raise _cache_error(error, location) from None
        except pa.ArrowNotImplementedError:
            raise _no_flight(location) from None
        except (pa.ArrowException, StopIteration, OSError) as error:
            # A broken stream, or a closed client.
            raise NodeUnavailableError(f"node at {location} did not answer: {error!r}") from None


def _no_flight(location: str) -> ConfigError:
    return ConfigError(
        f"the server at {location} does not serve Arrow Flight: give the Flight port of a node, by "
        "default 50051"
    )


def _cache_error(error: flight.FlightError, location: str) -> CacheError:
    if error.extra_info:
        return from_proto(pb.Error.FromString(bytes(error.extra_info)))
    if any(words in str(error) for words in _NO_FLIGHT):
        return _no_flight(location)
    first_line = str(error).splitlines()[0] if str(error) else repr(error)
    reason = _NO_REASON.split(first_line)[0]
    return NodeUnavailableError(f"node at {location} did not answer: {without_middle(reason)}")
