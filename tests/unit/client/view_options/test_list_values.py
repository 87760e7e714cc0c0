import numpy as np
import pyarrow as pa
import pytest

from cache_client.batches import convert
from cache_client.reading import rows as reading_rows
from cache_client.view_options import list_values
from cache_client.views import view
from cache_protocol.storage.layout import Layout


@pytest.mark.parametrize(
    ("lists", "padded"),
    [
        ([[1, 2], [3, 4]], [[1, 2], [3, 4]]),
        ([[1, 2], None, [3]], [[1, 2], [7, 7], [3, 7]]),
        ([[], None], [[], []]),
        ([], []),
    ],
)
def test_lists_are_padded_to_the_longest(
    lists: list[list[int] | None], padded: list[list[int]]
) -> None:
    layout = Layout(pa.schema([("tokens", pa.list_(pa.int64()))]))
    rows = reading_rows.Rows(layout, {}, {0: pa.array(lists, pa.list_(pa.int64()))}, len(lists))
    assemble = list_values.padding_lists(
        convert.Converter(layout, batch_format="numpy"), {"tokens": 7}, "numpy"
    )

    (batch,) = assemble(rows, view.Samples(np.arange(len(lists))), [len(lists)])

    assert batch["tokens"].tolist() == padded and batch["tokens"].dtype == np.int64
    lengths = [len(row or ()) for row in lists]
    assert batch["tokens_mask"].sum(axis=1).tolist() == lengths
    batch["tokens"] += 1
    assert rows.arrays[0].to_pylist() == lists
