"""Train on a cached table with Hugging Face Accelerate, and resume inside an epoch.

    torchrun --nproc-per-node 2 examples/train_accelerate.py --endpoint grpc://127.0.0.1:50051

With GPUs, use ``accelerate launch``. With ``--stop-after-steps 20`` it saves its state and ends, as
a pre-empted job does. Start it again with the same ``--state-dir`` and any number of ranks: it
continues with the next row.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed.nn  # before the group: see "The end of a rank" in README.md
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from cache_client import CacheIterableDataset

FEATURES = ["quantity", "discount", "tax", "part"]


def main() -> None:
    """Trains for a few epochs; prints the loss and whether every row was seen exactly once."""
    parser = argparse.ArgumentParser(description="Train with Accelerate")
    parser.add_argument("--endpoint", help="default: CACHE_ENDPOINT")
    parser.add_argument("--dataset", default="lineitem")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--state-dir", type=Path, default=Path("accelerate-state"))
    parser.add_argument("--stop-after-steps", type=int)
    arguments = parser.parse_args()

    # Without a GPU, accelerate trains each process alone unless cpu=True.
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    complete = train(arguments, accelerator)
    accelerator.free_memory()
    accelerator.end_training()
    if not complete:
        raise SystemExit("some rows were missed or repeated")


def train(arguments: argparse.Namespace, accelerator: Accelerator) -> bool:
    """Whether every row was seen exactly once in every finished epoch."""
    torch.manual_seed(0)
    dataset = CacheIterableDataset(
        arguments.dataset,
        cache=arguments.endpoint,
        batch_size=arguments.batch_size,
        columns=["row_key", *FEATURES, "price"],
        stack={"features": FEATURES},
        shuffle=True,
        device=accelerator.device,
    )
    model: nn.Module = nn.Sequential(nn.Linear(len(FEATURES), 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    # accelerate leaves this loader alone, and saves its state with the others. A DataLoader of
    # another kind is refused: accelerate would divide among the ranks what is divided already.
    model, optimizer, loader = accelerator.prepare(model, optimizer, dataset.loader())

    keys: list[torch.Tensor] = []
    if arguments.state_dir.exists():
        accelerator.load_state(str(arguments.state_dir))
        keys = load_keys(arguments.state_dir) if accelerator.is_main_process else []
    steps, complete = 0, True
    for epoch in range(dataset.epoch, arguments.epochs):
        dataset.set_epoch(epoch)  # changes nothing in a resumed epoch
        losses: list[torch.Tensor] = []
        for batch in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch["features"]).squeeze(1), batch["price"])
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
            keys.append(batch["row_key"].cpu())
            steps += 1
            if steps == arguments.stop_after_steps:
                accelerator.save_state(str(arguments.state_dir))
                # After the last step, the next start begins with the next epoch.
                keys = keys if dataset.state_dict()["rows_consumed"] < dataset.num_rows else []
                save_keys(keys, arguments.state_dir, accelerator)
                accelerator.print(f"stopped after {steps} steps, in epoch {epoch}")
                return complete
        mean = accelerator.reduce(torch.stack(losses).mean(), "mean")
        once = count_seen_once(keys)
        keys = []
        complete &= once == dataset.num_rows
        accelerator.print(
            f"epoch {epoch}: loss {float(mean):.5f}, {len(losses)} steps, "
            f"{once:,} of {dataset.num_rows:,} rows seen exactly once"
        )
    return complete


def count_seen_once(keys: list[torch.Tensor]) -> int:
    """Counts the keys that occur exactly once over all ranks."""
    _, counts = torch.unique(torch.cat(gather_object(keys)), return_counts=True)
    return int((counts == 1).sum())


def save_keys(keys: list[torch.Tensor], state_dir: Path, accelerator: Accelerator) -> None:
    """Saves the rows that all ranks saw in the epoch, for the check at its end."""
    everywhere = gather_object(keys)
    if accelerator.is_main_process:
        torch.save(everywhere, state_dir / "keys.pt")


def load_keys(state_dir: Path) -> list[torch.Tensor]:
    """Returns the rows that all ranks saw before they stopped."""
    saved: list[torch.Tensor] = torch.load(state_dir / "keys.pt")
    return saved


if __name__ == "__main__":
    main()
