"""How a bucket is reached: connections that are kept, a proxy, settings that cannot be right."""

from __future__ import annotations

import pytest

from cache_protocol.errors import RequestError
from cache_server.object_stores import expand
from cache_server.object_stores.client import Location
from cache_server.object_stores.connections import client_for
from tests.object_store import S3Server
from tests.unit.object_stores.conftest import PARQUET


def test_connections_are_kept(s3: S3Server) -> None:
    location = Location.of("s3://lake/a")
    assert client_for(location, s3.options, s3.secrets) is client_for(
        Location.of("s3a://lake/b"), s3.options, s3.secrets
    )


def test_a_proxy_of_the_environment_is_used(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.put("lake", "proxied.parquet", b"rows")
    monkeypatch.setenv("http_proxy", s3.endpoint)
    options = {**s3.options, "endpoint": "http://storage.example"}
    expand("s3://lake/proxied.parquet", PARQUET, options, s3.secrets)
    assert [request.host for request in s3.requests] == ["storage.example"]


def test_an_unknown_option_is_named_without_its_value(s3: S3Server) -> None:
    with pytest.raises(RequestError, match="the s3 store has no option 'acess_key_id'") as caught:
        expand("s3://lake/a", PARQUET, s3.options, {"acess_key_id": "hush-hush"})
    assert "hush" not in str(caught.value)
    with pytest.raises(RequestError, match="'skip_signature' must be true or false, got 'maybe'"):
        expand("s3://lake/a", PARQUET, {"skip_signature": "maybe"}, {})
    with pytest.raises(RequestError, match=r"'max_retries' must be a whole number .*, got 'many'"):
        expand("s3://lake/a", PARQUET, {"max_retries": "many"}, s3.secrets)
    for endpoint in (
        *("localhost:9000", "not a url", "ftp://host", "http://hôst", "http://h%"),
        *("http://u:hush/hush@host", "http://u:hush#hush@host", "u:hush@host"),
    ):
        with pytest.raises(RequestError, match="the option 'endpoint' is not right") as caught:
            expand("s3://lake/a", PARQUET, {"endpoint": endpoint}, s3.secrets)
        assert "hush" not in str(caught.value)
    with pytest.raises(RequestError, match="it names a file of the node: set it in the environ"):
        expand("gs://b/a", PARQUET, {"google_application_credentials": "/nowhere"}, {})
    with pytest.raises(RequestError, match="must be given together"):
        expand("s3://lake/a", PARQUET, {}, {"access_key_id": "hush-hush"})


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(RequestError, match="the scheme 'ftp' is not served"):
        expand("ftp://host/a", PARQUET, {}, {})


@pytest.mark.parametrize(
    "source", ["s3://la ke/a", "s3://la`ke/a", "gs://la\nke/a", "az://la ke/a"]
)
def test_a_bucket_that_cannot_be_is_named(s3: S3Server, source: str) -> None:
    with pytest.raises(RequestError, match=r"'la.+ke' cannot be the name of a (bucket|container)"):
        expand(source, PARQUET, {"skip_signature": "true"}, {})
