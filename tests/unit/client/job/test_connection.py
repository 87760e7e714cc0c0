"""`Connection`: a value that hides its token, and what the environment adds to it."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache_client.job import connection
from cache_protocol.errors import ConfigError

HERE = "grpc://cache:50051"


def test_a_connection_is_compared_and_pickled_and_never_shows_its_token(tmp_path: Path) -> None:
    made = connection.Connection(HERE, token="s3cret", deadline_s=5.0)
    assert pickle.loads(pickle.dumps(made)) == made != replace(made, token="other")
    assert len({made, replace(made)}) == 1
    assert HERE in repr(made) and "s3cret" not in repr(made)
    assert "s3cret" not in repr(connection.access_to(made))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"endpoint": "cache:1"}, "endpoint must be grpc://HOST:PORT, got 'cache:1'"),
        ({"deadline_s": 0}, "deadline_s must be a number greater than 0, got 0"),
        ({"local": 1}, "local must be True or False, got 1"),
        ({"tls_ca": ""}, "tls_ca must be a path, got ''"),
        ({"token": ""}, "token must be a string that is not empty"),
        ({"token": "s3cret", "token_file": "f"}, "token and token_file exclude each other"),
    ],
)
def test_a_bad_argument_is_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        connection.Connection(**{"deadline_s": 1.0, **arguments})
    assert words in str(caught.value) and "s3cret" not in str(caught.value)


def test_an_endpoint_stands_for_its_connection_and_nothing_for_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert connection.access_to(HERE) == connection.access_to(connection.Connection(HERE))
    monkeypatch.setenv("CACHE_ENDPOINT", HERE)
    assert connection.access_to(None) == connection.access_to(HERE)
    with pytest.raises(ConfigError, match="cache must be a Connection or grpc://HOST:PORT, got 5"):
        connection.access_to(5)  # type: ignore[arg-type]
