"""pyarrow's own Flight clients, with a token: what a program without this project's client does."""

from __future__ import annotations

from typing import Any

import pyarrow.flight as flight

from cache_protocol.wire.credentials import find_token


class _Bearer(flight.ClientMiddleware):
    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token

    def sending_headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._token}"}


class _BearerFactory(flight.ClientMiddlewareFactory):
    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token

    def start_call(self, info: flight.CallInfo) -> flight.ClientMiddleware:
        return _Bearer(self._token)


def connect(location: Any, token: str | None = None, **options: Any) -> flight.FlightClient:
    """A client that sends a token; default: that of the local cluster at this location."""
    text = location if isinstance(location, str) else location.uri.decode()
    token = token or find_token(text)
    middleware = [] if token is None else [_BearerFactory(token)]
    return flight.connect(location, middleware=middleware, **options)
