"""Writes, seals, adopts, maps and drops shard files.

    <cache_dir>/<dataset>/<fingerprint>/shard-00007.arrow     one Arrow IPC file, one record batch;
                                                              versions may share it by a hard link
    <cache_dir>/<dataset>/<fingerprint>/manifest.jsonl        a line for each sealed shard
    <cache_dir>/.lock, .node-id                               one process, one lasting name: see
                                                              `node_name`
    <cache_dir>/.erasing/                                     rows to overwrite, if a node ends
    <cache_dir>/.scratch/                                     temporary files
    <cache_dir>/.removed-*/                                   dropped, soon freed: see `removals`

A shard is written under a temporary name, checksummed, fsynced, renamed, added to the manifest, and
then memory-mapped. A file that the manifest lacks, or with another checksum, never counts.
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from cache_protocol.errors import (
    ConfigError,
    LoadError,
    NodeUnavailableError,
)
from cache_protocol.storage.layout import Layout
from cache_protocol.storage.shard_files import (
    MANIFEST,
    MappedShard,
    SealedShard,
    checksum_of,
    shard_file_name,
)
from cache_server.shards import adoption, checked_names, erasures_begun, manifest, node_name
from cache_server.shards.checksums import PieceDigests, file_digests
from cache_server.shards.directory_format import DirectoryFormat
from cache_server.shards.disk import fsync, remove, remove_empty, remove_file
from cache_server.shards.draft import ShardDraft, padded, shard_writer
from cache_server.shards.removals import Removals
from cache_server.shards.version_key import VersionKey

logger = logging.getLogger(__name__)

SCRATCH = ".scratch"


class NoRoomError(LoadError):
    """A shard does not fit in the memory limit or on the file system now.

    Attributes:
        num_bytes: that do not fit; 0: unknown.
    """

    def __init__(self, message: str, num_bytes: int = 0) -> None:
        super().__init__(message)
        self.num_bytes = num_bytes


class ShardStore:
    """All shards of one node, in one directory that no other process uses. Thread-safe.

    Args:
        cache_dir: made if it is missing.
        memory_limit_bytes: of all shard files together; None: only the file system limits them.
        adopt_threads: for the checksums of adopted shards.
        address: of a node with a lasting address, which gives its first id. So a node that comes
            back with an empty directory is the same node. None: a random id.

    Attributes:
        left_out: gives a row set of the rows of a stored batch that must not be kept.

    Raises:
        ConfigError: the directory cannot be made, or another node uses it; its id or a manifest
            cannot be read; or a valid shard in it cannot be opened.
    """

    def __init__(
        self,
        cache_dir: Path,
        memory_limit_bytes: int | None = None,
        *,
        adopt_threads: int = 4,
        address: str | None = None,
    ) -> None:
        self.cache_dir = cache_dir
        self.memory_limit_bytes = memory_limit_bytes
        self._lock = threading.Lock()
        self._manifests = threading.Lock()  # taken before the other one
        self._shards: dict[VersionKey, dict[int, MappedShard]] = {}
        self._stored_bytes = 0  # of `_shards`: added up for each shard, 10,000 would cost 10**8
        self._names: Counter[tuple[int, int]] = Counter()  # of each file: versions may share it
        self._reserved: dict[Path, int] = {}  # of files being written
        self._removals = Removals(cache_dir)
        self.left_out: Callable[[VersionKey, int, pa.RecordBatch], bytes] = lambda *_: b""
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
            self._format = DirectoryFormat(cache_dir)
            self.node_id = node_name.load(cache_dir, address)
            remove(self.scratch)  # left by a killed process
            self._removals.finish_old()
            erasures_begun.continue_all(cache_dir)
            self._shards = adoption.adopt_all(cache_dir, adopt_threads)
            for shards in self._shards.values():
                self._count(shards.values())
            if any(shard.erased for shard in self.sealed()):  # the file of the format was lost
                self._format.note_erased()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ShardStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drops the maps and releases the directory; the files stay."""
        with self._lock:
            self._shards.clear()
            self._names.clear()
            self._stored_bytes = 0
        self._lock_file.close()

    @property
    def scratch(self) -> Path:
        """A folder for temporary files; emptied when the store opens."""
        return self.cache_dir / SCRATCH

    @property
    def stored_bytes(self) -> int:
        """Size of all sealed shard files."""
        with self._lock:
            return self._stored_bytes

    def free_bytes(self) -> int | None:
        """What the memory limit leaves beside all files; None: no limit."""
        with self._lock:
            if self.memory_limit_bytes is None:
                return None
            return self.memory_limit_bytes - self._stored_bytes - sum(self._reserved.values())

    def versions(self) -> dict[VersionKey, dict[int, MappedShard]]:
        """The sealed shards, a copy: version -> shard index -> shard."""
        with self._lock:
            return {key: dict(shards) for key, shards in self._shards.items()}

    def sealed(self) -> list[MappedShard]:
        """One shard of each file of all versions."""
        with self._lock:
            shards = [shard for shards in self._shards.values() for shard in shards.values()]
        return [*{shard.inode: shard for shard in shards}.values()]

    def shards(self, key: VersionKey) -> dict[int, MappedShard]:
        """The sealed shards of one version, a copy, by shard index."""
        with self._lock:
            return dict(self._shards.get(key, {}))

    @contextlib.contextmanager
    def draft(
        self,
        key: VersionKey,
        index: int,
        layout: Layout,
        num_rows: int,
        grow: Callable[[int, Callable[[], None]], None] | None = None,
    ) -> Iterator[ShardDraft]:
        """A file to fill and then to `seal` as shard ``index``; removed if it is not sealed.

        Args:
            num_rows: of the shard, exactly; at least 1.
            grow: the rows may never come: room is held only for those that did. Called before the
                file grows, with its bytes then and an action to call, which raises `NoRoomError`
                while they do not fit. None: the room for all rows is held now.

        Raises:
            NoRoomError: it does not fit. LoadError: it cannot be written.
        """
        directory = self._directory(key)
        path = directory / _temporary_name(index)
        size = num_rows * layout.fixed_row_bytes
        self._reserve(path, size)
        if grow is not None:
            self._release(path)  # it would fit now

        def step(num_bytes: int) -> None:
            assert grow is not None
            grow(num_bytes, lambda: self._reserve(path, num_bytes))

        try:
            try:
                self._create(path)
                draft = ShardDraft(path, layout, num_rows, step if grow else None)
            except OSError as error:
                raise _cannot_write(key, index, size, directory, error) from None
            with draft:
                yield draft
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise  # of the caller
            raise _cannot_write(key, index, size, directory, error) from None
        finally:
            remove_file(path)
            self._release(path)
            self._remove_empty(directory)

    def seal(
        self,
        key: VersionKey,
        index: int,
        batch: pa.RecordBatch,
        draft: ShardDraft | None = None,
        nulls: Mapping[str, int] | None = None,
    ) -> MappedShard:
        """Writes ``batch`` as shard ``index`` and maps it.

        Args:
            draft: from `draft`; holds the packed columns of ``batch``.
            nulls: see `SealedShard`.

        Raises:
            NoRoomError: it does not fit. LoadError: it cannot be written. No file stays.
        """
        size = batch.nbytes
        temporary = self._directory(key) / _temporary_name(index) if draft is None else draft.path

        def write() -> SealedShard:
            if draft is not None:
                draft.complete(batch)
                digests = draft.digests()
            else:
                write_shard_file(temporary, batch)
                digests = file_digests(temporary)
            size_of_file, checksum = temporary.stat().st_size, checksum_of(digests)
            sealed = SealedShard(
                index, batch.num_rows, size_of_file, checksum, dict(nulls or {}), digests
            )
            erased = self.left_out(key, index, batch)
            return erasures_begun.overwrite(temporary, sealed, erased) if erased else sealed

        return self._keep(key, index, temporary, size, write)

    def receive(
        self, key: VersionKey, sealed: SealedShard, chunks: Iterable[pa.Buffer]
    ) -> MappedShard:
        """Stores the file of a shard that another node sealed.

        Args:
            chunks: the bytes of the file, in order.

        Raises:
            NodeUnavailableError: the bytes differ from the sealed ones. NoRoomError: they do not
                fit. LoadError: they cannot be written. No file stays.
        """
        temporary = self._directory(key) / _temporary_name(sealed.index)

        def write() -> SealedShard:
            digests = PieceDigests()
            with temporary.open("w+b") as file:
                for chunk in chunks:
                    if file.tell() + len(chunk) > sealed.num_bytes:
                        break  # the room was reserved for so many
                    digests.add(file.tell(), chunk)
                    file.write(chunk)
                file.flush()
                joined = digests.joined(file.fileno())
            if checksum_of(joined) != sealed.checksum:
                raise NodeUnavailableError(
                    f"shard {sealed.index} of {key.dataset!r} did not arrive as it was sealed"
                )
            return replace(sealed, digests=joined)

        return self._keep(key, sealed.index, temporary, sealed.num_bytes, write)

    def move(self, source: VersionKey, place: int, key: VersionKey, index: int) -> MappedShard:
        """Makes shard ``place`` of ``source`` shard ``index`` of ``key``; no bytes are copied.

        If the process ends meanwhile, at least one of the two names has the file.

        Raises:
            LoadError: there is no such shard, or it cannot be moved.
        """
        moved = self.shards(source).get(place)
        if moved is None:
            raise LoadError(f"shard {place} of {source.fingerprint} is not on this node")
        temporary = self._directory(key) / _temporary_name(index)

        def link() -> SealedShard:
            self._link(moved.path, temporary)
            return replace(moved.sealed, index=index)

        shard = self._keep(key, index, temporary, 0, link, moved.renamed)
        self.drop(source, place)
        return shard

    def share(
        self, key: VersionKey, sealed: SealedShard, other: VersionKey, index: int
    ) -> MappedShard:
        """Gives the file of another version's shard a second name: no byte is copied.

        Args:
            sealed: the shard to store, with the checksum of the other one.

        Raises:
            NodeUnavailableError: the other one is not here, or the file system has no hard links.
            LoadError: it cannot be written.
        """
        temporary = self._directory(key) / _temporary_name(sealed.index)
        shard = self.shards(other).get(index)
        if shard is None or shard.sealed.checksum != sealed.checksum:
            raise NodeUnavailableError(f"shard {index} of {other} is not on this node")

        def link() -> SealedShard:
            try:
                self._link(shard.path, temporary)
            except OSError as error:
                raise NodeUnavailableError(
                    f"the file of shard {index} of {other} cannot be shared: {error.strerror}"
                ) from None
            return replace(shard.sealed, index=sealed.index)

        return self._keep(key, sealed.index, temporary, 0, link, shard.renamed)

    def erase(self, key: VersionKey, index: int, places: bytes) -> None:
        """Overwrites rows of a shard in its file, under all names that the file has.

        If the process ends meanwhile, the next one continues: see `erasures_begun`.

        Args:
            places: a row set.

        Raises:
            OSError: the file cannot be written. It stays as it was, or is damaged.
        """
        with self._manifests:  # so nobody takes it for damaged
            shard = self.shards(key).get(index)
            if shard is None:
                return
            names = {
                (name, at): other
                for name, shards in self.versions().items()
                for at, other in shards.items()
                if other.inode == shard.inode
            }
            paths = [other.path for other in names.values()]
            self._format.note_erased()
            with erasures_begun.noted(self.cache_dir, paths, places):
                sealed = erasures_begun.overwrite(shard.path, shard.sealed, places)
                for (name, at), other in names.items():
                    made = MappedShard(replace(sealed, index=at), other.path)
                    manifest.add(self._directory(name) / MANIFEST, made.sealed)
                    self._add(name, made)
        logger.info("rows erased dataset=%s shard=%d", key.dataset, index)

    @property
    def is_removing(self) -> bool:
        """Whether dropped files are still being freed."""
        return self._removals.are_running

    def _keep(
        self,
        key: VersionKey,
        index: int,
        temporary: Path,
        size: int,
        write: Callable[[], SealedShard],
        mapped: Callable[[SealedShard, Path], MappedShard] = MappedShard,
    ) -> MappedShard:
        """Writes a file under a temporary name, seals it, and maps it."""
        directory = self._directory(key)
        final = directory / shard_file_name(index)
        if size:  # a shared file takes no room
            self._reserve(temporary, size)
        try:
            self._create(temporary)
            sealed = write()
            if sealed.erased:
                self._format.note_erased()
            temporary.chmod(0o444)  # readers map it: a write would change or end them
            fsync(temporary)
            os.replace(temporary, final)
            fsync(directory)
            shard = mapped(sealed, final)
            if size:  # else its offsets were checked under its other name
                shard.check_all()
            with self._manifests:
                manifest.add(directory / MANIFEST, sealed)
                self._add(key, shard, temporary)
        except OSError as error:
            remove_file(final)
            raise _cannot_write(key, index, size, directory, error) from None
        except (ValueError, pa.ArrowException) as error:
            remove_file(final)
            raise NodeUnavailableError(
                f"shard {index} of {key.dataset!r} cannot be read as it was sealed: {error}"
            ) from None
        finally:
            remove_file(temporary)
            self._release(temporary)
            self._remove_empty(directory)
        logger.info(
            "shard sealed dataset=%s shard=%d rows=%d bytes=%d",
            key.dataset, index, sealed.num_rows, sealed.num_bytes,
        )  # fmt: skip
        return shard

    def _add(self, key: VersionKey, shard: MappedShard, reserved: Path | None = None) -> None:
        """Adds a sealed shard and ends the reservation of its file, so that it counts once."""
        with self._lock:
            if reserved is not None:
                self._reserved.pop(reserved, None)
            shards = self._shards.setdefault(key, {})
            replaced = shards.get(shard.sealed.index)
            shards[shard.sealed.index] = shard
            self._count([shard])
            self._uncount([replaced] if replaced is not None else [])

    def drop(self, key: VersionKey, *indices: int) -> None:
        """Removes some shards. Readers that have them mapped keep their rows.

        Each call writes the manifest once.
        """
        with self._manifests:
            self._drop(key, indices)
        self._remove_empty(self._directory(key))

    def drop_this(self, key: VersionKey, shard: MappedShard) -> bool:
        """Removes one shard, unless another one has replaced it; returns whether it did.

        Also removes it from the versions that share its file.
        """
        with self._manifests:  # needed to replace a shard
            if self.shards(key).get(shard.sealed.index) is not shard:
                return False
            for name, shards in self.versions().items():
                same = [i for i, other in shards.items() if other.inode == shard.inode]
                self._drop(name, same)
                self._remove_empty(self._directory(name))
        return True

    def _drop(self, key: VersionKey, indices: Iterable[int]) -> None:
        """Needs the lock of the manifests."""
        directory = self._directory(key)
        with self._lock:
            shards = self._shards.get(key, {})
            dropped = [shards.pop(index) for index in indices if index in shards]
            self._uncount(dropped)
            kept = [shard.sealed for shard in shards.values()]
            if not shards:
                self._shards.pop(key, None)
        if not dropped:
            return
        self._removals.remove([shard.path for shard in dropped], _bytes_of(dropped))
        for shard in dropped:
            logger.info("shard dropped dataset=%s shard=%d", key.dataset, shard.sealed.index)
        try:
            manifest.write(directory / MANIFEST, kept)
        except OSError as error:  # adoption drops a line without a file
            logger.warning("manifest not written path=%s reason=%s", directory, error)

    def drop_version(self, key: VersionKey) -> None:
        """Removes all files of one version."""
        with self._lock:
            shards = self._shards.pop(key, {})
            self._uncount(shards.values())
        directory = self._directory(key)
        if directory.exists():
            self._removals.remove([directory], _bytes_of(shards.values()))
            logger.info("version dropped dataset=%s fingerprint=%s", key.dataset, key.fingerprint)
        self._remove_empty(directory)

    def _directory(self, key: VersionKey) -> Path:
        """The one place that makes a path of a name; it is always below ``cache_dir``.

        Raises:
            InvalidTicketError: it is not a valid name.
        """
        checked_names.version_key(key.dataset, key.fingerprint)
        return self.cache_dir / key.folder / key.fingerprint

    def _create(self, path: Path) -> None:
        """Makes an empty file and its directories, so that `_remove_empty` keeps them."""
        with self._lock:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def _link(self, path: Path, name: Path) -> None:
        """Replaces the empty file ``name`` by another name of a file."""
        with self._lock:  # the directory is empty meanwhile
            name.unlink()
            os.link(path, name)

    def _remove_empty(self, directory: Path) -> None:
        """Removes the directories of a version and of its dataset, if they are empty."""
        with self._lock:
            remove_empty(directory)

    def _reserve(self, path: Path, size: int) -> None:
        """Checks that a file fits; part of it may be reserved already."""
        with self._lock:
            others = sum(self._reserved.values())
        if self._free_bytes() < size + others:
            self._removals.wait()
        with self._lock:
            before = self._reserved.get(path, 0)
            held = self._stored_bytes + sum(self._reserved.values()) - before
            limit = self.memory_limit_bytes
            if limit is not None and held + size > limit:
                raise NoRoomError(
                    f"a shard of {size} bytes does not fit: {held} of the memory limit of "
                    f"{limit} bytes are used",
                    held + size - limit,
                )
            free = self._free_bytes()
            if size - before > free:
                raise NoRoomError(
                    f"a shard of {size} bytes does not fit in {self.cache_dir}: {free} bytes free",
                    size - before - free,
                )
            self._reserved[path] = size

    def _free_bytes(self) -> int:
        try:
            return shutil.disk_usage(self.cache_dir).free
        except OSError as error:  # it was removed, such as /dev/shm when its owner logs out
            raise LoadError(f"cannot use cache_dir {self.cache_dir}: {error.strerror}") from None

    def _count(self, shards: Iterable[MappedShard]) -> None:
        """Adds the bytes of files that have no other name. Needs the lock."""
        for shard in shards:
            self._names[shard.inode] += 1
            self._stored_bytes += shard.sealed.num_bytes * (self._names[shard.inode] == 1)

    def _uncount(self, shards: Iterable[MappedShard]) -> None:
        """Like `_count`, for names that were removed."""
        for shard in shards:
            self._names[shard.inode] -= 1
            if not self._names[shard.inode]:
                del self._names[shard.inode]
                self._stored_bytes -= shard.sealed.num_bytes

    def _release(self, path: Path) -> None:
        with self._lock:
            self._reserved.pop(path, None)


def write_shard_file(path: Path, batch: pa.RecordBatch) -> None:
    """Writes a stored batch as one Arrow IPC file."""
    whole = padded(batch)
    with pa.OSFile(str(path), "wb") as sink, shard_writer(sink, whole.schema) as writer:
        writer.write_batch(whole)


def _temporary_name(index: int) -> str:
    return f".{shard_file_name(index)}.{uuid.uuid4().hex}.tmp"


def _cannot_write(
    key: VersionKey, index: int, size: int, directory: Path, error: OSError
) -> LoadError:
    reason = (
        f"cannot write shard {index} of {key.dataset!r} ({size} bytes) to {directory}: "
        f"{error.strerror}"
    )
    return NoRoomError(reason, size) if error.errno == errno.ENOSPC else LoadError(reason)


def _bytes_of(shards: Iterable[MappedShard]) -> int:
    return sum(shard.sealed.num_bytes for shard in shards)
