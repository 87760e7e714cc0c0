"""Connects to buckets: options, secrets and the environment -> a connection that is kept.

Options override the environment, and the environment overrides obstore's defaults. obstore reads
the usual variables itself; this module keeps them from mixing with the given options. Connections
must not be carried over a fork: they belong to threads of obstore.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from obstore import exceptions
from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

from cache_protocol.datasets.source_options import STORES, Form, Option
from cache_protocol.errors import LoadError, RequestError
from cache_server.egress import gate as gates
from cache_server.egress.addresses import parse_address
from cache_server.egress.gate import Pass
from cache_server.egress.hosts import Endpoint
from cache_server.object_stores.aws_credentials import ANONYMOUS, KEYS, s3_credentials
from cache_server.object_stores.client import Location, ObjectClient, Patience
from cache_server.object_stores.errors import Place
from cache_server.object_stores.options import (
    check_text,
    number_setting,
    store_settings,
)
from cache_server.secrets.redaction import redacted, secret_values

_CLIENT = ("allow_http", "connect_timeout", "timeout")
_RETRY = ("max_retries", "retry_timeout_s")
_AZURE_CREDENTIALS = {  # settings -> obstore's type of the credential
    "account_key": "access_key",
    "sas_key": "sas_token",
    "token": "bearer_token",
    "client_secret": "client_secret",
}
# What obstore or this module reads from the environment.
_ENVIRONMENT = ("AWS_", "GOOGLE_", "AZURE_", "HTTP_", "HTTPS_", "NO_PROXY", "ALL_PROXY")
# Of each kind of store.
_VARIABLES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_", "hf": "HF_"}
# Where machines of clouds find their credentials.
_METADATA = {
    *(("169.254.169.254", 80), ("169.254.170.2", 80)),
    *(("metadata.google.internal", 80), ("metadata", 80)),
}
_CREDENTIAL_SERVERS = (
    *("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_EC2_METADATA_SERVICE_ENDPOINT"),
    *("AWS_METADATA_ENDPOINT", "AWS_ENDPOINT_URL_STS", "AZURE_MSI_ENDPOINT"),
)
_FABRIC = ".fabric.microsoft.com"
_MICROSOFT = (".core.windows.net", _FABRIC)
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
    settings = store_settings(location.kind, options, secrets)
    environ = from_env()
    return _connect(
        location._replace(key=""),
        tuple(sorted(settings.items())),
        tuple(sorted(environ.items())),
        secret_values(secrets, environ),
        _pass_for(location, settings, environ, (options, secrets), mixes=location.kind == "gs"),
    )


def from_env() -> dict[str, str]:
    """The variables that decide how a store is reached."""
    # By name first: this runs for every object, and reading a variable costs more.
    names = [name for name in os.environ if name.upper().startswith(_ENVIRONMENT)]
    return {name: os.environ[name] for name in names}


def settings_for_delta(
    kind: str, options: Mapping[str, str], secrets: Mapping[str, str]
) -> dict[str, str]:
    """Settings of a store for deltalake, which has its own connection.

    It finds credentials like AWS's own tools, but not the endpoint of an S3 that is not Amazon's.
    The endpoint comes from the environment, unless the dataset gives it.

    Raises:
        RequestError: for a value or a variable that no library could use.
    """
    settings = store_settings(kind, options, secrets)
    environ = from_env()
    _check_environ(kind, environ, settings)
    for name in _S3_VARIABLES if kind == "s3" else ():
        if name not in settings and (found := _s3_variable(environ, name)):
            settings[name] = found
    return settings


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
    if way is None:
        return ObjectClient(location, store, place, secret, patience)
    return ObjectClient(location, store, place, secret, patience, way.failure)


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
    endpoint = (
        values.get("base_url")
        or environ.get("GOOGLE_BASE_URL", "")
        or _account_url(
            environ.get("GOOGLE_SERVICE_ACCOUNT") or environ.get("GOOGLE_SERVICE_ACCOUNT_PATH", "")
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
    container, host = location.bucket.partition("@")[0], location.host
    if host:
        account, _, domain = host.partition(".")
        values.setdefault("account_name", account)
        if f".{domain}".endswith(_FABRIC):
            values.setdefault("use_fabric_endpoint", "true")
        elif domain and not f".{domain}".endswith(_MICROSOFT):
            values.setdefault("endpoint", f"https://{account}.{domain.replace('dfs.', 'blob.', 1)}")
    for name, kind in _AZURE_CREDENTIALS.items():
        if name in values:
            values["credential_type"] = kind  # overrides that of the environment
            break
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
    token = values.get("token")
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
    options: dict[str, Any] = {
        "connect_timeout": _seconds(values, "connect_timeout", _CONNECT_TIMEOUT_S),
        "read_timeout": timedelta(seconds=READ_TIMEOUT_S),
        "timeout": _seconds(values, "timeout", _REQUEST_TIMEOUT_S),
    }
    if "allow_http" in values:
        options["allow_http"] = values["allow_http"] == "true"
    return options


def pass_for(
    location: Location,
    options: Mapping[str, str],
    secrets: Mapping[str, str],
    *,
    mixes: bool,
) -> Pass | None:
    """What lets a connection to a store through the gate; None: it may reach everything.

    Args:
        mixes: as for `refuse_foreign`.

    Raises:
        RequestError: the credentials of the node would go to an address of the caller.
    """
    if gates.current() is None:
        return None
    settings = store_settings(location.kind, options, secrets)
    return _pass_for(location, settings, from_env(), (options, secrets), mixes=mixes)


def _pass_for(
    location: Location,
    settings: Mapping[str, str],
    environ: Mapping[str, str],
    given: tuple[Mapping[str, str], Mapping[str, str]],
    *,
    mixes: bool,
) -> Pass | None:
    """As `pass_for`, with what is known of the options: this runs for every object."""
    if (gate := gates.current()) is None:
        return None
    refuse_foreign(location.kind, settings, environ, host=location.host, mixes=mixes)
    return gate.pass_for(*given, _trusted(location, settings, environ))


def refuse_foreign(
    kind: str,
    settings: Mapping[str, str],
    environ: Mapping[str, str],
    *,
    host: str = "",
    mixes: bool = False,
) -> None:
    """Refuses an address of a caller to which the credentials of the node would go.

    Args:
        kind: of the store.
        settings: by the names of `store_settings`.
        host: of the account, if the URI of the source names one.
        mixes: the library takes credentials of the environment though it is given others.

    Raises:
        RequestError: names the address, and what to do.
    """
    store = STORES[kind]
    if settings.get("skip_signature") == "true":
        return
    own = _addresses_of(kind, environ)
    given = [(f"the option {name!r}", settings[name]) for name in _addresses(kind) & {*settings}]
    if "." in host and not host.endswith(_MICROSOFT):
        given.append(("the source", f"https://{host}"))
    foreign = [each for each in sorted(given) if _endpoint(*each) not in own]
    is_complete = any(settings.keys() >= {*group} for group in store.credentials)
    found = _secrets_of(kind, environ, settings) if mixes else []
    if not foreign or (is_complete and not found):
        return
    what, address = foreign[0]
    ways = " or ".join(" and ".join(group) for group in store.credentials)
    anonymous = ", or skip_signature=true" if store.find("skip_signature") else ""
    reason = (
        f"the nodes have others too ({', '.join(found)}), which would be used: only the operator"
        if is_complete
        else f"give {ways}{anonymous}. The operator"
    )
    raise RequestError(
        f"{what} names {shown_endpoint(address)}, to which this cache does not send the "
        f"credentials of its nodes: {reason} can name such an address in the environment of the "
        f"nodes ({store.variable})"
    )


def _secrets_of(kind: str, environ: Mapping[str, str], settings: Mapping[str, str]) -> list[str]:
    """The variables with credentials for a store that are not given."""
    return [
        variable
        for variable in sorted(environ)
        if (option := _of_variable(kind, variable)) is not None
        and not option.public
        and option.name not in settings
        and (kind != "s3" or option.form is not Form.NEVER)  # keys come before what names a file
    ]


def _addresses(kind: str) -> set[str]:
    """The options of a store that name a server."""
    return {option.name for option in STORES[kind].options if option.form is Form.ADDRESS}


def _addresses_of(kind: str, environ: Mapping[str, str]) -> set[Endpoint]:
    """The servers that the environment names for a kind of store."""
    found = set()
    for variable, value in environ.items():
        option = _of_variable(kind, variable)
        if option is not None and option.form is Form.ADDRESS:
            with suppress(RequestError):  # the store reports it better
                found.add(_endpoint(variable, value))
    return found


def _of_variable(kind: str, variable: str) -> Option | None:
    """The option of a store that a variable sets."""
    is_its = kind in _VARIABLES and variable.startswith(_VARIABLES[kind])
    return STORES[kind].find(variable) if is_its else None


def _endpoint(what: str, address: str) -> Endpoint:
    found = parse_address(what, address)
    return found.host, found.used_port


def _trusted(
    location: Location, settings: Mapping[str, str], environ: Mapping[str, str]
) -> set[Endpoint]:
    """The hosts of a store that the environment names.

    Also those that give a machine its credentials, unless the dataset names any host: its answer
    could lead there.
    """
    kind = location.kind
    found = _addresses_of(kind, environ)
    found |= {(f"{location.bucket.lower()}.{host}", port) for host, port in found}
    if kind in _VARIABLES and not settings.keys() & _addresses(kind) and not location.host:
        found |= _METADATA
        for variable, value in environ.items():
            if variable in _CREDENTIAL_SERVERS:
                with suppress(RequestError):
                    found.add(_endpoint(variable, value))
    return found


def _check_environ(kind: str, environ: Mapping[str, str], settings: Mapping[str, str]) -> None:
    """Checks the variables for settings that are not given."""
    beaten = {*settings, *(KEYS if settings.keys() & {*KEYS, "skip_signature"} else ())}
    for variable, value in environ.items():
        option = _of_variable(kind, variable)
        if option is not None and option.name not in beaten:
            check_text(f"the environment variable {variable}", value)


def check_endpoint(endpoint: str) -> None:
    """Raises a `RequestError` for a bad address; an operator's may have a user and a password."""
    parse_address("the endpoint of a store", endpoint, may_have_password=True)


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
