"""Every option that a library knows, with a program, addresses of loopback and a path.

The names come from the installed packages. A release with a new name fails
`test_each_name_that_a_library_knows_is_decided_about`, until somebody decides about it.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import obstore
import pytest

from cache_protocol.datasets.source_options import (
    CATALOGS,
    GOOGLE_KEY,
    POSTGRES,
    STORES,
    Form,
    Option,
    Options,
    is_public,
)
from cache_protocol.errors import RequestError
from cache_server.object_stores.options import checked, known, lent_settings, store_settings

PROGRAM, FILE = "subprocess.Popen", "/etc/hostname"
# The last two are well written: `--allow-source` decides about them, not the tables.
SPELLINGS = (
    *("127.0.0.1:9", "http:127.0.0.1:9", "http:/127.0.0.1:9", "http:\\\\127.0.0.1:9"),
    *("http://127.0.0.1:9\\@example.com", "http://example.com@127.0.0.1:9", "http://127.1:9"),
    *("http://2130706433:9", "http://0x7f.0.0.1:9", "http://127.0.0.1:9?/x"),
    *("http://127.0.0.1%00.example.com:9", "http://\u2460\u2461\u2466.0.0.1:9"),
    *("http://127.0.0.1:9", "http://[::ffff:127.0.0.1]:9"),
)
# Names that a library knows, and no caller may give. Most are for writers, or of other libraries
# that pyiceberg could use.
REFUSED = {
    "obstore": (
        *("disable_tagging", "disable_bulk_delete", "sse_kms_key_id", "sse_bucket_key_enabled"),
        *("credential_type", "fabric_token_service_url", "fabric_workload_host"),
        *("fabric_session_token", "fabric_cluster_identifier", "allow_invalid_certificates"),
        *("default_content_type", "default_headers", "pool_idle_timeout"),
        *("pool_max_idle_per_host", "root_certificate", "randomize_addresses", "read_timeout"),
        *("user_agent", "init_backoff", "max_backoff", "base", "backoff", "retry_timeout"),
        *("http1_only", "http2_only", "http2_keep_alive_interval", "http2_keep_alive_timeout"),
        "http2_keep_alive_while_idle",
    ),
    "pyiceberg": (
        *("adls.credential", "auth.manager", "botocore_session"),
        *("buffer-size", "downcast-ns-timestamp-to-us-on-write"),
        *("gcp.bigquery.credential-file", "gcp.bigquery.credentials-info"),
        *("gcp.bigquery.location", "gcp.bigquery.project-id"),
        *("gcs.access", "gcs.cache-timeout", "gcs.consistency", "gcs.default-bucket-location"),
        *("gcs.oauth2.token-expires-at", "gcs.project-id", "gcs.requester-pays"),
        *("gcs.session-kwargs", "gcs.version-aware"),
        *("hdfs.host", "hdfs.kerberos_ticket", "hdfs.port", "hdfs.user"),
        *("s3.resolve-region", "s3.retry-strategy-impl", "s3.signer", "s3.signer.endpoint"),
        *("s3.signer.uri", "s3.sse-kms-key-id"),
    ),
    "libpq": (
        *("client_encoding", "fallback_application_name", "gssdelegation", "gsslib"),
        *("oauth_client_id", "oauth_client_secret", "oauth_issuer", "oauth_scope", "replication"),
        *("requirepeer", "requiressl", "scram_client_key", "scram_server_key", "sslcertmode"),
        "sslpassword",
    ),
}
# Properties of pyiceberg that are not of one store or catalogue by their prefix.
UNPREFIXED = {
    *("uri", "type", "warehouse", "token", "credential", "prefix", "scope", "audience"),
    *("resource", "oauth2-server-uri", "ssl", "auth", "botocore_session", "table-name"),
    *("snapshot-loading-mode", "scan-planning-mode", "namespace-separator"),
    *("view-endpoints-supported", "lock-check-retries", "lock-check-min-wait-time"),
    *("lock-check-max-wait-time", "buffer-size", "downcast-ns-timestamp-to-us-on-write"),
}
PREFIXED = re.compile(r"(s3|gcs|adls|hdfs|hf|client|glue|dynamodb|gcp|hive|rest|py|auth)[.-].*")


def obstore_names() -> set[str]:
    """The keys of obstore's typed dictionaries of settings."""
    folder = Path(obstore.__file__).parent / "_store"
    lent = ("Credential", "Token", "AccessKey")  # what a provider of credentials gives
    names = set()
    for stub in ("_aws", "_azure", "_gcs", "_client", "_retry"):
        for node in ast.parse((folder / f"{stub}.pyi").read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.endswith(lent):
                names |= {
                    item.target.id
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                }
    return names


def pyiceberg_names() -> set[str]:
    """The constants of pyiceberg that name a property of a catalogue or of a store."""
    root = Path(importlib.import_module("pyiceberg").__path__[0])
    files = [root / "io" / "__init__.py", root / "io" / "pyarrow.py", root / "table/__init__.py"]
    files += (root / "catalog").rglob("*.py")
    texts = set()
    for file in files:
        for node in ast.parse(file.read_text()).body:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                texts.add(value.value)
    assert texts >= UNPREFIXED
    return {text for text in texts if PREFIXED.fullmatch(text)} | UNPREFIXED


def libpq_names() -> set[str]:
    """The key words that libpq of the ADBC driver accepts, among all texts in its library."""
    adbc = pytest.importorskip("adbc_driver_postgresql")
    dbapi = importlib.import_module("adbc_driver_postgresql.dbapi")
    (library,) = Path(adbc.__file__).parent.glob("*.so")
    texts = re.findall(rb"\0([a-z][a-z0-9_]{2,30})(?=\0)", library.read_bytes())
    names = {"host", "port", "user", "password", "service"}  # also ends of other texts
    for name in sorted({text.decode() for text in texts}):
        with pytest.raises(dbapi.Error) as caught:
            dbapi.connect(f"postgresql:///?host=/nonexistent&{name}=x")
        if "invalid URI query parameter" not in str(caught.value):
            names.add(name)
    return names


def tables_of(library: str) -> tuple[Options, ...]:
    if library == "libpq":
        return (POSTGRES,)
    return tuple(STORES.values()) + (tuple(CATALOGS.values()) if library == "pyiceberg" else ())


NAMES = {"obstore": obstore_names, "pyiceberg": pyiceberg_names, "libpq": libpq_names}


@pytest.mark.parametrize("library", NAMES)
def test_each_name_that_a_library_knows_is_decided_about(library: str) -> None:
    names = NAMES[library]()
    assert len(names) > 30
    undecided = {name for name in names if not any(t.find(name) for t in tables_of(library))}
    assert undecided == set(REFUSED[library])


def every_option() -> Iterator[tuple[Options, Option]]:
    for table in (*STORES.values(), *CATALOGS.values(), POSTGRES, GOOGLE_KEY):
        for option in table.options:
            yield table, option


def test_no_option_takes_a_program_a_path_or_an_odd_address_for_what_it_names() -> None:
    accepted = set()
    for table, option in every_option():
        for value in (PROGRAM, FILE, *SPELLINGS):
            try:
                text = checked("it", known([table], option.name, option), value)
            except RequestError:
                continue
            if option.form in (Form.ADDRESS, Form.THRIFT):
                assert urlsplit(text).hostname in ("127.0.0.1", "::ffff:7f00:1")
                assert text in ("http://127.0.0.1:9", "http://[::ffff:7f00:1]:9")
            elif option.form is Form.NAME:
                assert value == PROGRAM  # a part of a host or path, of letters and a dot
            elif option.form is Form.HOSTS:
                assert value in (PROGRAM, FILE)  # a host, and a socket: see `AllowedSources`
            else:
                assert option.form in (Form.TEXT, Form.LINES, Form.UNUSED)
                if option.form is not Form.UNUSED:
                    accepted.add(option.name)
    code = re.compile(r".*(impl|file|path|profile|cert|manager|proxy|endpoint|host|url|uri).*")
    assert {name for name in accepted if code.fullmatch(name)} == {"load_balance_hosts"}  # a flag


@pytest.mark.parametrize("key", ["py-io-impl", "py-catalog-impl", "ssl", "auth", "io-impl"])
def test_a_name_of_code_is_refused_for_every_catalogue(key: str) -> None:
    for table in CATALOGS.values():
        with pytest.raises(RequestError, match=f"option '{key}'"):
            known([table], key, table.find(key))


def test_an_unknown_option_comes_with_the_nearest_one() -> None:
    for kind, key, near in (
        ("s3", "aws_secret_acess_key", "secret_access_key"),
        ("az", "azure_storage_acount_name", "account_name"),
        ("hf", "revison", "revision"),
    ):
        with pytest.raises(RequestError, match=f"has no option '{key}'; .*mean '{near}'") as caught:
            store_settings(kind, {}, {key: "hush-hush"})
        assert "hush" not in str(caught.value)
    with pytest.raises(RequestError, match=r"the s3 store has no option 'catalog\.uri'"):
        store_settings("s3", {"catalog.uri": "http://127.0.0.1:9"}, {})


def test_a_proxy_is_refused_with_the_way_round() -> None:
    for kind in ("s3", "gs", "az", "http"):
        for spelling in SPELLINGS:
            with pytest.raises(RequestError, match=r"'proxy_url' cannot be given: .*HTTPS_PROXY"):
                store_settings(kind, {"proxy_url": spelling}, {})


def test_a_value_of_the_wrong_type_is_quoted_unless_it_is_a_secret() -> None:
    for kind, key, value, quoted in (
        ("s3", "aws_allow_http", "yes", True),
        ("s3", "timeout", "-1", True),
        ("s3", "region", "x.127.0.0.1:9/?", True),
        ("az", "account_name", "127.0.0.1:9/", True),
        ("gs", "service_account_key", "hush-hush", False),
        ("s3", "session_token", "hush-hush\n", False),
    ):
        with pytest.raises(RequestError, match=key) as caught:
            store_settings(kind, {key: value}, {})
        assert (value.strip() in str(caught.value)) == quoted, key
        assert is_public(key) == quoted


GOOGLE = {"type": "service_account", "private_key": "-----BEGIN\nx\n", "private_key_id": "1",
          "client_email": "a@b", "token_uri": "http://127.0.0.1:9"}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gcs_base_url", "http://127.0.0.1:9"),
        ("disable_oauth", True),
        ("universe_domain", "127.0.0.1"),
        ("type", "external_account"),
        ("credential_source", {"executable": {"command": "/bin/sh"}}),
        ("service_account_impersonation_url", "http://127.0.0.1:9"),
        ("client_email", 7),
    ],
)
def test_keys_in_a_credential_of_google_name_no_code_file_or_address(
    key: str, value: object
) -> None:
    with pytest.raises(RequestError, match=key):
        store_settings("gs", {}, {"service_account_key": json.dumps({**GOOGLE, key: value})})


