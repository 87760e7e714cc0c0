"""Functions of texts that SQL lacks, and that need no model; see `docs/functions.md`."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import xxhash

from cache_server.functions.declared import Column, Compute, Function, Option

_TEXT = Column(pa.string())
_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")


def normalize_text() -> Function:
    """``normalize_text(text, form => 'NFKC')``: a text in a normal form of Unicode."""
    return Function(
        "normalize_text",
        f"1+unicode-{unicodedata.unidata_version}",
        {"text": _TEXT, "form": Option("text", "NFC")},
        _normalizing,
        pa.string(),
        text="a text in a normal form of Unicode: NFC, NFD, NFKC or NFKD",
    )


def json_field() -> Function:
    """``json_field(text, '$.a.b[0]')``: one value of a text of JSON, as a text."""
    return Function(
        "json_field",
        "1",
        {"text": _TEXT, "path": Option("text")},
        _taking,
        pa.string(),
        text="the value at a path such as $.a[0] of a text of JSON; null if there is none",
    )


def hash_bucket() -> Function:
    """``hash_bucket(text, 100)``: a number from 0 that only the text decides."""
    return Function(
        "hash_bucket",
        "1",
        {"text": _TEXT, "buckets": Option("integer"), "seed": Option("integer", 0)},
        _hashing,
        pa.int32(),
        text="a number from 0 to buckets - 1 that only text and seed decide",
    )


def _normalizing(options: Mapping[str, Any]) -> Compute:
    form = str(options["form"]).upper()
    if form not in _FORMS:
        raise ValueError(f"form must be one of {', '.join(_FORMS)}, got {options['form']!r}")

    def compute(text: pa.Array) -> pa.Array:
        values = [unicodedata.normalize(form, value) for value in text.to_pylist()]  # type: ignore[arg-type]
        return pa.array(values, pa.string())

    return compute


def _taking(options: Mapping[str, Any]) -> Compute:
    path = str(options["path"])
    steps = [int(found[2]) if found[2] else found[1] for found in _STEP.finditer(path)]
    if not path.startswith("$") or "$" + "".join(f[0] for f in _STEP.finditer(path)) != path:
        raise ValueError(f"path must be such as $.a.b[0], got {path!r}")

    def taken(text: str) -> str | None:
        value: Any = json.loads(text)
        for step in steps:
            if isinstance(step, str):
                value = value.get(step) if isinstance(value, dict) else None
            else:
                value = value[step] if isinstance(value, list) and step < len(value) else None
        if value is None or isinstance(value, str):
            return value
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    return lambda text: pa.array([taken(value) for value in text.to_pylist()], pa.string())


def _hashing(options: Mapping[str, Any]) -> Compute:
    buckets, seed = options["buckets"], options["seed"]
    if not 1 <= buckets < 1 << 31 or not 0 <= seed < 1 << 64:
        raise ValueError(f"buckets must be from 1 to 2147483647, got {buckets} with seed {seed}")

    def compute(text: pa.Array) -> pa.Array:
        found = [
            xxhash.xxh3_64_intdigest(value.encode(), seed) % buckets for value in text.to_pylist()
        ]
        return pa.array(found, pa.int32())

    return compute
