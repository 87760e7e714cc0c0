"""Fine-tune on packed chats in a plain loop of torch with FSDP, and resume inside an epoch.

FSDP divides the model among the ranks. A checkpoint of `torch.distributed.checkpoint` has the
model, the optimizer and the position of the dataset, and any number of ranks can load it. It starts
a cache on this machine, trains on two ranks, stops, and continues with one:

    python examples/train_fsdp.py

With a cache that has the dataset ``chats`` of `chats.py`:

    torchrun --nproc-per-node 2 examples/train_fsdp.py --endpoint grpc://127.0.0.1:50051
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import chats
import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group: see "The end of a rank" in README.md
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from cache_client import CacheIterableDataset, View

SEQUENCE_LENGTH, WIDTH = 128, 32


def main() -> None:
    """Trains for two epochs; prints the loss, and how many chats were seen exactly once."""
    arguments = chats.arguments(
        "Fine-tune on chats with FSDP", "fsdp-output", 2, "sequences a step, of each rank"
    )
    dist.init_process_group("gloo")
    train(arguments)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # caches of torch keep the group: see "The end of a rank" in README.md


def train(arguments: argparse.Namespace) -> None:
    """Trains, from the checkpoint on if there is one."""
    torch.manual_seed(0)
    dataset = CacheIterableDataset(
        "chats",
        cache=arguments.endpoint,
        batch_size=arguments.batch_size,
        shuffle=True,
        view=View(
            pack="chat.tokens",
            label_mask="chat.loss_mask",
            sequence_length=SEQUENCE_LENGTH,
            cut_documents=False,
            long_documents="truncate",
            best_fit=True,
            pack_outputs=["position_ids", "document_ids", "labels"],
        ),
    )
    model = CausalModel(chats.make_tokenizer().get_vocab_size())
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpoint = Path(arguments.output_dir, "checkpoint")
    if checkpoint.exists():
        restore(checkpoint, model, optimizer, dataset)
    steps, losses, seen = 0, [], []
    for epoch in range(dataset.epoch, arguments.epochs):
        dataset.set_epoch(epoch)  # changes nothing in a resumed epoch
        for batch in dataset.loader():
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
            seen += documents(batch)
            steps += 1
            if steps == arguments.stop_after_steps:
                save(checkpoint, model, optimizer, dataset)
                chats.note(arguments.output_dir, steps, dataset.rank, seen)
                return
    chats.note(arguments.output_dir, 0, dataset.rank, seen)
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last one")
        print(chats.count(arguments.output_dir, arguments.epochs))


def save(checkpoint: Path, model: nn.Module, optimizer: Any, dataset: CacheIterableDataset) -> None:
    """Each rank writes its part of the model; the position of the dataset is the same on each."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "dataset": json.dumps(dataset.state_dict())}
    save_parts(state, checkpoint_id=checkpoint)


def restore(
    checkpoint: Path, model: nn.Module, optimizer: Any, dataset: CacheIterableDataset
) -> None:
    """Each rank reads its part, also of a checkpoint of more ranks."""
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments, "dataset": ""}
    load_parts(state, checkpoint_id=checkpoint)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    dataset.load_state_dict(json.loads(state["dataset"]))


def loss_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The mean over the labels of all ranks: FSDP takes the mean of the gradients of ranks."""
    logits = model(batch["chat.tokens"], batch["position_ids"], batch["document_ids"])
    labels = batch["labels"][:, 1:].reshape(-1)  # the prediction at one place is of the next
    number = (labels != -100).sum()
    dist.all_reduce(number)
    loss = functional.cross_entropy(
        logits[:, :-1].reshape(len(labels), -1), labels, reduction="sum"
    )
    mean: Tensor = loss * dist.get_world_size() / number
    return mean


def documents(batch: dict[str, Any]) -> list[object]:
    """The chats of a batch."""
    found: list[object] = []
    for tokens, ids in zip(batch["chat.tokens"], batch["document_ids"], strict=True):
        found += [tokens[ids == number].tolist() for number in range(int(ids.max()) + 1)]
    return found


class Layer(nn.Module):
    """Attention, in which a token sees only the tokens of its chat before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, sees: Tensor) -> Tensor:
        """Adds what the tokens see; ``[B, L, WIDTH]``."""
        query, key, value = self.attention(self.norm(hidden)).chunk(3, dim=-1)
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=sees)
        result: Tensor = hidden + self.output(seen)
        return result


class CausalModel(nn.Module):
    """Two layers; FSDP gathers the weights of one at a time."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(SEQUENCE_LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.output = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, tokens: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        """Logits of the next token; ``[B, L, vocabulary]``."""
        hidden = self.tokens(tokens) + self.positions(position_ids)
        sees = (document_ids[:, :, None] == document_ids[:, None, :]).tril()
        for layer in self.layers:
            hidden = layer(hidden, sees)
        logits: Tensor = self.output(hidden)
        return logits


if __name__ == "__main__":
    main()
