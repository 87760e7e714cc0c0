"""What may be said of an exception that nobody foresaw: without the secrets that were at hand.

Libraries put addresses, headers and whole configurations into their errors. An error of our own
tree was made to be read and is said as it is.
"""

from __future__ import annotations

import traceback

from cache_server.object_stores.errors import redacted, secret_values
from protos.cache.v1 import cache_pb2 as pb


def reason(error: BaseException, secrets: pb.Secrets) -> str:
    """The exception in one line."""
    return f"{type(error).__name__}({redacted(str(error), _values(secrets))!r})"


def trace(error: BaseException, secrets: pb.Secrets) -> str:
    """The traceback, with its causes; lines lose the space before them."""
    values = _values(secrets)
    text = "".join(traceback.format_exception(error))
    for value in values:  # also one of several lines, such as a private key
        text = text.replace(value, "***")
    return "\n".join(redacted(line, values) for line in text.splitlines())


def _values(secrets: pb.Secrets) -> frozenset[str]:
    found: set[str] = set()
    for table in secrets.tables.values():
        found |= secret_values(table.values, {})
    # As they stand in a repr: a key of several lines has its line breaks escaped there.
    return frozenset(found | {repr(value)[1:-1] for value in found})
