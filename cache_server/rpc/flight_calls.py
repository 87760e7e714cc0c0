"""The caller of a Flight call, and errors on their way to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow.flight as flight

from cache_protocol.errors import (
    CacheError,
    NodeUnavailableError,
    NotReadyError,
    PermissionDeniedError,
    UnauthenticatedError,
    to_proto,
)
from cache_server.auth.authenticator import Authenticator, Caller
from cache_server.node.traffic import Traffic

_NAME = "caller"


class _Call(flight.ServerMiddleware):
    """Headers of one call, and its caller once it is known."""

    def __init__(self, verb: str, headers: Mapping[str, str]) -> None:
        self.verb, self.headers = verb, headers
        self.caller: Caller | None = None


class CallerMiddleware(flight.ServerMiddlewareFactory):
    """Refuses calls before their handler runs. Thread-safe.

    It sees method and headers only. A caller without a token may have a certificate, which only
    the handler sees: `caller` checks it there.
    """

    def __init__(self, authenticator: Authenticator, traffic: Traffic) -> None:
        super().__init__()
        self._authenticator = authenticator
        self._traffic = traffic

    def start_call(
        self, info: flight.CallInfo, headers: Mapping[str, Sequence[str]]
    ) -> flight.ServerMiddleware:
        """Checks the token and the role of the method."""
        call = _Call(
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

    def caller(self, context: flight.ServerCallContext) -> Caller:
        """The caller of a running call.

        Raises:
            UnauthenticatedError, PermissionDeniedError: its certificate is not enough.
        """
        call: _Call = context.get_middleware(_NAME)
        if call.caller is None:
            peer = context.peer_identity().decode("utf-8", "replace")
            call.caller = Caller(self._authenticator, call.verb, call.headers, peer)
        return call.caller


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
