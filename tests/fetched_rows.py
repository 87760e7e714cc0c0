"""Rows of numbers, booleans, strings and lists, as a reader fetches them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from cache_client.reading import rows as reading_rows
from cache_protocol.storage.layout import Layout

SCHEMA = pa.schema(
    [
        pa.field("a", pa.float32(), nullable=False),
        pa.field("b", pa.float32(), nullable=False),
        pa.field("label", pa.int64(), nullable=False),
        pa.field("ok", pa.bool_(), nullable=False),
        pa.field("text", pa.string()),
        pa.field("ids", pa.list_(pa.int64())),
    ]
)
LAYOUT = Layout(SCHEMA)


def rows(labels: list[int]) -> reading_rows.Rows:
    """A row for each label."""
    size = len(labels)
    values = {
        "a": np.arange(2 * size, dtype=np.float32).reshape(size, 2),
        "label": np.array(labels).reshape(size, 1),
        "ok": np.ones((size, 1), np.uint8),
    }
    plain = {
        "text": pa.array([f"{n}" for n in range(size)]),
        "ids": pa.array([list(range(n)) for n in range(size)], pa.list_(pa.int64())),
    }
    return reading_rows.Rows(
        LAYOUT,
        {LAYOUT.place(name)[0]: matrix for name, matrix in values.items()},
        {LAYOUT.place(name)[0]: array for name, array in plain.items()},
        size,
    )
