"""Is text tokenised once by the nodes as fast as by the library, and faster than by `datasets`?

The same texts, in turn: a load with ``tokenize`` (file to sealed shards, and its drop), tokenizers
alone over texts in memory with as many threads as the node has function workers, and a
``datasets.map(batched=True, num_proc=2)`` end to end (file to Arrow files), of a tokenizer of
Transformers, and of the library alone.

    python -m benchmarks.tokens --rows 8000
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import load_dataset
from datasets.utils.logging import disable_progress_bar
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.common import (
    Timing,
    measure_in_turn,
    print_ratios,
    print_table,
    ratio,
    write_timings,
)
from cache_client import CacheClient, DatasetSpec
from cache_server import LocalCluster

LOAD, BATCH = "load with tokenize", "encode_batch"
MAP, BARE = "datasets.map(tokenizer, num_proc=2)", "datasets.map of bare tokenizers"
TARGETS = {f"{LOAD} / {BATCH}": 0.8, f"{LOAD} / {MAP}": 1.5}
_WORKERS = 2
_VOCABULARY = 8000


def main() -> None:
    """Prints the ratios and writes ``results/tokens.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a look in seconds")
    arguments = parser.parse_args()
    rows: int = 1_000 if arguments.quick else arguments.rows
    os.environ["RAYON_NUM_THREADS"] = str(_WORKERS)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        timings = _measured(Path(folder), rows, arguments.repeats, stack)
    ratios: dict[str, float | None] = {
        f"{LOAD} / {other}": ratio(timings, LOAD, other) for other in (BATCH, MAP, BARE)
    }
    print_table(timings)
    print_ratios(ratios, TARGETS)
    write_timings("tokens", timings, ratios, TARGETS, quick=arguments.quick)


def _measured(folder: Path, num_rows: int, repeats: int, stack: ExitStack) -> dict[str, Timing]:
    disable_progress_bar()
    texts = _texts(num_rows)
    num_bytes = sum(len(text.encode()) for text in texts)
    source, file = folder / "texts.parquet", folder / "tokenizer.json"
    pq.write_table(pa.table({"text": texts}), source, row_group_size=max(1, num_rows // 8))
    _train(texts[:4000]).save(str(file))
    tokenizer = Tokenizer.from_file(str(file))
    cluster = stack.enter_context(LocalCluster(nodes=1))
    client, names = CacheClient(cluster.endpoint), count()
    sql = f"SELECT tokenize(text, '{file}') AS tokens FROM source"

    def load() -> int:
        name = f"tokens-{next(names)}"
        # Another size of shards makes another version: nothing is reused.
        spec = DatasetSpec(name, source, sql=sql, target_shard_bytes=(64 << 20) + next(names))
        num_loaded: int = client.load(spec).num_rows
        client.drop(name)
        return num_loaded

    def encode() -> int:
        _let_threads()
        return len(tokenizer.encode_batch(texts))

    def mapped(encoded: Callable[..., Any]) -> int:
        cache = folder / f"hf-{next(names)}"
        rows = load_dataset("parquet", data_files=str(source), split="train", cache_dir=str(cache))
        found = rows.map(
            encoded,
            batched=True,
            num_proc=2,
            remove_columns=["text"],
            fn_kwargs={"file": str(file)},
        )
        num_found = len(found)
        shutil.rmtree(cache)
        return num_found

    timings = measure_in_turn(
        {
            LOAD: load,
            BATCH: encode,
            MAP: partial(mapped, _by_transformers),
            BARE: partial(mapped, _by_tokenizers),
        },
        num_rows=num_rows,
        num_bytes=num_bytes,
        repeats=repeats,
    )
    return timings


def _let_threads() -> None:
    """`datasets` switches the threads of tokenizers off before it forks, and leaves them off."""
    os.putenv("TOKENIZERS_PARALLELISM", "true")


_MADE: dict[str, Any] = {}


def _by_transformers(batch: dict[str, list[str]], file: str) -> Any:
    """As Transformers shows it."""
    if file not in _MADE:
        _MADE[file] = PreTrainedTokenizerFast(tokenizer_file=file)
    return _MADE[file](batch["text"])


def _by_tokenizers(batch: dict[str, list[str]], file: str) -> dict[str, list[list[int]]]:
    """Without the cost of the wrapper, and without a mask."""
    if file not in _MADE:
        _MADE[file] = Tokenizer.from_file(file)
    return {"input_ids": [each.ids for each in _MADE[file].encode_batch(batch["text"])]}


def _texts(num_rows: int) -> list[str]:
    """Texts of 100 to 2000 characters, of words with the frequencies of a language."""
    rng = random.Random(0)
    letters = "etaoinshrdlcumwfgypbvk"
    words = ["".join(rng.choices(letters, k=rng.randrange(2, 11))) for _ in range(20_000)]
    weights = [1 / (rank + 2) for rank in range(len(words))]
    drawn = rng.choices(words, weights, k=200_000)
    starts = (rng.randrange(len(drawn) - 400) for _ in range(num_rows))
    return [" ".join(drawn[start : start + rng.randrange(20, 400)]) for start in starts]


def _train(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


if __name__ == "__main__":
    main()
