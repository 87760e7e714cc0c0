import io
import os
import random
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as encryption
import pytest

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import LoadError
from cache_server.tables import files, footers, local_files

ROWS = 40


def parquet_bytes() -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"a": range(ROWS), "b": [f"row {i}" for i in range(ROWS)]}), sink)
    return sink.getvalue()


def with_changed_footer(data: bytes, seed: int) -> bytes:
    """The file with one to three other bytes in its footer."""
    changed, random_of = bytearray(data), random.Random(seed)
    length = int.from_bytes(data[-8:-4], "little")
    for _ in range(random_of.randint(1, 3)):
        changed[len(data) - 8 - length + random_of.randrange(length)] = random_of.randrange(256)
    return bytes(changed)


def reason_of(tail: bytes) -> str:
    fault = footers.first_fault([tail])
    return fault[1] if fault else ""


@pytest.fixture(scope="module")
def aborting() -> bytes:
    """A file whose footer ends the process that looks at its columns."""
    data = parquet_bytes()
    damaged = (with_changed_footer(data, seed) for seed in range(5000))
    return next(data for data in damaged if "ends the process" in reason_of(data))


def read(*paths: Path) -> tuple[pq.FileMetaData, ...]:
    (table,) = DatasetSpec("t", list(paths)).tables
    _, found, _ = local_files.find_files(table)
    return footers.read_footers(found, table)


def test_a_footer_that_would_end_the_process_is_refused_with_its_file(
    aborting: bytes, tmp_path: Path
) -> None:
    sound, damaged = tmp_path / "0.parquet", tmp_path / "1.parquet"
    sound.write_bytes(parquet_bytes())
    damaged.write_bytes(aborting)
    with pytest.raises(LoadError, match=r"footer of .*/1\.parquet: it is damaged: .*SIGABRT"):
        read(sound, damaged)
    assert [footer.num_rows for footer in read(sound)] == [ROWS]


@pytest.mark.parametrize("rows", [-ROWS, ROWS + 1])
def test_a_row_group_of_other_rows_than_its_columns_is_refused(rows: int) -> None:
    known, wanted = (bytes([2 * abs(n) - (n < 0)]) for n in (ROWS, rows))  # numbers of Thrift
    data = parquet_bytes()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    places = [place for place in range(start, len(data)) if data[place : place + 1] == known]
    changed = (data[:place] + wanted + data[place + 1 :] for place in places)
    assert f"a row group of {rows} rows has {ROWS} values" in map(reason_of, changed)


def test_the_first_damaged_footer_of_many_is_named(aborting: bytes) -> None:
    sound = parquet_bytes()
    for place in (0, 1, 200, 300):
        tails = [sound] * place + [aborting] + [sound, b"not Parquet", aborting]
        fault = footers.first_fault(tails)
        assert fault is not None and fault[0] == place
    fault = footers.first_fault([sound] * 7 + [b"not Parquet", aborting])
    assert fault is not None and fault[0] == 7 and "magic" in fault[1]


def test_the_process_that_reads_footers_may_be_killed_at_any_time() -> None:
    sound = parquet_bytes()
    assert footers.first_fault([sound]) is None
    process = footers._CHECKER._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    assert footers.first_fault([sound] * 100) is None


def test_all_footers_are_read_by_one_process(tmp_path: Path) -> None:
    for index in range(600):
        (tmp_path / f"{index:03d}.parquet").write_bytes(parquet_bytes())
    assert footers.first_fault([parquet_bytes()]) is None
    before = footers._CHECKER._process
    assert len(read(tmp_path)) == 600
    assert footers._CHECKER._process is before


class PlainKeys(encryption.KmsClient):  # type: ignore[misc]
    """Wraps keys by writing them out."""

    def wrap_key(self, key: bytes, master: str) -> str:
        return key.hex()

    def unwrap_key(self, wrapped: str, master: str) -> bytes:
        return bytes.fromhex(wrapped)


@pytest.mark.parametrize(
    ("plaintext_footer", "reason"),
    [(True, "column 'secret', 'nested.part' is encrypted"), (False, "it is encrypted")],
)
def test_encrypted_columns_are_refused_by_name(
    tmp_path: Path, plaintext_footer: bool, reason: str
) -> None:
    table = pa.table({"a": [1, 2], "secret": ["x", "y"], "nested": [{"part": 1}, {"part": 2}]})
    properties = encryption.CryptoFactory(lambda config: PlainKeys()).file_encryption_properties(
        encryption.KmsConnectionConfig(),
        encryption.EncryptionConfiguration(
            footer_key="footer",
            column_keys={"key": ["secret", "nested.part"]},
            plaintext_footer=plaintext_footer,
        ),
    )
    path = tmp_path / "t.parquet"
    with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    with pytest.raises(LoadError, match=f"{path}: {reason}, which is not read: write the file"):
        read(path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [(b"abc\xff\xfefgh", "codec can't decode byte 0xff"), (b"abcdefgh", "")],
)
def test_a_column_name_that_is_not_utf8_is_refused_with_its_file(
    tmp_path: Path, name: bytes, reason: str
) -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"abcdefgh": [1]}), sink, store_schema=False)
    path = tmp_path / "t.parquet"
    path.write_bytes(sink.getvalue().replace(b"abcdefgh", name))
    if reason:
        with pytest.raises(LoadError, match=f"{path}.*{reason}"):
            read(path)
    else:
        assert len(read(path)) == 1


def test_footers_that_were_checked_lately_are_known_and_older_ones_make_room() -> None:
    now = 0.0
    known = footers.KnownFooters(10, clock=lambda: now)
    known.add("a", b"12345")
    known.add("b", b"12345")
    known.add("c", b"1")  # no room beside those of the last hour
    assert [known.get(key) for key in "abc"] == [b"12345", b"12345", None]
    now = 3000.0
    assert known.get("a") == b"12345"
    now = 4000.0
    known.add("c", b"1234")
    assert [known.get(key) for key in "abc"] == [b"12345", None, b"1234"]
    known.add("d", b"more than there is room for")
    assert known.get("d") is None


def test_a_file_that_changed_or_is_in_another_store_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int] = []
    first_fault = footers.first_fault
    monkeypatch.setattr(
        footers, "first_fault", lambda tails: checked.append(len(tails)) or first_fault(tails)
    )
    for name in ("a", "b"):
        pq.write_table(pa.table({"n": [1, 2]}), tmp_path / f"{name}.parquet")
    table = DatasetSpec("t", tmp_path).tables[0]
    _, first = files.pin(table)
    assert checked == [2]
    pq.write_table(pa.table({"n": [1, 2, 3]}), tmp_path / "b.parquet")

    _, second = files.pin(table)

    assert checked == [2, 1]
    rows = [
        [s.num_rows for s in pin.cut(pa.schema([("n", pa.int64())]), 1)] for pin in (first, second)
    ]
    assert rows == [[2, 2], [2, 3]]
