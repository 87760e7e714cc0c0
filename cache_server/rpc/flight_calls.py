"""The caller of a Flight call, and errors on their way to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow.flight as flight

from cache_protocol.errors import (
    CacheError,
    NodeUnavailableError,
    NotReadyError,
    PermissionDeniedError,
    UnauthenticatedError,
    to_proto,
)
from cache_protocol.wire import tracing, zones
from cache_server.auth.authenticator import Authenticator, Caller
from cache_server.auth.principals import Principal
from cache_server.node.traffic import Traffic
from cache_server.rpc.stream_limits import LimitedCall, StreamLimits

_NAME = "caller"
_T = TypeVar("_T")


class Call(flight.ServerMiddleware):
    """Headers of one call, its caller once it is known, and its share of the node.

    Attributes:
        caller: None before it is known.
        limited: None before the handler runs.
    """

    def __init__(self, verb: str, headers: Mapping[str, str]) -> None:
        self.verb, self.headers = verb, headers
        self.caller: Caller | None = None
        self.limited: LimitedCall | None = None
        self._span: Any = None

    def trace(self, dataset: str) -> None:
        """Traces the call, until its end, below the span of its caller."""
        traceparent = self.headers.get(tracing.TRACEPARENT, "")
        self._span = tracing.begin_below(traceparent, "cache.node", dataset=dataset)

    @property
    def zone(self) -> str:
        """Of the caller; empty: it is not known."""
        return zones.told(self.headers)

    @property
    def principal(self) -> Principal:
        """Who calls."""
        assert self.caller is not None  # known before the handler runs
        return self.caller.principal

    def note_read(self, dataset: str, version: str) -> None:
        """See `Caller.note_read`."""
        assert self.caller is not None
        self.caller.note_read(dataset, version)

    def still_allowed(self) -> Principal:
        """See `Caller.still_allowed`."""
        assert self.caller is not None
        return self.caller.still_allowed()

    def paced(self, messages: Iterable[_T], num_bytes: int, request_bytes: int = 0) -> Iterator[_T]:
        """See `LimitedCall.paced`."""
        assert self.limited is not None
        return self.limited.paced(messages, num_bytes, request_bytes)

    def call_completed(self, exception: BaseException | None) -> None:
        """Gives its share back; Flight calls it at the end of every call."""
        tracing.end(self._span, exception)
        if self.limited is not None:
            self.limited.end()


class CallerMiddleware(flight.ServerMiddlewareFactory):
    """Refuses calls before their handler runs. Thread-safe.

    It sees method and headers only. A caller without a token may have a certificate, which only
    the handler sees: `caller` checks it there.
    """

    def __init__(
        self, authenticator: Authenticator, traffic: Traffic, limits: StreamLimits
    ) -> None:
        super().__init__()
        self._authenticator = authenticator
        self._limits = limits
        self._traffic = traffic

    def start_call(
        self, info: flight.CallInfo, headers: Mapping[str, Sequence[str]]
    ) -> flight.ServerMiddleware:
        """Checks the token and the role of the method."""
        call = Call(
            f"flight {info.method.name}",
            {name: value for name, (value, *_) in headers.items() if isinstance(value, str)},
        )
        if "authorization" in call.headers or not self._authenticator.knows_certificates:
            try:
                call.caller = Caller(self._authenticator, call.verb, call.headers, "")
            except CacheError as error:
                self._traffic.count_error(type(error).__name__)
                raise flight_error(error) from None
        return call

    @property
    def by_name(self) -> dict[str, flight.ServerMiddlewareFactory]:
        """The argument ``middleware`` of a server."""
        return {_NAME: self}

    def begin(self, context: flight.ServerCallContext) -> Call:
        """The running call, with its caller; it counts until its end.

        Raises:
            UnauthenticatedError, PermissionDeniedError: its certificate is not enough.
            NodeUnavailableError: the caller has too many calls.
        """
        call: Call = context.get_middleware(_NAME)
        if call.caller is None:
            peer = context.peer_identity().decode("utf-8", "replace")
            call.caller = Caller(self._authenticator, call.verb, call.headers, peer, context.peer())
        else:
            call.caller.address = context.peer()  # the middleware did not see it
        call.limited = self._limits.begin(call.principal.name, context.peer())
        return call


def flight_error(error: CacheError) -> flight.FlightError:
    """The Flight error that carries a `CacheError`."""
    kind = flight.FlightServerError
    if isinstance(error, NotReadyError | NodeUnavailableError):
        kind = flight.FlightUnavailableError
    elif isinstance(error, UnauthenticatedError):
        kind = flight.FlightUnauthenticatedError
    elif isinstance(error, PermissionDeniedError):
        kind = flight.FlightUnauthorizedError
    return kind(str(error), to_proto(error).SerializeToString())


class UnformattedError(flight.FlightServerError):
    """An error of GetSchema, without a traceback.

    pyarrow 26 formats every error of this verb as a traceback, sends it to the caller, and leaks
    its lines: 2.4 KB a call. If `traceback` cannot format the error, it sends only the message.
    """

    @property
    def __cause__(self) -> BaseException | None:
        raise RuntimeError("not to be formatted")
