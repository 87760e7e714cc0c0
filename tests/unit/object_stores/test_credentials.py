"""Who signs the requests to S3, and that no message or log shows it."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest

from cache_protocol.errors import LoadError, RequestError
from cache_server.object_stores import download, expand, read_tail
from cache_server.object_stores.client import Location
from cache_server.object_stores.connections import client_for
from tests.object_store import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server
from tests.unit.object_stores.conftest import PARQUET, assert_no_secret, found, one


@pytest.mark.parametrize("source", ["s3://lake/a.parquet", "s3://lake/a/*"])
def test_wrong_keys_name_bucket_and_endpoint_and_never_the_key(
    s3: S3Server, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    s3.require("SOMEONE-ELSE")
    caplog.set_level(logging.DEBUG)
    with pytest.raises(LoadError) as caught:
        found(s3, source)
    message = str(caught.value)
    assert f"access to bucket 'lake' at {s3.endpoint} was refused (403" in message
    assert message.endswith(": check the credentials")
    assert caught.value.__suppress_context__
    assert_no_secret(message + caplog.text)


def test_nothing_shows_the_keys(s3: S3Server) -> None:
    assert_no_secret(repr(client_for(Location.of("s3://lake/a"), s3.options, s3.secrets)))


def test_anonymous_requests_are_not_signed(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "unwanted")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "unwanted")
    s3.put("open-data", "a.parquet", b"rows", public=True)
    options = {**s3.options, "skip_signature": "true"}
    (file,) = expand("s3://open-data/a.parquet", PARQUET, options, {})
    download(file, tmp_path / "f", options, {})
    assert (tmp_path / "f").read_bytes() == b"rows"
    assert {request.access_key_id for request in s3.requests} == {""}


def test_a_session_token_is_sent_and_the_environments_is_not_mixed_in(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "from-the-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "from-the-environment")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "from-the-environment")
    s3.put("lake", "token.parquet", b"rows")
    one(s3, "s3://lake/token.parquet")
    expand(
        "s3://lake/token.parquet", PARQUET, s3.options, {**s3.secrets, "aws_session_token": "mine"}
    )
    assert [request.session_token for request in s3.requests] == ["", "mine"]
    assert {request.access_key_id for request in s3.requests} == {ACCESS_KEY_ID}


def test_the_environment_counts_where_the_dataset_says_nothing(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put("lake", "env.parquet", b"rows")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENVKEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "ENVSECRET")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "ENVTOKEN")
    (file,) = expand("s3://lake/env.parquet", PARQUET, {}, {})
    assert read_tail(file, 4, {}, {}) == b"rows"
    assert {(r.access_key_id, r.session_token) for r in s3.requests} == {("ENVKEY", "ENVTOKEN")}


@pytest.mark.parametrize("name", ["access_key_id", "secret_access_key", "session_token", "region"])
@pytest.mark.parametrize("place", ["options", "environment"])
def test_a_line_break_in_a_setting_is_named_without_the_setting(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    keys = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY, name: "Valu\n"}
    options = {**s3.options, **keys}
    if place == "environment":
        for key in keys:
            monkeypatch.setenv(f"AWS_{key.upper()}", options.pop(key))
    with pytest.raises(RequestError, match="no line break") as caught:
        expand("s3://lake/a.parquet", PARQUET, options, {})
    assert (name if place == "options" else f"AWS_{name.upper()}") in str(caught.value)
    assert "Valu" not in str(caught.value)
    assert not s3.requests


def test_a_variable_that_an_option_beats_may_be_anything(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put("lake", "beaten.parquet", b"rows")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other\n")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "other\n")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "other\n")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", "of another store\n")
    assert one(s3, "s3://lake/beaten.parquet").size == 4


def test_a_profile_of_the_environment_counts(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    profiles = tmp_path / "credentials"
    profiles.write_text("[team]\naws_access_key_id = PROFILEKEY\naws_secret_access_key = s\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profiles))
    monkeypatch.setenv("AWS_PROFILE", "team")
    s3.put("lake", "profile.parquet", b"rows")
    expand("s3://lake/profile.parquet", PARQUET, s3.options, {})
    assert {request.access_key_id for request in s3.requests} == {"PROFILEKEY"}


def test_an_option_beats_the_environment(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.put("lake", "env.parquet", b"rows")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    one(s3, "s3://lake/env.parquet")
    assert {request.access_key_id for request in s3.requests} == {ACCESS_KEY_ID}


def test_a_machine_without_credentials_is_told_so_at_once(s3: S3Server) -> None:
    with pytest.raises(LoadError, match=r"no credentials for bucket 'lake' at ") as caught:
        expand("s3://lake/a", PARQUET, s3.options, {})
    # Names that count both as storage options and in the environment, and those of a TrainJob.
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE=true", " SECRET_ACCESS_KEY"):
        assert name in str(caught.value)


def test_a_profile_that_does_not_exist_is_named(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(LoadError, match=r"no credentials for bucket 'lake' at .*nobody"):
        expand("s3://lake/a", PARQUET, s3.options, {})


def test_the_web_identity_of_a_pod_counts(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    s3.put("lake", "pod.parquet", b"rows")
    (tmp_path / "token").write_text("a-web-identity-token")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/pod")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", s3.endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    expand("s3://lake/pod.parquet", PARQUET, s3.options, {})
    assert s3.requests[-1].access_key_id.startswith("ASIA")


def test_a_role_is_assumed_at_the_same_endpoint(
    s3: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    s3.put("lake", "role.parquet", b"rows")
    options = {**s3.options, "role_arn": "arn:aws:iam::123456789012:role/reader"}
    (file,) = expand("s3://lake/role.parquet", PARQUET, options, s3.secrets)
    assert read_tail(file, 4, options, s3.secrets) == b"rows"
    sts, *reads = s3.requests
    assert (sts.method, sts.key, sts.access_key_id) == ("POST", "", ACCESS_KEY_ID)
    assert len(reads) == 2
    for read in reads:
        assert read.access_key_id.startswith("ASIA")
        assert read.session_token
    assert_no_secret(caplog.text)


def test_a_role_that_may_not_be_assumed_is_named(s3: S3Server) -> None:
    s3.put("lake", "role2.parquet", b"rows")
    s3.require("SOMEONE-ELSE")
    options = {**s3.options, "role_arn": "arn:aws:iam::123456789012:role/other"}
    with pytest.raises(
        LoadError, match=r"no credentials for bucket 'lake' at .*AssumeRole"
    ) as caught:
        expand("s3://lake/role2.parquet", PARQUET, options, s3.secrets)
    assert_no_secret(str(caught.value))


def test_a_role_whose_service_never_answers_is_given_up(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache_server.object_stores.aws_credentials._STS_TIMEOUT_S", 0.2)
    s3.put("lake", "role3.parquet", b"rows")
    with socket.create_server(("127.0.0.1", 0)) as mute:  # takes connections, and says nothing
        sts = f"http://127.0.0.1:{mute.getsockname()[1]}"
        role = {"role_arn": "arn:aws:iam::123456789012:role/reader", "sts_endpoint": sts}
        with pytest.raises(
            LoadError, match=f"no credentials for bucket 'lake' at .*timeout.*{sts}"
        ) as caught:
            expand("s3://lake/role3.parquet", PARQUET, {**s3.options, **role}, s3.secrets)
    assert_no_secret(str(caught.value))
