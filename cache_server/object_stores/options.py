"""Settings of a store: each of their usual names -> one name. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from cache_protocol.errors import RequestError
from cache_protocol.spec.secret_settings import CATALOG_PREFIX

_PREFIXES = ("aws_", "google_", "azure_storage_", "azure_", "s3.", "gcs.", "adls.")
_MAX_NUMBER = 1_000_000
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SAME = {
    "default_region": "region",
    "endpoint_url_s3": "endpoint",
    "endpoint_url": "endpoint",
    "path": "application_credentials",
    # Unlike application_credentials, this one may name another endpoint.
    "service_account_path": "service_account",
    "oauth2.token": "bearer_token",
    "account": "account_name",
    "key": "account_key",
    "access_key": "account_key",
    "master_key": "account_key",
    "sas_key": "sas_token",
    "authority_id": "tenant_id",
    "endpoint_url_sts": "sts_endpoint",
    "request_payer": "requester_pays",
    "force_virtual_addressing": "virtual_hosted_style_request",
    "proxy_uri": "proxy_url",
    "request_timeout": "timeout",
    "token": "session_token",
    "anonymous": "skip_signature",
}


def store_settings(options: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    """Settings of the store, without those of a catalogue.

    Returns:
        plain names, such as ``access_key_id``, ``secret_access_key``, ``session_token``,
        ``region``, ``endpoint``, ``allow_http``, ``skip_signature``, ``role_arn``. Names that
        `object_store` knows lose their prefix, such as ``aws_``.

    Raises:
        RequestError: for a value that `check_text` refuses.
    """
    settings = {}
    for key, value in {**options, **secrets}.items():
        if key.startswith(CATALOG_PREFIX):
            continue
        check_text(f"the option {key!r}", value)
        settings[setting_name(key)] = value
    return settings


def setting_name(key: str) -> str:
    """The one name of a setting that a user or a variable calls ``key``, in lower case."""
    name = key.replace("-", "_")
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return _SAME.get(name, name)


def check_text(what: str, value: str) -> None:
    """Refuses a value on which object_store panics, such as a line break in a key.

    Raises:
        RequestError: naming ``what``, without its value.
    """
    is_key_file = value.lstrip().startswith("{")  # of Google, as it is
    if not is_key_file and (value != value.strip() or _CONTROL.search(value)):
        raise RequestError(
            f"{what} must have no space before or after its value, and no line break or other "
            "control character"
        )


def catalog_settings(options: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    """Properties of the catalogue, by the names that the user gave them."""
    return {
        key.removeprefix(CATALOG_PREFIX): value
        for key, value in {**options, **secrets}.items()
        if key.startswith(CATALOG_PREFIX)
    }


def number_setting(settings: Mapping[str, str], name: str, default: float) -> float:
    """A number, such as a time in seconds; ``5s`` counts as 5.

    Raises:
        RequestError: naming it, without its value.
    """
    text = settings.get(name)
    if text is None:
        return default
    try:
        number = float(text.removesuffix("s"))
    except ValueError:
        number = -1.0
    if not 0 <= number <= _MAX_NUMBER:
        raise RequestError(f"the option {name!r} must be a number from 0 to {_MAX_NUMBER}")
    return number
