"""Credentials for S3: the keys of the dataset, or those of AWS's own chain.

The chain is boto3's. That of object_store reads no profiles, assumes no role, and takes minutes to
say that a machine has no credentials. Credentials are never logged or shown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import UTC, timedelta
from typing import Any

from cache_protocol.errors import LoadError, RequestError
from cache_server.object_stores.errors import Place

Credentials = Callable[[], Any]
_OWN_CHAIN = ("imdsv1_fallback",)  # left to object_store, which has settings for it
KEYS = ("access_key_id", "secret_access_key", "session_token")
_ROLE = ("role_arn", "role_session_name", "external_id", "sts_endpoint")
_FRESH_FOR = timedelta(minutes=5)  # boto3 renews ten minutes before keys expire
_STS_TIMEOUT_S, _STS_ATTEMPTS = 10.0, 3  # boto3's own take five minutes of one that is silent


def ANONYMOUS() -> None:
    """Stands for credentials where requests are not signed."""


def s3_credentials(
    values: dict[str, str],
    environ: Mapping[str, str],
    endpoint: str,
    place: Place,
    proxy_url: str = "",
) -> Credentials | None:
    """What signs the requests; removes the settings that it uses from ``values``.

    Args:
        proxy_url: through which a role is asked for; empty: that of the environment.

    Returns:
        `ANONYMOUS`, a credential provider for obstore, or None where obstore finds them itself.

    Raises:
        RequestError: for half a pair of keys.
        LoadError: where there are no credentials at all.
    """
    keys = {name: values.pop(name) for name in KEYS if name in values}
    if ("access_key_id" in keys) != ("secret_access_key" in keys):
        raise RequestError("access_key_id and secret_access_key must be given together")
    skip = values.pop("skip_signature", "" if keys else environ.get("AWS_SKIP_SIGNATURE", ""))
    if skip.lower() == "true":
        for name in _ROLE:
            values.pop(name, None)
        return ANONYMOUS
    if not keys and any(name in values for name in _OWN_CHAIN):
        values.pop("external_id", None)
        return None
    role = {name: values.pop(name) for name in _ROLE if name in values}
    if "role_arn" in role:
        return _assumed(role, keys, environ, endpoint, values.get("region"), proxy_url)
    if "access_key_id" in keys:
        # A provider keeps the session token of the environment out.
        static = {
            "access_key_id": keys["access_key_id"],
            "secret_access_key": keys["secret_access_key"],
            "token": keys.get("session_token"),
            "expires_at": None,
        }
        return lambda: static
    return _found(place)


def _found(place: Place) -> Credentials:
    boto3 = _boto3()
    from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]  # no stubs
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        session = boto3.Session()
        found = session.get_credentials()
    except BotoCoreError as error:  # such as a profile that does not exist
        raise LoadError(f"no credentials for {place}: {error}") from None
    if found is None:
        raise LoadError(
            f"no credentials for {place}: give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the "
            "storage options or the node's environment (ACCESS_KEY_ID and SECRET_ACCESS_KEY of a "
            "TrainJob), or AWS_SKIP_SIGNATURE=true for public objects"
        )
    return Boto3CredentialProvider(session, ttl=_FRESH_FOR)


def _assumed(
    role: Mapping[str, str],
    keys: Mapping[str, str],
    environ: Mapping[str, str],
    endpoint: str,
    region: str | None,
    proxy_url: str,
) -> Credentials:
    boto3 = _boto3()
    from botocore.config import Config  # type: ignore[import-untyped]  # no stubs

    session = boto3.Session(
        aws_access_key_id=keys.get("access_key_id"),
        aws_secret_access_key=keys.get("secret_access_key"),
        aws_session_token=keys.get("session_token"),
        region_name=region,
    )
    # boto3 has a variable for it.
    other = None if environ.get("AWS_ENDPOINT_URL_STS") else endpoint or None
    client = session.client(
        "sts",
        endpoint_url=role.get("sts_endpoint", other),
        region_name=session.region_name or "us-east-1",
        config=Config(
            connect_timeout=_STS_TIMEOUT_S,
            read_timeout=_STS_TIMEOUT_S,
            retries={"mode": "standard", "total_max_attempts": _STS_ATTEMPTS},
            # If it is given, boto3 reads neither HTTPS_PROXY nor NO_PROXY.
            proxies={"http": proxy_url, "https": proxy_url} if proxy_url else None,
        ),
    )
    request = {
        "RoleArn": role["role_arn"],
        "RoleSessionName": role.get("role_session_name", "data-cache"),
    }
    if "external_id" in role:
        request["ExternalId"] = role["external_id"]

    def assume() -> dict[str, Any]:
        found = client.assume_role(**request)["Credentials"]
        return {
            "access_key_id": found["AccessKeyId"],
            "secret_access_key": found["SecretAccessKey"],
            "token": found["SessionToken"],
            # obstore requires this UTC; botocore uses another class.
            "expires_at": found["Expiration"].astimezone(UTC),
        }

    return assume


def _boto3() -> Any:
    import boto3

    # At debug level it logs the requests that it signs, with the access key.
    logging.getLogger("botocore").setLevel(logging.INFO)
    return boto3
