"""Train on a cached table with Lightning, and resume inside an epoch.

    torchrun --nproc-per-node 2 examples/train_lightning.py --endpoint grpc://127.0.0.1:50051

It saves a checkpoint after every tenth step. With ``--stop-after-steps 20`` it ends, as a
pre-empted job does. Start it again with the same ``--output-dir`` and number of ranks, because
Lightning counts steps: it continues with the next row.
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group: see "The end of a rank" in README.md
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from cache_client import CacheIterableDataset, CacheLoader

FEATURES = ["quantity", "discount", "tax", "part"]


class CacheData(LightningDataModule):
    """The rows of this rank."""

    def __init__(self, table: str, *, endpoint: str | None, batch_size: int) -> None:
        super().__init__()
        self.table, self.endpoint, self.batch_size = table, endpoint, batch_size

    def setup(self, stage: str) -> None:
        """Makes the dataset here, where torch.distributed is initialised."""
        self.dataset = CacheIterableDataset(
            self.table,
            cache=self.endpoint,
            batch_size=self.batch_size,
            columns=["row_key", *FEATURES, "price"],
            stack={"features": FEATURES},
            shuffle=True,
        )

    def train_dataloader(self) -> CacheLoader:
        """Returns a loader whose state Lightning saves: it is the same on every rank."""
        return self.dataset.loader()


class PriceModel(LightningModule):
    """A small regression that also records the rows it sees."""

    def __init__(self, data: CacheData) -> None:
        super().__init__()
        self.data = data
        self.layers = nn.Sequential(nn.Linear(len(FEATURES), 64), nn.ReLU(), nn.Linear(64, 1))
        self.keys: list[torch.Tensor] = []
        self.complete = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        """The mean squared error of a batch."""
        self.keys.append(batch["row_key"].cpu())
        loss = nn.functional.mse_loss(self.layers(batch["features"]).squeeze(1), batch["price"])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        """Counts the rows that occur once over all ranks; prints that and the loss."""
        loss = float(self.trainer.callback_metrics["loss"])
        if self.trainer.global_step == self.trainer.max_steps:
            self.print(f"stopped after {self.global_step} steps: loss {loss:.5f}")
            return
        _, counts = torch.unique(torch.cat(_of_all_ranks(self.keys)), return_counts=True)
        once, rows = int((counts == 1).sum()), self.data.dataset.num_rows
        self.complete &= once == rows
        self.keys = []
        done = f"{once:,} of {rows:,} rows seen exactly once"
        self.print(f"epoch {self.current_epoch}: loss {loss:.5f}, {done}")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called on every rank. Only the check above needs the keys."""
        # After the last step, the next start begins with the next epoch.
        rest = self.data.dataset.state_dict()["rows_consumed"] < self.data.dataset.num_rows
        keys = self.keys if rest else []
        checkpoint["keys"] = _of_all_ranks(keys)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Gives rank 0 the keys that all ranks saw."""
        self.keys = checkpoint["keys"] if self.global_rank == 0 else []


def _of_all_ranks(keys: list[torch.Tensor]) -> list[torch.Tensor]:
    everywhere = [keys]
    if dist.is_initialized():
        everywhere *= dist.get_world_size()
        dist.all_gather_object(everywhere, keys)
    return [tensor for of_rank in everywhere for tensor in of_rank]


def main() -> None:
    """Trains for a few epochs; prints the loss and whether every row was seen exactly once."""
    parser = argparse.ArgumentParser(description="Train with Lightning")
    parser.add_argument("--endpoint", help="default: CACHE_ENDPOINT")
    parser.add_argument("--dataset", default="lineitem")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--output-dir", type=Path, default=Path("lightning-output"))
    parser.add_argument("--stop-after-steps", type=int, default=-1)
    arguments = parser.parse_args()

    complete = train(arguments)
    if dist.is_initialized():  # by Lightning, with more than one rank
        gc.collect()  # the Trainer and its model refer to each other
        dist.destroy_process_group()
    if not complete:
        raise SystemExit("some rows were missed or repeated")


def train(arguments: argparse.Namespace) -> bool:
    """Whether every row was seen exactly once in every finished epoch."""
    torch.manual_seed(0)
    checkpoint = arguments.output_dir / "latest.ckpt"
    data = CacheData(
        arguments.dataset, endpoint=arguments.endpoint, batch_size=arguments.batch_size
    )
    model = PriceModel(data)
    trainer = Trainer(
        # The number that torchrun started.
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        max_epochs=arguments.epochs,
        max_steps=arguments.stop_after_steps,
        callbacks=ModelCheckpoint(
            arguments.output_dir, "latest", every_n_train_steps=10, enable_version_counter=False
        ),
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(model, data, ckpt_path=checkpoint if checkpoint.exists() else None)
    return model.complete


if __name__ == "__main__":
    main()
