"""A ZenML step that trains on a cached table, on the number of pods in its settings.

ZenML's Kubeflow Trainer step operator makes a TrainJob of the step. Every pod runs the function
once, without torchrun. Its environment has RANK, WORLD_SIZE and MASTER_ADDR. A TrainJob of ZenML
has no initializer, so the cache of the runtime starts empty. Rank 0 loads what STORAGE_URI and
CACHE_* in ``trainer_env`` describe, and the others wait for it.

    zenml step-operator register trainer --flavor kubeflow_trainer ...
    python examples/zenml_step.py

Limits:

- You must give ``num_proc_per_node``. Without it Trainer counts the CPUs of a pod, and ZenML
  multiplies the world size by them, although each pod runs one process: all ranks wait for ranks
  that do not exist. For n > 1 ZenML makes n times as many pods, each with one process and as many
  GPUs as before.
- Everyone who may read TrainJobs can read ``trainer_env``. Give the pods an identity, or pass
  ACCESS_KEY_ID and SECRET_ACCESS_KEY by ``@step(secrets=[...])``: ZenML puts them into the
  environment of the running step.
- The step operator is in ZenML's branch develop, and in no release up to 0.98.0. So the tests do
  not run it, nor `main`, which needs a stack with it. They run the step in a TrainJob of the
  operator's shape, with its mapping of variables.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group: see "The end of a rank" in README.md
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cache_client import CacheClient, CacheIterableDataset, Connection
from cache_protocol.datasets.job_settings import spec_from_env

try:
    from zenml import step
except ModuleNotFoundError:  # then `train` is a plain function, and only `main` cannot run

    def step(**settings: Any) -> Callable[[Callable[..., float]], Callable[..., float]]:
        """Leaves the function as it is."""
        return lambda function: function


SQL = """
    SELECT l_orderkey * 8 + l_linenumber AS row_key,
           CAST(l_quantity AS FLOAT) / 50 AS quantity,
           CAST(l_discount AS FLOAT) * 10 AS discount,
           CAST(l_tax AS FLOAT) * 10 AS tax,
           CAST(l_extendedprice AS FLOAT) / 50000 AS price
    FROM source
"""
SETTINGS = {
    "runtime_ref_name": "torch-distributed-data-cache",
    "num_nodes": 2,
    "num_proc_per_node": 1,
    "trainer_env": {"STORAGE_URI": "s3://warehouse/tpch/lineitem/", "CACHE_SQL": SQL},
}


@step(  # type: ignore[untyped-decorator]
    step_operator="trainer", enable_cache=False, settings={"step_operator": SETTINGS}
)
def train(epochs: int = 2, batch_size: int = 1024, load_timeout_s: float = 3600.0) -> float:
    """Trains a small regression with DDP; the artifact of the step is the last loss.

    Args:
        epochs: passes over the table.
        batch_size: rows of a rank in a step.
        load_timeout_s: how long to wait for the cache to be loaded.
    """
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")  # one process, one GPU a pod
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(minutes=30))
    torch.manual_seed(0)
    spec = spec_from_env(os.environ)
    if dist.get_rank() == 0:
        CacheClient().load(spec, wait=False)  # attaches to an existing version
    dist.barrier()
    dataset = CacheIterableDataset(
        spec.name,
        batch_size=batch_size,
        stack={"features": ["quantity", "discount", "tax"]},
        shuffle=True,
        cache=Connection(deadline_s=load_timeout_s),
    )
    network = nn.Linear(3, 1).to(device)
    model = DistributedDataParallel(network, device_ids=[device] if gpu else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    mean_loss = 0.0
    for epoch in range(epochs):
        dataset.set_epoch(epoch)
        keys, loss_sum = [], 0.0
        for batch in dataset:
            prediction = model(batch["features"].to(device)).squeeze(1)
            loss = nn.functional.mse_loss(prediction, batch["price"].to(device))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            keys.append(batch["row_key"])
            loss_sum += float(loss.detach()) * len(prediction)
        mean_loss = report(epoch, torch.cat(keys), loss_sum, dataset.num_rows)
    dist.barrier()  # there is no launcher: no rank ends while another needs it
    del model
    dist.destroy_process_group()
    return mean_loss


def report(epoch: int, keys: torch.Tensor, loss_sum: float, num_rows: int) -> float:
    """The mean loss of all ranks; prints it, and whether the ranks saw each row exactly once."""
    print(f"epoch {epoch}: rank {dist.get_rank()} had {len(keys)} rows", flush=True)
    ranks = [(keys, loss_sum)] * dist.get_world_size()
    dist.all_gather_object(ranks, ranks[0])
    distinct, times = torch.unique(torch.cat([keys for keys, _ in ranks]), return_counts=True)
    mean_loss = sum(loss_sum for _, loss_sum in ranks) / sum(len(keys) for keys, _ in ranks)
    if dist.get_rank() == 0:
        print(
            f"epoch {epoch}: loss {mean_loss:.4f}, {int((times == 1).sum())} of {num_rows} rows "
            f"seen exactly once by {len(ranks)} ranks, their keys add up to {int(distinct.sum())}",
            flush=True,
        )
    return mean_loss


def main() -> None:
    """Runs a pipeline of this step on the active stack."""
    from zenml import pipeline

    def lineitem() -> None:
        train()

    pipeline(lineitem)()


if __name__ == "__main__":
    main()
