"""The manifest of a version: a line for each sealed shard, whole or not there. Read in `protos`."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from cache_protocol.storage.shard_files import SealedShard, manifest_line
from cache_server.shards.disk import remove_file, replace_file


def add(path: Path, sealed: SealedShard) -> None:
    """Adds a line, or nothing at all: half of one would spoil the next.

    Raises:
        OSError: it cannot be written.
    """
    line = manifest_line(sealed).encode()
    with path.open("ab", buffering=0) as manifest:  # a buffer would be written again at the end
        before = manifest.tell()
        try:
            if manifest.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(manifest.fileno())
        except OSError:
            manifest.truncate(before)
            raise


def write(path: Path, shards: Iterable[SealedShard]) -> None:
    """Replaces a manifest where it differs; removes it when there is no shard.

    Raises:
        OSError: it cannot be written; what was there still is.
    """
    text = "".join(map(manifest_line, shards))
    if not text:
        remove_file(path)
    elif path.read_text(encoding="utf-8", errors="replace") != text:
        replace_file(path, text)
