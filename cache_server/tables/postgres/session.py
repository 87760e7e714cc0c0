"""Connections to a PostgreSQL server: its address, transactions and errors, without passwords.

A `Session` is one read-only transaction. Its opener must close it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import quote, unquote, urlsplit

import adbc_driver_postgresql.dbapi as adbc
import pyarrow as pa

from cache_protocol.datasets.source_options import POSTGRES, RELATION
from cache_protocol.errors import LoadError, RequestError, without_middle
from cache_server.egress import gate as gates
from cache_server.egress.addresses import parse_host
from cache_server.egress.allowed_sources import POSTGRES_PORT
from cache_server.object_stores.options import checked, known
from cache_server.secrets.redaction import redacted
from cache_server.source.outages import load_error
from cache_server.sql.quoting import literal

DEFAULT_CONNECT_TIMEOUT_S = 10
_LOCK_TIMEOUT_MS = 60_000

# Notices a dead server within about a minute, also during a long answer.
_DEFAULTS = {
    "connect_timeout": str(DEFAULT_CONNECT_TIMEOUT_S),
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
    "application_name": "cache_server",
    "client_encoding": "utf8",
}
# One text form of values, whatever the role, database or environment set.
_SETTINGS = {
    "TimeZone": "UTC",
    "DateStyle": "ISO, YMD",
    "IntervalStyle": "iso_8601",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "standard_conforming_strings": "on",
    "synchronize_seqscans": "off",  # or a scan would begin at the position of another one
    "lock_timeout": str(_LOCK_TIMEOUT_MS),
}
# These limits would end a long load.
_TIMEOUTS = ("statement_timeout", "idle_in_transaction_session_timeout", "transaction_timeout")
# The server's message for a snapshot that was released.
_SNAPSHOT_GONE = {"22023", "42704", "55000"}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Address:
    """A database, without secrets.

    Attributes:
        parameters: libpq's key words.
    """

    parameters: Mapping[str, str]

    def __str__(self) -> str:
        known = self.parameters
        hosts = known.get("host", known.get("hostaddr", "")).split(",")
        ports = known.get("port", "").split(",")
        ports = ports * len(hosts) if len(ports) == 1 else ports
        places = [
            (f"[{host}]" if ":" in host else quote(host, safe="")) + (port and f":{port}")
            for host, port in zip(hosts, ports, strict=False)
        ]
        user = f"{quote(known['user'], safe='')}@" if "user" in known else ""
        return f"postgresql://{user}{','.join(places)}/{quote(known.get('dbname', ''), safe='')}"

    def uri(self, secrets: Mapping[str, str]) -> str:
        """The connection URI for libpq, with those secrets that are its key words.

        Raises:
            RequestError: for a host that callers may not name, or one to which the password of the
                node would go.
            LoadError: a host has no address.
        """
        words = {**_DEFAULTS, **self.parameters, **keywords_of(secrets)[0]}
        if (gate := gates.current()) is not None:
            words = _held(words, gate, str(self))
        return "postgresql:///?" + "&".join(
            f"{name}={quote(value, safe='')}" for name, value in words.items()
        )


def _held(words: Mapping[str, str], gate: gates.Gate, what: str) -> dict[str, str]:
    """The key words with the checked address of each host, so that libpq resolves none again."""
    if "hostaddr" in words:
        raise RequestError(f"{what}: this cache takes no hostaddr: give the server as host")
    hosts = words.get("host", "").split(",")
    ports = words.get("port", str(POSTGRES_PORT)).split(",")
    ports = ports * len(hosts) if len(ports) == 1 else ports
    if len(ports) != len(hosts) or not all(map(str.isdecimal, ports)):
        raise RequestError(f"{what} has not one port, and not one port for each host")
    has_password, own = from_env()
    foreign = [host for host in hosts if host not in own]
    if has_password and foreign and "password" not in words:
        raise RequestError(
            f"{what} names {foreign[0]}, to which this cache does not send the password of its "
            "nodes: give user and password. The operator can name such a server in the "
            "environment of the nodes (PGHOST)"
        )
    held: list[tuple[str, str, str]] = []
    for host, port in zip(hosts, ports, strict=True):
        name = parse_host(what, f"[{host}]" if ":" in host else host)
        try:
            found = gate.check_host(name, int(port))
        except OSError as error:
            raise load_error(f"cannot connect to {what}: {name}: {error.strerror}", error) from None
        held += [(name, address, port) for address in found]
    names, addresses, numbers = zip(*held, strict=True)
    return {
        **words,
        "host": ",".join(names),
        "hostaddr": ",".join(addresses),
        "port": ",".join(numbers),
    }


def from_env() -> tuple[bool, list[str]]:
    """Whether the environment has a password for libpq, and the hosts that it names."""
    return bool(os.environ.get("PGPASSWORD")), os.environ.get("PGHOST", "").split(",")


def parse_uri(uri: str) -> tuple[dict[str, str], dict[str, str]]:
    """Libpq's key words of a URI, and its other parameters.

    As in libpq, ``%20`` is a space and ``+`` is a plus.

    Raises:
        RequestError: it names no database server, or has a fragment.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("postgresql", "postgres"):
        raise RequestError(f"source {uri!r} is not a postgresql:// URI")
    if parts.fragment:
        raise RequestError(f"source {uri!r}: write '#' as %23")
    user, _, place = parts.netloc.rpartition("@")
    hosts, ports = [], []
    for item in place.split(",") if place else []:
        host, colon, port = item.rpartition(":")
        bare = not colon or item.endswith("]")  # an IPv6 address has colons
        hosts.append(unquote(item if bare else host).strip("[]"))
        ports.append("" if bare else port)
    found = {
        "user": unquote(user.partition(":")[0]),
        "host": ",".join(hosts),
        "port": ",".join(ports) if any(ports) else "",
        "dbname": unquote(parts.path.removeprefix("/")),
    }
    words, _ = keywords_of({name: value for name, value in found.items() if value})
    others: dict[str, str] = {}
    for item in parts.query.split("&") if parts.query else []:
        name, _, value = item.partition("=")
        for target, given in zip((words, others), keywords_of({name: unquote(value)}), strict=True):
            for key, text in given.items():
                if target.setdefault(key, text) != text:
                    raise RequestError(f"source {uri.partition('?')[0]!r} gives {key} twice")
    return words, others


