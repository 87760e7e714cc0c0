"""The schemas of open writes, which a node asks its coordinator for once.

Answers to heartbeats only name a schema: one of 60,000 columns has millions of bytes.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable

import pyarrow as pa

from cache_protocol.errors import InvalidTicketError
from cache_protocol.storage.layout import Layout, schema_from_bytes
from cache_server.node.desired import OpenWrite


class WriteSchemas:
    """Schemas by their digest. Thread-safe.

    Args:
        fetch: asks the coordinator for the schema of a write.
    """

    def __init__(self, fetch: Callable[[str], bytes]) -> None:
        self._fetch = fetch
        self._fetching = threading.Lock()  # puts of one write begin together
        self._known: dict[str, Layout] = {}

    def keep(self, writes: Iterable[OpenWrite]) -> None:
        """Forgets the schemas of all other writes."""
        wanted = {write.schema_digest for write in writes if not write.committed}
        for digest in self._known.keys() - wanted:
            self._known.pop(digest, None)

    def layout(self, write: OpenWrite) -> Layout:
        """How the rows of a write are stored.

        Raises:
            InvalidTicketError: the coordinator sent another schema, or none.
            What the call of the coordinator raises.
        """
        if (known := self._known.get(write.schema_digest)) is not None:
            return known
        with self._fetching:
            if (known := self._known.get(write.schema_digest)) is not None:
                return known
            data = self._fetch(write.write_id)
            if hashlib.sha256(data).hexdigest() != write.schema_digest:
                raise InvalidTicketError(
                    f"the schema of a write of {write.dataset!r} has another digest than the "
                    "coordinator said"
                )
            layout = self._known[write.schema_digest] = _decode(write, data)
            return layout


def _decode(write: OpenWrite, data: bytes) -> Layout:
    try:
        return Layout(schema_from_bytes(data))
    except (ValueError, OSError, pa.ArrowException) as error:
        raise InvalidTicketError(
            f"the schema of a write of {write.dataset!r} cannot be decoded: {error}"
        ) from None
