"""Tokens of the local clusters of this user, by control port.

`LocalCluster` writes one; every process of the same user and machine finds it, as Jupyter's tools
find its servers. Other users cannot read the directory.
"""

from __future__ import annotations

import json
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from cache_protocol.errors import ConfigError

_LOOPBACK = re.compile(r"(?:grpc(?:\+tcp)?://)?(?:127\.0\.0\.1|localhost):(\d+)/?")


def publish(token: str, *locations: str) -> None:
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


def withdraw(*locations: str) -> None:
    """Removes what `publish` wrote."""
    for path in map(_file, locations):
        if path is not None:
            with suppress(OSError):
                path.unlink()


def find(location: str) -> str | None:
    """The token of the local cluster at a location; None if there is none."""
    path = _file(location)
    if path is None or not _is_private(path.parent):
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        os.kill(found["pid"], 0)  # a killed process leaves its file, and its port may be reused
        return str(found["token"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _directory() -> Path:
    of_user = Path(f"/run/user/{os.getuid()}")
    if os.access(of_user, os.W_OK):
        return of_user / "data-cache"
    return Path(f"/tmp/data-cache-{os.getuid()}")


def _file(location: str) -> Path | None:
    found = _LOOPBACK.fullmatch(location)
    return _directory() / found[1] if found else None


def _is_private(directory: Path) -> bool:
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
