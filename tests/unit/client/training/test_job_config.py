"""The arguments of `CacheIterableDataset`: how many, and where each former one is."""

from __future__ import annotations

import inspect
import re

import pytest

from cache_client import CacheClient, CacheDataset, CacheIterableDataset, ConfigError, View
from cache_client.training import job_config

MOST_ARGUMENTS = 27  # three of them are for replays


def test_a_dataset_takes_few_arguments() -> None:
    assert len(inspect.signature(CacheIterableDataset).parameters) <= MOST_ARGUMENTS


@pytest.mark.parametrize(("name", "place"), job_config.moved_arguments().items())
def test_an_argument_of_another_object_is_named_with_its_place(name: str, place: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"{name} is {place}")):
        CacheIterableDataset("t", batch_size=1, **{name: 1})


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (CacheIterableDataset, {"shufle": True}, "shufle: did you mean shuffle?"),
        (CacheIterableDataset, {"weigths": "w"}, "did you mean weights? It is now view=View("),
        (CacheDataset, {"endpoint": "a"}, "endpoint is now cache=Connection(endpoint=...)"),
        (CacheDataset, {"view": 1}, "view is an argument of CacheIterableDataset"),
        (CacheClient, {"timeout_s": 1}, "timeout_s is now cache=Connection(deadline_s=...)"),
        (CacheClient, {"xyzzy": 1}, "xyzzy: it takes cache"),
    ],
)
def test_an_unknown_argument_is_explained(kind: type, given: dict, words: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(TypeError, match=re.escape(words)):
        kind(**given)


def test_all_unknown_arguments_are_named_at_once() -> None:
    with pytest.raises(TypeError) as caught:
        CacheIterableDataset("t", where="a", num_workers=2, shufle=1)  # type: ignore[call-arg]
    for words in ("where is now view", "num_workers is an argument of loader()", "shuffle?"):
        assert words in str(caught.value)


def test_a_view_of_the_environment_is_checked_and_gives_way_to_that_of_the_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refusal(**arguments: object) -> str:
        with pytest.raises(ConfigError) as caught:
            # Its batch size, so that no cache is asked.
            CacheIterableDataset("t", cache="grpc://h:1", batch_size=0, **arguments)  # type: ignore[arg-type]
        return str(caught.value)

    for text, words in (
        ('{"wher": "a > 1"}', "CACHE_VIEW: View does not take wher. wher: did you mean where?"),
        ('{"fold": [3, 2]}', "CACHE_VIEW: fold must be"),
        ('{"pack": "tokens", "sequence_length": 8}', "batch_format"),
    ):
        monkeypatch.setenv("CACHE_VIEW", text)
        assert words in refusal(batch_format="jax"), text
        assert words not in refusal(view=View(where="a > 1"))
