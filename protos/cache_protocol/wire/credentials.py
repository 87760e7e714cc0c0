"""What a process shows to a cache: a token, and its side of TLS. Never shown or logged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from cache_protocol.errors import ConfigError
from cache_protocol.wire.reloaded_file import ReloadedFile

TLS_SCHEME = "grpc+tls://"
_VARIABLES = {
    "token": "CACHE_TOKEN",
    "token_file": "CACHE_TOKEN_FILE",
    "tls_ca": "CACHE_TLS_CA",
    "tls_cert": "CACHE_TLS_CERT",
    "tls_key": "CACHE_TLS_KEY",
}


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

    Raises:
        ConfigError: a file cannot be read, or two settings exclude each other.
    """

    token: str | None = field(default=None, repr=False)
    token_file: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None

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
        """The metadata of a call over gRPC."""
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
