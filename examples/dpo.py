"""Prefer some answers to others with TRL's DPOTrainer, and resume inside an epoch.

A row has a prompt, a chosen and a rejected answer; the nodes of the cache have made tokens of them.
It starts a cache on this machine, trains a tiny model on two ranks, stops, and continues with one:

    python examples/dpo.py

With a cache that has the dataset ``pairs`` of `chats.py`:

    torchrun --nproc-per-node 2 examples/dpo.py --endpoint grpc://127.0.0.1:50051
"""

from __future__ import annotations

import argparse
import gc
import os
from typing import Any

import chats
import pyarrow as pa
import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group: see "The end of a rank" in README.md
from chat_sft import Stop, make_tokenizer, tiny_model
from transformers.trainer_utils import get_last_checkpoint
from trl import DPOConfig, DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from cache_client import CacheIterableDataset, TrainsFromCache


def main() -> None:
    """Trains for two epochs; prints the loss, and how many pairs were seen exactly once."""
    arguments = chats.arguments(
        "Learn preferences with TRL", "dpo-output", 16, "pairs a step, of all ranks"
    )
    train(arguments)
    if dist.is_initialized():  # by DPOConfig, with more than one rank
        gc.collect()
        dist.destroy_process_group()


class PairTrainer(TrainsFromCache, DPOTrainer):
    """TRL's trainer, with batches and positions of the cache; notes what it trains on."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.seen: list[object] = []

    def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any) -> Any:
        """Takes the numbers of the pairs, which no model needs."""
        self.seen += inputs.pop("id").tolist()
        return super().training_step(model, inputs, *rest)


class Collate:
    """TRL's collator over rows of the cache; may go to DataLoader workers."""

    def __init__(self, pad_token_id: int) -> None:
        self.collate = DataCollatorForPreference(pad_token_id)

    def __call__(self, batch: pa.RecordBatch) -> dict[str, Any]:
        """Pads chosen and rejected answers to one tensor, each after its prompt."""
        rows = batch.to_pylist()  # as `datasets` gives them
        return {**self.collate(rows), "id": torch.tensor([row["id"] for row in rows])}


def train(arguments: argparse.Namespace) -> None:
    """Trains, from the last checkpoint on, if there is one."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    options = DPOConfig(
        arguments.output_dir,
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=arguments.batch_size // world_size,
        learning_rate=1e-2,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
    )
    tokenizer = make_tokenizer()
    # After DPOConfig, which initialises torch.distributed.
    dataset = CacheIterableDataset(
        "pairs",
        cache=arguments.endpoint,
        batch_size=arguments.batch_size // world_size,
        shuffle=True,
        batch_format="arrow",
        transform=Collate(tokenizer.pad_token_id),
    )
    trainer = PairTrainer(
        tiny_model(len(tokenizer)),
        tiny_model(len(tokenizer)),  # the reference
        options,
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[Stop(arguments.stop_after_steps)],
    )
    os.makedirs(arguments.output_dir, exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.output_dir))
    steps = trainer.state.global_step
    chats.note(arguments.output_dir, steps, dataset.rank, trainer.seen)
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
        print(f"loss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at step {steps}")
        if steps == trainer.state.max_steps:
            print(chats.count(arguments.output_dir, arguments.epochs))


if __name__ == "__main__":
    main()