def test_a_library_gets_a_credential_without_the_addresses_in_it() -> None:
    given = {"google_service_account_key": json.dumps(GOOGLE)}
    (kept,) = store_settings("gs", {}, given).values()
    assert json.loads(kept) == {name: GOOGLE[name] for name in GOOGLE if name != "token_uri"}


@pytest.mark.parametrize(
    "uri",
    [
        *("sqlite:///x?uri=true", "sqlite://", "sqlite+pysqlcipher:///x", "any.module://h/d"),
        *("postgresql://h/d?host=127.0.0.1", "postgresql://h/d?plugin=x", "postgresql:///d"),
        *("postgresql://a,127.0.0.1/d", "postgresql://u:p@w@h/d", "mysql+pymysql://h/../d"),
        *("postgresql+pg8000://h/d", "postgresql://u:hush@h/d?sslkey=/x", "postgresql://%2Frun/d"),
    ],
)
def test_an_address_of_a_database_has_no_parameters_and_a_known_driver(uri: str) -> None:
    option = CATALOGS["sql"].find("uri")
    assert option is not None
    with pytest.raises(RequestError) as caught:
        checked("the option 'catalog.uri'", option, uri)
    assert "hush" not in str(caught.value)


def test_an_answer_of_a_catalogue_sets_only_what_it_may() -> None:
    names = pyiceberg_names()
    for table in (CATALOGS["rest"], STORES["s3"], STORES["gs"], STORES["az"]):
        lent = {name for name in names if (o := table.find(name)) is not None and o.lent}
        assert 0 < len(lent) < 12
        for value in (PROGRAM, FILE, {"impl": PROGRAM}):
            assert not dict(lent_settings(dict.fromkeys(names - lent, value), table))
        for name in lent:
            option = table.find(name)
            assert option is not None
            for value in SPELLINGS[:-2] if option.form is Form.ADDRESS else ():
                with pytest.raises(RequestError, match=f"catalogue's answer '{name}'"):
                    dict(lent_settings({name: value}, table))
