import os
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_server.shards import checksums
from cache_server.shards.checksums import PieceDigests, file_checksum

PIECE = 64


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "PIECE_BYTES", PIECE)


def by_its_definition(content: bytes) -> str:
    pieces = [content[at : at + PIECE] for at in range(0, len(content), PIECE)]
    return xxhash.xxh3_128_hexdigest(b"".join(map(xxhash.xxh3_128_digest, pieces)))


@given(st.binary(max_size=400))
def test_of_a_file_it_is_the_digest_of_the_digests_of_its_pieces(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("checksum") / "file"
    path.write_bytes(content)
    assert file_checksum(path) == by_its_definition(content)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 300), st.binary(max_size=200)), max_size=12))
def test_it_is_that_of_the_file_in_whatever_order_and_how_often_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[int, bytes]]
) -> None:
    digests = PieceDigests()
    path = tmp_path_factory.mktemp("checksum") / "file"
    with path.open("w+b", buffering=0) as file:
        for start, data in writes:
            os.pwrite(file.fileno(), data, start)
            digests.add(start, data)

        found = digests.checksum(file.fileno())

    assert found == file_checksum(path) == by_its_definition(path.read_bytes())


def test_a_file_that_is_cut_while_it_is_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"x" * 3 * PIECE)
    preadv = os.preadv

    def cut_off(handle: int, buffers: list[memoryview], at: int) -> int:
        os.truncate(tmp_path / "file", PIECE + 10)
        return preadv(handle, buffers, at)

    monkeypatch.setattr(os, "preadv", cut_off)
    with pytest.raises(OSError, match=rf"ends at byte {PIECE + 10}, {PIECE - 10} too early"):
        file_checksum(tmp_path / "file")


def test_what_was_written_from_end_to_end_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = np.arange(40, dtype=np.int64)  # five pieces
    digests = PieceDigests()
    read: list[int] = []
    preadv = os.preadv

    def spy(handle: int, buffers: list[bytearray], at: int) -> int:
        read.append(at)
        return preadv(handle, buffers, at)

    with (tmp_path / "file").open("w+b", buffering=0) as file:
        for first, last in ((4, 17), (30, 40), (17, 30)):  # all but the first four
            os.pwrite(file.fileno(), content[first:last], 8 * first)
            digests.add(8 * first, content[first:last])
        os.pwrite(file.fileno(), content[:4], 0)
        monkeypatch.setattr(os, "preadv", spy)

        found = digests.checksum(file.fileno())

    assert found == by_its_definition(content.tobytes())
    assert read == [0, 3 * PIECE]  # begun elsewhere, and written before what stands before it
