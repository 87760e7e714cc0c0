"""The settings of a TrainJob -> the `DatasetSpec` that its cache nodes hold.

The variables of a Kubeflow TrainJob's initializer say what to cache: those of the ancestor
(`DataCacheInitializer`), those of the SDK's `S3DatasetInitializer` and
`HuggingFaceDatasetInitializer`, and ``CACHE_*``, which any pod may have:

    variable                  sources        in the spec
    STORAGE_URI               all            source; of ``cache://SCHEMA/TABLE``, the name only
    METADATA_LOC              cache          source; the format is iceberg
    IAM_ROLE                  s3, cache      storage option role_arn
    ROLE_ARN                  s3, cache      storage option role_arn
    ENDPOINT                  s3, cache      storage option endpoint
    REGION                    s3, cache      storage option region
    ACCESS_KEY_ID             s3, cache      secret storage option access_key_id
    SECRET_ACCESS_KEY         s3, cache      secret storage option secret_access_key
    SESSION_TOKEN             s3, cache      secret storage option session_token
    ACCESS_TOKEN              hf             secret storage option hf_token
    IGNORE_PATTERNS           files          ignore, separated by commas
    CACHE_DATASET             all            name
    CACHE_FORMAT              all            format
    CACHE_SQL                 all            sql
    CACHE_COLUMNS             all            columns, separated by commas
    CACHE_FILTER              all            filter
    CACHE_REPLICAS            all            replicas
    CACHE_TARGET_SHARD_BYTES  all            target_shard_bytes

``s3a://`` and ``s3n://`` are ``s3://``, and ``hf://ORG/NAME`` is ``hf://datasets/ORG/NAME``. For
``cache``, the variables of s3 count if METADATA_LOC is in s3.

Without CACHE_DATASET the name is ``SCHEMA.TABLE``, ``ORG.NAME`` for Hugging Face, otherwise the
last part of the path before any wildcard, without the suffix of a file:
``s3://bucket/tpch/lineitem/`` and ``/data/lineitem.parquet`` are both ``lineitem``.

- An empty variable counts as absent, as in the SDK.
- A useless setting is an error, except a secret for another store: a TrainJob passes whole
  Kubernetes secrets.
- Other variables are ignored: a pod has many, and Kubernetes adds some, such as
  ``CACHE_SERVICE_HOST``. But a name that is close to one of the table is an error: it is probably
  misspelt, and without it the whole table would be loaded.
- The variables of stores (``AWS_*``, ``GOOGLE_*``, ``AZURE_*``) are read by the code that opens the
  store.

No I/O: the environment is an argument, and the source is not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from cache_protocol.datasets.dataset_spec import FILE_SUFFIXES, DatasetSpec
from cache_protocol.errors import ConfigError, short

_PUBLIC_OF_S3 = {
    "ENDPOINT": "endpoint",
    "REGION": "region",
    "ROLE_ARN": "role_arn",
    "IAM_ROLE": "role_arn",
}
_SECRETS_OF_S3 = {
    "ACCESS_KEY_ID": "access_key_id",
    "SECRET_ACCESS_KEY": "secret_access_key",
    "SESSION_TOKEN": "session_token",
}
_SECRETS = (*_SECRETS_OF_S3, "ACCESS_TOKEN")
OF_ACCESS = (*_PUBLIC_OF_S3, *_SECRETS)  # credentials and the place of the store
_SPEC_ARGUMENTS = {
    "CACHE_FORMAT": "format",
    "CACHE_SQL": "sql",
    "CACHE_COLUMNS": "columns",
    "CACHE_FILTER": "filter",
    "CACHE_REPLICAS": "replicas",
    "CACHE_TARGET_SHARD_BYTES": "target_shard_bytes",
    "IGNORE_PATTERNS": "ignore",
}
VARIABLES = (
    *("STORAGE_URI", "METADATA_LOC", "CACHE_DATASET"),
    *(*OF_ACCESS, *_SPEC_ARGUMENTS),
)

_PREFIX, _NEAR = "CACHE_", 0.75  # how alike two names are, as `difflib` measures it

_SCHEMES = {
    **{"s3": "s3", "s3a": "s3", "s3n": "s3", "gs": "gs", "az": "az", "abfss": "abfss"},
    **{"file": "file", "http": "http", "https": "https", "hf": "hf", "cache": "cache"},
    **{"postgresql": "postgresql", "postgres": "postgresql"},
}
_METADATA_SCHEMES = ("", "file", "s3", "gs", "az", "abfss", "http", "https")
_HOSTLESS = ("file", "postgresql", "postgres")  # the host may be absent: this machine
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PASSWORD = re.compile(r"://([^:/?#@]*):.*@", re.DOTALL)
_BARE_PASSWORD = re.compile(r"^([^:/?#@]*):(?!//).*@", re.DOTALL)  # of a URI without slashes
_QUERY = re.compile(r"\?[^?]*=.*", re.DOTALL)
_REGION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# The account may be missing and the partition other than AWS's, as in MinIO and Ceph.
_ROLE = re.compile(r"arn:[A-Za-z0-9-]+:iam:[A-Za-z0-9-]*:[A-Za-z0-9]*:role/\S+")


def spec_from_env(environ: Mapping[str, str]) -> DatasetSpec:
    """The dataset that the variables of a TrainJob describe; see the table of this module.

    Raises:
        ConfigError: every variable that is missing, bad or contradicts another one, with its
            value unless that is a secret.
    """
    given = {name: environ[name] for name in VARIABLES if environ.get(name)}
    problems = _misspelt(environ)
    place = _place(given, problems)
    options = _store_options(given, place, problems)
    arguments = _spec_arguments(given, place, problems)
    name = _name(given, place, problems)
    if problems or place is None:
        raise ConfigError("bad settings: " + "; ".join(problems))
    return DatasetSpec(name, place.source, storage_options=options or None, **arguments)


def _misspelt(environ: Mapping[str, str]) -> list[str]:
    known = {name.removeprefix(_PREFIX): name for name in VARIABLES if name.startswith(_PREFIX)}
    problems = []
    for name in sorted(environ):
        if not name.startswith(_PREFIX) or name in VARIABLES:
            continue
        near = get_close_matches(name.removeprefix(_PREFIX), known, 1, _NEAR)
        if near:
            problems.append(f"{name} is unknown: did you mean {known[near[0]]}?")
    return problems


def asks_for_dataset(environ: Mapping[str, str]) -> bool:
    """Whether any variable says what to cache, even wrongly.

    Secrets alone do not: they may be for a later load.
    """
    return any(environ.get(name) for name in VARIABLES if name not in _SECRETS)


@dataclass(frozen=True)
class _Place:
    """The place of a table.

    Attributes:
        source: for `DatasetSpec`; it may hold a password.
        scheme: of STORAGE_URI; empty for a path.
        store: the scheme of the files, which differs for ``cache``.
        name: of the dataset; None: the last part of ``source``.
    """

    source: str
    scheme: str
    store: str
    name: str | None = None


def _place(given: Mapping[str, str], problems: list[str]) -> _Place | None:
    uri = given.get("STORAGE_URI")
    if uri is None:
        problems.append("STORAGE_URI is missing")
        return None
    wrong = _wrong_uri(uri, _SCHEMES)
    scheme, rest = _split(uri)
    if wrong is None and scheme != "cache" and "METADATA_LOC" in given:
        problems.append(
            f"{_quoted(given, 'METADATA_LOC')} needs a STORAGE_URI of cache://SCHEMA/TABLE, "
            f"got {_shown(uri)!r}"
        )
    if wrong is None and scheme == "cache":
        return _iceberg(given, rest, problems)
    if wrong is None and scheme == "hf":
        parts = rest.removeprefix("datasets/").strip("/").split("/")
        if len(parts) >= 2 and all(parts):
            path, name = "/".join(parts), parts[1].partition("@")[0]  # a revision comes after @
            return _Place(f"hf://datasets/{path}", "hf", "hf", f"{parts[0]}.{name}")
        wrong = "must be hf://ORG/NAME"
    if wrong is not None:
        problems.append(f"{_quoted(given, 'STORAGE_URI')}: {wrong}")
        return None
    source = f"{scheme}://{rest}" if scheme else uri
    return _Place(source, scheme, scheme)


def _iceberg(given: Mapping[str, str], rest: str, problems: list[str]) -> _Place | None:
    before = len(problems)
    parts = rest.rstrip("/").split("/")
    if len(parts) != 2 or not all(parts):
        problems.append(f"{_quoted(given, 'STORAGE_URI')}: must be cache://SCHEMA/TABLE")
    location = given.get("METADATA_LOC")
    if location is None:
        problems.append(
            f"METADATA_LOC is missing, which {_quoted(given, 'STORAGE_URI')} needs: the metadata "
            "file of the Iceberg table, such as s3a://bucket/table/metadata/v3.metadata.json"
        )
        return None
    wrong = _wrong_uri(location, {key: v for key, v in _SCHEMES.items() if v in _METADATA_SCHEMES})
    if wrong is None and not location.endswith("metadata.json"):
        wrong = "must be the metadata file of an Iceberg table, whose name ends in metadata.json"
    if wrong is not None:
        problems.append(f"{_quoted(given, 'METADATA_LOC')}: {wrong}")
    if len(problems) > before:
        return None
    store, path = _split(location)
    return _Place(f"{store}://{path}" if store else path, "cache", store, ".".join(parts))


def _store_options(
    given: Mapping[str, str], place: _Place | None, problems: list[str]
) -> dict[str, str]:
    for name in _SECRETS:
        if name in given and given[name] != given[name].strip():
            problems.append(f"{name} has white space around it (its value is not shown)")
    store = place.store if place is not None else None
    if store == "hf":
        _refuse_unused(given, tuple(_PUBLIC_OF_S3), place, problems)
        return {"hf_token": given["ACCESS_TOKEN"]} if "ACCESS_TOKEN" in given else {}
    if store not in ("s3", None):
        _refuse_unused(given, tuple(_PUBLIC_OF_S3), place, problems)
        return {}
    _check_keys(given, problems)
    if "ENDPOINT" in given and (wrong := _wrong_endpoint(given["ENDPOINT"])):
        problems.append(f"{_quoted(given, 'ENDPOINT')}: {wrong}")
    if "REGION" in given and not _REGION.fullmatch(given["REGION"]):
        problems.append(f"{_quoted(given, 'REGION')}: must be a region such as us-east-1")
    roles = [name for name in ("ROLE_ARN", "IAM_ROLE") if name in given]
    for name in roles:
        if not _ROLE.fullmatch(given[name]):
            problems.append(
                f"{_quoted(given, name)}: must be a role such as arn:aws:iam::123456789012:role/x"
            )
    if len({given[name] for name in roles}) > 1:
        both = " and ".join(_quoted(given, name) for name in roles)
        problems.append(f"{both} are two roles: give one of them")
    known = {**_PUBLIC_OF_S3, **_SECRETS_OF_S3}
    return {option: given[name] for name, option in known.items() if name in given}


def _check_keys(given: Mapping[str, str], problems: list[str]) -> None:
    key, secret = "ACCESS_KEY_ID", "SECRET_ACCESS_KEY"
    if (key in given) != (secret in given):
        present, absent = (key, secret) if key in given else (secret, key)
        problems.append(f"{absent} is missing, without which {present} is of no use")
    elif "SESSION_TOKEN" in given and key not in given:
        problems.append(f"{key} and {secret} are missing, without which SESSION_TOKEN is of no use")


def _wrong_endpoint(endpoint: str) -> str | None:
    wrong = _wrong_uri(endpoint, {"http": "http", "https": "https"})
    if wrong is None and (not _SCHEME.match(endpoint) or "@" in endpoint or "?" in endpoint):
        wrong = "must be an http:// or https:// URL without credentials"
    return wrong


def _refuse_unused(
    given: Mapping[str, str], names: tuple[str, ...], place: _Place | None, problems: list[str]
) -> None:
    unused = [_quoted(given, name) for name in names if name in given]
    if unused and place is not None:
        which = "METADATA_LOC" if place.scheme == "cache" else "STORAGE_URI"
        problems.append(
            f"{' and '.join(unused)}: only for s3, which {_quoted(given, which)} is not"
        )


def _spec_arguments(
    given: Mapping[str, str], place: _Place | None, problems: list[str]
) -> dict[str, Any]:
    """The arguments that `DatasetSpec` accepts, each checked alone."""
    arguments: dict[str, Any] = {}
    for name, argument in _SPEC_ARGUMENTS.items():
        if name not in given:
            continue
        value = parsed(name, given[name])
        wrong = refusal(**{argument: value})
        if name == "IGNORE_PATTERNS" and re.fullmatch(r"\[\s*['\"].*['\"]\s*\]", given[name]):
            wrong = "must be patterns separated by commas, not a list"
        if wrong is None:
            arguments[argument] = value
        else:
            problems.append(f"{_quoted(given, name)}: {wrong}")
    for shortcut in ("CACHE_COLUMNS", "CACHE_FILTER"):
        if "CACHE_SQL" in given and shortcut in given:
            both = f"{_quoted(given, 'CACHE_SQL')} and {_quoted(given, shortcut)}"
            problems.append(f"{both} cannot be combined: write it all in the sql")
    if place is not None:
        _check_format(given, place, arguments, problems)
    return arguments


def _check_format(
    given: Mapping[str, str], place: _Place, arguments: dict[str, Any], problems: list[str]
) -> None:
    format = arguments.get("format")
    only = {"cache": "iceberg", "postgresql": "postgres"}.get(place.scheme)
    if format is not None and format != (only or format):
        problems.append(
            f"{_quoted(given, 'CACHE_FORMAT')}: {_quoted(given, 'STORAGE_URI')} is {only}"
        )
    elif format == "postgres" and only is None:
        problems.append(
            f"{_quoted(given, 'CACHE_FORMAT')}: {_quoted(given, 'STORAGE_URI')} is not postgresql://"
        )
    if only == "iceberg":
        arguments["format"] = only
    of_table = only or format
    if "ignore" in arguments and refusal(format=of_table, ignore=arguments["ignore"]):
        problems.append(
            f"{_quoted(given, 'IGNORE_PATTERNS')}: only for files, and {of_table} says itself "
            "which ones are its own"
        )


def parsed(name: str, text: str) -> Any:
    """The value of a variable's text, for `DatasetSpec`, which checks it."""
    if name == "CACHE_COLUMNS":
        return [item.strip() for item in text.split(",")]
    if name == "IGNORE_PATTERNS":
        # As in the SDK and huggingface_hub: empty items are skipped, and a directory stands for
        # everything in it.
        items = [item.strip() for item in text.split(",") if item.strip()]
        return [f"{item}*" if item.endswith("/") else item for item in items]
    if name == "CACHE_REPLICAS" and re.fullmatch("[0-9]{1,9}", text):
        return int(text)
    return text


