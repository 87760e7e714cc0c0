from __future__ import annotations

import pytest

from cache_client.errors import ConfigError
from cache_client.ranks import Rank, find_endpoint, find_rank

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4"}


def test_arguments_beat_the_environment_which_beats_the_default() -> None:
    assert find_rank(1, 2, TORCHRUN) == Rank(1, 2)
    assert find_rank(environ=TORCHRUN) == Rank(3, 4)
    assert find_rank(environ={}) == Rank(0, 1)


@pytest.mark.parametrize(
    "environ",
    [{"RANK": "3"}, {"WORLD_SIZE": "4"}, {"RANK": "x", "WORLD_SIZE": "4"},
     {"RANK": "4", "WORLD_SIZE": "4"}, {"RANK": "-1", "WORLD_SIZE": "4"}],
)  # fmt: skip
def test_pairs_that_do_not_fit_are_quoted(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        find_rank(environ=environ)
    for value in environ.values():
        assert value in str(caught.value)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0), (None, 2), (1, None)])
def test_arguments_that_do_not_fit_are_quoted(rank: int | None, world_size: int | None) -> None:
    with pytest.raises(ConfigError, match=rf"rank={rank} world_size={world_size}"):
        find_rank(rank, world_size, {})


def test_an_endpoint_is_the_argument_or_the_environment_or_an_error() -> None:
    assert find_endpoint("grpc://a:1", {"CACHE_ENDPOINT": "grpc://b:2"}) == "grpc://a:1"
    assert find_endpoint(None, {"CACHE_ENDPOINT": "grpc://b:2"}) == "grpc://b:2"
    with pytest.raises(ConfigError, match="CACHE_ENDPOINT"):
        find_endpoint(None, {})
