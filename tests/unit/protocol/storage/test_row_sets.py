"""Row sets are the sorted numbers that they were made of, and damaged ones are refused."""

from __future__ import annotations

import numpy as np
import pytest

from cache_protocol.errors import InvalidRowsError
from cache_protocol.storage.row_sets import among, decode_rows, encode_rows, union


@pytest.mark.parametrize("largest", [3, 200, 100_000, 2**62])
def test_a_row_set_has_the_rows_that_it_was_made_of(largest: int) -> None:
    random = np.random.default_rng(largest)
    for _ in range(200):
        one, other = (
            np.unique(random.integers(0, largest, random.integers(0, 50))) for _ in range(2)
        )
        assert decode_rows(encode_rows(one)).tolist() == one.tolist()
        both = union(encode_rows(one), encode_rows(other))
        assert decode_rows(both).tolist() == sorted({*one.tolist(), *other.tolist()})
        assert among(one, other).tolist() == [row in set(other.tolist()) for row in one.tolist()]


def test_a_run_takes_a_byte_a_row() -> None:
    assert len(encode_rows(np.arange(1_000))) == 1_000


@pytest.mark.parametrize("damaged", [b"\x80", b"\x01\xff", b"\x80" * 10 + b"\x01"])
def test_what_is_no_row_set_is_refused(damaged: bytes) -> None:
    with pytest.raises(InvalidRowsError, match="row set"):
        decode_rows(damaged)