def _name(given: Mapping[str, str], place: _Place | None, problems: list[str]) -> str:
    name = given.get("CACHE_DATASET")
    if name is not None:
        if wrong := refusal(name=name):
            problems.append(f"{_quoted(given, 'CACHE_DATASET')}: {wrong}")
        return name
    if place is None:
        return ""
    name = place.name if place.name is not None else _last_part(place.source)
    if refusal(name=name):
        problems.append(
            f"CACHE_DATASET is missing: {_quoted(given, 'STORAGE_URI')} makes no name of a dataset"
        )
    return name


def _last_part(source: str) -> str:
    """The last part of a path before any wildcard, without a file's suffix; or the host."""
    scheme, path = _split(source)
    if scheme in ("http", "https", "postgresql"):
        path = path.partition("?")[0]
    steps = [step for step in path.split("/") if step]
    if scheme and steps and not path.startswith("/"):
        steps[0] = urlsplit(source).hostname or ""
    for index, step in enumerate(steps):
        if any(mark in step for mark in "*?["):
            steps = steps[:index]
            break
    last = PurePosixPath(steps[-1] if steps else "")
    if last.name.endswith("metadata.json"):  # it differs between the snapshots of a table
        return ""
    return last.stem if last.suffix.lower() in FILE_SUFFIXES else last.name


