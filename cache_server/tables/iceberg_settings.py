"""Settings of an Iceberg table's store and catalogue, by pyiceberg's names."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from cache_protocol.errors import RequestError
from cache_server.object_stores.connections import check_names, settings_for_libraries
from cache_server.object_stores.options import setting_name, store_settings

# Name in `store_settings` -> pyiceberg's name.
_STORE_PROPERTIES = {
    "endpoint": "s3.endpoint",
    "access_key_id": "s3.access-key-id",
    "secret_access_key": "s3.secret-access-key",
    "session_token": "s3.session-token",
    "region": "s3.region",
    "role_arn": "s3.role-arn",
    "role_session_name": "s3.role-session-name",
    "skip_signature": "s3.anonymous",
    "connect_timeout": "s3.connect-timeout",
    "timeout": "s3.request-timeout",
    "proxy_url": "s3.proxy-uri",
    "virtual_hosted_style_request": "s3.force-virtual-addressing",
    "account_name": "adls.account-name",
    "account_key": "adls.account-key",
    "sas_token": "adls.sas-token",
    "sas_key": "adls.sas-token",
    "tenant_id": "adls.tenant-id",
    "client_id": "adls.client-id",
    "client_secret": "adls.client-secret",
}
_OWN_PREFIXES = ("s3.", "gcs.", "adls.", "client.")  # already pyiceberg's names
_UNTRANSLATED = ("application_credentials",)  # pyarrow reads it only from the environment


def store_properties(options: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    """Settings of the store by pyiceberg's names.

    Raises:
        RequestError: naming a setting that no store has, or one that pyiceberg cannot use.
    """
    own = {setting_name(key) for key in (*options, *secrets) if key.startswith(_OWN_PREFIXES)}
    check_names("", store_settings(options, secrets), own)
    settings = settings_for_libraries(options, secrets)
    for name in _UNTRANSLATED:
        if name in settings:
            raise RequestError(
                f"{name} cannot be set for one Iceberg table: set it in the environment of the "
                "nodes (GOOGLE_APPLICATION_CREDENTIALS)"
            )
    properties = {
        key: value for key, value in {**options, **secrets}.items() if key.startswith(_OWN_PREFIXES)
    }
    properties |= {
        _STORE_PROPERTIES[name]: value
        for name, value in settings.items()
        if name in _STORE_PROPERTIES
    }
    if "s3.endpoint" in properties and "client.region" not in properties:
        # Without a region pyiceberg asks Amazon for the bucket's, even if it is on another server.
        properties.setdefault("s3.region", "us-east-1")
    return properties


def is_rest(catalog: Mapping[str, str]) -> bool:
    """Whether a catalogue is a REST one, which may lend credentials."""
    kind = catalog.get("type")
    return (
        kind.lower() == "rest"
        if kind
        else urlsplit(catalog.get("uri", "")).scheme in ("http", "https")
    )
