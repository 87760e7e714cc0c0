"""Other readers of the same Parquet files, each at its best setting for two cores.

    python readers.py TASK --peer NAME --table KIND --paths A.parquet ... [--packed B.parquet ...]

Runs in a separate environment (`requirements.txt`), knows nothing of the cache, and prints one
JSON line for each result, or for a peer that does not run, with its reason. Tasks:

- ``shuffle``: batches of 1024 in shuffled order. What a peer converts beforehand is not timed.
  The clock of a pass starts when its first batch is there, so starting worker processes and
  filling a shuffle buffer is not timed either; the pass ends with the rows or after ``--seconds``.
  Where several settings are reasonable, each is tried and the fastest is measured.
- ``mix``: the same of two sources, the table twice, in the proportions 7 to 3.
- ``load``: once, from the Parquet files to what the peer reads from.

``--packed`` are the same rows with their 32 numbers in one list column: a peer may read either.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import logging
import os
import shutil
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader

BATCH_SIZE = 1024
BUFFER_ROWS = 10_000
WORKERS = 2  # of a DataLoader or a pool; the machine of the published numbers has two cores
CHUNK_BYTES = 64 * 1024 * 1024  # of a converted file, where a peer lets one choose
_SAMPLE_S = 0.02
_TRY_SHARE = 0.5  # of --seconds, for trying out a setting


@dataclass(frozen=True)
class Source:
    """The table to read.

    Attributes:
        paths: as its users have it.
        packed: the same rows, numbers in one list column; the same as ``paths`` where they are.
        work: a folder for what is converted.
    """

    kind: str
    paths: list[str]
    packed: list[str]
    work: Path

    @property
    def num_rows(self) -> int:
        """From the footers."""
        return sum(int(pq.read_metadata(path).num_rows) for path in self.packed)


Batches = Iterator[int]  # the rows of each batch, when it is there


@dataclass(frozen=True)
class Contender:
    """One way to read with a peer.

    Attributes:
        order: what its shuffle really does.
        settings: description -> one pass; the fastest is measured.
    """

    name: str
    order: str
    settings: Mapping[str, Callable[[], Batches]]


# -- columns ---------------------------------------------------------------------------------------


def read_columns(source: Source) -> dict[str, npt.NDArray[Any]]:
    """The whole table in memory: ``[N]`` or ``[N, n]`` arrays; strings as objects."""
    table = pq.read_table(source.packed).combine_chunks()
    return {name: as_array(table.column(name)) for name in table.column_names}


def as_array(column: pa.ChunkedArray | pa.Array) -> npt.NDArray[Any]:
    """``[N]`` or, of a fixed-size list, ``[N, n]``."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pa.types.is_fixed_size_list(column.type):
        values: npt.NDArray[Any] = column.flatten().to_numpy()
        return values.reshape(-1, column.type.list_size)
    array: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return array


def as_tensors(batch: pa.Table | pa.RecordBatch) -> dict[str, Any]:
    """Numbers as tensors, on Arrow's memory wherever it lies in one piece; strings stay Arrow.

    torch warns that such tensors must not be written to; a copy would be the peer's time.
    """
    result: dict[str, Any] = {}
    for name in batch.schema.names:
        column = batch.column(name)
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            result[name] = column
        else:
            result[name] = torch.from_numpy(as_array(column))
    return result


