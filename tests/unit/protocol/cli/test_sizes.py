"""Bytes as a person reads them."""

from __future__ import annotations

import pytest

from cache_protocol.cli.output import size


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),  # not 1024.0 KiB
        (2**30 - 2**20, "1023.0 MiB"),
        (2**30 - 1, "1.0 GiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_a_size_is_below_1024_of_its_unit_unless_it_is_the_largest(
    num_bytes: int, shown: str
) -> None:
    assert size(num_bytes) == shown
