"""Says which failures of a source pass without a change by anyone. Pure.

The one place where the failure of a load is classified. A server that does not answer, has no
address or is overloaded may answer later, so the same load may succeed: `TransientLoadError`. What
is missing, refused, damaged or wrong stays so: `LoadError`.

The libraries of sources have no common base of exceptions. So this reads what all of them have: the
class, a status of HTTP, a state of PostgreSQL, an errno, and the words of libraries in Rust and C.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from http import HTTPStatus

from cache_protocol.errors import CacheError, LoadError, TransientLoadError

_STATUS = re.compile(r"status code:?(?:\s|\x1b\[\d+m|↳)*(\d{3})\b")
_PASSING_STATUS = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS)
_LASTING_STATUS = (HTTPStatus.NOT_IMPLEMENTED, HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
# Of PostgreSQL: no connection, no resources, shutting down or starting, a conflict, a lock.
_PASSING_STATE = re.compile(r"08|53|57P|58030|40|55P03")
_PASSING_ERRNO = (
    *(errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ENOTCONN, errno.ENETDOWN, errno.ENETUNREACH),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ETIMEDOUT, errno.EREMOTEIO),
)
# By name: which HTTP library another one speaks through depends on its version.
_PASSING_CLASSES = (
    *("TransportError", "EndpointConnectionError", "HTTPClientError", "ServerError"),
    *("ServiceUnavailableError", "gaierror"),
)
_LASTING_WORDS = re.compile(
    r"[Cc]ertificate|InvalidMessage\(|ProxyAuthRequired|TooManyRedirects|authentication failed"
    r"|169\.254\.|token request"  # the machine has no credentials
)
_PASSING_WORDS = re.compile(
    r"error sending request|response body error|dns error|failed to lookup address"
    r"|[Nn]ame or service not known|name resolution|No address associated|NameResolutionError"
    r"|could not translate host name|Could(n't| not) (connect|resolve)|[Cc]onnection refused"
    r"|[Cc]onnection (reset|aborted|closed)|No route to host|Network is unreachable"
    r"|[Tt]imed? ?out|timeout expired|ended the connection|[Bb]roken pipe"
    r"|server closed the connection|SSL SYSCALL|starting up|shutting down|recovery mode"
    r"|too many (clients|connections)|remaining connection slots|NETWORK_CONNECTION|SLOW_DOWN"
)


def load_error(message: str, cause: BaseException) -> LoadError:
    """The error of a load, of the class that its cause deserves."""
    return (TransientLoadError if may_pass(cause) else LoadError)(message)


def may_pass(error: BaseException) -> bool:
    """Whether the same call may succeed later without a change by anyone."""
    if isinstance(error, CacheError):
        return isinstance(error, TransientLoadError)
    chain = list(_chain(error))
    text = " ".join(map(str, chain))
    if (status := _status(chain, text)) is not None:
        return status in _PASSING_STATUS or (status >= 500 and status not in _LASTING_STATUS)
    if isinstance(error, FileNotFoundError | PermissionError) or _LASTING_WORDS.search(text):
        return False
    return any(map(_passes, chain)) or _PASSING_WORDS.search(text) is not None


def _passes(error: BaseException) -> bool:
    state = getattr(error, "sqlstate", None)
    if isinstance(state, str) and state.strip("\0 "):
        return _PASSING_STATE.match(state) is not None
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError) and error.errno in _PASSING_ERRNO:
        return True
    return any(kind.__name__ in _PASSING_CLASSES for kind in type(error).__mro__)


def _status(chain: list[BaseException], text: str) -> int | None:
    """The status of HTTP that a failure names."""
    for error in chain:
        found = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(found, int):
            return int(found)
    match = _STATUS.search(text)
    return int(match[1]) if match else None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__
