"""What a process shows to a cache: a token, and its side of TLS. Never shown or logged.

`LocalCluster` publishes its token; every process of the same user and machine finds it, as
Jupyter's tools find their servers. Other users cannot read the directory.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from cache_protocol.errors import ConfigError
from cache_protocol.wire import protocol_version, tracing, zones

logger = logging.getLogger(__name__)

TLS_SCHEME = "grpc+tls://"
_VARIABLES = {
    "token": "CACHE_TOKEN",
    "token_file": "CACHE_TOKEN_FILE",
    "tls_ca": "CACHE_TLS_CA",
    "tls_cert": "CACHE_TLS_CERT",
    "tls_key": "CACHE_TLS_KEY",
    "zone": zones.VARIABLE,
}
_LOOPBACK = re.compile(r"(?:grpc(?:\+tcp)?://)?(?:127\.0\.0\.1|localhost):(\d+)/?")

_T = TypeVar("_T")


class ReloadedFile(Generic[_T]):
    """The parsed content of a file. Thread-safe without a lock, which a fork could leave taken.

    A change that cannot be read or parsed is logged once; the last good content stays.

    Args:
        path: looked at with every call of `value`.
        parse: raises ValueError for bad content; its message must quote no secret.

    Raises:
        ConfigError: the file cannot be read or parsed now; names it.
    """

    def __init__(self, path: str | os.PathLike[str], parse: Callable[[str], _T]) -> None:
        self._path = Path(path)
        self._parse = parse
        try:
            self._seen = self._look()
            self._value = self._read()
        except OSError as error:
            raise ConfigError(f"cannot read {self._path}: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"{self._path}: {error}") from None

    def value(self) -> _T:
        """The newest content that could be parsed."""
        try:
            seen: object = self._look()
        except OSError as error:
            seen = error.errno
        if seen != self._seen:
            self._seen = seen
            try:
                self._value = self._read()
                logger.info("file read again path=%s", self._path)
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                logger.error("file not read again path=%s reason=%s", self._path, reason)
        return self._value

    def _look(self) -> object:
        status = self._path.stat()
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> _T:
        return self._parse(self._path.read_text(encoding="utf-8"))


class TlsFiles(NamedTuple):
    """PEM texts; None: the default of gRPC."""

    ca: bytes | None
    key: bytes | None
    cert: bytes | None


@dataclass(frozen=True)
class Credentials:
    """Pickled with a dataset, so that workers have them. Thread-safe.

    Attributes:
        token: sent with every call.
        token_file: of a token instead; read again when it changes.
        tls_ca: file of the certificates that sign those of the nodes; None: those of the system.
        tls_cert, tls_key: files of the certificate that this process shows; both or neither.
        zone: in which this process is; None: it is not known.

    Raises:
        ConfigError: a file cannot be read, two settings exclude each other, or the zone is no name.
    """

    token: str | None = field(default=None, repr=False)
    token_file: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    zone: str | None = None

    def __post_init__(self) -> None:
        if self.token is not None and self.token_file is not None:
            raise ConfigError("token and token_file exclude each other: give one of them")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key go together: give both or neither")
        if self.token is not None:
            try:
                _parse_token(self.token)
            except ValueError as error:
                raise ConfigError(f"token: {error}") from None
        if self.zone is not None and not zones.is_zone(self.zone):
            raise ConfigError(f"{zones.VARIABLE} must be {zones.RULE}, got {self.zone[:200]!r}")
        self.current_token()
        self.tls_files()

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Credentials:
        """Those of the variables ``CACHE_TOKEN`` and so on; an empty one counts as absent."""
        return cls(**{name: environ.get(variable) or None for name, variable in _VARIABLES.items()})

    def current_token(self) -> str | None:
        """The token to send now; None: there is none."""
        return self.token if self.token_file is None else _token_file(self.token_file).value()

    def headers(self) -> tuple[tuple[str, str], ...]:
        """The headers of a call: the version of the protocol, the token, the zone, the span."""
        return (
            protocol_version.header(),
            *self.authorization(),
            *zones.header(self.zone),
            *tracing.headers(),
        )

    def authorization(self) -> tuple[tuple[str, str], ...]:
        """The header of the token; none without a token."""
        token = self.current_token()
        return () if token is None else (("authorization", f"Bearer {token}"),)

    def tls_files(self) -> TlsFiles:
        """The content of the files; they are read again for every connection."""
        return TlsFiles(*map(_content, (self.tls_ca, self.tls_key, self.tls_cert)))


def _content(path: str | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


@lru_cache(maxsize=64)
def _token_file(path: str) -> ReloadedFile[str]:
    return ReloadedFile(path, _parse_token)


def _parse_token(text: str) -> str:
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("a token must be printable ASCII without spaces")
    return token


NO_CREDENTIALS = Credentials()


def publish_token(token: str, *locations: str) -> None:
    """Makes the token of a cluster known, until this process ends or withdraws it.

    Raises:
        ConfigError: the directory is another user's, or cannot be written.
    """
    directory = _directory()
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        if not _is_private(directory):
            raise ConfigError(f"{directory} must be a directory that only you can use: remove it")
        for location in locations:
            path = _file(location)
            assert path is not None, location
            temporary = path.with_suffix(f".{os.getpid()}")
            temporary.unlink(missing_ok=True)
            temporary.touch(0o600, exist_ok=False)
            temporary.write_text(json.dumps({"pid": os.getpid(), "token": token}), "utf-8")
            temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error.strerror}") from None


def withdraw_token(*locations: str) -> None:
    """Removes what `publish_token` wrote."""
    for path in map(_file, locations):
        if path is not None:
            with suppress(OSError):
                path.unlink()


def find_token(location: str) -> str | None:
    """The token of the local cluster at a location; None if there is none."""
    path = _file(location)
    if path is None or not _is_private(path.parent):
        return None
    try:
        published = json.loads(path.read_text(encoding="utf-8"))
        os.kill(published["pid"], 0)  # a killed process leaves its file, and its port may be reused
        return str(published["token"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _directory() -> Path:
    of_user = Path(f"/run/user/{os.getuid()}")
    if os.access(of_user, os.W_OK):
        return of_user / "data-cache"
    return Path(f"/tmp/data-cache-{os.getuid()}")


def _file(location: str) -> Path | None:
    matched = _LOOPBACK.fullmatch(location)
    return _directory() / matched[1] if matched else None


def _is_private(directory: Path) -> bool:
    try:
        status = directory.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    )
