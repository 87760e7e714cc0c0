"""What may be said of an exception that nobody foresaw: without the secrets that were at hand.

Libraries put addresses, headers and whole configurations into their errors. An error of our own
tree was made to be read and is said as it is.
"""

from __future__ import annotations

import traceback

from cache_protocol.v1 import cache_pb2 as pb
from cache_server.secrets.redaction import hidden, redacted, secret_values

# Asked for by somebody. Anything else that nobody foresaw is a defect, whether it is an Exception
# or not: a library in Rust that panics raises a BaseException.
EXITS = (SystemExit, KeyboardInterrupt, GeneratorExit)


def reason(error: BaseException, secrets: pb.Secrets) -> str:
    """The exception in one line."""
    return f"{type(error).__name__}({redacted(str(error), _values(secrets))!r})"


def trace(error: BaseException, secrets: pb.Secrets) -> str:
    """The traceback, with its causes; lines lose the space before them."""
    values = _values(secrets)
    # All of it first: a private key is of several lines.
    text = hidden("".join(traceback.format_exception(error)), values)
    return "\n".join(redacted(line, values) for line in text.splitlines())


def _values(secrets: pb.Secrets) -> frozenset[str]:
    return frozenset().union(
        *(secret_values(table.values, {}) for table in secrets.tables.values())
    )