def keywords_of(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Libpq's key words among options, by libpq's names, and the other options.

    Raises:
        RequestError: for a key word that names a file of the node, or a value that is wrong.
    """
    words, others = {}, {}
    for name, value in options.items():
        found = POSTGRES.find(name)
        if found is None or found.name in RELATION:
            others[name] = value
        else:
            word = known([POSTGRES], name, found)
            words[word.name] = checked(f"the option {name!r}", word, value)
    return words, others


class Session:
    """A read-only transaction that sees one state of the database.

    Thread-safe; runs one statement at a time.

    Args:
        address: of the database.
        secrets: libpq's key words among them are used. Errors never show a secret.
        snapshot: exported by another session, whose state this one sees.
        search_path: for the names in a query.
        what: is read, for messages.

    Raises:
        LoadError: naming the database and the reason; or the snapshot has ended.
    """

    def __init__(
        self,
        address: Address,
        secrets: Mapping[str, str],
        *,
        snapshot: str | None = None,
        search_path: str | None = None,
        what: str = "",
    ) -> None:
        self.what = what or str(address)
        self._secrets = secrets
        self._lock = threading.Lock()
        self._is_closed = False
        try:
            self._connection = adbc.connect(address.uri(secrets), autocommit=True)
        except adbc.Error as error:
            wanted = f" to read {what}" if what else ""
            raise load_error(
                f"cannot connect to {address}{wanted}: {self._reason(error)}", error
            ) from None
        try:
            self._begin(snapshot, search_path)
        except BaseException:
            self.close()
            raise

    def _begin(self, snapshot: str | None, search_path: str | None) -> None:
        self.execute("BEGIN TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        if snapshot is not None:
            try:
                self._run(f"SET TRANSACTION SNAPSHOT {literal(snapshot)}")
            except adbc.Error as error:
                if error.sqlstate in _SNAPSHOT_GONE:
                    raise LoadError(
                        f"the snapshot of {self.what} has ended: load it again with --refresh"
                    ) from None
                self._fail(error)
        settings = dict(_SETTINGS)
        if search_path is not None:
            settings["search_path"] = search_path
        values = [f"({literal(name)}, {literal(value)})" for name, value in settings.items()]
        names = ", ".join(literal(name) for name in _TIMEOUTS)
        self.rows(
            "SELECT pg_catalog.set_config(name, value, true) "
            f"FROM (VALUES {', '.join(values)}) AS wanted (name, value)"
        )
        self.rows(
            "SELECT pg_catalog.set_config(name, '0', true) "
            f"FROM pg_catalog.pg_settings WHERE name IN ({names})"
        )

    def execute(self, statement: str) -> None:
        """Runs a statement without a result."""
        try:
            self._run(statement)
        except adbc.Error as error:
            self._fail(error)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """The whole result of a query; it must be small."""
        try:
            return self._run(query)
        except adbc.Error as error:
            self._fail(error)

    def schema(self, query: str) -> pa.Schema:
        """The schema of the batches of `stream`, with the driver's metadata."""
        try:
            with self._lock, self._cursor() as cursor:
                cursor.execute(f"SELECT * FROM ({query}\n) AS answer LIMIT 0")
                return cursor.fetch_arrow_table().schema
        except adbc.Error as error:
            self._fail(error)

    def stream(self, query: str) -> Iterator[pa.RecordBatch]:
        """The result of a query, as it arrives; the session is busy until the last batch."""
        try:
            with self._lock, self._cursor() as cursor:
                cursor.execute(query)
                with cursor.fetch_record_batch() as reader:
                    yield from reader
        except (adbc.Error, pa.ArrowException, OSError) as error:
            self._fail(error)

    def close(self) -> None:
        """Ends the transaction and the connection; never raises, even if the server is gone.

        Waits for a statement of another thread.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            try:
                self._connection.close()
            except adbc.Error as error:
                logger.warning("connection lost what=%s reason=%s", self.what, self._reason(error))

    @contextlib.contextmanager
    def _cursor(self) -> Iterator[adbc.Cursor]:
        if self._is_closed:
            raise LoadError(f"the snapshot of {self.what} has ended: load it again with --refresh")
        with self._connection.cursor() as cursor:
            yield cursor

    def _run(self, query: str) -> list[tuple[Any, ...]]:
        with self._lock, self._cursor() as cursor:
            # COPY, which the driver uses for large results, cannot run EXPLAIN.
            cursor.adbc_statement.set_options(**{"adbc.postgresql.use_copy": "false"})
            cursor.execute(query)
            return list(cursor.fetchall()) if cursor.description else []

    def _reason(self, error: BaseException) -> str:
        text = str(error).partition("\n\nQuery was:")[0].partition("\nLINE ")[0]
        text = text.partition(". SQLSTATE")[0]
        for mark in ("ERROR:  ", "FATAL:  ", "Failed to connect: ", "[libpq] "):
            _, found, rest = text.partition(mark)
            if found:
                text = rest
                break
        return without_middle(redacted(text, self._secrets.values()))

    def _fail(self, error: BaseException) -> NoReturn:
        state = getattr(error, "sqlstate", None) or ""
        # 42: a name is unknown or the SQL is wrong; except a missing privilege.
        refused = (state.startswith("42") and state != "42501") or state == "25006"
        message = f"cannot read {self.what}: {self._reason(error)}"
        raise (RequestError(message) if refused else load_error(message, error)) from None
