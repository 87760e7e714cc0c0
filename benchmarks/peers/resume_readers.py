"""How long do other readers take to resume inside an epoch? Run by the peers' own Python.

    python resume_readers.py (hugging-face | mosaicml) --parquet FOLDER --rows N --scratch FOLDER

Prints one JSON object a line: the reader, the part of the epoch that was done, the seconds of each
repeat from making the reader to its first batch. Knows nothing of the packages of this project.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

FEATURES = [f"f{i}" for i in range(32)]
BUFFER_ROWS = 10_000
State = Mapping[str, Any]

_IMAGES_AND_TEXT = (
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
)


def main() -> None:
    """Makes the states, then resumes from each in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reader", choices=("hugging-face", "mosaicml"))
    parser.add_argument("--parquet", type=Path, required=True)
    parser.add_argument("--rows", type=int, required=True, help="of the Parquet files")
    parser.add_argument("--scratch", type=Path, required=True, help="for converted files, kept")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--points", type=float, nargs="+", default=[0.0, 0.5, 0.99])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    batch_size: int = arguments.batch_size
    steps = {p: int(arguments.rows * p) // batch_size for p in arguments.points}
    resume: Callable[[State | None], tuple[Any, Iterator[dict[str, Any]]]]
    if arguments.reader == "hugging-face":
        name, package = f"Hugging Face, shuffle({BUFFER_ROWS:,})", "datasets"
        files = sorted(str(path) for path in arguments.parquet.glob("*.parquet"))
        kept = arguments.scratch / f"{package}-{metadata.version(package)}-{arguments.rows}.json"
        states = hugging_face_states(files, batch_size, steps, kept)

        def resume(state: State | None) -> tuple[Any, Iterator[dict[str, Any]]]:
            return hugging_face(files, batch_size, state)

    else:
        name, package = "MosaicML Streaming, py1e", "mosaicml-streaming"
        mds = write_mds(arguments.parquet, arguments.scratch / f"mds-f32x32-{arguments.rows}")
        states = {p: mosaicml_state(mds, batch_size, step) for p, step in steps.items()}

        def resume(state: State | None) -> tuple[Any, Iterator[dict[str, Any]]]:
            return mosaicml(mds, batch_size, state)

    seconds: dict[float, list[float]] = {point: [] for point in states}
    for turn in range(1 + arguments.repeats):  # the first is a warm-up
        for point, state in states.items():
            gc.collect()
            start = time.perf_counter()
            reader = resume(state)
            batch = next(reader[1], None)
            elapsed = time.perf_counter() - start
            del reader  # which takes its time, too
            if batch is None:
                # Of the rows that are left, a buffer full had been read ahead and is lost.
                print(f"{name} yields no batch at {point:.0%}", file=sys.stderr)
                continue
            assert tuple(batch["features"].shape) == (batch_size, len(FEATURES))
            assert tuple(batch["label"].shape) == (batch_size,)
            if turn:
                seconds[point].append(elapsed)
    for point, each in seconds.items():
        if not each:
            continue
        result = {"reader": name, "version": metadata.version(package), "point": point}
        print(json.dumps({**result, "seconds": each}), flush=True)


# -- Hugging Face datasets, streaming --------------------------------------------------------------


def hugging_face(
    files: list[str], batch_size: int, state: State | None
) -> tuple[Any, Iterator[dict[str, Any]]]:
    """The dataset, and its batches as tensors."""
    # The files are local: nothing to ask its hub for, which would count as its time.
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets
    import numpy as np
    import torch

    # A stream sleeps for five seconds where its shards end, and may begin close to such an end.
    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
    dataset = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    dataset = dataset.shuffle(seed=0, buffer_size=BUFFER_ROWS)
    if state is not None:
        dataset.load_state_dict(state)

    def batches() -> Iterator[dict[str, Any]]:
        rows = iter(dataset)
        while batch := list(itertools.islice(rows, batch_size)):
            features = np.array([[row[name] for name in FEATURES] for row in batch], np.float32)
            label = np.array([row["label"] for row in batch], np.int64)
            yield {"features": torch.from_numpy(features), "label": torch.from_numpy(label)}

    return dataset, batches()


def hugging_face_states(
    files: list[str], batch_size: int, steps: Mapping[float, int], kept: Path
) -> dict[float, State | None]:
    """States after so many steps of one pass; None before the first, as a job begins.

    A state can only be had by reading up to it, so they are kept in a file. The rows are read as
    Arrow tables for that: four times as fast as dicts, and the states are the same.
    """
    states: dict[str, State | None] = json.loads(kept.read_text()) if kept.exists() else {}
    if not {str(point) for point in steps} <= states.keys():
        dataset, _ = hugging_face(files, batch_size, None)
        dataset = dataset.with_format("arrow")
        rows = iter(dataset)
        done = 0
        for point, step in sorted(steps.items()):
            for _ in itertools.islice(rows, step * batch_size - done):
                pass
            done = step * batch_size
            states[str(point)] = dataset.state_dict() if done else None
        kept.write_text(json.dumps(states))
    return {point: states[str(point)] for point in steps}


# -- MosaicML Streaming ----------------------------------------------------------------------------


class _StandIn(ModuleType):
    """A package in which every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name == "__path__":  # it has modules
            return []
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def import_streaming() -> Any:
    """The package, with stand-ins for what it imports for images and text: no table needs them."""
    stand_ins = {name: _StandIn(name) for name in _IMAGES_AND_TEXT}
    sys.modules.update(stand_ins)
    try:
        import streaming  # type: ignore[import-not-found]
    finally:
        for name in stand_ins:
            del sys.modules[name]
    return streaming


def write_mds(parquet: Path, directory: Path) -> Path:
    """The table in Streaming's own format, a row one array and a label; written once."""
    import numpy as np
    import pyarrow.dataset

    if directory.exists():
        return directory
    partial = directory.with_name(f".{directory.name}.partial")
    columns = {"features": f"ndarray:float32:{len(FEATURES)}", "label": "int64"}
    writer_of = import_streaming().MDSWriter
    with writer_of(out=str(partial), columns=columns, exist_ok=True) as writer:
        for batch in pyarrow.dataset.dataset(parquet).to_batches():
            features = np.stack([batch.column(name).to_numpy() for name in FEATURES], axis=1)
            for row, label in zip(features, batch.column("label").to_numpy(), strict=True):
                writer.write({"features": row, "label": label})
    partial.rename(directory)
    return directory


def mosaicml(
    directory: Path, batch_size: int, state: State | None
) -> tuple[Any, Iterator[dict[str, Any]]]:
    """The dataset, and its batches as tensors."""
    from torch.utils.data import DataLoader

    streaming = import_streaming()
    # To Streaming each repeat is a separate process: it keeps its state in shared memory.
    streaming.base.util.clean_stale_shared_memory()
    dataset = streaming.StreamingDataset(
        local=str(directory), batch_size=batch_size, shuffle=True, shuffle_seed=0
    )
    if state is not None:
        dataset.load_state_dict(dict(state))
    return dataset, iter(DataLoader(dataset, batch_size=batch_size))


def mosaicml_state(directory: Path, batch_size: int, step: int) -> State | None:
    """What the dataset says after so many steps; it needs no pass for that."""
    if not step:
        return None
    dataset, batches = mosaicml(directory, batch_size, None)
    next(batches)  # an epoch has begun
    state: State = dataset.state_dict(step * batch_size, True)
    return state


if __name__ == "__main__":
    main()
