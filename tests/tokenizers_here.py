"""Tokenizers, texts and chats that a test makes: of each kind of model, with odd Unicode."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

KINDS = ("bpe", "wordpiece", "unigram")
BOS, EOS = "<s>", "</s>"
_SPECIAL = [BOS, EOS, "<unk>", "<pad>"]
_RANGES = (
    *((0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x5D0, 0x5EA), (0x621, 0x64A)),
    *((0x900, 0x97F), (0x3040, 0x30FF), (0x4E00, 0x4FFF), (0xAC00, 0xAD00), (0x1F300, 0x1F64F)),
    *((0x1F3FB, 0x1F3FF), (0x200B, 0x200F), (0xFE00, 0xFE0F), (0x2028, 0x202E), (0x0, 0x1F)),
)
_TEXT = "the model reads a row and the cache sends it as tokens to every rank of the job"

# As real ones: spans of the assistant, tools, what a message lacks, and Jinja's loops.
TEMPLATE = """{{ bos_token }}{%- if tools %}
<tools>{{ tools | tojson }}</tools>
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>' }}
        {%- generation %}
            {%- if message.reasoning_content is defined %}
                {{- '(' + message.reasoning_content + ')' }}
            {%- endif %}
            {%- if message.content is defined %}{{ message.content }}{% endif %}
            {%- for call in message.tool_calls or [] %}
                {{- '\\n[' + call.name + ' ' + (call.arguments | tojson) + ']' }}
            {%- endfor %}
            {{- eos_token }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|' + message.role + '|>' + message.content }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of words and of any characters; some empty, some long."""
    rng = random.Random(seed)

    def text(number: int) -> str:
        if number % 50 == 0:
            return " " * (number // 50 % 4)
        parts = rng.choices(_TEXT.split(), k=rng.randrange(1, 30))
        for _ in range(rng.randrange(4)):
            low, high = rng.choice(_RANGES)
            odd = "".join(chr(rng.randint(low, high)) for _ in range(rng.randrange(1, 9)))
            parts.insert(rng.randrange(len(parts) + 1), odd)
        return " ".join(parts) * (200 if number % 500 == 7 else 1)

    return [text(number) for number in range(count)]


def chats(count: int, seed: int = 1) -> list[tuple[list[dict[str, Any]], list[Any] | None]]:
    """Chats and their tools: with and without system turns, calls of tools, and reasoning."""
    rng, said = random.Random(seed), texts(400, seed)
    schema = {"type": "object", "properties": {"city": {"type": "string", "minLength": 1}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}

    def chat(number: int) -> tuple[list[dict[str, Any]], list[Any] | None]:
        has_tools = number % 3 == 0
        turns: list[dict[str, Any]] = []
        if number % 2:
            turns.append({"role": "system", "content": rng.choice(said)})
        for _ in range(rng.randrange(1, 5)):
            turns.append({"role": "user", "content": rng.choice(said)[:300]})
            if has_tools:
                call = {"name": "weather", "arguments": json.dumps({"city": rng.choice(said)[:9]})}
                turns.append({"role": "assistant", "content": None, "tool_calls": [call]})
                turns.append({"role": "tool", "content": '{"degrees": 21}'})
            answer = {"role": "assistant", "content": rng.choice(said)[:300]}
            if rng.random() < 0.2:
                answer["reasoning"] = "so"
            turns.append(answer)
        return turns, [tool] if has_tools else None

    return [chat(number) for number in range(count)]


def trained(kind: str, path: Path, corpus: Iterable[str]) -> Path:
    """Trains a tokenizer of a kind of model, and saves it."""
    options: dict[str, Any] = {
        "vocab_size": 1000,
        "special_tokens": _SPECIAL,
        "show_progress": False,
    }
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(initial_alphabet=alphabet, **options)
    elif kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(**options)
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **options)
    tokenizer.train_from_iterator(corpus, trainer)
    numbers = [(token, tokenizer.token_to_id(token)) for token in (BOS, EOS)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}", special_tokens=numbers
    )
    tokenizer.save(str(path))
    return path
