"""Train on a cached table with the Kubeflow SDK: one call makes the trainers and their cache.

TPC-H ``lineitem``, from any of these places:

    python examples/kubeflow_sdk.py s3://warehouse/tpch/lineitem/ --endpoint https://minio:9000
    python examples/kubeflow_sdk.py hf://ORG/lineitem
    python examples/kubeflow_sdk.py cache://tpch/lineitem --metadata-loc s3a://.../v3.metadata.json

It needs a cluster with Kubeflow Trainer 2.3 and the runtimes of this project, and a kubeconfig that
lets you create TrainJobs. Keys of S3 come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a token
of the Hub from HF_TOKEN. The SDK writes them into the TrainJob: everyone who may read TrainJobs
sees them. Without keys the cache pods use their identity (``--role-arn``).

It follows the log of the first trainer, and exits with 0 when the TrainJob is complete.
"""

from __future__ import annotations

import argparse
import os

from kubeflow.trainer import (
    CustomTrainer,
    DataCacheInitializer,
    HuggingFaceDatasetInitializer,
    Initializer,
    S3DatasetInitializer,
    TrainerClient,
)

from cache_protocol.datasets.job_settings import spec_from_env
from cache_runtimes.sdk import cache_options

RUNNING, COMPLETE = "Running", "Complete"


def train(
    dataset: str,
    key: list[str],
    features: list[str],
    target: str,
    epochs: int,
    batch_size: int,
) -> None:
    """Trains a small regression with DDP and proves that every row came once in each epoch.

    The SDK ships the text of this function alone, through a shell that would expand a dollar sign,
    a backquote or a backslash: it imports all that it uses, and has none of these.
    """
    import os

    import torch
    import torch.distributed as dist
    import torch.distributed.nn  # before the group: see "The end of a rank" in README.md
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from cache_client import CacheIterableDataset

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    torch.manual_seed(0)
    # The runtime sets CACHE_ENDPOINT and RANK.
    rows = CacheIterableDataset(
        dataset, batch_size=batch_size, columns=[*key, *features, target], shuffle=True, seed=0
    )
    network = nn.Sequential(nn.Linear(len(features), 32), nn.ReLU(), nn.Linear(32, 1))
    model = DistributedDataParallel(network.to(device), device_ids=[device] if gpu else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(epochs):
        rows.set_epoch(epoch)
        seen, loss_sum = [], 0.0
        for batch in rows:
            x = torch.stack([batch[name].float().log1p() for name in features], dim=1).to(device)
            y = batch[target].float().log1p().to(device)
            loss = nn.functional.mse_loss(model(x).squeeze(1), y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            loss_sum += float(loss.detach()) * len(y)
            seen.append(torch.stack([batch[name].long() for name in key], dim=1))
        # The keys of all ranks; they must fit into memory.
        gathered = [(torch.cat(seen), loss_sum)] * dist.get_world_size()
        dist.all_gather_object(gathered, gathered[0])
        keys = torch.cat([keys for keys, _ in gathered])
        distinct, times = torch.unique(keys, dim=0, return_counts=True)
        mean_loss = sum(loss_sum for _, loss_sum in gathered) / len(keys)
        if dist.get_rank() == 0:
            print(
                f"epoch {epoch}: loss {mean_loss:.4f}, {int((times == 1).sum())} of "
                f"{rows.num_rows} rows seen exactly once by {len(gathered)} ranks, "
                f"their keys add up to {int(distinct.sum())}",
                flush=True,
            )
        if len(distinct) != rows.num_rows:
            raise SystemExit(f"{rows.num_rows - len(distinct)} rows were not seen")
    del model
    dist.destroy_process_group()


def main() -> None:
    """Creates the TrainJob, follows it, and exits with an error when it fails."""
    arguments = parse_arguments()
    where = {"STORAGE_URI": arguments.storage_uri, "METADATA_LOC": arguments.metadata_loc or ""}
    client = TrainerClient()
    name = client.train(
        runtime=arguments.runtime,
        initializer=Initializer(dataset=dataset_initializer(arguments)),
        trainer=CustomTrainer(
            func=train,
            func_args={
                "dataset": spec_from_env(where).name,  # the name that the cache pods use
                "key": arguments.key.split(","),
                "features": arguments.features.split(","),
                "target": arguments.target,
                "epochs": arguments.epochs,
                "batch_size": arguments.batch_size,
            },
            num_nodes=arguments.num_nodes,
            # Without GPUs, Trainer starts one process a CPU.
            resources_per_node={"cpu": arguments.cpu, "memory": arguments.memory}
            | ({"gpu": arguments.gpu} if arguments.gpu else {}),
        ),
        options=[
            cache_options(
                runtime=arguments.runtime,
                columns=columns_of(arguments),
                replicas=arguments.replicas,
            )
        ],
    )
    print(f"TrainJob {name} is created", flush=True)
    # The trainers start when the cache is loaded.
    client.wait_for_job_status(name, status={RUNNING, COMPLETE}, timeout=arguments.timeout_s)
    for line in client.get_job_logs(name, follow=True):
        print(line, flush=True)
    client.wait_for_job_status(name, timeout=arguments.timeout_s)
    print(f"TrainJob {name} is complete")


def columns_of(arguments: argparse.Namespace) -> list[str]:
    """The columns that the training reads: no others are cached."""
    return [*arguments.key.split(","), *arguments.features.split(","), arguments.target]


def dataset_initializer(
    arguments: argparse.Namespace,
) -> S3DatasetInitializer | HuggingFaceDatasetInitializer | DataCacheInitializer:
    """Returns the initializer of the SDK for this URI."""
    uri = arguments.storage_uri
    if uri.startswith("cache://"):
        return DataCacheInitializer(
            storage_uri=uri,
            metadata_loc=arguments.metadata_loc,
            # Only the runtime torch-distributed-with-cache uses this number.
            num_data_nodes=arguments.num_data_nodes,
            iam_role=arguments.role_arn,
        )
    if uri.startswith("hf://"):
        return HuggingFaceDatasetInitializer(
            storage_uri=uri, access_token=os.environ.get("HF_TOKEN")
        )
    return S3DatasetInitializer(
        storage_uri=uri,
        endpoint=arguments.endpoint,
        region=arguments.region,
        role_arn=arguments.role_arn,
        access_key_id=os.environ.get("AWS_ACCESS_KEY_ID"),
        secret_access_key=os.environ.get("AWS_SECRET_ACCESS_KEY"),
    )


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("storage_uri", help="s3://, hf:// or cache://SCHEMA/TABLE")
    parser.add_argument("--metadata-loc", help="metadata file of the Iceberg table of cache://")
    parser.add_argument("--endpoint", help="of an S3 that is not Amazon's")
    parser.add_argument("--region")
    parser.add_argument("--role-arn", help="that the cache pods take on")
    parser.add_argument("--runtime", default="torch-distributed-data-cache")
    parser.add_argument("--num-data-nodes", type=int, default=2)
    parser.add_argument("--replicas", type=int, help="cache nodes that hold each row")
    parser.add_argument("--num-nodes", type=int, default=2, help="machines that train")
    parser.add_argument("--cpu", type=int, default=1, help="of each of them")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--memory", default="4Gi")
    parser.add_argument("--key", default="l_orderkey,l_linenumber", help="what a row is known by")
    parser.add_argument("--features", default="l_quantity,l_discount,l_tax")
    parser.add_argument("--target", default="l_extendedprice")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--timeout-s", type=int, default=3600)
    return parser.parse_args()


if __name__ == "__main__":
    main()
