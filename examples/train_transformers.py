"""Train on a cached table with the Trainer of transformers, and resume inside an epoch.

    torchrun --nproc-per-node 2 examples/train_transformers.py --endpoint grpc://127.0.0.1:50051

With ``--stop-after-steps 20`` it saves a checkpoint and ends, as a pre-empted job does. Start it
again with the same ``--output-dir`` and number of ranks, because the Trainer counts steps: it
continues with the next row.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group: see "The end of a rank" in README.md
from accelerate.utils import gather_object, is_deepspeed_available
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from cache_client import CacheIterableDataset, TrainsFromCache

if is_deepspeed_available():
    import deepspeed  # noqa: F401  # before the group too: accelerate imports it if it is installed

FEATURES = ["quantity", "discount", "tax", "part"]


class CacheTrainer(TrainsFromCache, Trainer):
    """A Trainer with batches of the cache, and its positions in checkpoints."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.keys: list[torch.Tensor] = []  # of the rows that this rank saw in the epoch

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Any:
        """The mean squared error of a batch."""
        self.keys.append(inputs["row_key"].cpu())
        return nn.functional.mse_loss(model(inputs["features"]).squeeze(1), inputs["price"])


class CacheCallback(TrainerCallback):
    """Keeps the rows that were seen in checkpoints, and checks them at the end of epochs."""

    def __init__(self, trainer: CacheTrainer, checkpoint: str | None, stop_after: int | None):
        self.trainer, self.checkpoint, self.stop_after = trainer, checkpoint, stop_after
        self.complete = True

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Continues from the checkpoint."""
        if self.checkpoint:
            self.trainer.keys = torch.load(self._keys_file(self.checkpoint))

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Adds the rows of this rank to what the Trainer saved."""
        checkpoint = f"{args.output_dir}/checkpoint-{state.global_step}"
        position = self.trainer.train_dataset.state_dict()
        # After the last step, the next start begins with the next epoch.
        rest = position["rows_consumed"] < self.trainer.train_dataset.num_rows
        keys = self.trainer.keys if rest else []
        torch.save(keys, self._keys_file(checkpoint))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Saves and ends after the requested step."""
        if state.global_step == self.stop_after:
            control.should_save = control.should_training_stop = True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Counts the rows that occur once over all ranks."""
        if state.global_step == self.stop_after:
            return
        _, counts = torch.unique(torch.cat(gather_object(self.trainer.keys)), return_counts=True)
        once, rows = int((counts == 1).sum()), self.trainer.train_dataset.num_rows
        self.trainer.keys = []
        self.complete &= once == rows
        if state.is_world_process_zero:
            print(f"step {state.global_step}: {once:,} of {rows:,} rows seen exactly once")

    def _keys_file(self, checkpoint: str) -> Path:
        return Path(checkpoint, f"keys-{self.trainer.args.process_index}.pt")


def main() -> None:
    """Trains for a few epochs; prints the loss and whether every row was seen exactly once."""
    parser = argparse.ArgumentParser(description="Train with transformers' Trainer")
    parser.add_argument("--endpoint", help="default: CACHE_ENDPOINT")
    parser.add_argument("--dataset", default="lineitem")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--output-dir", default="transformers-output")
    parser.add_argument("--stop-after-steps", type=int)
    arguments = parser.parse_args()

    complete = train(arguments)
    if dist.is_initialized():  # by TrainingArguments, with more than one rank
        gc.collect()  # the Trainer and its callbacks refer to each other
        dist.destroy_process_group()
    if not complete:
        raise SystemExit("some rows were missed or repeated")


def train(arguments: argparse.Namespace) -> bool:
    """Whether every row was seen exactly once in every finished epoch."""
    torch.manual_seed(0)
    options = TrainingArguments(
        output_dir=arguments.output_dir,
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=arguments.batch_size,
        learning_rate=3e-3,
        save_strategy="no",
        logging_strategy="epoch",
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),  # without a GPU, each rank would train alone
    )
    # After TrainingArguments, which initialise torch.distributed.
    dataset = CacheIterableDataset(
        arguments.dataset,
        cache=arguments.endpoint,
        batch_size=arguments.batch_size,
        columns=["row_key", *FEATURES, "price"],
        stack={"features": FEATURES},
        shuffle=True,
    )
    model = nn.Sequential(nn.Linear(len(FEATURES), 64), nn.ReLU(), nn.Linear(64, 1))
    trainer = CacheTrainer(model, options, train_dataset=dataset)
    saved = Path(arguments.output_dir).exists()
    checkpoint = get_last_checkpoint(arguments.output_dir) if saved else None
    callback = CacheCallback(trainer, checkpoint, arguments.stop_after_steps)
    trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.accelerator.wait_for_everyone()  # no rank ends while another needs it
    return callback.complete


if __name__ == "__main__":
    main()
