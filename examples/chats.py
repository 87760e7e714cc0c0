"""Chats and pairs of answers, with a tokenizer, loaded as tokens into a cache of this machine.

`chat_sft.py`, `dpo.py` and `train_fsdp.py` use it. The nodes tokenise once, while they load: no
rank does, and no start of a job. As a program it writes the tables into a folder, for
`fine_tuning.yaml`:

    python examples/chats.py /tmp/chats
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from cache_client import CacheClient, DatasetSpec

CHATS = 120
END, PAD = "<|end|>", "<|pad|>"
TEMPLATE = """{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + eos_token }}{% endgeneration %}
    {%- else %}
        {{- message.content }}
    {%- endif %}
{%- endfor %}
"""


def arguments(description: str, output_dir: str, batch_size: int, unit: str) -> argparse.Namespace:
    """The options of a script, which runs it as `run` does if there is no cache.

    Args:
        unit: of ``batch_size``, for people.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--endpoint", default=os.environ.get("CACHE_ENDPOINT"))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=batch_size, help=unit)
    parser.add_argument("--output-dir", default=output_dir)
    parser.add_argument("--stop-after-steps", type=int)
    found = parser.parse_args()
    if found.endpoint is None:
        run(sys.argv[0])
        sys.exit()
    return found


def run(script: str) -> None:
    """Runs a script over a cache of this machine: two ranks stop in an epoch, one continues."""
    from cache_server import LocalCluster  # trainers of a cluster need no server

    with tempfile.TemporaryDirectory() as name, LocalCluster(nodes=2) as cluster:
        folder = Path(name)
        load(cluster.endpoint, folder)
        options = ["--endpoint", cluster.endpoint, "--output-dir", str(folder / "output")]
        for ranks, stop in ((2, ["--stop-after-steps", "4"]), (1, [])):
            torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            subprocess.run([sys.executable, "-m", *torchrun, script, *options, *stop], check=True)


def load(endpoint: str, folder: Path) -> None:
    """Writes the tables and a tokenizer, and loads both tables as tokens."""
    write(folder)
    tokenizer, client = f"'{folder}/tokenizer.json'", CacheClient(endpoint)
    chat = f"chat_tokens(messages, {tokenizer}, '{folder}/template.jinja', eos_token => '{END}')"
    client.load(
        DatasetSpec("chats", folder / "chats.parquet", sql=f"SELECT {chat} AS chat FROM source")
    )
    texts = ", ".join(
        f"tokenize({text}, {tokenizer}) AS {text}_ids" for text in ("prompt", "chosen", "rejected")
    )
    client.load(
        DatasetSpec("pairs", folder / "pairs.parquet", sql=f"SELECT id, {texts} FROM source")
    )


def write(folder: Path) -> None:
    """Writes ``chats.parquet``, ``pairs.parquet``, ``tokenizer.json`` and ``template.jinja``."""
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(pairs()), folder / "pairs.parquet")
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    table = pa.table({"messages": pa.array(messages(), pa.list_(message))})
    pq.write_table(table, folder / "chats.parquet")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "template.jinja").write_text(TEMPLATE, encoding="utf-8")


def turns() -> list[list[str]]:
    """What is said in each chat: by a user, an assistant, and both once more."""
    return [
        [
            f"What is {number} plus {number}?",
            f"It is {2 * number}.",
            "Thank you. " * (1 + number % 7),
            "You are welcome.",
        ]
        for number in range(CHATS)
    ]


def messages() -> list[list[dict[str, str]]]:
    """The chats, as templates of chats take them."""
    roles = ("user", "assistant") * 2
    return [
        [{"role": role, "content": text} for role, text in zip(roles, chat, strict=True)]
        for chat in turns()
    ]


def pairs() -> list[dict[str, object]]:
    """A prompt of each chat, with a chosen and a rejected answer."""
    return [
        {
            "id": number,
            "prompt": f"<|user|>{chat[0]}<|assistant|>",
            "chosen": chat[1] + END,
            "rejected": "I do not know." + END,
        }
        for number, chat in enumerate(turns())
    ]


def make_tokenizer() -> Tokenizer:
    """A small BPE of bytes, trained on the chats: the same on each machine."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[PAD, END, "<|user|>", "<|assistant|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for chat in turns() for text in chat), trainer)
    return tokenizer


def note(output_dir: str, start: int, rank: int, seen: list[object]) -> None:
    """Keeps what a rank has trained on since a step, for `count`."""
    path = Path(output_dir, f"seen-{start}-{rank}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(seen), encoding="utf-8")


def count(output_dir: str, epochs: int) -> str:
    """How many samples all ranks of all starts have trained on once in each epoch, in words."""
    files = [json.loads(path.read_text("utf-8")) for path in Path(output_dir).glob("seen-*.json")]
    counts = Counter(json.dumps(each) for seen in files for each in seen)
    once = sum(number == epochs for number in counts.values())
    return f"{once} of {CHATS} seen exactly once in each of {epochs} epochs"


if __name__ == "__main__":
    write(Path(sys.argv[1]))
