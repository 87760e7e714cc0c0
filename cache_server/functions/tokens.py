"""Text -> tokens, and back, by the library `tokenizers`; see `docs/functions.md`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tokenizers import Encoding, Tokenizer

from cache_server.functions.declared import Column, Compute, Function, Option

_TEXT = Column(pa.string())
_TOKENIZER = Option("json file")
_SHOWS = "list<uint16 or uint32, by the vocabulary>"


def tokenize() -> Function:
    """``tokenize(text, 'tokenizer.json')``: the tokens of a text."""
    return Function(
        "tokenize",
        library_version(),
        {
            "text": _TEXT,
            "tokenizer": _TOKENIZER,
            "special_tokens": Option("boolean", True),
            "max_length": Option("integer", None),
        },
        partial(_made, _lists),
        lambda types, options: tokens_type(tokenizer_of(options["tokenizer"])),
        _SHOWS,
        text="the tokens of a text; of the first max_length tokens, if it is given",
    )


def num_tokens() -> Function:
    """``num_tokens(text, 'tokenizer.json')``: how many tokens a text has."""
    return Function(
        "num_tokens",
        library_version(),
        {"text": _TEXT, "tokenizer": _TOKENIZER, "special_tokens": Option("boolean", True)},
        partial(_made, _counts),
        pa.int32(),
        text="how many tokens a text has",
    )


def decode_tokens() -> Function:
    """``decode_tokens(tokens, 'tokenizer.json')``: the text of tokens, for a look."""
    return Function(
        "decode_tokens",
        library_version(),
        {
            "tokens": Column(pa.list_(pa.uint32())),
            "tokenizer": _TOKENIZER,
            "skip_special_tokens": Option("boolean", False),
        },
        _decoding,
        pa.string(),
        text="the text of tokens",
    )


def library_version() -> str:
    """The version of a function whose results `tokenizers` decides."""
    return f"1+tokenizers-{version('tokenizers')}"


def tokenizer_of(text: str, max_length: int | None = None) -> Tokenizer:
    """The tokenizer of a file's text, without the padding that the file may ask for.

    Raises:
        ValueError: the text is no tokenizer, or ``max_length`` is not positive.
    """
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # of Rust
        raise ValueError(f"the file is no tokenizer.json: {error}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if max_length is not None:
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        tokenizer.enable_truncation(max_length)
    return tokenizer


def tokens_type(tokenizer: Tokenizer) -> pa.DataType:
    """Lists of the smaller type that holds every token."""
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    return pa.list_(pa.uint16() if largest < 1 << 16 else pa.uint32())


def token_lists(rows: Sequence[Sequence[int]], dtype: pa.DataType) -> pa.Array:
    """Lists of numbers as an array of a list type."""
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    numbers: npt.NDArray[Any] = np.fromiter(
        chain.from_iterable(rows), dtype.value_type.to_pandas_dtype(), int(offsets[-1])
    )
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(numbers), dtype)


def _made(
    values: Callable[[list[Encoding], pa.DataType], pa.Array], options: Mapping[str, Any]
) -> Compute:
    tokenizer = tokenizer_of(options["tokenizer"], options.get("max_length"))
    dtype, special = tokens_type(tokenizer), bool(options["special_tokens"])

    def compute(text: pa.Array) -> pa.Array:
        # Without the offsets of characters, which nothing here needs.
        found = tokenizer.encode_batch_fast(text.to_pylist(), add_special_tokens=special)
        return values(found, dtype)

    return compute


def _lists(found: list[Encoding], dtype: pa.DataType) -> pa.Array:
    return token_lists([each.ids for each in found], dtype)


def _counts(found: list[Encoding], dtype: pa.DataType) -> pa.Array:
    return pa.array([len(each) for each in found], pa.int32())


def _decoding(options: Mapping[str, Any]) -> Compute:
    tokenizer = tokenizer_of(options["tokenizer"])
    skip = bool(options["skip_special_tokens"])

    def compute(tokens: pa.Array) -> pa.Array:
        rows = tokens.to_pylist()
        return pa.array(tokenizer.decode_batch(rows, skip_special_tokens=skip), pa.string())

    return compute
