"""`View` as a value: printed, compared, pickled, and its declared rules."""

from __future__ import annotations

import itertools
import pickle
import re
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from cache_client.order import view_text
from cache_client.view_options import lookups, options
from cache_protocol.errors import ConfigError

# A value for each option, and what it needs beside it.
GOOD: dict[str, Any] = {
    "where": "a > 1",
    "split": {"a": 0.5},
    "part": "a",
    "split_by": ["k"],
    "fold": (0, 2),
    "except_fold": (0, 2),
    "subset": [2, 1],
    "weights": "w",
    "replacement": False,
    "per_class": "c",
    "epoch_rows": 7,
    "pack": "t",
    "sequence_length": 4,
    "cut_documents": False,
    "long_documents": "drop",
    "best_fit": True,
    "end_token": 2,
    "pad_token": 1,
    "pack_outputs": ["labels"],
    "label_mask": "m",
    "label_column": "l",
    "group_by": "g",
    "order_by": "o",
    "window": (2, 1),
    "length_buckets": "n",
    "bucket_rows": 8,
    "pad_lists": {"t": 0},
    "codes": ["c"],
    "join": {"k": lookups.Join("others")},
}
RULES = {each.name: each.metadata["rule"] for each in fields(options.View)}


def with_needs(*names: str) -> dict[str, Any]:
    """Options by name, with those that they need."""
    given: dict[str, Any] = {}
    wanted = list(names)
    while wanted:
        name = wanted.pop()
        given[name] = GOOD[name]
        missing = RULES[name].needs and not set(RULES[name].needs) & given.keys()
        wanted += [RULES[name].needs[0]] if missing else []
        wanted += ["part"] if name == "split" and "part" not in given else []
    return given


def excluded(given: dict[str, Any]) -> bool:
    return any(other in given for name in given for other in RULES[name].excludes)


def test_the_table_has_every_option() -> None:
    assert list(GOOD) == [each.name for each in fields(options.View)]


@pytest.mark.parametrize("name", GOOD)
def test_an_option_is_printed_compared_and_pickled(name: str) -> None:
    view = options.View(**with_needs(name))
    assert f"{name}={GOOD[name]!r}" in repr(view)
    assert eval(repr(view), {"View": options.View, "Join": lookups.Join}) == view
    copy = pickle.loads(pickle.dumps(view))
    assert copy == view and hash(copy) == hash(view) and copy != options.View()
    default = next(each.default for each in fields(options.View) if each.name == name)
    if name not in ("pack", "split", "part", "sequence_length", "group_by", "weights"):
        assert replace(view, **{name: default}) != view


@pytest.mark.parametrize("name", [name for name in GOOD if RULES[name].needs])
def test_an_option_without_what_it_needs_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} needs {' or '.join(RULES[name].needs)}, got"):
        options.View(**{name: GOOD[name]})


def test_two_options_are_refused_where_one_excludes_the_other() -> None:
    for pair in itertools.combinations(GOOD, 2):
        given = with_needs(*pair)
        if excluded(given):
            with pytest.raises(ConfigError, match="exclude each other"):
                options.View(**given)
        else:
            options.View(**given)


def test_none_and_a_default_stand_for_an_option_that_is_left_out() -> None:
    plain = options.View()
    assert options.View(**dict.fromkeys(GOOD)) == plain
    assert (repr(plain), plain.text, plain.given()) == ("View()", "", {})
    assert options.View(replacement=True, bucket_rows=1024) == plain


def test_row_ids_are_compared_by_their_numbers_and_printed_in_short() -> None:
    view = options.View(subset=np.arange(1_000_000))
    assert view == options.View(subset=np.arange(1_000_000, dtype=np.int32))
    assert view != options.View(subset=np.arange(1_000_000)[::-1])
    assert repr(view) == "View(subset=[0, 1, 2, 3, 4, 5, ...])"


def test_the_text_of_a_view_is_bounded_and_has_the_options_back() -> None:
    for name in GOOD:
        view = options.View(**with_needs(name))
        if name in ("codes", "join"):
            assert "others" in view.text or "codes" in view.text
        else:
            assert options.View(**view_text.view_options(view.text)).text == view.text
    rows = np.arange(1_000_000)
    large = [
        options.View(subset=rows),
        options.View(where="a > 1 AND " * 500 + "b"),
        options.View(split={f"part {n}": 1e-6 for n in range(5000)}, part="part 7"),
    ]
    for view in large:
        assert len(view.text) < 3000
        with pytest.raises(ValueError, match="too long to be kept"):
            view_text.view_options(view.text)
    assert large[0].text == options.View(subset=rows.astype(np.int32).tolist()).text
    assert large[0].text != options.View(subset=rows[::-1]).text
    for size in (3, 1000):
        some = np.arange(size)
        same = [some, some.tolist(), [*some], range(size), pa.array(some), torch.tensor(some)]
        assert len({options.View(subset=each).text for each in same}) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        ({"where": "a > 1"}, {"where": "a > 2"}, "where is 'a > 1' there and 'a > 2' here"),
        ({}, {"epoch_rows": 3}, "epoch_rows is not given there and 3 here"),
        (
            {"split": {"train": 0.9, "val": 0.1}, "part": "train"},
            {"split": {"train": 0.8, "val": 0.1}, "part": "train"},
            "split.train is 0.9 there and 0.8 here",
        ),
        (
            {"subset": list(range(50))},
            {"subset": list(range(51))},
            r"subset is \[0, 1, 2, 3, 4, 5\.\.\. \(size 50, sha256 \w+\) there and .*size 51",
        ),
        ({"where": "a"}, {"where": "a"}, "^$"),
    ],
)
def test_two_views_are_told_apart_by_the_option_that_differs(
    before: dict[str, Any], now: dict[str, Any], text: str
) -> None:
    texts = (options.View(**before).text, options.View(**now).text)
    assert re.search(text, view_text.view_differences(*texts, of="there"))
    assert view_text.view_digest("") == ""


def test_an_unknown_option_gets_the_nearest_name() -> None:
    with pytest.raises(TypeError, match=r"View does not take wher\. wher: did you mean where\?"):
        options.View(wher="a")  # type: ignore[call-arg]


def test_a_digest_tells_views_apart_also_where_their_texts_are_cut() -> None:
    rows = np.arange(100_000)
    codes = [lookups.Vocabulary([value]) for value in "xy"]
    given: list[dict[str, Any]] = [
        {},
        {"where": "a > 1"},
        {"where": "a > 2"},
        {"subset": rows},
        {"subset": rows[::-1]},
        {"codes": {"a": codes[0]}},
        {"codes": {"a": codes[1]}},
        {"split": {"a": 0.5, "b": 0.5}, "part": "a"},
        {"split": {"a": 0.5, "b": 0.4}, "part": "a"},
    ]

    digests = {view_text.view_digest(options.View(**each).text) for each in given}

    assert len(digests) == len(given)
