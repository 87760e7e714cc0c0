"""The quick start of Kubeflow Trainer, FashionMNIST, with its images in a cache.

A small convolutional network learns from 60,000 images of the Hugging Face Hub, with DDP on two
machines. The cache reads the Hub once; no trainer downloads anything:

    python examples/fashion_mnist.py

It needs a cluster with Kubeflow Trainer 2.3 and the runtimes of this project, and a kubeconfig that
lets you create TrainJobs. Where the Hub asks for a token, set HF_TOKEN.
"""

from __future__ import annotations

import argparse
import os

from kubeflow.trainer import (
    CustomTrainer,
    HuggingFaceDatasetInitializer,
    Initializer,
    TrainerClient,
)

from cache_protocol.datasets.job_settings import spec_from_env
from cache_runtimes.sdk import cache_options

TRAIN_IMAGES = "hf://zalando-datasets/fashion_mnist/fashion_mnist/train*.parquet"
RUNNING, COMPLETE = "Running", "Complete"


def train_fashion_mnist(dataset: str, epochs: int, batch_size: int) -> None:
    """Trains a network of two convolutions with DDP; prints loss, accuracy and images seen.

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
    # The runtime sets CACHE_ENDPOINT and RANK: no sampler divides the images among the ranks.
    images = CacheIterableDataset(
        dataset,
        batch_size=batch_size,
        columns=["image.bytes", "label"],
        decode={"image.bytes": "gray"},  # PNG to a uint8 tensor of 1 x 28 x 28
        shuffle=True,
        seed=0,
    )
    network = nn.Sequential(
        *(nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(4 * 4 * 50, 500), nn.ReLU(), nn.Linear(500, 10)),
    )
    model = DistributedDataParallel(network.to(device), device_ids=[device] if gpu else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    # An image is known by the sum of its pixels, each with its own weight.
    weights = torch.arange(1, 28 * 28 + 1) ** 3
    for epoch in range(epochs):
        images.set_epoch(epoch)
        seen, loss_sum, correct = [], 0.0, 0
        for batch in images.loader():
            pixels = batch["image"]["bytes"]
            labels = batch["label"].to(device)
            scores = model(pixels.to(device).float() / 255)
            loss = nn.functional.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            loss_sum += float(loss.detach()) * len(labels)
            correct += int((scores.argmax(dim=1) == labels).sum())
            seen.append((pixels.flatten(1).long() * weights).sum(dim=1))
        ranks = [(torch.cat(seen), loss_sum, correct)] * dist.get_world_size()
        dist.all_gather_object(ranks, ranks[0])
        known = torch.cat([known for known, _, _ in ranks])
        if dist.get_rank() == 0:
            print(
                f"epoch {epoch}: loss {sum(loss for _, loss, _ in ranks) / len(known):.4f}, "
                f"accuracy {sum(right for _, _, right in ranks) / len(known):.1%}, "
                f"{len(known)} of {images.num_rows} images by {len(ranks)} ranks, "
                f"{len(set(known.tolist()))} different",
                flush=True,
            )
    del model
    dist.destroy_process_group()


def main() -> None:
    """Creates the TrainJob, follows it, and exits with an error when it fails."""
    arguments = parse_arguments()
    client = TrainerClient()
    name = client.train(
        runtime=arguments.runtime,
        initializer=Initializer(
            dataset=HuggingFaceDatasetInitializer(
                storage_uri=arguments.storage_uri, access_token=os.environ.get("HF_TOKEN")
            )
        ),
        trainer=CustomTrainer(
            func=train_fashion_mnist,
            func_args={
                # The name that the cache pods use: zalando-datasets.fashion_mnist
                "dataset": spec_from_env({"STORAGE_URI": arguments.storage_uri}).name,
                "epochs": arguments.epochs,
                "batch_size": arguments.batch_size,
            },
            num_nodes=arguments.num_nodes,
            packages_to_install=arguments.packages.split(",") if arguments.packages else None,
            # Without GPUs, Trainer starts one process a CPU.
            resources_per_node={"cpu": 1, "memory": "4Gi"}
            | ({"gpu": arguments.gpu} if arguments.gpu else {}),
        ),
        options=[cache_options(runtime=arguments.runtime, columns=["image", "label"])],
    )
    print(f"TrainJob {name} is created", flush=True)
    # The trainers start when the cache is loaded.
    client.wait_for_job_status(name, status={RUNNING, COMPLETE}, timeout=3600)
    for line in client.get_job_logs(name, follow=True):
        print(line, flush=True)
    client.wait_for_job_status(name, timeout=3600)
    print(f"TrainJob {name} is complete")


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("storage_uri", nargs="?", default=TRAIN_IMAGES, help="hf://ORG/NAME/FILES")
    parser.add_argument("--runtime", default="torch-distributed-data-cache")
    parser.add_argument("--num-nodes", type=int, default=2, help="machines that train")
    parser.add_argument("--gpu", type=int, default=0, help="of each of them")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument(
        "--packages",
        default="pillow",
        help="that pip installs in the trainers, to decode PNG; empty if their image has one",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
