"""Every option of a source: its names, what its value may be, and whether it is public. Pure.

An option that is not in these tables is refused. None of them names code or a file of the node;
where a library has such an option, `Form.NEVER` says the way round. `cache_server` checks values.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

HEADER_PREFIX = "header."  # of HTTP headers, among the options of a REST catalogue


class Form(Enum):
    """What the value of an option must be."""

    TEXT = auto()  # without line breaks and other control characters
    LINES = auto()  # text with line breaks
    NAME = auto()  # becomes a part of a host or a path: letters, digits, "-", "_", "."
    FLAG = auto()  # true or false
    COUNT = auto()
    SECONDS = auto()
    ADDRESS = auto()  # http:// or https://
    THRIFT = auto()  # one or more thrift://HOST:PORT, with commas
    DATABASE = auto()  # of SQLAlchemy
    HOSTS = auto()  # with commas
    PORTS = auto()  # with commas
    GOOGLE_KEY = auto()  # the JSON of a service account's key: `GOOGLE_KEY`
    UNUSED = auto()  # of writers; accepted, and given to no library
    NEVER = auto()  # refused; see `Option.instead`


class Option(NamedTuple):
    """An option.

    Attributes:
        name: as the library calls it.
        form: of its value.
        also: its other names. Every name counts with "-" in place of "_" too.
        public: may be shown; any other option is a secret.
        lent: the answer of a catalogue may set it.
        choices: the values that it may have, in lower case; empty: any of its form.
        instead: of `Form.NEVER`, what to do.
    """

    name: str
    form: Form = Form.TEXT
    also: Sequence[str] = ()
    public: bool = False
    lent: bool = False
    choices: Sequence[str] = ()
    instead: str = ""


class Options:
    """The options of one thing, such as of a store. Immutable.

    Args:
        what: has them, for messages.
        prefixes: that every name may have.
        credentials: each group of options that is whole credentials of a caller.
        variable: of the nodes, by which the operator names the address of a store.
    """

    def __init__(
        self,
        what: str,
        prefixes: Sequence[str],
        options: Iterable[Option],
        *,
        credentials: Sequence[Sequence[str]] = (),
        variable: str = "",
    ) -> None:
        self.what = what
        self.prefixes = tuple(prefixes)
        self.credentials = tuple(credentials)
        self.variable = variable
        self.options = tuple(options)
        self._by_name: Mapping[str, Option] = MappingProxyType(
            {
                _plain(name): option
                for option in self.options
                for name in (option.name, *option.also)
            }
        )

    def find(self, key: str) -> Option | None:
        """The option that a user calls ``key``; None: there is none."""
        name = _plain(key)
        stripped = (name.removeprefix(_plain(p)) for p in self.prefixes if name.startswith(p))
        found = next((o for n in (name, *stripped) if (o := self._by_name.get(n))), None)
        if found is None and name.startswith(HEADER_PREFIX):
            return self._by_name.get(HEADER_PREFIX)
        return found

    @property
    def known(self) -> list[str]:
        """The names of the options that may be given."""
        return sorted(option.name for option in self.options if option.form is not Form.NEVER)

    def nearest(self, key: str) -> str:
        """The known name most like ``key``; empty if none is."""
        name = _plain(key)
        for prefix in self.prefixes:
            name = name.removeprefix(prefix)
        names = {plain: option.name for plain, option in self._by_name.items()
                 if option.form is not Form.NEVER}  # fmt: skip
        found = difflib.get_close_matches(name, names, n=1)
        return names[found[0]] if found else ""


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _never(instead: str, *names: str) -> list[Option]:
    return [Option(name, Form.NEVER, instead=instead) for name in names]


def _unused(*names: str) -> list[Option]:
    return [Option(name, Form.UNUSED, public=True) for name in names]


_BY_NODES = "set it in the environment of the nodes"
_CLIENT = (
    Option("allow_http", Form.FLAG, public=True),
    Option("connect_timeout", Form.SECONDS, ("connect_timeout_s",), public=True),
    Option("timeout", Form.SECONDS, ("request_timeout",), public=True),
    Option("max_retries", Form.COUNT, public=True),
    Option("retry_timeout_s", Form.SECONDS, public=True),
    *_never(
        "a proxy is named by the operator (HTTPS_PROXY in the environment of the nodes)",
        *("proxy_url", "proxy_uri", "proxy_ca_certificate", "proxy_excludes"),
    ),
)
# obstore's names.
S3 = Options(
    "the s3 store",
    ("aws_", "s3.", "client."),
    (
        Option("access_key_id", lent=True),
        Option("secret_access_key", lent=True),
        Option("session_token", also=("token",), lent=True),
        Option("region", Form.NAME, ("default_region",), public=True, lent=True),
        Option(
            "endpoint", Form.ADDRESS, ("endpoint_url", "endpoint_url_s3"), public=True, lent=True
        ),
        Option("skip_signature", Form.FLAG, ("anonymous",), public=True),
        Option(
            "virtual_hosted_style_request",
            Form.FLAG,
            ("force_virtual_addressing",),
            public=True,
        ),
        Option("path_style_access", Form.FLAG, public=True, lent=True),
        Option("request_payer", Form.FLAG, ("requester_pays",), public=True),
        Option("role_arn", also=("iam_role_arn",), public=True),
        Option("role_session_name", also=("iam_role_session_name",), public=True),
        Option("external_id"),
        Option("sts_endpoint", Form.ADDRESS, ("endpoint_url_sts",), public=True),
        Option("imdsv1_fallback", Form.FLAG, public=True),
        Option("unsigned_payload", Form.FLAG, public=True),
        Option("s3_express", Form.FLAG, public=True),
        Option("server_side_encryption"),
        Option("sse_customer_key_base64"),
        *_CLIENT,
        *_unused("bucket", "bucket_name", "conditional_put", "checksum_algorithm"),
        *_unused("copy_if_not_exists", "s3_allow_unsafe_rename", "allow_unsafe_rename"),
        *_unused("s3_locking_provider", "dynamo_lock_table_name"),
        *_never(
            f"it names a file of the node: {_BY_NODES} (AWS_WEB_IDENTITY_TOKEN_FILE, "
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE, AWS_PROFILE)",
            *("web_identity_token_file", "container_authorization_token_file", "profile_name"),
            "profile",
        ),
        *_never(
            f"it says where the machine gets its own credentials: {_BY_NODES}",
            *("container_credentials_relative_uri", "container_credentials_full_uri"),
            "metadata_endpoint",
        ),
    ),
    credentials=(("access_key_id", "secret_access_key"),),
    variable="AWS_ENDPOINT_URL",
)
GS = Options(
    "the gs store",
    ("google_", "gcs."),
    (
        Option("service_account_key", Form.GOOGLE_KEY),
        Option("bearer_token", also=("oauth2.token", "token", "session_token"), lent=True),
        Option("base_url", Form.ADDRESS, ("endpoint", "service.host"), public=True, lent=True),
        Option("skip_signature", Form.FLAG, ("anonymous",), public=True),
        *_CLIENT,
        *_unused("bucket", "bucket_name"),
        *_never(
            f"it names a file of the node: {_BY_NODES} (GOOGLE_SERVICE_ACCOUNT, "
            "GOOGLE_APPLICATION_CREDENTIALS), or give the text of the key as service_account_key",
            *("application_credentials", "service_account", "service_account_path", "path"),
        ),
    ),
    credentials=(("service_account_key",), ("bearer_token",)),
    variable="GOOGLE_BASE_URL",
)
AZ = Options(
    "the az store",
    ("azure_storage_", "azure_", "adls."),
    (
        Option("account_name", Form.NAME, ("account",), public=True, lent=True),
        Option("account_key", also=("key", "access_key", "master_key"), lent=True),
        Option("sas_key", also=("sas_token",), lent=True),
        Option("token", also=("bearer_token", "session_token"), lent=True),
        Option("client_id", public=True),
        Option("client_secret"),
        Option("tenant_id", Form.NAME, ("authority_id",), public=True),
        Option("authority_host", Form.ADDRESS, public=True),
        Option("endpoint", Form.ADDRESS, ("endpoint_url",), public=True),
        Option("object_id", public=True),
        Option("msi_resource_id"),
        Option("encryption_key"),
        Option("use_fabric_endpoint", Form.FLAG, public=True),
        Option("skip_signature", Form.FLAG, ("anonymous", "anon"), public=True),
        *_CLIENT,
        *_unused("container_name"),
        *_never(
            f"it names a file of the node: {_BY_NODES} (AZURE_FEDERATED_TOKEN_FILE)",
            "federated_token_file",
        ),
        *_never(
            f"it runs a program on the node: {_BY_NODES} (AZURE_USE_AZURE_CLI)", "use_azure_cli"
        ),
        *_never(f"it says where the machine gets its own credentials: {_BY_NODES}", "msi_endpoint"),
        *_never("the emulator is on the machine of the node: give endpoint", "use_emulator"),
        *_never(
            "give endpoint",
            *("account_host", "blob_storage_authority", "dfs_storage_authority"),
            *("blob_storage_scheme", "dfs_storage_scheme", "connection_string"),
        ),
    ),
    credentials=(
        *(("account_key",), ("sas_key",), ("token",)),
        ("client_id", "client_secret", "tenant_id"),
    ),
    variable="AZURE_STORAGE_ENDPOINT",
)
HTTP = Options(
    "the http store",
    (),
    (
        Option("user", public=True),
        Option("password"),
        Option("token", also=("session_token", "bearer_token", "access_token")),
        *_CLIENT,
    ),
)
HF = Options(
    "the hf store",
    ("hf_", "hf."),
    (
        Option("revision", public=True),
        Option("endpoint", Form.ADDRESS, public=True),
        Option("token", also=("session_token", "access_token")),
        Option("max_retries", Form.COUNT, public=True),
        Option("retry_timeout_s", Form.SECONDS, public=True),
    ),
    credentials=(("token",),),
    variable="HF_ENDPOINT",
)
STORES: Mapping[str, Options] = MappingProxyType(
    {"s3": S3, "gs": GS, "az": AZ, "http": HTTP, "hf": HF}
)

# The keys of `Form.GOOGLE_KEY`. No library is given the addresses in it: it is signed with the key.
GOOGLE_KEY = Options(
    "the key of a service account",
    (),
    (
        Option("type", choices=("service_account",)),
        Option("private_key", Form.LINES),
        Option("private_key_id"),
        Option("client_email"),
        Option("universe_domain", choices=("googleapis.com",)),
        *_unused("project_id", "client_id", "quota_project_id", "auth_uri", "token_uri"),
        *_unused("auth_provider_x509_cert_url", "client_x509_cert_url"),
        *_never("give the option endpoint", "gcs_base_url"),
        *_never("give the option skip_signature", "disable_oauth"),
    ),
)

# pyiceberg's names.
_CATALOG = (
    Option("type", public=True),
    Option("name", public=True),
    Option("warehouse", public=True, lent=True),
    *_never(
        "it names code, which no caller can; a catalogue is named by its type",
        *("py-catalog-impl", "catalog-impl", "py-io-impl", "io-impl"),
    ),
)
_AWS = (
    Option("client.region", Form.NAME, public=True),
    Option("client.access-key-id"),
    Option("client.secret-access-key"),
    Option("client.session-token"),
    *_never(
        f"{_BY_NODES} (AWS_PROFILE)",
        *("client.profile-name", "glue.profile-name", "dynamodb.profile-name"),
    ),
)
CATALOGS: Mapping[str, Options] = MappingProxyType(
    {
        "rest": Options(
            "a REST catalogue",
            (),
            (
                *_CATALOG,
                Option("uri", Form.ADDRESS, public=True, lent=True),
                Option("prefix", public=True, lent=True),
                Option("token", lent=True),
                Option("credential"),
                Option("oauth2-server-uri", Form.ADDRESS, public=True, lent=True),
                Option("scope", public=True),
                Option("audience", public=True),
                Option("resource", public=True),
                Option("snapshot-loading-mode", choices=("all", "refs"), public=True, lent=True),
                Option("namespace-separator", public=True, lent=True),
                Option("rest.sigv4-enabled", Form.FLAG, public=True),
                Option("rest.signing-region", Form.NAME, public=True),
                Option("rest.signing-name", public=True),
                Option(HEADER_PREFIX),
                *_AWS,
                *_unused("rest-page-size", "view-endpoints-supported", "scan-planning-mode"),
                *_unused("rest.sigv4.max-retries"),
                *_never("give token, credential or a header.* option", "auth"),
                *_never(f"{_BY_NODES} (REQUESTS_CA_BUNDLE)", "ssl"),
            ),
        ),
        "sql": Options(
            "a SQL catalogue",
            (),
            (
                *_CATALOG,
                Option("uri", Form.DATABASE, public=True),
                Option("pool_pre_ping", Form.FLAG, public=True),
                *_unused("echo", "init_catalog_tables", "schema_version"),
            ),
        ),
        "glue": Options(
            "a Glue catalogue",
            (),
            (
                *_CATALOG,
                Option("glue.id", public=True),
                Option("glue.endpoint", Form.ADDRESS, public=True),
                Option("glue.region", Form.NAME, public=True),
                Option("glue.access-key-id"),
                Option("glue.secret-access-key"),
                Option("glue.session-token"),
                *_unused("glue.skip-archive", "glue.max-retries", "glue.retry-mode"),
                *_AWS,
            ),
        ),
        "hive": Options(
            "a Hive catalogue",
            (),
            (
                *_CATALOG,
                Option("uri", Form.THRIFT, public=True),
                Option("ugi", public=True),
                Option("hive.kerberos-authentication", Form.FLAG, public=True),
                Option("hive.kerberos-service-name", Form.NAME, public=True),
                *_unused("hive.hive2-compatible", "lock-check-min-wait-time"),
                *_unused("lock-check-max-wait-time", "lock-check-retries"),
            ),
        ),
        "dynamodb": Options(
            "a DynamoDB catalogue",
            (),
            (
                *_CATALOG,
                Option("table-name", Form.NAME, public=True),
                Option("dynamodb.region", Form.NAME, public=True),
                Option("dynamodb.access-key-id"),
                Option("dynamodb.secret-access-key"),
                Option("dynamodb.session-token"),
                *_AWS,
            ),
        ),
    }
)

RELATION = ("table", "query", "split_column")  # what of a database is read
# `RELATION`, and libpq's names without those that change a session or its logging.
POSTGRES = Options(
    "a PostgreSQL source",
    (),
    (
        Option("table", public=True),
        Option("query", Form.LINES, public=True),
        Option("split_column", public=True),
        Option("host", Form.HOSTS, public=True),
        Option("hostaddr", Form.HOSTS),
        Option("port", Form.PORTS, public=True),
        Option("dbname", also=("database",), public=True),
        Option("user", also=("username",), public=True),
        Option("password"),
        Option("connect_timeout", Form.COUNT, ("connect_timeout_s",), public=True),
        Option("sslmode", public=True),
        Option("sslrootcert", choices=("system",), public=True),
        Option("sslcompression", Form.COUNT),
        Option("sslsni", Form.COUNT),
        Option("sslnegotiation"),
        Option("ssl_min_protocol_version"),
        Option("ssl_max_protocol_version"),
        Option("gssencmode"),
        Option("krbsrvname"),
        Option("channel_binding"),
        Option("require_auth"),
        Option("target_session_attrs"),
        Option("load_balance_hosts"),
        Option("keepalives", Form.COUNT),
        Option("keepalives_idle", Form.COUNT),
        Option("keepalives_interval", Form.COUNT),
        Option("keepalives_count", Form.COUNT),
        Option("tcp_user_timeout", Form.COUNT),
        Option("application_name"),
        *_never(
            f"it names a file of the node: {_BY_NODES} (PGPASSFILE, PGSSLCERT, PGSSLKEY, "
            "PGSSLROOTCERT, PGSSLCRL, PGSERVICEFILE)",
            *("passfile", "sslcert", "sslkey", "sslcrl", "sslcrldir", "servicefile", "service"),
            "sslkeylogfile",
        ),
        *_never("write the settings into the query", "options"),
    ),
)


@lru_cache(maxsize=1024)
def is_public(name: str) -> bool:
    """Whether every table that knows an option says that it is public; false for an unknown one."""
    tables = (*STORES.values(), *CATALOGS.values(), POSTGRES)
    found = [
        option
        for table in tables
        if (option := table.find(name)) is not None and option.form is not Form.NEVER
    ]
    return bool(found) and all(option.public for option in found)
