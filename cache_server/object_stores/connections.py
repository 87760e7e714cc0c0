"""Connects to buckets: options, secrets and the environment -> a connection that is kept.

Options override the environment, and the environment overrides obstore's defaults. obstore reads
the usual variables itself; this module keeps them from mixing with the given options. Connections
must not be carried over a fork: they belong to threads of obstore.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from obstore import exceptions
from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

from cache_protocol.errors import LoadError, RequestError
from cache_server.egress import gate as gates
from cache_server.egress.addresses import check_name, parse_address
from cache_server.egress.gate import Pass
from cache_server.egress.hosts import Endpoint
from cache_server.object_stores.aws_credentials import ANONYMOUS, KEYS, s3_credentials
from cache_server.object_stores.client import Location, ObjectClient, Patience, kind_of
from cache_server.object_stores.errors import Place
from cache_server.object_stores.options import (
    check_text,
    number_setting,
    setting_name,
    store_settings,
)
from cache_server.secrets.redaction import redacted, secret_values

_CLIENT = ("allow_http", "connect_timeout", "connect_timeout_s", "timeout", "proxy_url")
_RETRY = ("max_retries", "retry_timeout_s")
# The URI says which bucket it is.
_UNUSED = ("bucket", "bucket_name", "container_name", "default_region")
_S3 = (
    *("access_key_id", "secret_access_key", "session_token", "region", "endpoint"),
    *("skip_signature", "virtual_hosted_style_request", "path_style_access", "requester_pays"),
    *("role_arn", "role_session_name", "external_id", "sts_endpoint", "web_identity_token_file"),
    *("container_credentials_relative_uri", "container_credentials_full_uri"),
    *("container_authorization_token_file", "imdsv1_fallback", "metadata_endpoint"),
    *("unsigned_payload", "conditional_put", "checksum_algorithm", "s3_express"),
    *("server_side_encryption", "sse_customer_key_base64"),
)
_GCS = (
    *("application_credentials", "service_account", "service_account_key", "bearer_token"),
    *("base_url", "endpoint", "skip_signature"),
)
_AZURE_CREDENTIALS = {
    "account_key": "access_key",
    "sas_token": "sas_token",
    "session_token": "bearer_token",
    "client_secret": "client_secret",
    "federated_token_file": "workload_identity",
}
_AZURE = (
    *("account_name", "client_id", "tenant_id", "authority_host", "endpoint", "use_emulator"),
    *("use_fabric_endpoint", "use_azure_cli", "skip_signature", "msi_endpoint", "object_id"),
    *("msi_resource_id", "encryption_key", *_AZURE_CREDENTIALS),
)
_HTTP = ("user", "password", "session_token", "bearer_token", "access_token")
_SETTINGS = {"s3": _S3, "gs": _GCS, "az": _AZURE, "http": _HTTP}
_FLAGS = {
    *("allow_http", "skip_signature", "virtual_hosted_style_request", "path_style_access"),
    *("requester_pays", "imdsv1_fallback", "unsigned_payload", "s3_express", "use_emulator"),
    *("use_fabric_endpoint", "use_azure_cli"),
}
# What obstore or this module reads from the environment.
_ENVIRONMENT = ("AWS_", "GOOGLE_", "AZURE_", "HTTP_", "HTTPS_", "NO_PROXY", "ALL_PROXY")
_VARIABLES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}  # of each kind of store
# Names that become a part of a host or of a path.
_PARTS_OF_HOSTS = {"region", "account_name", "tenant_id"}
# Options that name a host, or hold one.
_ADDRESSES = {
    *("endpoint", "base_url", "sts_endpoint", "metadata_endpoint", "authority_host"),
    *("msi_endpoint", "container_credentials_full_uri", "service_account"),
    *("service_account_key", "application_credentials", "use_emulator"),
}
# Where machines of clouds find their credentials.
_METADATA = {
    *(("169.254.169.254", 80), ("169.254.170.2", 80)),
    *(("metadata.google.internal", 80), ("metadata", 80)),
}
_NO_ADDRESS = re.compile(r"[^!-~]")
_HOST = re.compile(r"[\w.\-\[\]:@]+", re.ASCII)
_CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 30.0  # without a byte
_REQUEST_TIMEOUT_S = 24 * 3600.0  # no limit for a large object while bytes come
MAX_RETRIES = 10
RETRY_TIMEOUT_S = 120.0
_FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 15.0
# For S3; other libraries than obstore do not look these up. The first one that is set counts.
_S3_VARIABLES = {
    "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
}


def client_for(
    location: Location, options: Mapping[str, str], secrets: Mapping[str, str]
) -> ObjectClient:
    """The client of a bucket; the same settings give the same client, which keeps its connections.

    Raises:
        RequestError: for a setting that the store does not have, or that cannot be right.
        LoadError: there are no credentials.
    """
    settings = store_settings(options, secrets)
    check_names(location.kind, settings)
    for name in _UNUSED:
        settings.pop(name, None)
    for name in _FLAGS & settings.keys():
        settings[name] = settings[name].lower()
        if settings[name] not in ("true", "false"):
            raise RequestError(f"the option {name!r} must be true or false")
    check_host_parts(settings)
    environ = from_env()
    way = None
    if (gate := gates.current()) is not None:
        _refuse_proxies(settings)
        trusted = _trusted(location, settings, environ)
        way = gate.pass_for(options, secrets, trusted)
    return _connect(
        location._replace(key=""),
        tuple(sorted(settings.items())),
        tuple(sorted(environ.items())),
        secret_values(secrets, environ),
        way,
    )


def check_names(kind: str, settings: Iterable[str], others: Collection[str] = ()) -> None:
    """Raises a `RequestError` for a setting that a store does not have.

    Args:
        kind: of the store, see `kind_of`. Empty: files of the nodes; the settings of any store are
            accepted, because one set of settings may be given for all sources.
        settings: by the names of `store_settings`.
        others: further known settings.
    """
    kinds = [kind] if kind else list(_SETTINGS)
    known = {*_CLIENT, *_RETRY, *(name for each in kinds for name in _SETTINGS[each])}
    if unknown := sorted({*settings} - {*known, *_UNUSED, *others}):
        names = ", ".join(map(repr, unknown))
        if kind:
            reason = f"the {kind} store has no option {names}; it has {', '.join(sorted(known))}"
        else:
            reason = f"no store has an option {names}"
        raise RequestError(reason)


def known_settings(kind: str) -> set[str]:
    """The settings of a kind of store, by the names of `store_settings`."""
    return {*_CLIENT, *_RETRY, *_UNUSED, *_SETTINGS[kind]}


def from_env() -> dict[str, str]:
    """The variables that decide how a store is reached."""
    # By name first: this runs for every object, and reading a variable costs more.
    names = [name for name in os.environ if name.upper().startswith(_ENVIRONMENT)]
    return {name: os.environ[name] for name in names}


def settings_for_libraries(
    options: Mapping[str, str], secrets: Mapping[str, str]
) -> dict[str, str]:
    """Settings of a store for a library with its own connection: pyiceberg, deltalake.

    Such a library finds credentials like AWS's own tools, but not the endpoint of an S3 that is not
    Amazon's. The endpoint comes from the environment, unless the dataset gives it.

    Raises:
        RequestError: for a value that no library could use.
    """
    settings = store_settings(options, secrets)
    check_host_parts(settings)
    environ = from_env()
    for name in _S3_VARIABLES:
        if name not in settings and (found := _s3_variable(environ, name)):
            settings[name] = found
    return settings


def check_variables(uri: str, options: Mapping[str, str], secrets: Mapping[str, str]) -> None:
    """Settings of the environment for the store of ``uri``, for such a library.

    Raises:
        RequestError: for a variable that no library could use.
    """
    _check_environ(kind_of(uri), from_env(), store_settings(options, secrets))


def is_region_unknown(settings: Mapping[str, str]) -> bool:
    """Whether Amazon's S3 is read, and neither a setting nor the environment names the region."""
    environ = from_env()
    return not any(settings.get(name) or _s3_variable(environ, name) for name in _S3_VARIABLES)


