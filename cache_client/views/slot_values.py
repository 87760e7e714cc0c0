"""Values of the rows of a version -> those of the slots of a view."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from cache_client.views.view import View
from cache_protocol.errors import ConfigError


def of_slots(found: pa.ChunkedArray, inner: View) -> pa.Array:
    """The value of each slot.

    Args:
        found: the values of all rows of the version, in order.
        inner: a view with one row in each slot, the same in all epochs.
    """
    rows = inner.samples(np.arange(inner.num_slots(0), dtype=np.int64), 0).row_ids
    if len(rows) != len(found) or not np.array_equal(rows, np.arange(len(rows))):
        found = found.take(pa.array(rows))
    return found.combine_chunks()


def codes_of(option: str, found: pa.ChunkedArray) -> pa.ChunkedArray:
    """A code for each value, from 0 by first appearance; int32. A null stays null.

    Values are encoded one chunk after the other: together, texts may be longer than an Arrow array.

    Args:
        option: that has these values, for the error.
        found: of any type but lists and structs.

    Raises:
        ConfigError: Arrow does not encode values of this type; quotes it.
    """
    if pa.types.is_null(found.type):  # Arrow does not unify dictionaries of this type
        return found.cast(pa.int32())
    try:
        encoded = found.dictionary_encode().unify_dictionaries()
    except pa.ArrowNotImplementedError:
        raise ConfigError(f"{option} must give single values, got {found.type}") from None
    return pa.chunked_array([chunk.indices for chunk in encoded.chunks], pa.int32())
