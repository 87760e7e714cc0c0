"""Adopts the shard files of a node's directory when it starts."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from cache_protocol.errors import ConfigError, InvalidTicketError
from cache_protocol.storage.shard_files import (
    MANIFEST,
    MappedShard,
    SealedShard,
    checksum_of,
    read_manifest,
    shard_file_name,
)
from cache_server.shards import checked_names, manifest
from cache_server.shards.checksums import file_digests
from cache_server.shards.disk import (
    NOT_THE_FILES_FAULT,
    remove_empty,
    remove_file,
    temporary_of,
)
from cache_server.shards.version_key import VersionKey

logger = logging.getLogger(__name__)

_WRITTEN = ("shard-*.arrow", ".shard-*.tmp", temporary_of(Path(MANIFEST)).name)


def adopt_all(cache_dir: Path, threads: int) -> dict[VersionKey, dict[int, MappedShard]]:
    """Maps the valid shards that manifests name, and removes leftovers of other shards.

    Files that no store wrote stay: the directory may have other users.

    Args:
        threads: for the checksums.

    Raises:
        ConfigError: a manifest cannot be read or written, or a valid shard cannot be opened.
    """
    found = {}
    with ThreadPoolExecutor(threads, thread_name_prefix="adopt") as pool:
        for directory in sorted(cache_dir.glob("*/*/")):
            there = [path for pattern in _WRITTEN for path in directory.glob(pattern)]
            if not there and not (directory / MANIFEST).exists():
                continue
            try:
                key = VersionKey.of_folder(directory.parent.name, directory.name)
                checked_names.version_key(key.dataset, key.fingerprint)
            except InvalidTicketError:
                continue  # no store made this folder
            adopted = _adopt(directory, _listed(directory / MANIFEST), pool)
            sound = {shard.path for shard in adopted}
            for path in there:
                if path not in sound:
                    logger.warning("file removed path=%s reason=damaged or never sealed", path)
                    remove_file(path)
            _write_again(directory / MANIFEST, adopted)
            remove_empty(directory)
            if adopted:
                found[key] = {shard.sealed.index: shard for shard in adopted}
    return found


def _listed(path: Path) -> list[SealedShard]:
    try:
        return read_manifest(path)
    except OSError as error:
        raise ConfigError(f"cannot read the manifest {path}: {error.strerror}") from None


def _write_again(path: Path, adopted: Iterable[MappedShard]) -> None:
    """Rewrites a manifest without torn lines, which would spoil the next added line."""
    try:
        manifest.write(path, [shard.sealed for shard in adopted])
    except OSError as error:
        raise ConfigError(f"cannot write the manifest {path}: {error.strerror}") from None


def _adopt(
    directory: Path, listed: Iterable[SealedShard], pool: ThreadPoolExecutor
) -> list[MappedShard]:
    paths = {sealed: directory / shard_file_name(sealed.index) for sealed in listed}
    maps = {sealed: pool.submit(_map_sound, path, sealed) for sealed, path in paths.items()}
    adopted = []
    for sealed, path in paths.items():
        try:
            shard = maps[sealed].result()
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in NOT_THE_FILES_FAULT:
                pool.shutdown(wait=False, cancel_futures=True)
                raise ConfigError(
                    f"cannot adopt shard {path}: {error.strerror or error}; the system allows "
                    "too few maps (vm.max_map_count), addresses (ulimit -v) or open files "
                    "(ulimit -n), or the file is another user's"
                ) from None
            logger.warning("shard damaged path=%s reason=%s", path, error)
            continue
        adopted.append(shard)
        logger.info("shard adopted dataset=%s shard=%d", directory.parent.name, sealed.index)
    return adopted


def _map_sound(path: Path, sealed: SealedShard) -> MappedShard:
    """Maps a file after checking that it is the sealed one.

    Raises:
        OSError: it is missing. ValueError: it has other bytes or another layout.
    """
    size = path.stat().st_size
    if size != sealed.num_bytes:
        raise ValueError(f"{size} bytes instead of {sealed.num_bytes}")
    digests = file_digests(path)
    checksum = checksum_of(digests)
    if checksum != sealed.checksum:
        raise ValueError(f"checksum {checksum} instead of {sealed.checksum}")
    shard = MappedShard(replace(sealed, digests=digests), path)
    if shard.batch.num_rows != sealed.num_rows:
        raise ValueError(f"{shard.batch.num_rows} rows instead of {sealed.num_rows}")
    shard.check_all()
    return shard