def _s3_variable(environ: Mapping[str, str], name: str) -> str:
    """A setting of S3 in the environment; empty if it is not set."""
    return next((environ[key] for key in _S3_VARIABLES[name] if environ.get(key)), "")


@lru_cache(maxsize=64)
def _connect(
    location: Location,
    settings: tuple[tuple[str, str], ...],
    environ: tuple[tuple[str, str], ...],
    secret: frozenset[str],
    way: Pass | None,
) -> ObjectClient:
    values = dict(settings)
    _check_environ(location.kind, dict(environ), values)
    patience = Patience(
        int(number_setting(values, "max_retries", MAX_RETRIES)),
        number_setting(values, "retry_timeout_s", RETRY_TIMEOUT_S),
        _FIRST_BACKOFF_S,
        MAX_BACKOFF_S,
    )
    common = {
        "client_options": _client_options(values),
        "retry_config": {
            "max_retries": patience.max_retries,
            "retry_timeout": timedelta(seconds=patience.timeout_s),
            "backoff": {
                "init_backoff": timedelta(seconds=patience.first_pause_s),
                "max_backoff": timedelta(seconds=patience.max_pause_s),
                "base": 2,
            },
        },
    }
    for name in (*_CLIENT, *_RETRY):
        values.pop(name, None)
    if way is not None:
        # Without exclusions: obstore reads NO_PROXY only where it has found the proxy itself.
        common["client_options"]["proxy_url"] = way.url
    try:
        store, place = _MAKERS[location.kind](location, values, dict(environ), common)
    except (exceptions.BaseError, ValueError, TypeError) as error:
        # Their text quotes values, and a secret may be given under a wrong name.
        text = str(error).partition("\n\n")[0]
        given = [value for _, value in settings if len(value) > 1]
        raise RequestError(
            f"the settings of the {location.kind} store ({', '.join(name for name, _ in settings)})"
            f" are not right: {redacted(text, {*given, *secret})}"
        ) from None
    unreachable = str if way is None else way.failure
    return ObjectClient(location, store, place, secret, patience, unreachable)


