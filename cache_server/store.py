"""Shard files: write, seal, adopt, map, drop.

    <cache_dir>/<dataset>/<fingerprint>/shard-00007.arrow     one Arrow IPC file, one record batch
    <cache_dir>/<dataset>/<fingerprint>/manifest.jsonl        a line for each sealed shard
    <cache_dir>/.lock, .node-id                               one process, one lasting name
    <cache_dir>/.scratch/                                     what is needed for a moment

A shard is written under a temporary name, checksummed, fsynced, renamed, then named in the
manifest, and from then on memory-mapped. A file that the manifest does not name, or whose checksum
differs, never counts. It knows files; neither sources, nor readers, nor the network.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType

import pyarrow as pa

from cache_server.checksums import PieceDigests, file_checksum
from cache_server.draft import ShardDraft
from cache_server.planning import VersionKey
from protos.errors import (
    ConfigError,
    LoadError,
    NodeUnavailableError,
)
from protos.layout import Layout
from protos.shards import (
    MANIFEST,
    NODE_ID_FILE,
    MappedShard,
    SealedShard,
    manifest_line,
    read_manifest,
    shard_file_name,
)

logger = logging.getLogger(__name__)

_NOT_THE_FILES_FAULT = {errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM}

SCRATCH = ".scratch"


class ShardStore:
    """All shards of one node, in one directory that no other process uses. Thread-safe.

    Args:
        cache_dir: made when missing.
        memory_limit_bytes: of all shard files together; None for no limit but the file system's.

    Raises:
        ConfigError: when the directory cannot be made or another node uses it; when a shard that
            lies there cannot be opened, which says nothing about the shard.
    """

    def __init__(self, cache_dir: Path, memory_limit_bytes: int | None = None) -> None:
        self.cache_dir = cache_dir
        self.memory_limit_bytes = memory_limit_bytes
        self._lock = threading.Lock()
        self._shards: dict[VersionKey, dict[int, MappedShard]] = {}
        self._reserved: dict[Path, int] = {}  # of files being written
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            self._lock_file = (cache_dir / ".lock").open("a+")
        except OSError as error:
            raise ConfigError(f"cannot use cache_dir {cache_dir}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock_file.close()
            raise ConfigError(f"cache_dir {cache_dir} is used by another cache node") from None
        try:
            self.node_id = self._load_node_id()
            shutil.rmtree(self.scratch, ignore_errors=True)  # of a process that was killed
            self._adopt_all()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ShardStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Forgets the maps and releases the directory; the files stay."""
        with self._lock:
            self._shards.clear()
        self._lock_file.close()

    @property
    def scratch(self) -> Path:
        """A folder for what is needed for a moment; emptied when the store opens."""
        return self.cache_dir / SCRATCH

    @property
    def stored_bytes(self) -> int:
        """Size of all sealed shard files."""
        with self._lock:
            return self._stored_bytes()

    def versions(self) -> dict[VersionKey, dict[int, MappedShard]]:
        """A copy of what is sealed: version -> shard index -> shard."""
        with self._lock:
            return {key: dict(shards) for key, shards in self._shards.items()}

    @contextlib.contextmanager
    def draft(
        self, key: VersionKey, index: int, layout: Layout, num_rows: int
    ) -> Iterator[ShardDraft]:
        """A file to fill and then to `seal` as shard ``index``; removed if it is not.

        Args:
            num_rows: at least 1; the rows of the shard, exactly.

        Raises:
            LoadError: when it does not fit in the memory limit or on the file system.
        """
        directory = self._directory(key)
        path = directory / _temporary_name(index)
        size = num_rows * layout.fixed_row_bytes
        self._reserve(path, size)
        try:
            try:
                self._create(path)
                draft = ShardDraft(path, layout, num_rows)
            except OSError as error:
                raise _cannot_write(key, index, size, directory, error) from None
            with draft:
                yield draft
        finally:
            _remove_file(path)
            self._release(path)
            self._remove_empty(directory)

    def seal(
        self, key: VersionKey, index: int, batch: pa.RecordBatch, draft: ShardDraft | None = None
    ) -> MappedShard:
        """Writes ``batch`` as shard ``index`` and maps it.

        Args:
            draft: from `draft`, whose columns those of ``batch`` are.

        Raises:
            LoadError: when it does not fit in the memory limit or on the file system; nothing is
                left behind.
        """
        size = batch.nbytes
        temporary = self._directory(key) / _temporary_name(index) if draft is None else draft.path

        def write() -> SealedShard:
            if draft is not None:
                draft.complete(batch)
                checksum = draft.checksum()
            else:
                write_shard_file(temporary, batch)
                checksum = file_checksum(temporary)
            return SealedShard(index, batch.num_rows, temporary.stat().st_size, checksum)

        return self._keep(key, index, temporary, size, write)

    def receive(
        self, key: VersionKey, sealed: SealedShard, chunks: Iterable[pa.Buffer]
    ) -> MappedShard:
        """Keeps the file of a shard that was sealed elsewhere.

        Args:
            chunks: the bytes of the file, in order.

        Raises:
            NodeUnavailableError: they are not the bytes that were sealed. LoadError: they do not
                fit in the memory limit or on the file system. Nothing is left behind.
        """
        temporary = self._directory(key) / _temporary_name(sealed.index)

        def write() -> SealedShard:
            digests = PieceDigests()
            with temporary.open("w+b") as file:
                for chunk in chunks:
                    digests.add(file.tell(), chunk)
                    file.write(chunk)
                file.flush()
                checksum = digests.checksum(file.fileno())
            if checksum != sealed.checksum:
                raise NodeUnavailableError(
                    f"shard {sealed.index} of {key.dataset!r} did not arrive as it was sealed"
                )
            return sealed

        return self._keep(key, sealed.index, temporary, sealed.num_bytes, write)

    def _keep(
        self,
        key: VersionKey,
        index: int,
        temporary: Path,
        size: int,
        write: Callable[[], SealedShard],
    ) -> MappedShard:
        """Has a file written under a temporary name, and makes a sealed shard of it."""
        directory = self._directory(key)
        final = directory / shard_file_name(index)
        self._reserve(temporary, size)
        try:
            self._create(temporary)
            sealed = write()
            _fsync(temporary)
            os.replace(temporary, final)
            _fsync(directory)
            with (directory / MANIFEST).open("a", encoding="utf-8") as manifest:
                manifest.write(manifest_line(sealed))
                manifest.flush()
                os.fsync(manifest.fileno())
            shard = MappedShard(sealed, final)
        except OSError as error:
            _remove_file(final)
            raise _cannot_write(key, index, size, directory, error) from None
        finally:
            _remove_file(temporary)
            self._release(temporary)
            self._remove_empty(directory)
        with self._lock:
            self._shards.setdefault(key, {})[index] = shard
        logger.info(
            "shard sealed dataset=%s shard=%d rows=%d bytes=%d",
            key.dataset, index, sealed.num_rows, sealed.num_bytes,
        )  # fmt: skip
        return shard

    def drop(self, key: VersionKey, index: int) -> None:
        """Removes one shard. Readers that have it mapped keep their rows."""
        with self._lock:
            shards = self._shards.get(key, {})
            shard = shards.pop(index, None)
            if not shards:
                self._shards.pop(key, None)
        if shard is not None:
            shard.path.unlink(missing_ok=True)
            logger.info("shard dropped dataset=%s shard=%d", key.dataset, index)

    def drop_version(self, key: VersionKey) -> None:
        """Removes everything that was written for one version."""
        with self._lock:
            self._shards.pop(key, None)
        directory = self._directory(key)
        if directory.exists():
            shutil.rmtree(directory, ignore_errors=True)
            logger.info("version dropped dataset=%s fingerprint=%s", key.dataset, key.fingerprint)
        self._remove_empty(directory)

    def _directory(self, key: VersionKey) -> Path:
        return self.cache_dir / key.dataset / key.fingerprint

    def _create(self, path: Path) -> None:
        """Makes an empty file and the directories it needs, which `_remove_empty` leaves then."""
        with self._lock:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def _remove_empty(self, directory: Path) -> None:
        """Removes the directories of a version and of its dataset where nothing is left in them."""
        with self._lock:
            for path in (directory, directory.parent):
                if path.is_dir() and not any(path.iterdir()):
                    path.rmdir()

    def _stored_bytes(self) -> int:
        return sum(s.sealed.num_bytes for v in self._shards.values() for s in v.values())

    def _reserve(self, path: Path, size: int) -> None:
        """Makes sure that there is room for a file, which may have some reserved already."""
        with self._lock:
            before = self._reserved.get(path, 0)
            held = self._stored_bytes() + sum(self._reserved.values()) - before
            limit = self.memory_limit_bytes
            if limit is not None and held + size > limit:
                raise LoadError(
                    f"a shard of {size} bytes does not fit: {held} of the memory limit of "
                    f"{limit} bytes are used"
                )
            free = shutil.disk_usage(self.cache_dir).free
            if size - before > free:
                raise LoadError(
                    f"a shard of {size} bytes does not fit in {self.cache_dir}: {free} bytes free"
                )
            self._reserved[path] = size

    def _release(self, path: Path) -> None:
        with self._lock:
            self._reserved.pop(path, None)

    def _load_node_id(self) -> str:
        path = self.cache_dir / NODE_ID_FILE
        if not path.exists() or not path.read_text(encoding="utf-8"):
            path.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
        return path.read_text(encoding="utf-8").strip()

    def _adopt_all(self) -> None:
        for directory in sorted(self.cache_dir.glob("*/*/")):
            adopted = self._adopt(directory, read_manifest(directory / MANIFEST))
            sound = {shard.path for shard in adopted}
            for path in (*directory.glob("shard-*.arrow"), *directory.glob(".*.tmp")):
                if path not in sound:
                    logger.warning("file removed path=%s reason=damaged or never sealed", path)
                    _remove_file(path)
            # Without torn lines, which would spoil the next one to be added.
            _write_manifest(directory / MANIFEST, [shard.sealed for shard in adopted])
            self._remove_empty(directory)

    def _adopt(self, directory: Path, listed: Iterable[SealedShard]) -> list[MappedShard]:
        """Maps the listed shards whose files are sound."""
        key = VersionKey(directory.parent.name, directory.name)
        adopted = []
        for sealed in listed:
            path = directory / shard_file_name(sealed.index)
            try:
                shard = _map_sound(path, sealed)
            except (OSError, ValueError) as error:
                if isinstance(error, OSError) and error.errno in _NOT_THE_FILES_FAULT:
                    raise ConfigError(
                        f"cannot adopt shard {path}: {error.strerror or error}; the system allows "
                        "too few maps (vm.max_map_count), addresses (ulimit -v) or open files "
                        "(ulimit -n), or the file is another user's"
                    ) from None
                logger.warning("shard damaged path=%s reason=%s", path, error)
                continue
            self._shards.setdefault(key, {})[sealed.index] = shard
            adopted.append(shard)
            logger.info("shard adopted dataset=%s shard=%d", key.dataset, sealed.index)
        return adopted