def as_lists(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Strings of NumPy and Arrow as Python lists."""

    def as_list(value: Any) -> Any:
        if isinstance(value, pa.Array | pa.ChunkedArray):
            return value.to_pylist()
        return value.tolist() if isinstance(value, np.ndarray) else value

    return {name: as_list(value) for name, value in batch.items()}


def rows_of(batch: Mapping[str, Any]) -> int:
    """Rows of a batch that is a dict of columns."""
    return len(next(iter(batch.values())))


def samples(source: Source) -> Iterator[dict[str, Any]]:
    """Row by row, as the writers of row formats want them."""
    for path in source.packed:
        for batch in pq.ParquetFile(path).iter_batches(batch_size=8192):
            names = batch.schema.names
            columns = [as_array(column) for column in batch.columns]
            for values in zip(*columns, strict=True):
                yield dict(zip(names, values, strict=True))


# -- Hugging Face datasets -------------------------------------------------------------------------


def hugging_face(source: Source) -> list[Contender]:
    """Streaming through a buffer, and map-style from its Arrow cache."""
    import datasets

    datasets.disable_progress_bars()
    # A stream sleeps for five seconds where its shards end, so that reading threads can go: once a
    # pass, which would be most of the time of the few rows that are read here.
    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0

    def open_(paths: list[str], streaming: bool) -> Any:
        return datasets.load_dataset(
            "parquet",
            data_files=paths,
            split="train",
            streaming=streaming,
            cache_dir=str(source.work / "hf"),
        )

    to_tensors: dict[str, Callable[[Any], Mapping[str, Any]]] = {
        "torch": dict,
        "numpy": to_torch,
        "arrow": as_tensors,
    }

    def streamed(make: Callable[[], Any], format_: str, lists: bool = False) -> Batches:
        rows = make().shuffle(seed=0, buffer_size=BUFFER_ROWS).with_format(format_)
        for batch in rows.iter(batch_size=BATCH_SIZE):
            tensors = to_tensors[format_](batch)
            yield rows_of(as_lists(tensors) if lists else tensors)

    mapped = open_(source.packed, False)

    def shuffled() -> Batches:
        for batch in mapped.shuffle(seed=0).with_format("torch").iter(batch_size=BATCH_SIZE):
            yield rows_of(batch)

    def taken() -> Batches:
        rows = mapped.with_format("arrow")
        order = np.random.default_rng(0).permutation(len(rows))
        for start in range(0, len(order), BATCH_SIZE):
            yield rows_of(as_tensors(rows[order[start : start + BATCH_SIZE]]))

    # A DataLoader over any of these, with workers, is slower than each without.
    def streams(
        form: str,
        make: Callable[[], Any],
        formats: Iterable[str] = to_tensors,
        lists: bool = False,
    ) -> dict[str, Callable[[], Batches]]:
        return {
            f"{form}, with_format({format_!r}).iter(1024)": partial(streamed, make, format_, lists)
            for format_ in formats
        }

    def from_cache() -> Any:
        return mapped.to_iterable_dataset(num_shards=len(source.packed))

    order = f"buffer of {BUFFER_ROWS:,}"
    settings = streams("packed", partial(open_, source.packed, True))
    settings["packed, Arrow cache, to_iterable_dataset, with_format('arrow').iter(1024)"] = partial(
        streamed, from_cache, "arrow"
    )
    contenders = [Contender("Hugging Face, streaming", order, settings)]
    if source.kind == "lineitem":  # what a tokenizer takes, and what the cache gives
        name = "Hugging Face, streaming, strings as lists"
        listed = streams("packed", partial(open_, source.packed, True), lists=True)
        contenders.append(Contender(name, order, listed))
    if source.paths != source.packed:
        name = "Hugging Face, streaming, 33 columns"
        columns = partial(open_, source.paths, True)
        contenders.append(Contender(name, order, streams("columns", columns)))
        # As its guides for torch read it; and what it was to be measured against.
        as_guided = streams("columns", columns, ["torch"])
        contenders.append(Contender(f"{name}, torch format", order, as_guided))
    return [
        *contenders,
        Contender(
            "Hugging Face, map-style",
            "exact global",
            # A DataLoader over it, with workers or without, is slower than either, and
            # flatten_indices(), once an epoch, writes 0.04 million rows a second.
            {
                "packed, shuffle().with_format('torch').iter(1024)": shuffled,
                "packed, with_format('arrow')[permutation[i : i + 1024]]": taken,
            },
        ),
    ]


def to_torch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """NumPy columns of numbers as tensors."""
    return {
        name: torch.from_numpy(value)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iuf"
        else value
        for name, value in batch.items()
    }


def load_hugging_face(source: Source) -> int:
    """Builds the Arrow cache from nothing."""
    import datasets

    datasets.disable_progress_bars()
    rows = datasets.load_dataset(
        "parquet",
        data_files=source.paths,
        split="train",
        cache_dir=str(source.work / "hf-load"),
        num_proc=WORKERS if len(source.paths) >= WORKERS else None,
    )
    return len(rows)


# -- MosaicML Streaming ----------------------------------------------------------------------------


class _Absent(ModuleType):
    """Replaces a package that a table does not need; any name in it is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@contextmanager
def absent(*names: str) -> Iterator[None]:
    """While it lasts, the packages that are missing can be imported, as empty ones."""
    stand_ins = {}
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]) is None or name in stand_ins:
            stand_ins[name] = _Absent(name)
            stand_ins[name].__path__ = []
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]


