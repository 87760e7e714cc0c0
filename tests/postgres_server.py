"""A real PostgreSQL of the distribution's packages, on a Unix socket of its own.

Each test process starts one server when the first test asks for it. Nothing listens on TCP, so any
number of them run side by side; nothing is synced to the disk, so they start fast.
"""

from __future__ import annotations

import contextlib
import glob
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import adbc_driver_postgresql.dbapi as adbc
import pytest

from tests.waiting import wait_until

PASSWORD = "correct horse & battery/staple"
_STARTUP_S = 60.0
_DATABASE = "test_cache"
_SETTINGS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0777",
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "shared_buffers": "16MB",
    "max_connections": "40",
    "autovacuum": "off",  # statistics are there when a test asks for them, and only then
    "timezone": "Asia/Kolkata",
}


@dataclass(frozen=True)
class PostgresServer:
    """A running server; its superuser is ``owner``, whose password is `PASSWORD`.

    Attributes:
        socket_dir: where its socket is.
    """

    socket_dir: str
    _connections: dict[str, adbc.Connection] = field(default_factory=dict)

    def uri(self, database: str, *, user: str = "owner", **parameters: str) -> str:
        """Of a database, without a password; ``parameters`` go into the query of the URI."""
        query = {"host": self.socket_dir, **parameters}
        words = "&".join(f"{key}={quote(value, safe='')}" for key, value in query.items())
        return f"postgresql://{user}@/{database}?{words}"

    def connect(self, database: str = "postgres") -> adbc.Connection:
        """A connection of the superuser, in autocommit mode; the caller closes it."""
        address = f"postgresql://owner:{quote(PASSWORD, safe='')}@/{database}"
        uri = f"{address}?host={quote(self.socket_dir, safe='')}&application_name=test"
        return adbc.connect(uri, autocommit=True)

    def run(self, database: str, *statements: str) -> None:
        """Executes the statements, each committed when it returns. For one thread at a time."""
        with self._connection(database).cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    def rows(self, database: str, query: str) -> list[tuple[object, ...]]:
        """What a query gives. For one thread at a time."""
        with self._connection(database).cursor() as cursor:
            cursor.execute(query)
            return cursor.fetchall()

    def close(self) -> None:
        """Closes the connections of `run` and `rows`."""
        while self._connections:
            self._connections.popitem()[1].close()

    def _connection(self, database: str) -> adbc.Connection:
        # Kept: the driver takes 40 ms to open one.
        if database not in self._connections:
            self._connections[database] = self.connect(database)
        return self._connections[database]

    def num_connections(self, database: str) -> int:
        """Connections to a database, but for the ones of this class."""
        query = (
            "SELECT count(*) FROM pg_stat_activity "
            f"WHERE datname = '{database}' AND application_name <> 'test'"
        )
        return int(str(self.rows("postgres", query)[0][0]))


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A server for all tests of a process; use `database` for one of your own."""
    with running_server() as server:
        yield server


@contextlib.contextmanager
def running_server() -> Iterator[PostgresServer]:
    """A server in a new directory, which is removed."""
    programs = _programs()
    user = _user()
    # The path of a socket has to fit in 107 bytes, which pytest's own directories do not.
    directory = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
    try:
        if user is not None:
            os.chown(directory, user.pw_uid, user.pw_gid)
        directory.chmod(0o755)
        data = directory / "data"
        _initialise(programs, data, user)
        with _running(programs, directory, data, user) as server:
            server.run("postgres", f"CREATE DATABASE {_DATABASE}")
            yield server
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def database(postgres_server: PostgresServer) -> Iterator[str]:
    """A database with nothing in it but an empty schema ``public``, which is emptied afterwards.

    One for all tests of a process: to connect to a new one for the first time takes a while.
    """
    yield _DATABASE
    found = postgres_server.rows(
        _DATABASE, "SELECT nspname::text FROM pg_namespace WHERE nspname !~ '^(pg_|information_)'"
    )
    schemas = ", ".join('"' + str(name).replace('"', '""') + '"' for (name,) in found)
    postgres_server.run(
        _DATABASE,
        f"DROP SCHEMA IF EXISTS {schemas} CASCADE",
        "CREATE SCHEMA public",
        "GRANT USAGE ON SCHEMA public TO PUBLIC",
    )


def _programs() -> Path:
    found = sorted(
        glob.glob("/usr/lib/postgresql/*/bin/initdb"),
        key=lambda path: int(Path(path).parts[4]),
    )
    path = found[-1] if found else shutil.which("initdb")
    if path is None:
        pytest.skip("PostgreSQL is not installed (no initdb): apt-get install postgresql")
    return Path(path).parent


def _user() -> pwd.struct_passwd | None:
    """Whom the server runs as; None: as whoever runs the tests. It refuses to run as root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    pytest.skip("PostgreSQL does not run as root, and there is no user postgres or nobody")


def _as(user: pwd.struct_passwd | None) -> dict[str, object]:
    if user is None:
        return {}
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _initialise(programs: Path, data: Path, user: pwd.struct_passwd | None) -> None:
    password = data.parent / "password"
    password.write_text(PASSWORD + "\n")
    command = [str(programs / "initdb"), "--no-sync", "--username=owner", "--encoding=UTF8"]
    command += ["--locale=C", "--auth=scram-sha-256", f"--pwfile={password}", str(data)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_STARTUP_S, cwd="/", **_as(user)
    )
    assert done.returncode == 0, done.stdout + done.stderr


@contextlib.contextmanager
def _running(
    programs: Path, directory: Path, data: Path, user: pwd.struct_passwd | None
) -> Iterator[PostgresServer]:
    # Should the tests be killed, the server goes with them.
    command = ["setpriv", "--pdeathsig", "QUIT"]
    if user is not None:
        command += [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    command += [str(programs / "postgres"), "-D", str(data), "-k", str(directory)]
    for name, value in _SETTINGS.items():
        command += ["-c", f"{name}={value}"]
    log = directory / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/"
        )
    try:
        # The last line of the file says how far it is.
        status = data / "postmaster.pid"
        wait_until(
            lambda: process.poll() is not None or _is_ready(status),
            _STARTUP_S,
            "PostgreSQL started",
        )
        assert process.poll() is None, log.read_text()
        with contextlib.closing(PostgresServer(str(directory))) as server:
            yield server
    finally:
        process.send_signal(signal.SIGINT)  # fast shutdown: ends the connections first
        try:
            process.wait(_STARTUP_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGQUIT)
            process.wait(_STARTUP_S)


def _is_ready(status: Path) -> bool:
    try:
        lines = status.read_text().splitlines()
    except FileNotFoundError:
        return False
    return len(lines) >= 8 and lines[7].strip() == "ready"
