"""The coordinator's stub, with a token."""

from __future__ import annotations

from typing import Any

import grpc

from cache_protocol.wire.credentials import find_token


class _Bearer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    def __init__(self, token: str) -> None:
        self._header = ("authorization", f"Bearer {token}")

    def _intercept(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = (*(details.metadata or ()), self._header)
        return continuation(details._replace(metadata=metadata), request)

    intercept_unary_unary = intercept_unary_stream = _intercept


def open_channel(location: str, token: str | None = None, **options: Any) -> grpc.Channel:
    """A channel that sends a token; default: that of the local cluster at this location."""
    token = token or find_token(location)
    channel = grpc.insecure_channel(location, **options)
    return channel if token is None else grpc.intercept_channel(channel, _Bearer(token))
