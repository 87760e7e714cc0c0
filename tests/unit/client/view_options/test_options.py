"""What holds for every option of a view: values of wrong types, the memory of workers."""

from __future__ import annotations

import pickle
from dataclasses import fields
from multiprocessing import context
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cache_client.flight import routing
from cache_client.view_options import columns, lookups, open_view, selection
from cache_client.view_options import options as view_options
from cache_protocol.errors import ConfigError

FITTING: dict[str, Any] = {
    "a flag": True,
    "an integer": 3,
    "a negative integer": -1,
    "a text": "drop",
    "names": ["labels"],
    "nothing": [],
    "a pair": (1, 2),
    "integers": [1, 2, 3],
    "fractions": {"a": 0.5},
    "texts by name": {"a": "b"},
    "no entries": {},
}
WRONG: tuple[Any, ...] = (
    1.5, float("nan"), 10**30, "", " ", b"a", {"a"}, object(), type, iter([1]),
    [None], [["a"]], [[1, 2], [3]], ["a", 1], (["a"], 0.5), ("train", [0.5]),
    {1: "a"}, {"a": None}, {"a": []}, {"a": object()}, {"a": np.array([1, 2])}, {("a",): 0.5},
    np.array([["a"]]), np.array([0.5]),
)  # fmt: skip
TAKES: dict[str, set[str]] = {
    "where": {"a text"},
    "split": {"fractions"},
    "part": {"a text"},
    "split_by": {"names"},
    "fold": {"a pair"},
    "except_fold": {"a pair"},
    "subset": {"a pair", "integers", "nothing"},
    "weights": {"a text"},
    "replacement": {"a flag"},
    "per_class": {"a text"},
    "epoch_rows": {"an integer"},
    "pack": {"a text"},
    "sequence_length": {"an integer"},
    "cut_documents": {"a flag"},
    "long_documents": {"a text"},
    "best_fit": {"a flag"},
    "end_token": {"an integer"},
    "pad_token": {"an integer", "a negative integer"},
    "pack_outputs": {"names", "nothing"},
    "label_mask": {"a text"},
    "label_column": {"a text"},
    "group_by": {"a text", "names"},
    "order_by": {"a text"},
    "window": {"a pair"},
    "length_buckets": {"a text"},
    "bucket_rows": {"an integer"},
    "pad_lists": {"fractions", "no entries"},
    "codes": {"names", "nothing", "no entries"},
    "join": {"texts by name", "no entries"},
}
PACK: dict[str, Any] = {"pack": "t", "sequence_length": 4}
WHOLE: dict[str, Any] = {**PACK, "cut_documents": False}
BESIDE: dict[str, dict[str, Any]] = {
    "split": {"part": "a"},
    "part": {"split": {"drop": 0.5}},
    "split_by": {"fold": (0, 2)},
    "replacement": {"weights": "w"},
    "pack": {"sequence_length": 4},
    "sequence_length": {"pack": "t"},
    "cut_documents": PACK,
    "long_documents": WHOLE,
    "best_fit": {**WHOLE, "long_documents": "drop"},
    "end_token": PACK,
    "pad_token": PACK,
    "pack_outputs": PACK,
    "label_mask": PACK,
    "label_column": PACK,
    "order_by": {"group_by": "g"},
    "window": {"group_by": "g"},
    "bucket_rows": {"length_buckets": "n"},
}
ROWS = 5_000
SCHEMA = pa.schema([("a", pa.int64()), ("t", pa.list_(pa.int64()))])
VERSION = columns.VersionNodes(
    "grpc://nowhere:1",
    routing.ShardMap("t", "f", SCHEMA, ROWS, np.zeros(1, np.int64), (), ((),)),
)


def problems_of(option: str, value: Any) -> list[str]:
    """Those that are found without a node, and those of the rows of a version."""
    options = {**BESIDE.get(option, {}), option: value}
    try:
        view = view_options.View(**options)
        if option == "subset":
            selection.make_selection(view, VERSION)
    except ConfigError as error:
        return [str(error)]
    return []


def test_the_table_has_every_option() -> None:
    assert TAKES.keys() == {each.name for each in fields(view_options.View)}


@pytest.mark.parametrize("option", TAKES)
def test_a_value_of_a_wrong_type_is_refused_by_name(option: str) -> None:
    accepted = {kind for kind, value in FITTING.items() if not problems_of(option, value)}
    assert accepted == TAKES[option]
    others = [value for kind, value in FITTING.items() if kind not in accepted]
    for value in (*others, *WRONG):
        problems = problems_of(option, value)
        assert any(option in problem for problem in problems), f"{option}={value!r}: {problems}"


@pytest.mark.parametrize(
    "options",
    [
        {"subset": range(ROWS)[::-1]},
        {"weights": "a"},
        {"per_class": "a"},
        {"pack": "t", "sequence_length": 8},
        {"group_by": "a"},
        {"group_by": ["a", "t"], "order_by": "a", "window": (1, 1)},
        {"length_buckets": "a"},
    ],
)
def test_a_spawned_worker_maps_the_tables_of_a_view(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = pa.chunked_array([pa.array(range(1, ROWS + 1))])
    monkeypatch.setattr(open_view, "row_values", lambda version, sql: numbers)
    view = open_view.make_view(view_options.View(**options), VERSION).view
    monkeypatch.setattr(context._tls, "spawning_popen", object(), raising=False)
    pickled = pickle.dumps(view)
    monkeypatch.undo()

    assert len(pickled) < 2_000 < ROWS <= view.num_bytes
    slots = np.arange(view.num_slots(0))[::-7]
    found, expected = (each.samples(slots, 0) for each in (pickle.loads(pickled), view))
    assert found.row_ids.tolist() == expected.row_ids.tolist()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"dataset": 1}, "dataset must be a name, got 1"),
        ({"dataset": "u", "key": ["k"]}, r"key must be the name of a column, got \['k'\]"),
        ({"dataset": "u", "columns": "y"}, "columns must be a list of names, got 'y'"),
        ({"dataset": "u", "columns": []}, r"columns must be a list of names, got \[\]"),
    ],
)
def test_a_join_refuses_arguments_of_a_wrong_type(arguments: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        lookups.Join(**arguments)
