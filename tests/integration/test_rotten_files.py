"""Shard files that change under a node and its readers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from cache_client import CacheClient, CacheIterableDataset, Connection, DatasetSpec, Reading
from cache_protocol.storage.shard_files import MANIFEST, read_manifest, shard_file_name
from cache_server.local import LocalNode
from cache_server.shards.checksums import file_checksum
from tests.conftest import numbered_table, write_numbered
from tests.waiting import wait_until

WAIT_S = 30.0
ROWS = 2000


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[LocalNode]]:
    arguments = ["--allow-source", "", "--scrub-interval-s", "1", "--heartbeat-interval-s", "0.1"]
    first = LocalNode(tmp_path / "one", arguments)
    second = LocalNode(tmp_path / "two", arguments)
    try:
        first.start()
        second._arguments += ["--coordinator", first.control_location]
        second.start()
        yield [first, second]
    finally:
        first.close()
        second.close()


def flip(path: Path, *, shows: bool = True) -> None:
    """Changes 64 bytes in place."""
    before = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(before.st_size // 2)
        changed = bytes(byte ^ 0xFF for byte in file.read(64))
        file.seek(before.st_size // 2)
        file.write(changed)
    if not shows:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def are_sound(directories: list[Path]) -> bool:
    """Whether every file of four shards is there and has its checksum."""
    for directory in directories:
        sealed = read_manifest(directory / MANIFEST)
        if len(sealed) != 4:
            return False
        for shard in sealed:
            path = directory / shard_file_name(shard.index)
            if not path.exists() or file_checksum(path) != shard.checksum:
                return False
    return True


def test_flipped_and_cut_files_are_repaired_from_a_replica_or_the_source(
    nodes: list[LocalNode], tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "source", ROWS, files=4)
    client = CacheClient(nodes[0].endpoint)
    wait_until(lambda: len(client.nodes()) == 2, WAIT_S, "both nodes")
    info = client.load(DatasetSpec("t", source, target_shard_bytes=1, replicas=2))
    directories = [node.cache_dir / "t" / info.fingerprint for node in nodes]
    files = [
        [directory / shard_file_name(index) for index in range(4)] for directory in directories
    ]
    assert all(path.stat().st_mode & 0o777 == 0o444 for row in files for path in row)

    def rows(*, local: bool) -> Iterator[list[int]]:
        dataset = CacheIterableDataset(
            "t", batch_size=100, cache=Connection(nodes[0].endpoint, local=local), columns=["row"]
        )
        return (batch["row"].tolist() for batch in dataset)

    reading = rows(local=True)
    seen = next(reading)
    for row in files:
        flip(row[1], shows=False)  # in both replicas
    flip(files[0][0])
    files[1][2].chmod(0o644)
    os.truncate(files[1][2], 4096)

    wait_until(lambda: are_sound(directories), WAIT_S, "repaired files")
    assert sum((batch for batch in reading), seen) == list(range(ROWS))
    for local in (False, True):
        assert [row for batch in rows(local=local) for row in batch] == list(range(ROWS))
    for node in nodes:
        assert node.exit_code is None and "shard damaged dataset=t" in node.log_tail(10**6)
    assert client.describe("t").state == "ready"


def flip_offsets(path: Path) -> None:
    """Flips a high bit in several offsets of the strings of a shard, as a bad disk does."""
    before, table = path.stat(), pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
    data = bytearray(path.read_bytes())
    offsets = table.column(table.schema.get_field_index("text")).buffers()[1].to_pybytes()
    start = data.index(offsets)
    path.chmod(0o644)
    with path.open("r+b") as file:
        for row in (1, 7, table.num_rows // 2):
            file.seek(start + 4 * row + 3)
            file.write(bytes([data[start + 4 * row + 3] ^ 0x40]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("replicas", [2, 1])
def test_offsets_that_flip_in_place_end_no_process_and_are_repaired(
    nodes: list[LocalNode], tmp_path: Path, replicas: int
) -> None:
    source = write_numbered(tmp_path / "source", ROWS, files=4)
    client = CacheClient(nodes[0].endpoint)
    wait_until(lambda: len(client.nodes()) == 2, WAIT_S, "both nodes")
    info = client.load(DatasetSpec("t", source, target_shard_bytes=1, replicas=replicas))
    expected = numbered_table(ROWS).column("text").to_pylist()

    def rows(*, local: bool, shuffle: bool) -> list[tuple[int, str]]:
        dataset = CacheIterableDataset(
            "t",
            batch_size=100,
            cache=Connection(nodes[0].endpoint, local=local, deadline_s=WAIT_S),
            columns=["row", "text"],
            shuffle=shuffle,
        )
        return sorted(
            pair
            for batch in dataset
            for pair in zip(batch["row"].tolist(), batch["text"], strict=True)
        )

    for local, shuffle in ((False, True), (False, False), (True, True)):
        found = [
            sorted((node.cache_dir / "t" / info.fingerprint).glob("shard-*.arrow"))
            for node in nodes
        ]
        for path in found[0][:2]:
            flip_offsets(path)
        assert rows(local=local, shuffle=shuffle) == [*enumerate(expected)]
        assert [node.exit_code for node in nodes] == [None, None]
    assert "shard damaged dataset=t" in nodes[0].log_tail(10**6)


def test_a_local_reader_leaves_a_file_that_changes_while_it_is_mapped(
    nodes: list[LocalNode], tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "source", ROWS)
    client = CacheClient(nodes[0].endpoint)
    info = client.load(DatasetSpec("t", source))
    dataset = CacheIterableDataset(
        "t",
        batch_size=10,
        cache=nodes[0].endpoint,
        columns=["row"],
        reading=Reading(prefetch_batches=1),
    )
    reading = (batch["row"].tolist() for batch in dataset)
    found = next(reading)
    path = next(
        path
        for node in nodes
        for path in (node.cache_dir / "t" / info.fingerprint).glob("shard-*.arrow")
    )
    flip(path)
    flip(path)  # as before, but written
    found += [row for batch in reading for row in batch]
    assert found == list(range(ROWS))
    wait_until(lambda: "shard damaged" in "".join(n.log_tail() for n in nodes), WAIT_S, "found")
