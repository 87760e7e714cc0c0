"""The caller of a gRPC call, and errors on their way to it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from cache_protocol.errors import (
    CacheError,
    ConfigError,
    DatasetNotFoundError,
    InvalidTicketError,
    LoadError,
    NodeUnavailableError,
    NotReadyError,
    PermissionDeniedError,
    RequestError,
    StaleVersionError,
    UnauthenticatedError,
    to_proto,
)
from cache_protocol.wire import tracing
from cache_protocol.wire.channels import ERROR_TRAILER
from cache_server.auth.authenticator import Authenticator, Caller
from cache_server.auth.verbs import is_open

logger = logging.getLogger(__name__)

_CALLER = "cache_caller"
# grpc looks for these attributes of a handler.
_KEPT = ("experimental_thread_pool", "experimental_non_blocking")
_SAN = "x509_subject_alternative_name"

_STATUS: tuple[tuple[type[CacheError], grpc.StatusCode], ...] = (
    (DatasetNotFoundError, grpc.StatusCode.NOT_FOUND),
    (UnauthenticatedError, grpc.StatusCode.UNAUTHENTICATED),
    (PermissionDeniedError, grpc.StatusCode.PERMISSION_DENIED),
    (ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
    (RequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (NotReadyError, grpc.StatusCode.UNAVAILABLE),
    (NodeUnavailableError, grpc.StatusCode.UNAVAILABLE),
    (StaleVersionError, grpc.StatusCode.FAILED_PRECONDITION),
    (LoadError, grpc.StatusCode.FAILED_PRECONDITION),
)


class CallerInterceptor(grpc.ServerInterceptor):
    """Checks the caller of every verb, then parses its request. Thread-safe.

    The check runs in the thread of the handler: it may fetch the keys of an issuer.
    """

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        self._handlers: dict[str, Any] = {}

    def intercept_service(
        self, continuation: Callable[[Any], Any], handler_call_details: Any
    ) -> Any:
        """The handler of a verb behind the check; made at its first call."""
        method = handler_call_details.method
        if method in self._handlers:
            return self._handlers[method]
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        behaviour = None if handler.request_streaming else getattr(handler, kind)
        checked = _Checked(
            self._authenticator,
            f"grpc {method}",
            behaviour,
            handler.request_deserializer,
        )
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        self._handlers[method] = make(checked, None, _to_bytes(handler.response_serializer))
        return self._handlers[method]


def _to_bytes(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """The serializer of a verb whose handler may return bytes."""
    return lambda response: response if isinstance(response, bytes) else serialize(response)


class _Checked:
    """A handler behind the check.

    Its requests arrive as bytes. A deserializer of grpcio that raises would write a traceback and
    leak about 20 KB a call.

    Args:
        handler: None: of a verb whose requests stream, which has no rule.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        verb: str,
        handler: Callable[..., Any] | None,
        parse: Callable[[bytes], Any],
    ) -> None:
        self._authenticator, self._verb = authenticator, verb
        self._handler, self._parse = handler, parse
        for name in _KEPT:
            if hasattr(handler, name):
                setattr(self, name, getattr(handler, name))

    def __call__(self, request: bytes, *others: Any) -> Any:
        """Calls the handler; the second argument is the context."""
        context = others[0]
        try:
            if not is_open(self._verb):
                caller = Caller(
                    self._authenticator,
                    self._verb,
                    _headers(context),
                    _peer(context) if self._authenticator.knows_certificates else "",
                    context.peer(),
                )
                setattr(context, _CALLER, caller)
            parsed = self._parse(request)
        except CacheError as error:
            abort(context, error)
        except DecodeError:
            # Its bytes are not shown: they may hold a secret.
            refusal = InvalidTicketError(f"not a request of {self._verb}: {len(request)} bytes")
            logger.info("request refused reason=%s", refusal)
            abort(context, refusal)
        assert self._handler is not None  # the table has no verb whose requests stream
        with tracing.below(_headers(context)):
            return self._handler(parsed, *others)


def caller_of(context: grpc.ServicerContext) -> Caller:
    """The caller that the interceptor found."""
    caller: Caller = getattr(context, _CALLER)
    return caller


def abort(context: grpc.ServicerContext, error: CacheError) -> NoReturn:
    """Ends a call with the status of an error, and the error in a trailer."""
    status = next((s for kind, s in _STATUS if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    message = to_proto(error)
    context.set_trailing_metadata(((ERROR_TRAILER, message.SerializeToString()),))
    context.abort(status, message.message)
    raise AssertionError("abort raises")


def _headers(context: grpc.ServicerContext) -> dict[str, str]:
    return {name: value for name, value in context.invocation_metadata() if isinstance(value, str)}


def _peer(context: grpc.ServicerContext) -> str:
    """The first subject alternative name of the caller's certificate; empty: none."""
    names: Any = context.auth_context().get(_SAN) or [b""]
    return bytes(next(iter(names))).decode("utf-8", "replace")
