"""Unexpected exceptions as text, without secrets.

Libraries put addresses, headers and whole configurations into their errors. The errors of
`cache_protocol.errors` hold no secrets and do not come here.
"""

from __future__ import annotations

import traceback

from cache_protocol.v1 import cache_pb2 as pb
from cache_server.secrets.redaction import hidden, redacted, secret_values

# Requested ends. Any other unexpected exception is a defect; a panic of a library in Rust is a
# BaseException, not an Exception.
EXITS = (SystemExit, KeyboardInterrupt, GeneratorExit)


def reason(error: BaseException, secrets: pb.Secrets) -> str:
    """The exception in one line."""
    return f"{type(error).__name__}({redacted(str(error), _values(secrets))!r})"


def trace(error: BaseException, secrets: pb.Secrets) -> str:
    """The traceback, with its causes; lines lose the space before them."""
    values = _values(secrets)
    # The whole text first: a private key has several lines.
    text = hidden("".join(traceback.format_exception(error)), values)
    return "\n".join(redacted(line, values) for line in text.splitlines())


def _values(secrets: pb.Secrets) -> frozenset[str]:
    return frozenset().union(
        *(secret_values(table.values, {}) for table in secrets.tables.values())
    )
