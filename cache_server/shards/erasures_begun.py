"""Erases rows in shard files, so that a node that ends meanwhile continues when it starts.

<cache_dir>/.erasing/<random>.json    the names of a file, and the rows to overwrite in it
"""

from __future__ import annotations

import base64
import json
import logging
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from cache_protocol.storage.row_sets import decode_rows, union
from cache_protocol.storage.shard_files import (
    MANIFEST,
    MappedShard,
    SealedShard,
    checksum_of,
    read_manifest,
    shard_file_name,
)
from cache_server.shards import manifest
from cache_server.shards.checksums import file_digests
from cache_server.shards.disk import fsync, remove_file, replace_file
from cache_server.shards.erasing import erase

logger = logging.getLogger(__name__)

_FOLDER = ".erasing"


def overwrite(path: Path, sealed: SealedShard, places: bytes) -> SealedShard:
    """Overwrites rows of a file, and says what it is sealed as now.

    Raises:
        OSError: it cannot be written.
    """
    erased = union(base64.b64decode(sealed.erased), places)
    # Without digests: those of a file that is erased for the second time are not known.
    mapped = MappedShard(replace(sealed, digests=b""), path)
    erase(path, mapped, decode_rows(places), len(decode_rows(erased)))
    digests = file_digests(path)
    return replace(
        sealed,
        checksum=checksum_of(digests),
        digests=digests,
        erased=base64.b64encode(erased).decode(),
    )


@contextmanager
def noted(cache_dir: Path, paths: Sequence[Path], places: bytes) -> Iterator[None]:
    """Notes on disk which rows of a file are overwritten inside, until it is done.

    Raises:
        OSError: it cannot be noted; nothing was changed.
    """
    note = cache_dir / _FOLDER / f"{uuid.uuid4().hex}.json"
    names = [str(path.relative_to(cache_dir)) for path in paths]
    text = {"names": names, "places": base64.b64encode(places).decode()}
    replace_file(note, json.dumps(text))
    fsync(note.parent)
    yield
    remove_file(note)


def continue_all(cache_dir: Path) -> None:
    """Overwrites what a process that ended had noted, before any file is adopted."""
    for note in sorted((cache_dir / _FOLDER).glob("*.json")):
        try:
            content = json.loads(note.read_text(encoding="utf-8"))
            paths = [cache_dir / name for name in content["names"]]
            _continue(
                [path for path in paths if path.exists()], base64.b64decode(content["places"])
            )
        except (OSError, ValueError, LookupError) as error:
            logger.error("rows not erased path=%s reason=%s", note, error)
            for name in content["names"]:  # the rows must not stay
                remove_file(cache_dir / name)
        remove_file(note)


def _continue(paths: Sequence[Path], places: bytes) -> None:
    sealed: SealedShard | None = None
    for path in paths:
        for line in read_manifest(path.with_name(MANIFEST)):
            if shard_file_name(line.index) == path.name:
                if sealed is None:
                    sealed = overwrite(path, line, places)
                manifest.add(path.with_name(MANIFEST), replace(sealed, index=line.index))
                logger.warning("erasure continued path=%s", path)