def import_streaming() -> Any:
    """The package, without torchvision and transformers.

    It imports both for its ready-made image and text datasets, and for the type of a tokenised
    batch; neither plays a part in reading a table.
    """
    with absent(
        "torchvision",
        "torchvision.datasets",
        "torchvision.transforms",
        "torchvision.transforms.functional",
        "transformers",
        "transformers.feature_extraction_utils",
        "transformers.tokenization_utils_base",
        "transformers.models",
        "transformers.models.auto",
        "transformers.models.auto.tokenization_auto",
    ):
        import streaming  # type: ignore[import-not-found]
    return streaming


def write_mds(source: Source, directory: Path) -> int:
    """Converts to MDS, row by row, as it is done."""
    streaming = import_streaming()
    schema = pq.read_schema(source.packed[0])
    columns = {field.name: _mds_type(field.type) for field in schema}
    rows = 0
    with streaming.MDSWriter(
        out=str(directory), columns=columns, size_limit=CHUNK_BYTES, progress_bar=False
    ) as writer:
        for sample in samples(source):
            writer.write(sample)
            rows += 1
    return rows


def _mds_type(dtype: pa.DataType) -> str:
    if pa.types.is_fixed_size_list(dtype):
        return f"ndarray:{_mds_type(dtype.value_type)}:{dtype.list_size}"
    names = {pa.float32(): "float32", pa.float64(): "float64", pa.string(): "str"}
    return names.get(dtype, str(dtype))


def mosaic(source: Source) -> list[Contender]:
    """MDS files of 64 MB, read by a DataLoader."""
    directory = converted(source, "mds", lambda path: write_mds(source, path))
    streaming = import_streaming()

    def read(workers: int) -> Batches:
        streaming.base.util.clean_stale_shared_memory()
        rows = streaming.StreamingDataset(
            local=str(directory),
            shuffle=True,
            shuffle_algo="py1e",
            batch_size=BATCH_SIZE,
            num_canonical_nodes=1,
        )
        for batch in DataLoader(rows, batch_size=BATCH_SIZE, num_workers=workers):
            yield rows_of(batch)

    return [
        Contender(
            "MosaicML Streaming",
            "py1e: each row within a range of its shard",
            {f"DataLoader, {n} workers": partial(read, n) for n in (0, WORKERS)},
        )
    ]


# -- LitData ---------------------------------------------------------------------------------------


def _row_group(item: tuple[str, int]) -> Iterator[Any]:
    path, group = item
    table = pq.ParquetFile(path).read_row_group(group)
    names = table.column_names
    columns = [as_array(column) for column in table.columns]
    for values in zip(*columns, strict=True):
        yield {
            name: value.copy()
            if isinstance(value, np.ndarray)
            else value.item()
            if isinstance(value, np.generic)
            else value
            for name, value in zip(names, values, strict=True)
        }


def litdata(source: Source) -> list[Contender]:
    """Optimised chunks of 64 MB, read by its own DataLoader."""
    import litdata as lit  # type: ignore[import-not-found]

    def convert(path: Path) -> None:
        groups = [
            (str(Path(file).absolute()), group)
            for file in source.packed
            for group in range(pq.read_metadata(file).num_row_groups)
        ]
        lit.optimize(
            fn=_row_group,
            inputs=groups,
            output_dir=str(path),
            chunk_bytes=CHUNK_BYTES,
            num_workers=WORKERS,
        )

    directory = converted(source, "litdata", convert)

    def read(workers: int) -> Batches:
        rows = lit.StreamingDataset(str(directory), shuffle=True, seed=0)
        for batch in lit.StreamingDataLoader(rows, batch_size=BATCH_SIZE, num_workers=workers):
            yield rows_of(batch)

    return [
        Contender(
            "LitData",
            "chunks, and rows within each chunk",
            {f"StreamingDataLoader, {n} workers": partial(read, n) for n in (0, WORKERS)},
        )
    ]


# -- Ray Data --------------------------------------------------------------------------------------


