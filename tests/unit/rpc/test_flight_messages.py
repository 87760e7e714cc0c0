import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_server.rpc.flight_messages import header_size, padding


def encoded(number: int, length: int) -> int:
    """Bytes of a protobuf field's tag and length, by protobuf's own rule."""
    total = 0
    for value in (number << 3 | 2, length):
        total += 1
        while value := value >> 7:
            total += 1
    return total


@given(st.integers(1, 5000), st.integers(0, 2**31 - 1))
def test_with_the_padding_the_body_begins_at_a_multiple_of_16_bytes(header: int, body: int) -> None:
    metadata = len(padding(header, body))
    before = encoded(2, header) + header + encoded(1000, body)
    if metadata:
        before += encoded(3, metadata) + metadata
    assert before % 16 == 0
    assert metadata <= 16


@pytest.mark.parametrize("rows", [1, 2, 100_000])
def test_the_header_is_as_long_whatever_the_number_of_rows(rows: int) -> None:
    batch = pa.record_batch({"a": pa.array(range(rows)), "b": pa.array(["x"] * rows)})
    message = pa.ipc.read_message(batch.serialize())
    assert header_size(batch) == message.metadata.size