def _s3(
    location: Location, values: dict[str, str], environ: dict[str, str], common: dict[str, Any]
) -> tuple[Any, Place]:
    endpoint = values.pop("endpoint", "") or _s3_variable(environ, "endpoint")
    region = values.get("region") or _s3_variable(environ, "region")
    place = Place(
        location.bucket,
        shown_endpoint(endpoint or f"https://s3.{region or 'us-east-1'}.amazonaws.com"),
    )
    if endpoint:
        _allow_http(common, endpoint)
    if bundle := environ.get("AWS_CA_BUNDLE"):
        common["client_options"]["root_certificate"] = _certificates(bundle)
    proxy = common["client_options"].get("proxy_url", "")
    provider = s3_credentials(values, environ, endpoint, place, proxy)
    if values.pop("path_style_access", "true") == "false":
        values.setdefault("virtual_hosted_style_request", "true")
    if payer := values.pop("requester_pays", ""):
        values["request_payer"] = payer
    if endpoint:
        if values.get("virtual_hosted_style_request") == "true":
            endpoint = _with_bucket(endpoint, location.bucket)
        # A variable for S3 alone would override a plain endpoint.
        values |= {"endpoint": endpoint, "aws_endpoint_url_s3": endpoint}
    if provider is not None:
        # Set either way, so that no variable decides it.
        values["skip_signature"] = "true" if provider is ANONYMOUS else "false"
    signer = None if provider is ANONYMOUS else provider
    config = _config(values)
    return S3Store(location.bucket, config=config, credential_provider=signer, **common), place


