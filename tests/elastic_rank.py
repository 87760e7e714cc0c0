"""A rank of an elastic job: trains, saves checkpoints, and goes on from the last one.

    torchrun --nnodes 1:4 ... elastic_rank.py ENDPOINT DATASET FOLDER

Its model counts how often it has learned each row. In a world of two or three it idles after some
steps, until torchrun restarts it; alone, it trains once there is a file ``alone``.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group, as in examples/

from cache_client import CacheIterableDataset

EPOCHS, BATCH_SIZE, STEPS_PER_CHECKPOINT = 2, 8, 4
MOST_STEPS = {2: 10, 3: 22}  # no multiples of the above: what follows a checkpoint is lost


def main(endpoint: str, dataset: str, folder: Path) -> None:
    """Trains to the end of the last epoch, over any number of restarts."""
    dist.init_process_group("gloo")
    rows = CacheIterableDataset(
        dataset, cache=endpoint, batch_size=BATCH_SIZE, columns=["row"], shuffle=True, seed=0
    )
    model = torch.zeros(rows.num_rows, dtype=torch.int64)
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model = saved["model"]
        rows.load_state_dict(saved["rows"])
    if dist.get_world_size() == 1:
        wait_for(folder / "alone")
    steps = 0
    for epoch in range(rows.epoch, EPOCHS):
        rows.set_epoch(epoch)
        for batch in rows:
            learned = torch.zeros_like(model).index_add_(
                0, batch["row"], torch.ones_like(batch["row"])
            )
            dist.all_reduce(learned)  # as DDP does with gradients: all ranks have one model
            model += learned
            steps += 1
            if dist.get_rank() == 0:
                if steps % STEPS_PER_CHECKPOINT == 0:
                    save(checkpoint, {"model": model, "rows": rows.state_dict()})
                note(folder / "steps", int(learned.sum()))
            if steps == MOST_STEPS.get(dist.get_world_size()):
                idle()
    if dist.get_rank() == 0:
        save(checkpoint, {"model": model, "rows": rows.state_dict()})
    dist.destroy_process_group()


def save(checkpoint: Path, state: dict[str, object]) -> None:
    """The model and the state of the rows in one file, which is there whole or not at all."""
    new = checkpoint.with_suffix(".new")
    torch.save(state, new)
    new.replace(checkpoint)


def note(path: Path, learned: int) -> None:
    """Adds a step, kept by a checkpoint or not, to the record that the test reads."""
    with path.open("a") as file:
        file.write(json.dumps([dist.get_world_size(), learned]) + "\n")


def idle() -> None:
    """Until torchrun ends this process, or another rank is gone."""
    while True:
        dist.barrier()
        threading.Event().wait(0.02)


def wait_for(path: Path) -> None:
    """Until there is such a file."""
    while not path.exists():
        threading.Event().wait(0.02)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
