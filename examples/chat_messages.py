"""Fine-tune on chats as they are stored: lists of messages with a role and a content.

Starts a cache on this machine. A tiny model learns the answers of an assistant. Its loss leaves out
what users say:

    python examples/chat_messages.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from cache_client import CacheClient, CacheIterableDataset, DatasetSpec
from cache_server import LocalCluster

IGNORED = -100  # of a loss
MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])


def main() -> None:
    """Runs the example."""
    with tempfile.TemporaryDirectory() as directory, LocalCluster(nodes=1) as cluster:
        path = Path(directory) / "chats.parquet"
        write_chats(path)
        CacheClient(cluster.endpoint).load(DatasetSpec("chats", path))
        train(cluster.endpoint)


def train(endpoint: str) -> None:
    """Trains for a few epochs."""
    chats = CacheIterableDataset(
        "chats", cache=endpoint, batch_size=16, shuffle=True, transform=tokens_and_labels
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(256, 32), torch.nn.Linear(32, 256))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        chats.set_epoch(epoch)
        for batch in chats.loader():
            logits = model(batch["tokens"][:, :-1])
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED
            )
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


def tokens_and_labels(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Bytes as tokens, ``[B, longest]``; labels are those of the assistant."""
    tokens, labels = [], []
    for messages in batch["messages"]:  # a list of dicts for each chat
        chat, wanted = bytearray(), []
        for message in messages:
            content = f"<{message['role']}>{message['content']}\n".encode()
            chat += content
            is_answer = message["role"] == "assistant"
            wanted += list(content) if is_answer else [IGNORED] * len(content)
        tokens.append(torch.tensor(list(chat)))
        labels.append(torch.tensor(wanted))
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "tokens": pad(tokens, batch_first=True),
        "labels": pad(labels, batch_first=True, padding_value=IGNORED),
    }


def write_chats(path: Path) -> None:
    """Chats of two or four messages."""
    chats = []
    for number in range(160):
        chat = [
            {"role": "user", "content": f"What is {number} + {number}?"},
            {"role": "assistant", "content": f"It is {2 * number}."},
        ]
        if number % 3 == 0:
            chat.append({"role": "user", "content": "Thanks!"})
            chat.append({"role": "assistant", "content": "You are welcome."})
        chats.append(chat)
    table = pa.table({"messages": pa.array(chats, pa.list_(MESSAGE))})
    pq.write_table(table, path)


if __name__ == "__main__":
    main()