def _gcs(
    location: Location, values: dict[str, str], environ: dict[str, str], common: dict[str, Any]
) -> tuple[Any, Place]:
    if endpoint := values.pop("endpoint", ""):
        values.setdefault("base_url", endpoint)
    endpoint = (
        values.get("base_url")
        or environ.get("GOOGLE_BASE_URL", "")
        or _account_url(
            values.get("service_account")
            or environ.get("GOOGLE_SERVICE_ACCOUNT")
            or environ.get("GOOGLE_SERVICE_ACCOUNT_PATH", "")
        )
    )
    if endpoint:
        _allow_http(common, endpoint)
    place = Place(location.bucket, shown_endpoint(endpoint or "https://storage.googleapis.com"))
    return GCSStore(location.bucket, config=_config(values), **common), place


def _certificates(path: str) -> bytes:
    """The certificates of AWS_CA_BUNDLE, which obstore does not read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise LoadError(f"cannot read AWS_CA_BUNDLE {path}: {error.strerror}") from None


def _account_url(path: str) -> str:
    """The address in the file of a service account, which object_store can read."""
    try:
        account = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return ""  # obstore reports it better
    return str(account.get("gcs_base_url") or "") if isinstance(account, dict) else ""


def _azure(
    location: Location, values: dict[str, str], environ: dict[str, str], common: dict[str, Any]
) -> tuple[Any, Place]:
    container, _, host = location.bucket.partition("@")
    if host:
        account, _, domain = host.partition(".")
        values.setdefault("account_name", account)
        if domain.endswith("fabric.microsoft.com"):
            values.setdefault("use_fabric_endpoint", "true")
        elif domain and not domain.endswith("core.windows.net"):
            values.setdefault("endpoint", f"https://{account}.{domain.replace('dfs.', 'blob.', 1)}")
    for name, kind in _AZURE_CREDENTIALS.items():
        if name in values:
            values["credential_type"] = kind  # overrides that of the environment
            break
    for ours, theirs in (("session_token", "token"), ("sas_token", "sas_key")):
        if ours in values:
            values[theirs] = values.pop(ours)
    endpoint = (
        values.get("endpoint")
        or environ.get("AZURE_STORAGE_ENDPOINT")
        or environ.get("AZURE_ENDPOINT", "")
    )
    if endpoint:
        _allow_http(common, endpoint)
    account = values.get("account_name") or environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
    place = Place(container, shown_endpoint(endpoint or f"https://{account}.blob.core.windows.net"))
    return AzureStore(container, config=_config(values), **common), place


def _http(
    location: Location, values: dict[str, str], environ: dict[str, str], common: dict[str, Any]
) -> tuple[Any, Place]:
    del environ  # only the proxies, which obstore looks up
    user, at, host = location.bucket.rpartition("@")
    origin = f"{location.base.partition('://')[0]}://{host}"
    user = unquote(user) if at else values.get("user", "")
    token = values.get("bearer_token") or values.get("access_token") or values.get("session_token")
    # A compressed answer would have another size than the object, and no ranges.
    headers = {"Accept-Encoding": "identity"}
    if user and (password := values.get("password")):
        pair = base64.b64encode(f"{user}:{password}".encode()).decode()
        headers["Authorization"] = f"Basic {pair}"
    elif token:
        headers["Authorization"] = f"Bearer {token}"
    common["client_options"]["default_headers"] = headers
    _allow_http(common, origin)
    return HTTPStore(origin, **common), Place("", origin)


_MAKERS: dict[
    str,
    Callable[
        [Location, dict[str, str], dict[str, str], dict[str, Any]],
        tuple[Any, Place],
    ],
] = {"s3": _s3, "gs": _gcs, "az": _azure, "http": _http}


def _config(values: Mapping[str, str]) -> Any:
    return dict(values)  # one of obstore's typed dictionaries


def _client_options(values: Mapping[str, str]) -> dict[str, Any]:
    connect = "connect_timeout_s" if "connect_timeout_s" in values else "connect_timeout"
    options: dict[str, Any] = {
        "connect_timeout": _seconds(values, connect, _CONNECT_TIMEOUT_S),
        "read_timeout": timedelta(seconds=READ_TIMEOUT_S),
        "timeout": _seconds(values, "timeout", _REQUEST_TIMEOUT_S),
    }
    if "allow_http" in values:
        options["allow_http"] = values["allow_http"] == "true"
    if "proxy_url" in values:
        options["proxy_url"] = values["proxy_url"]
    return options


def check_host_parts(settings: Mapping[str, str]) -> None:
    """Refuses a region, an account or a tenant that is no plain name: it is a part of a host.

    Raises:
        RequestError: names the option.
    """
    for name in _PARTS_OF_HOSTS & settings.keys():
        if settings[name]:
            check_name(f"the option {name!r}", settings[name])


def pass_for(
    location: Location, options: Mapping[str, str], secrets: Mapping[str, str]
) -> Pass | None:
    """What lets a library with its own connection reach a store; None: it reaches everything.

    Raises:
        RequestError: for a proxy among the options.
    """
    if (gate := gates.current()) is None:
        return None
    settings = store_settings(options, secrets)
    _refuse_proxies(settings)
    return gate.pass_for(options, secrets, _trusted(location, settings, from_env()))


def _refuse_proxies(settings: Mapping[str, str]) -> None:
    if "proxy_url" in settings:
        raise RequestError(
            "this cache takes no option 'proxy_url': its connections go through the proxy of its "
            "operator (HTTPS_PROXY in the environment of the nodes)"
        )


def _trusted(
    location: Location, settings: Mapping[str, str], environ: Mapping[str, str]
) -> set[Endpoint]:
    """The hosts of a store that the environment names.

    Also those that give a machine its credentials, unless the dataset names any host: its answer
    could lead there.
    """
    kind = location.kind
    found: set[Endpoint] = set()
    for variable, value in environ.items():
        if kind in _VARIABLES and variable.startswith(_VARIABLES[kind]) and "://" in value:
            try:
                address = parse_address(variable, value)
            except RequestError:
                continue  # the store reports it better
            found.add((address.host, address.used_port))
            found.add((f"{location.bucket.lower()}.{address.host}", address.used_port))
    if kind in _VARIABLES and not settings.keys() & _ADDRESSES and "@" not in location.bucket:
        found |= _METADATA
    return found


def _check_environ(kind: str, environ: Mapping[str, str], settings: Mapping[str, str]) -> None:
    """Checks the variables for settings that are not given."""
    beaten = {*settings, *(KEYS if settings.keys() & {*KEYS, "skip_signature"} else ())}
    for variable in environ:
        name = setting_name(variable.lower())
        is_ours = kind in _VARIABLES and variable.startswith(_VARIABLES[kind])
        if is_ours and name in _SETTINGS[kind] and name not in beaten:
            check_text(f"the environment variable {variable}", environ[variable])


def check_endpoint(endpoint: str) -> None:
    """Raises a `RequestError` for a bad address, without quoting it: it may hold a password."""
    try:
        parts = urlsplit(endpoint)
        _ = parts.port  # raises for a password with an unescaped slash
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_address = False
    if not is_address or _NO_ADDRESS.search(endpoint) or not _HOST.fullmatch(parts.netloc):
        raise RequestError("the endpoint of a store must be an http:// or https:// address")


def _allow_http(common: dict[str, Any], endpoint: str) -> None:
    check_endpoint(endpoint)
    if endpoint.startswith("http://"):
        common["client_options"].setdefault("allow_http", True)


def _seconds(values: Mapping[str, str], name: str, default: float) -> timedelta:
    return timedelta(seconds=number_setting(values, name, default))


def _with_bucket(endpoint: str, bucket: str) -> str:
    scheme, _, host = endpoint.partition("://")
    return endpoint if host.startswith(f"{bucket}.") else f"{scheme}://{bucket}.{host}"


def shown_endpoint(endpoint: str) -> str:
    """The address without user, password and query."""
    parts = urlsplit(endpoint)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
