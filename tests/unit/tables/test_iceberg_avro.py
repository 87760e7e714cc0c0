"""Avro is decoded as pyiceberg does it, and never beyond its bytes."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.avro.encoder import BinaryEncoder

from cache_server.tables.iceberg_avro import BoundedDecoder


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.binary() | st.text()))
def test_values_are_those_that_pyiceberg_wrote(values: list[int | bytes | str]) -> None:
    sink = io.BytesIO()
    encoder = BinaryEncoder(sink)
    names = {int: "int", bytes: "bytes", str: "utf8"}
    for value in values:
        getattr(encoder, f"write_{names[type(value)]}")(value)
    decoder = BoundedDecoder(sink.getvalue())
    assert [getattr(decoder, f"read_{names[type(value)]}")() for value in values] == values
    assert decoder.tell() == len(sink.getvalue())


@pytest.mark.parametrize(
    ("data", "method"),
    [
        (b"\x14bc", "read_bytes"),
        (b"\x80", "read_int"),
        (b"", "read_bytes"),
        (b"\x01", "read_bytes"),
    ],
)
def test_what_would_be_read_beyond_the_bytes_is_refused(data: bytes, method: str) -> None:
    with pytest.raises(ValueError, match=r"should follow"):
        getattr(BoundedDecoder(data), method)()


@pytest.mark.parametrize("data", [b"\x80" * 10 + b"\0", b"\xff" * 100_000])
@pytest.mark.parametrize("method", ["read_int", "read_bytes"])
def test_an_integer_of_more_than_64_bits_is_refused_at_once(data: bytes, method: str) -> None:
    decoder = BoundedDecoder(data)
    with pytest.raises(ValueError, match="no 64-bit integer is at byte 0"):
        getattr(decoder, method)()
    assert decoder.tell() == 0


def test_the_end_of_the_bytes_is_told_where_an_integer_would_begin() -> None:
    with pytest.raises(EOFError):
        BoundedDecoder(b"").read_int()
    with pytest.raises(ValueError, match="100 bytes should follow byte 0"):
        BoundedDecoder(b"abc").skip(100)