def ray_data(source: Source) -> list[Contender]:
    """Decoded beforehand into its object store, then batches through a local buffer."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    import ray
    import ray.data

    ray.init(
        num_cpus=WORKERS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=2 * 10**9,
    )
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False

    def as_arrow(rows: Any, prefetch: int) -> Batches:
        for batch in rows.iter_batches(
            batch_format="pyarrow",
            batch_size=BATCH_SIZE,
            local_shuffle_buffer_size=BUFFER_ROWS,
            prefetch_batches=prefetch,
        ):
            yield rows_of(as_tensors(batch))

    def as_torch(rows: Any, prefetch: int) -> Batches:
        for batch in rows.iter_torch_batches(
            batch_size=BATCH_SIZE, local_shuffle_buffer_size=BUFFER_ROWS, prefetch_batches=prefetch
        ):
            yield rows_of(batch)

    ways = {"iter_batches(pyarrow)": as_arrow}
    if source.kind != "lineitem":  # torch has no strings
        ways["iter_torch_batches"] = as_torch
    forms = {"packed": source.packed}
    if source.paths != source.packed:
        forms["columns"] = source.paths
    settings = {}
    for form, paths in forms.items():
        rows = ray.data.read_parquet(paths).materialize()
        for (way, read), prefetch in itertools.product(ways.items(), (1, 4)):
            name = f"{form}, materialized, {way}, {prefetch} ahead"
            settings[name] = partial(read, rows, prefetch)
    return [Contender("Ray Data", f"buffer of {BUFFER_ROWS:,}", settings)]


# -- Lance -----------------------------------------------------------------------------------------


def lance(source: Source) -> list[Contender]:
    """Random takes of a ready permutation, two at a time."""
    import lance as lance_  # type: ignore[import-not-found]

    def convert(path: Path) -> None:
        lance_.write_dataset(pq.read_table(source.packed), str(path))

    directory = converted(source, "lance", convert)
    rows = lance_.dataset(str(directory))
    order = np.random.default_rng(0).permutation(source.num_rows)
    parts = [order[i : i + BATCH_SIZE] for i in range(0, len(order), BATCH_SIZE)]

    def take(ids: npt.NDArray[np.int64]) -> int:
        return rows_of(as_tensors(rows.take(pa.array(ids))))

    def read(threads: int) -> Batches:
        with ThreadPoolExecutor(threads) as pool:
            pending: deque[Future[int]] = deque()
            try:
                for part in parts:
                    pending.append(pool.submit(take, part))
                    if len(pending) >= 2 * threads:
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:
                for future in pending:
                    future.cancel()

    return [
        Contender(
            "Lance",
            "exact global",
            {f"dataset.take, {n} threads": partial(read, n) for n in (1, 2, 4)},
        )
    ]


# -- Grain -----------------------------------------------------------------------------------------


GRAIN_THREADS = (0, 1, 2)  # 0 is its own advice for what lies in memory


class _RowsInMemory:
    """A source of single rows, as Grain wants one."""

    def __init__(self, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        self._columns = dict(columns)
        self._num_rows = rows_of(columns)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self._columns.items()}


def grain(source: Source) -> list[Contender]:
    """Rows in memory, shuffled by index; row by row as its guide has it, and in ready batches."""
    import grain as grain_

    columns = read_columns(source)
    rows = _RowsInMemory(columns)

    def by_row(threads: int) -> Batches:
        dataset = grain_.MapDataset.source(rows).seed(0).shuffle().batch(BATCH_SIZE)
        options = grain_.ReadOptions(num_threads=threads, prefetch_buffer_size=16)
        for batch in dataset.to_iter_dataset(options):
            yield rows_of(to_torch(batch))

    def by_row_in_processes() -> Batches:
        dataset = grain_.MapDataset.source(rows).seed(0).shuffle().batch(BATCH_SIZE)
        options = grain_.MultiprocessingOptions(num_workers=WORKERS)
        for batch in dataset.to_iter_dataset().mp_prefetch(options):
            yield rows_of(to_torch(batch))

    def take(ids: npt.NDArray[np.int64]) -> dict[str, Any]:
        return {name: column[ids] for name, column in columns.items()}

    def by_batch(threads: int) -> Batches:
        ids = grain_.MapDataset.range(len(rows)).seed(0).shuffle().batch(BATCH_SIZE)
        options = grain_.ReadOptions(num_threads=threads, prefetch_buffer_size=16)
        for batch in ids.map(take).to_iter_dataset(options):
            yield rows_of(to_torch(batch))

    return [
        Contender(
            "Grain",
            "exact global",
            {
                **{f"rows in memory, {n} threads": partial(by_row, n) for n in GRAIN_THREADS},
                "rows in memory, mp_prefetch of 2": by_row_in_processes,
            },
        ),
        Contender(
            "Grain, of indices, one take a batch",
            "exact global",
            {f"columns in memory, {n} threads": partial(by_batch, n) for n in GRAIN_THREADS},
        ),
    ]


# -- mixtures --------------------------------------------------------------------------------------

SHARES = (0.7, 0.3)


def mixed_by_hugging_face(source: Source) -> list[Contender]:
    """`interleave_datasets`, with probabilities, of two shuffled tables."""
    import datasets

    table = datasets.load_dataset(
        "parquet", data_files=source.packed, split="train", cache_dir=str(source.work / "hf")
    )

    def read() -> Batches:
        mixed = datasets.interleave_datasets(
            [table.shuffle(seed=seed) for seed in (0, 1)], probabilities=list(SHARES), seed=0
        )
        for batch in mixed.with_format("torch").iter(BATCH_SIZE):
            yield rows_of(batch)

    name = "Hugging Face, interleave_datasets"
    return [Contender(name, "exact global, random source", {"iter": read})]


def mixed_by_mosaic(source: Source) -> list[Contender]:
    """Streams with proportions."""
    directory = converted(source, "mds", lambda path: write_mds(source, path))
    second = source.work / "mds-second"
    if not second.exists():
        shutil.copytree(directory, second)
    streaming = import_streaming()

    def read(workers: int) -> Batches:
        streaming.base.util.clean_stale_shared_memory()
        streams = [
            streaming.Stream(local=str(folder), proportion=share)
            for folder, share in zip((directory, second), SHARES, strict=True)
        ]
        rows = streaming.StreamingDataset(
            streams=streams, shuffle=True, batch_size=BATCH_SIZE, num_canonical_nodes=1
        )
        for batch in DataLoader(rows, batch_size=BATCH_SIZE, num_workers=workers):
            yield rows_of(batch)

    settings = {f"DataLoader, {n} workers": partial(read, n) for n in (0, WORKERS)}
    return [Contender("MosaicML, proportions", "each row within a range of its shard", settings)]


def mixed_by_litdata(source: Source) -> list[Contender]:
    """`CombinedStreamingDataset` with weights."""
    import litdata as lit

    litdata(source)  # converts
    directory = source.work / f"{source.kind}-{source.num_rows}" / "litdata"

    def read(workers: int) -> Batches:
        parts = [lit.StreamingDataset(str(directory), shuffle=True, seed=seed) for seed in (0, 1)]
        rows = lit.CombinedStreamingDataset(parts, weights=list(SHARES), iterate_over_all=False)
        for batch in lit.StreamingDataLoader(rows, batch_size=BATCH_SIZE, num_workers=workers):
            yield rows_of(batch)

    settings = {f"StreamingDataLoader, {n} workers": partial(read, n) for n in (0, WORKERS)}
    return [Contender("LitData, combined", "chunks, and rows within each chunk", settings)]


def mixed_by_grain(source: Source) -> list[Contender]:
    """`MapDataset.mix` of rows in memory."""
    import grain as grain_

    rows = _RowsInMemory(read_columns(source))

    def read(threads: int) -> Batches:
        parts = [grain_.MapDataset.source(rows).seed(seed).shuffle() for seed in (0, 1)]
        mixed = grain_.MapDataset.mix(parts, weights=list(SHARES)).batch(BATCH_SIZE)
        options = grain_.ReadOptions(num_threads=threads, prefetch_buffer_size=16)
        for batch in mixed.to_iter_dataset(options):
            yield rows_of(to_torch(batch))

    settings = {f"rows in memory, {n} threads": partial(read, n) for n in GRAIN_THREADS}
    return [Contender("Grain, mix", "exact global", settings)]


# -- running ---------------------------------------------------------------------------------------

PEERS: dict[str, Callable[[Source], list[Contender]]] = {
    "huggingface": hugging_face,
    "mosaic": mosaic,
    "litdata": litdata,
    "ray": ray_data,
    "lance": lance,
    "grain": grain,
}


MIXERS: dict[str, Callable[[Source], list[Contender]]] = {
    "huggingface": mixed_by_hugging_face,
    "mosaic": mixed_by_mosaic,
    "litdata": mixed_by_litdata,
    "grain": mixed_by_grain,
}

PACKAGES = {
    "huggingface": "datasets",
    "mosaic": "mosaicml-streaming",
    "litdata": "litdata",
    "ray": "ray",
    "lance": "pylance",
    "grain": "grain",
}


def converted(source: Source, name: str, convert: Callable[[Path], object]) -> Path:
    """The folder of ``source`` in a peer's format; converted when it is not there yet."""
    target = source.work / f"{source.kind}-{source.num_rows}" / name
    if not target.exists():
        partial = target.with_name(f".{name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        convert(partial)
        partial.rename(target)
    return target


def cpu_seconds() -> float:
    """Of this process and its descendants, those that have ended too."""
    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def timed_pass(batches: Batches, max_seconds: float) -> tuple[int, float, float]:
    """Rows, seconds and processor seconds from the first batch on."""
    gc.collect()
    next(batches)
    rows = 0
    cpu = cpu_seconds()
    start = time.perf_counter()
    seconds = 0.0
    for count in batches:
        rows += count
        seconds = time.perf_counter() - start
        if seconds > max_seconds:
            break
    result = rows, seconds, cpu_seconds() - cpu
    close = getattr(batches, "close", None)
    if close is not None:
        close()
    if not rows:
        raise ValueError("too few rows to measure: one batch or none")
    return result


def measure(contender: Contender, seconds: float, repeats: int) -> dict[str, Any]:
    """The fastest setting, ``repeats`` times."""
    best, best_rate, tried = "", -1.0, {}
    for setting, make in contender.settings.items():
        rows, took, _ = timed_pass(make(), seconds * _TRY_SHARE)
        tried[setting] = rows / took
        if rows / took > best_rate:
            best, best_rate = setting, rows / took
    passes = [timed_pass(contender.settings[best](), seconds) for _ in range(repeats)]
    return {
        "name": contender.name,
        "order": contender.order,
        "setting": best,
        "tried_rows_per_s": tried,
        "rows": [p[0] for p in passes],
        "seconds": [p[1] for p in passes],
        "cpu_seconds": [p[2] for p in passes],
    }


def measure_load(name: str, source: Source) -> dict[str, Any]:
    """Time, rows and the peak resident memory of this process and its children."""
    loads: dict[str, Callable[[], int]] = {
        "huggingface": lambda: load_hugging_face(source),
        "mosaic": lambda: write_mds(source, source.work / "mds-load"),
    }
    for leftover in ("hf-load", "mds-load"):
        shutil.rmtree(source.work / leftover, ignore_errors=True)
    if name == "mosaic":
        import_streaming()
    else:
        import datasets  # noqa: F401
    before = peak = resident_bytes()
    over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(_SAMPLE_S):
            peak = max(peak, resident_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    cpu = cpu_seconds()
    start = time.perf_counter()
    try:
        rows = loads[name]()
    finally:
        seconds = time.perf_counter() - start
        over.set()
        watcher.join()
    return {
        "name": name,
        "rows": [rows],
        "seconds": [seconds],
        "cpu_seconds": [cpu_seconds() - cpu],
        "rss_before_bytes": before,
        "rss_peak_bytes": peak,
    }


def resident_bytes() -> int:
    """Of this process and its children; memory that they share counts in each."""
    me = psutil.Process()
    total = 0
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):
            total += process.memory_info().rss
    return int(total)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a JSON line a result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=["shuffle", "mix", "load"])
    parser.add_argument("--peer", choices=list(PEERS), required=True)
    parser.add_argument("--table", required=True)
    parser.add_argument("--paths", nargs="+", required=True)
    parser.add_argument("--packed", nargs="+")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    work = options.work.absolute()
    source = Source(options.table, options.paths, options.packed or options.paths, work)
    try:
        version = metadata.version(PACKAGES[options.peer])
        if options.task == "load":
            say({**measure_load(options.peer, source), "version": version})
            return
        for contender in (MIXERS if options.task == "mix" else PEERS)[options.peer](source):
            try:
                result = measure(contender, options.seconds, options.repeats)
                say({**result, "version": version})
            except Exception as error:
                say({"name": contender.name, "skipped": reason(error)})
    except Exception as error:
        say({"name": options.peer, "skipped": reason(error)})


def reason(error: Exception) -> str:
    """One line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def say(result: Mapping[str, Any]) -> None:
    """One line on standard output."""
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
