"""Train a small regression model on a cached table with DistributedDataParallel.

Start a cache, load a dataset ``lineitem`` (see demo.py), then run

    CACHE_ENDPOINT=grpc://127.0.0.1:50051 torchrun --nproc-per-node 2 examples/train_ddp.py

Each rank streams its own rows. At the end of every epoch the ranks compare what they saw with the
table: every row exactly once.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group: see "The end of a rank" in README.md
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cache_client import CacheIterableDataset, CacheLoader

FEATURES = ["quantity", "discount", "tax", "part"]


@dataclass(frozen=True)
class EpochReport:
    """The result of one epoch."""

    loss: float
    rows_per_s: float
    rows_in_table: int
    rows_seen_once: int


def main() -> None:
    """Trains for a few epochs; prints the loss and whether every row was seen exactly once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="lineitem")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    complete = train(arguments)
    dist.destroy_process_group()
    if not complete:
        raise SystemExit("some rows were missed or repeated")


def train(arguments: argparse.Namespace) -> bool:
    """Whether every row was seen exactly once in every epoch."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dataset = CacheIterableDataset(
        arguments.dataset,
        batch_size=arguments.batch_size,
        columns=["row_key", *FEATURES, "price"],
        stack={"features": FEATURES},
        shuffle=True,
        seed=0,
    )
    loader = dataset.loader(num_workers=arguments.workers)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(len(FEATURES), 64), nn.ReLU(), nn.Linear(64, 1))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    complete = True
    for epoch in range(arguments.epochs):
        dataset.set_epoch(epoch)
        report = train_epoch(model, optimizer, loader, dataset, epoch)
        complete &= report.rows_seen_once == report.rows_in_table
        if dist.get_rank() == 0:
            print(
                f"epoch {epoch}: loss {report.loss:.5f}, {report.rows_per_s:,.0f} rows/s, "
                f"{report.rows_seen_once:,} of {report.rows_in_table:,} rows seen exactly once",
                flush=True,
            )
    return complete


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: CacheLoader,
    dataset: CacheIterableDataset,
    epoch: int,
) -> EpochReport:
    """One pass over this rank's rows."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    columns = (
        TextColumn(f"epoch {epoch}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.5f}  {task.fields[rows_per_s]:,.0f} rows/s"),
        TimeRemainingColumn(),
    )
    keys: list[torch.Tensor] = []
    loss_sum, rows, start = 0.0, 0, time.perf_counter()
    with Progress(*columns, disable=rank != 0) as progress:
        task = progress.add_task("train", total=len(dataset), loss=0.0, rows_per_s=0.0)
        for step, batch in enumerate(loader, 1):
            optimizer.zero_grad()
            prediction = model(batch["features"]).squeeze(1)
            loss = nn.functional.mse_loss(prediction, batch["price"])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            keys.append(batch["row_key"].clone())
            rows += len(prediction)
            loss_sum += float(loss.detach()) * len(prediction)
            if step % 20 == 0 or step == len(dataset):
                rate = rows * world_size / (time.perf_counter() - start)
                progress.update(task, completed=step, loss=loss_sum / rows, rows_per_s=rate)
    seconds = time.perf_counter() - start
    return EpochReport(
        loss=loss_sum / rows,
        rows_per_s=rows * world_size / seconds,
        rows_in_table=dataset.num_rows,
        rows_seen_once=count_seen_once(torch.cat(keys), rank, world_size),
    )


def count_seen_once(keys: torch.Tensor, rank: int, world_size: int) -> int:
    """Counts the keys that occur exactly once over all ranks."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([len(keys)]))
    padded = torch.full((int(max(sizes)),), -1, dtype=torch.int64)
    padded[: len(keys)] = keys
    gathered = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(gathered, padded)
    together = torch.cat([g[: int(n)] for g, n in zip(gathered, sizes, strict=True)])
    _, counts = torch.unique(together, return_counts=True)
    return int((counts == 1).sum())


if __name__ == "__main__":
    main()
