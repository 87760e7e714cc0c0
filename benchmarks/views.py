"""What does a view of a job cost, beside the plain read of the same table?

    python -m benchmarks.views [--rows N] [--quick]

- Reading: shuffled epochs of 32 float32 columns and a label, in batches of 1024 rows, from files of
  this machine: the plain read, views of it, and columns that are looked up: a text column of 10,000
  values as codes, and one column of a dataset that this text is the key of. Beside the codes: the
  texts themselves. Rates are of the rows that are read.
- Packing: sequences of 2048 tokens in batches of 8, out of documents of 540 tokens on average that
  are in memory, as a reader brings them. Beside it: as many batches of tokens that lie in memory
  side by side, copied. Rates are of tokens.
- Evaluating ``where``: a client asks the node for the rows that fulfil a condition, which the node
  has not evaluated before. DataFusion counts the rows that fulfil the same condition, in the same
  shard files and in Arrow files of one column after the other.

What enters a ratio is measured in turn, A B C A B C; a ratio is the median of those of each turn,
or of the processor time of all turns.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datafusion import SessionConfig, SessionContext

from benchmarks.common import (
    Contender,
    Timing,
    measure,
    memory_directory,
    print_ratios,
    print_table,
    write_timings,
)
from benchmarks.contenders import BATCH_SIZE, epochs_of
from benchmarks.tables import FEATURES, ROW_BYTES, floats
from cache_client import CacheClient, CacheIterableDataset, DatasetSpec, Join, View
from cache_client.job.ranks import find_credentials
from cache_client.reading.rows import Rows, cut
from cache_client.reading.shard_maps import wait_for_shard_map
from cache_client.view_options.columns import VersionNodes, selected_rows
from cache_client.view_options.packed_batches import PackedAssembler
from cache_client.view_options.sequences import sequences_at_once
from cache_client.views.packing import PackingView
from cache_client.views.shared_array import SharedArray
from cache_client.views.view import PlainView, Samples, Shuffle
from cache_protocol.storage.layout import Layout
from cache_server import LocalCluster

PLAIN, FILTERED = "plain", "where keeps half"
PACKED, WITH_LABELS = "packed tokens", "packed, positions and labels"
COPIED = "tokens copied"
SPLIT = "split of half by row id"
TEXTS, CODES, JOINED = "with a text column", "codes of a text column", "join by a text column"
STREETS = 10_000
CACHE, SAME_FILES, COLUMNS = "cache: where", "DataFusion, shard files", "DataFusion, column files"
TARGETS = {
    f"{FILTERED} / {PLAIN}": 0.7,
    f"{PACKED} / {COPIED}": 0.5,
    f"{CACHE} / {SAME_FILES}": 0.5,
}


def main() -> None:
    """Measures, prints and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4_000_000, help="4 million are 544 MB")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a look in seconds")
    arguments = parser.parse_args()
    rows: int = 400_000 if arguments.quick else arguments.rows
    repeats: int = 2 if arguments.quick else arguments.repeats
    torch.set_num_threads(1)
    with (
        memory_directory("cache-bench-") as directory,
        LocalCluster(1, directory / "cache") as cluster,
    ):
        table = floats(rows)
        client = CacheClient(cluster.endpoint)
        street = f"concat('street ', CAST(abs(f0) * 2500 AS BIGINT) % {STREETS}) AS street"
        client.load(DatasetSpec("table", table, sql=f"SELECT *, {street} FROM source"))
        names = [f"street {number}" for number in range(STREETS)]
        streets = pa.table({"street": names, "income": np.arange(STREETS, dtype=np.float32)})
        pq.write_table(streets, directory / "streets.parquet")
        client.load(DatasetSpec("streets", directory / "streets.parquet"))
        reads = measure(list(readers(cluster.endpoint)), repeats=repeats)
        asked = list(evaluations(cluster.endpoint, table, directory, rows))
        filters = measure(asked, repeats=repeats)
    packing = measure(list(packers(8000)), repeats=repeats)
    timings: dict[str, Timing] = {**reads, **packing, **filters}
    print_table(timings)
    ratios = {
        f"{view} / {PLAIN}": ratio_in_turn(found, reads[PLAIN])
        for view, found in reads.items()
        if view != PLAIN
    } | {
        f"{CACHE} / {other}": ratio_in_turn(filters[CACHE], filters[other])
        for other in (SAME_FILES, COLUMNS)
    }
    ratios |= {
        f"{view} / {PLAIN}, processor time": cpu_ratio(found, reads[PLAIN])
        for view, found in reads.items()
        if view != PLAIN
    }
    for name in (PACKED, WITH_LABELS):
        ratios[f"{name} / {COPIED}"] = ratio_in_turn(packing[name], packing[COPIED])
        in_processor_time = cpu_ratio(packing[name], packing[COPIED])
        ratios[f"{name} / {COPIED}, processor time"] = in_processor_time
    print()
    print_ratios(ratios, TARGETS)
    write_timings(
        "views",
        timings,
        ratios,
        TARGETS,
        quick=arguments.quick,
        rows=rows,
        row_bytes=ROW_BYTES,
        batch_size=BATCH_SIZE,
    )


def ratio_in_turn(ours: Timing, theirs: Timing) -> float:
    """How many times as many rows a second ours reads: the median of the ratios of each turn."""
    pairs = zip(ours.seconds, theirs.seconds, strict=True)
    turns = statistics.median(their_s / our_s for our_s, their_s in pairs)
    return turns * ours.num_rows / theirs.num_rows


def cpu_ratio(ours: Timing, theirs: Timing) -> float:
    """How many times as many rows ours reads in a second of a processor."""
    # A clock that counts hundredths of a second may show none for one turn.
    in_time = sum(theirs.cpu_seconds) / sum(ours.cpu_seconds)
    return in_time * ours.num_rows / theirs.num_rows


