"""Writes the manifest of a version: the lines of each sealed shard.

`cache_protocol.storage.shard_files` reads it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from cache_protocol.storage.shard_files import SealedShard, manifest_lines
from cache_server.shards.disk import remove_file, replace_file


def add(path: Path, sealed: SealedShard) -> None:
    """Adds the lines of a shard, or nothing: half a line would spoil the next one.

    Raises:
        OSError: it cannot be written.
    """
    line = manifest_lines(sealed).encode()
    with path.open("ab", buffering=0) as manifest:  # no second write on close
        before = manifest.tell()
        try:
            if manifest.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(manifest.fileno())
        except OSError:
            manifest.truncate(before)
            raise


def write(path: Path, shards: Iterable[SealedShard]) -> None:
    """Replaces a manifest if it differs; removes it if there is no shard.

    Raises:
        OSError: it cannot be written; the old one stays.
    """
    text = "".join(map(manifest_lines, shards))
    if not text:
        remove_file(path)
    elif path.read_text(encoding="utf-8", errors="replace") != text:
        replace_file(path, text)