def write_shard_file(path: Path, batch: pa.RecordBatch) -> None:
    """Writes a stored batch as one Arrow IPC file."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def _map_sound(path: Path, sealed: SealedShard) -> MappedShard:
    """Maps a file that must be the one that was sealed.

    Raises:
        OSError: it is missing. ValueError: it is another one, or of another layout.
    """
    size = path.stat().st_size
    if size != sealed.num_bytes:
        raise ValueError(f"{size} bytes instead of {sealed.num_bytes}")
    checksum = file_checksum(path)
    if checksum != sealed.checksum:
        raise ValueError(f"checksum {checksum} instead of {sealed.checksum}")
    return MappedShard(sealed, path)


def _write_manifest(path: Path, shards: Iterable[SealedShard]) -> None:
    """Replaces a manifest; removes it when there is no shard."""
    text = "".join(map(manifest_line, shards))
    if not text:
        _remove_file(path)
    elif path.read_text(encoding="utf-8", errors="replace") != text:
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(text, encoding="utf-8")
        _fsync(temporary)
        os.replace(temporary, path)


def _temporary_name(index: int) -> str:
    return f".{shard_file_name(index)}.{uuid.uuid4().hex}.tmp"


def _cannot_write(
    key: VersionKey, index: int, size: int, directory: Path, error: OSError
) -> LoadError:
    return LoadError(
        f"cannot write shard {index} of {key.dataset!r} ({size} bytes) to {directory}: "
        f"{error.strerror}"
    )


def _remove_file(path: Path) -> None:
    """Removes a file; none there, and none that could be there, is as good."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        path.unlink()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
