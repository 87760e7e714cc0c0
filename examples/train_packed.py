"""Fine-tune a tiny causal model on packed documents, and resume it in the middle of an epoch.

The documents are the sections of this project's pages, as bytes. The heading of a section is the
prompt: only the text below it is learned. The script starts a cache on this machine and needs
nothing else:

    python examples/train_packed.py

It trains twice, once without a break, and once with a new process state after half of the steps.
The losses are the same.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.nn import functional

from cache_client import CacheClient, CacheIterableDataset, DatasetSpec, View
from cache_server import LocalCluster

PAGES = Path(__file__).resolve().parents[1] / "docs"
SEQUENCE_LENGTH, BATCH_SIZE, WIDTH = 256, 4, 32
BYTES = 256


def main() -> None:
    """Trains with and without a break; prints the losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, LocalCluster(nodes=2) as cluster:
        source = write_documents(Path(directory))
        CacheClient(cluster.endpoint).load(DatasetSpec("pages", source))
        compare(cluster.endpoint, "pages", arguments.steps)


def compare(endpoint: str, name: str, steps: int) -> None:
    """Trains with and without a break, and compares the losses."""
    whole, _ = train(endpoint, name, 0, steps)
    first, checkpoint = train(endpoint, name, 0, steps // 2)
    second, _ = train(endpoint, name, steps // 2, steps, checkpoint)
    print(f"loss {whole[0]:.3f} at the first step, {whole[-1]:.3f} at the last one")
    if whole != first + second:
        raise SystemExit("the losses after the break differ")
    print(f"after a break at step {steps // 2}, all {steps} losses are the same")


def write_documents(directory: Path) -> Path:
    """Writes the sections of the pages, with a mask that is 0 for their headings."""
    tokens, answers = [], []
    for page in sorted(PAGES.glob("*.md")):
        for section in re.split(r"^(?=#)", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            heading, _, text = section.partition("\n")
            prompt, answer = heading.encode() + b"\n", text.encode()
            tokens.append(list(prompt + answer))
            answers.append([0] * len(prompt) + [1] * len(answer))
    table = pa.table(
        {
            "tokens": pa.array(tokens, pa.list_(pa.uint8())),
            "answer": pa.array(answers, pa.list_(pa.uint8())),
        }
    )
    path = directory / "pages.parquet"
    pq.write_table(table, path)
    return path


def train(
    endpoint: str, name: str, start: int, stop: int, checkpoint: dict[str, Any] | None = None
) -> tuple[list[float], dict[str, Any]]:
    """Trains from one step to another; returns the losses and a checkpoint."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dataset = CacheIterableDataset(
        name,
        cache=endpoint,
        batch_size=BATCH_SIZE,
        shuffle=True,
        drop_last=True,
        view=View(
            pack="tokens",
            sequence_length=SEQUENCE_LENGTH,
            pack_outputs=["position_ids", "document_ids", "labels"],
            label_mask="answer",
        ),
    )
    model = CausalModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if checkpoint is not None:
        dataset.load_state_dict(checkpoint["data"])
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    losses: list[float] = []
    while len(losses) < stop - start:
        dataset.set_epoch(dataset.epoch)
        for batch in dataset.loader():
            logits = model(batch["tokens"], batch["position_ids"], batch["document_ids"])
            # The prediction at one place is of the token at the next.
            loss = functional.cross_entropy(
                logits[:, :-1].reshape(-1, BYTES), batch["labels"][:, 1:].reshape(-1)
            )
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == stop - start:
                break
    return losses, {
        "data": dataset.state_dict(),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }


class CausalModel(nn.Module):
    """One layer of attention, in which a token sees only the tokens of its document before it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, WIDTH)
        self.positions = nn.Embedding(SEQUENCE_LENGTH, WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES))

    def forward(self, tokens: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        """Logits of the next token; ``[B, L, 256]``."""
        hidden = self.tokens(tokens) + self.positions(position_ids)
        query, key, value = self.attention(hidden).chunk(3, dim=-1)
        sees = (document_ids[:, :, None] == document_ids[:, None, :]).tril()
        hidden = hidden + functional.scaled_dot_product_attention(query, key, value, attn_mask=sees)
        logits: Tensor = self.output(hidden)
        return logits


if __name__ == "__main__":
    main()