def refusal(name: str = "probe", source: str = "/probe", **arguments: Any) -> str | None:
    """Why `DatasetSpec` refuses a value; None if it accepts it."""
    try:
        DatasetSpec(name, source, **arguments)
    except ConfigError as error:
        return str(error).removeprefix("bad dataset spec: ")
    return None


def _wrong_uri(uri: str, schemes: Mapping[str, str]) -> str | None:
    if uri != uri.strip() or "\n" in uri:
        return "must have no white space around it"
    match = _SCHEME.match(uri)
    before, colon, _ = uri.partition(":")
    if match is None and not (colon and before.lower() in schemes):  # s3:/bucket is not a path
        return None
    if match is None or match[1].lower() not in schemes:
        return f"must be a path or one of {', '.join(f'{name}://' for name in schemes)}"
    try:
        parts = urlsplit(uri)
        _ = parts.port
    except ValueError as error:
        return f"is not a valid URI ({type(error).__name__})"
    if not parts.netloc and match[1].lower() not in _HOSTLESS:
        return "must name a bucket or a host"
    if match[1].lower() == "file" and not (parts.netloc or parts.path):
        return "must name a file or a folder"
    return refusal(source=_PASSWORD.sub(r"://\1@", uri))


def _split(uri: str) -> tuple[str, str]:
    """The normalised scheme of a URI, empty for a path, and the rest after ``://``."""
    match = _SCHEME.match(uri)
    if match is None:
        return "", uri
    scheme = match[1].lower()
    return _SCHEMES.get(scheme, scheme), uri[match.end() :]


def _quoted(given: Mapping[str, str], name: str) -> str:
    return f"{name}={short(repr(_shown(given[name])))}"


def _shown(text: str) -> str:
    """``text`` without possible secrets of a URI: the password and the query."""
    text = _BARE_PASSWORD.sub(r"\1:...@", _PASSWORD.sub(r"://\1:...@", text))
    return _QUERY.sub("?...", text)
