"""Functions of texts that need no model."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from cache_server.functions.installed import function_named


def values(name: str, texts: list[str], **options: Any) -> list[Any]:
    function = function_named(name)
    every = {key: option.default for key, option in function.options.items()}
    found: list[Any] = function.make({**every, **options})(pa.array(texts, pa.string())).to_pylist()
    return found


def test_a_text_is_normalised_in_each_form_of_unicode() -> None:
    assert values("normalize_text", ["e\u0301", "ﬁ"]) == ["é", "ﬁ"]
    assert values("normalize_text", ["e\u0301", "ﬁ"], form="nfkc") == ["é", "fi"]
    assert values("normalize_text", ["é"], form="NFD") == ["e\u0301"]
    with pytest.raises(ValueError, match="form must be one of NFC, NFD, NFKC, NFKD, got 'x'"):
        values("normalize_text", [], form="x")


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("$", '{"a":{"b":[1,"ü",null]},"c d":true}'),
        ("$.a.b[1]", "ü"),
        ("$.a.b[0]", "1"),
        ("$.a.b[2]", None),
        ("$.a.b[3]", None),
        ("$.a[0]", None),
        ("$.a.b.c", None),
        ("$.c d", "true"),
        ("$.no", None),
        ("$.a", '{"b":[1,"ü",null]}'),
    ],
)
def test_a_path_takes_one_value_of_json(path: str, found: str | None) -> None:
    text = '{"a": {"b": [1, "\\u00fc", null]}, "c d": true}'
    assert values("json_field", [text], path=path) == [found]


@pytest.mark.parametrize("path", ["", "a", "$a", "$.", "$.a[x]", "$..a", "$.a["])
def test_a_bad_path_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"path must be such as \$\.a\.b\[0\]"):
        values("json_field", [], path=path)


def test_a_bucket_depends_on_text_and_seed_alone_and_buckets_are_even() -> None:
    texts = [f"text {number}" for number in range(10_000)]
    found = values("hash_bucket", texts, buckets=10)
    assert found == values("hash_bucket", texts, buckets=10)
    assert found != values("hash_bucket", texts, buckets=10, seed=1)
    assert found[:3] == [2, 3, 3]  # also on other machines
    assert all(900 < found.count(bucket) < 1100 for bucket in range(10))
    with pytest.raises(ValueError, match="buckets must be from 1"):
        values("hash_bucket", texts, buckets=0)