def readers(endpoint: str) -> Iterator[Contender]:
    """The plain read of a table, and views of it."""
    columns = [*FEATURES, "label"]
    with_street = [*columns, "street"]
    views: dict[str, tuple[list[str], View]] = {
        PLAIN: (columns, View()),
        FILTERED: (columns, View(where="f0 > 0")),
        SPLIT: (columns, View(split={"a": 0.5, "b": 0.5}, part="a")),
        TEXTS: (with_street, View()),
        CODES: (with_street, View(codes=["street"])),
        JOINED: (columns, View(join={"street": Join("streets", columns=["income"])})),
    }
    for name, (names, view) in views.items():
        dataset = CacheIterableDataset(
            "table",
            cache=endpoint,
            batch_size=BATCH_SIZE,
            shuffle=True,
            stack={"features": FEATURES},
            columns=names,
            view=view,
        )
        rows = dataset.num_samples
        yield Contender(name, epochs_of(dataset), rows, rows * ROW_BYTES, "exact global")


def packers(num_sequences: int) -> Iterator[Contender]:
    """Packed batches of documents in memory, and copies of as many tokens."""
    length, size, at_once = 2048, 8, 512
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(5.8, 1, 4 * num_sequences), 20_000).astype(np.uint16)
    ends = np.cumsum(lengths, dtype=np.int32)
    tokens = rng.integers(0, 50_000, ends[-1], np.int32)
    documents = pa.ListArray.from_arrays(np.concatenate([[0], ends]).astype(np.int32), tokens)
    layout = Layout(pa.schema([("tokens", documents.type)]))
    rows = PlainView(len(lengths))
    view = PackingView(rows, SharedArray(lengths), length, True, Shuffle(True))
    together = sequences_at_once(length)
    windows = range(0, view.num_slots(0) - at_once, at_once)

    def samples(window: int) -> Samples:
        slots = np.arange(window, window + at_once)
        return view.samples(slots, 0).shared([size] * (at_once // size))

    fetched = {}
    for window in windows:
        row_ids = samples(window).row_ids
        fetched[window] = Rows(layout, {}, {0: documents.take(pa.array(row_ids))}, len(row_ids))
    num_tokens = len(windows) * at_once * length
    for name, outputs in ((PACKED, ()), (WITH_LABELS, ("position_ids", "labels"))):
        assemble = PackedAssembler("tokens", length, 0, outputs, "torch")  # type: ignore[arg-type]

        def pack(assemble: PackedAssembler = assemble) -> int:
            found = 0
            for window, rows in fetched.items():
                here = samples(window)
                slot = 0
                for run in cut([rows], here.rows_of_steps([together] * (at_once // together))):
                    sizes = [size] * (together // size)
                    for batch in assemble(run, here.slots(slot, slot + together), sizes):
                        found += batch["tokens"].numel()
                    slot += together
            return found

        yield Contender(name, pack, num_tokens, num_tokens * 8)
    joined = np.resize(tokens.astype(np.int64), (num_tokens // length, length))

    def copy() -> int:
        return sum(
            torch.from_numpy(joined[at : at + size].copy()).numel()
            for at in range(0, len(joined), size)
        )

    yield Contender(COPIED, copy, num_tokens, num_tokens * 8)


def evaluations(endpoint: str, table: Path, directory: Path, num_rows: int) -> Iterator[Contender]:
    """One condition on two columns, evaluated by the cache and by DataFusion."""
    num_bytes = num_rows * 2 * 4
    credentials = find_credentials(endpoint)
    shards = wait_for_shard_map(endpoint, "table", (), 60, credentials)
    version = VersionNodes(endpoint, shards, credentials)
    fresh = itertools.count(1)  # what was evaluated before is not evaluated again

    def cache() -> int:
        selected_rows(version, [f"f0 > 0 AND f1 < {1 + next(fresh) / 1e6}"])
        return num_rows

    yield Contender(CACHE, cache, num_rows, num_bytes)
    largest = max(
        (directory / "cache").rglob("shard-*.arrow"), key=lambda path: path.stat().st_size
    )
    with pa.memory_map(str(largest)) as file:
        layout = Layout.of_stored(pa.ipc.open_file(file).schema)
    (index, first), (_, second) = layout.place("f0"), layout.place("f1")
    packed = layout.columns[index].field.name
    stored = counting(largest.parent, f"{packed}[{first + 1}]", f"{packed}[{second + 1}]")
    yield Contender(SAME_FILES, stored, num_rows, num_bytes)
    columns = directory / "columns"
    columns.mkdir()
    for path in sorted(table.glob("*.parquet")):
        rows = pq.read_table(path).combine_chunks()
        with pa.ipc.new_file(str(columns / f"{path.stem}.arrow"), rows.schema) as writer:
            writer.write_table(rows)
    yield Contender(COLUMNS, counting(columns, "f0", "f1"), num_rows, num_bytes)


def counting(folder: Path, first: str, second: str) -> Callable[[], int]:
    """Counts rows with DataFusion, on all processors; answers how many it looked at."""
    cores = len(os.sched_getaffinity(0))
    context = SessionContext(SessionConfig().with_target_partitions(cores))
    context.register_arrow("t", f"{folder.absolute().as_uri()}/", file_extension=".arrow")
    (total,) = context.sql("SELECT count(*) AS rows FROM t").to_pylist()

    def run() -> int:
        query = f"SELECT count(*) FROM t WHERE {first} > 0 AND {second} < 1.0"
        context.sql(query).collect()
        return int(total["rows"])

    return run


if __name__ == "__main__":
    main()
