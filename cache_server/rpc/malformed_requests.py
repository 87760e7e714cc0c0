"""Answers gRPC requests that cannot be parsed.

A deserializer of grpcio that raises writes a traceback and leaks about 20 KB a call. So every
request arrives as bytes, and its handler parses it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from cache_protocol.errors import InvalidTicketError, to_proto
from cache_protocol.wire.grpc_channel import ERROR_TRAILER

logger = logging.getLogger(__name__)

# grpc looks for these attributes of a handler.
_KEPT = ("experimental_thread_pool", "experimental_non_blocking")


class MalformedRequests(grpc.ServerInterceptor):
    """Parses the requests of every verb that takes one message. Thread-safe."""

    def intercept_service(
        self, continuation: Callable[[Any], Any], handler_call_details: Any
    ) -> Any:
        """The handler of a verb, which parses its request."""
        handler = continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        parsing = _Parsing(
            handler_call_details.method, getattr(handler, kind), handler.request_deserializer
        )
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(parsing, None, handler.response_serializer)


class _Parsing:
    """A handler whose requests are bytes."""

    def __init__(
        self, verb: str, handler: Callable[..., Any], parse: Callable[[bytes], Any]
    ) -> None:
        self._verb, self._handler, self._parse = verb, handler, parse
        for name in _KEPT:
            if hasattr(handler, name):
                setattr(self, name, getattr(handler, name))

    def __call__(self, request: bytes, *others: Any) -> Any:
        """Calls the handler; the last argument is the context."""
        try:
            parsed = self._parse(request)
        except DecodeError:
            error = InvalidTicketError(f"not a request of {self._verb}: {request[:64]!r}")
        else:
            return self._handler(parsed, *others)
        logger.info("request refused reason=%s", error)
        context = others[-1]
        context.set_trailing_metadata(((ERROR_TRAILER, to_proto(error).SerializeToString()),))
        return context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
