"""Losses of TRL's trainers over the cache, and over `datasets` in memory in the same order.

    python trl_losses.py ENDPOINT FOLDER

The cache has the tokens that its nodes made. In memory TRL makes them itself, of the texts of
examples/chats.py. Prints a JSON object: recipe -> losses of both.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from cache_client import CacheIterableDataset, TrainsFromCache
from cache_client.order import order as ordering

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import chat_sft
import chats
import dpo

BATCH_SIZE, SEED = 8, 3
ENDPOINT, FOLDER = sys.argv[1], sys.argv[2]


class Notes:
    """Mixin of a trainer that keeps the loss of each step, unrounded."""

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        loss = super().training_step(*arguments, **options)  # type: ignore[misc]
        self.losses = [*getattr(self, "losses", []), loss.item()]
        return loss


class MemorySFT(Notes, SFTTrainer):
    pass


class CacheSFT(Notes, TrainsFromCache, SFTTrainer):
    pass


class MemoryDPO(Notes, DPOTrainer):
    pass


class CacheDPO(Notes, TrainsFromCache, DPOTrainer):
    pass


def losses(trainer: Any) -> list[float]:
    trainer.train()
    found: list[float] = trainer.losses
    return found


def options(**more: Any) -> dict[str, Any]:
    return {
        "output_dir": FOLDER,
        "num_train_epochs": 1,
        "per_device_train_batch_size": BATCH_SIZE,
        "learning_rate": 1e-2,
        "train_sampling_strategy": "sequential",
        **{"save_strategy": "no", "report_to": "none", "disable_tqdm": True},
        **{"use_cpu": True, "bf16": False, **more},
    }


def in_order(rows: list[dict[str, Any]]) -> Dataset:
    """The rows in memory, as the first epoch of the cache has them."""
    order = ordering.EpochOrder(len(rows), shuffle=True, seed=SEED, epoch=0)
    return Dataset.from_list([rows[row] for row in order.row_ids(np.arange(len(rows))).tolist()])


def cached(name: str, transform: Any) -> CacheIterableDataset:
    return CacheIterableDataset(
        name,
        cache=ENDPOINT,
        batch_size=BATCH_SIZE,
        shuffle=True,
        seed=SEED,
        batch_format="arrow",
        transform=transform,
    )


def sft() -> dict[str, list[float]]:
    tokenizer = chat_sft.make_tokenizer()
    tokenizer.chat_template = chats.TEMPLATE
    arguments = SFTConfig(**options(assistant_only_loss=True))
    in_memory = MemorySFT(
        chat_sft.tiny_model(len(tokenizer)),
        arguments,
        train_dataset=in_order([{"messages": each} for each in chats.messages()]),
        processing_class=tokenizer,
    )
    collate = DataCollatorForLanguageModeling(tokenizer.pad_token_id)

    def batch_of(batch: Any) -> Any:
        rows = [row["chat"] for row in batch.to_pylist()]
        return collate(
            [
                {
                    "input_ids": row["tokens"],
                    "labels": [
                        token if learnt else -100
                        for token, learnt in zip(row["tokens"], row["loss_mask"], strict=True)
                    ],
                }
                for row in rows
            ]
        )

    of_cache = CacheSFT(
        chat_sft.tiny_model(len(tokenizer)),
        SFTConfig(**options()),
        train_dataset=cached("chats", batch_of),
        processing_class=tokenizer,
    )
    return {"memory": losses(in_memory), "cache": losses(of_cache)}


def preferences() -> dict[str, list[float]]:
    tokenizer = chat_sft.make_tokenizer()
    models = [chat_sft.tiny_model(len(tokenizer)) for _ in range(4)]
    pairs = [{name: each[name] for name in each if name != "id"} for each in chats.pairs()]
    in_memory = MemoryDPO(
        *models[:2],
        DPOConfig(**options()),
        train_dataset=in_order(pairs),
        processing_class=tokenizer,
    )
    collate = dpo.Collate(tokenizer.pad_token_id)
    of_cache = CacheDPO(
        *models[2:],
        DPOConfig(**options()),
        train_dataset=cached("pairs", lambda batch: without_id(collate(batch))),
        processing_class=tokenizer,
    )
    return {"memory": losses(in_memory), "cache": losses(of_cache)}


def without_id(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name != "id"}


if __name__ == "__main__":
    print("FOUND " + json.dumps({"sft": sft(), "dpo": preferences()}), flush=True)
