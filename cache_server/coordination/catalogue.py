"""The state that a coordinator keeps on disk, to decide the same after a restart.

<cache_dir>/.catalogue/<dataset>@<fingerprint>.json    one version: its plan and its shards
<cache_dir>/.catalogue/*.json.damaged                  one that cannot be read; set aside
<cache_dir>/.catalogue/<dataset>@<fingerprint>.log     the groups in which its shards were sealed
<cache_dir>/.members.json                              the nodes that ever joined
<cache_dir>/.proven-members.json                       those that hold a shard for certain
<cache_dir>/.drains.json                               those that are drained
<cache_dir>/.dropped.json                              dropped versions, with their attempts
<cache_dir>/.keepings.json                             pins, priorities and reads of datasets
<cache_dir>/.catalogue-made                            empty; its time is the first start
<cache_dir>/.catalogue-id.json                         random; write ids begin with it

Each file has a checksum: see `state_files`. A damaged one is never taken for another.
"""

from __future__ import annotations

import json
import logging
import math
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from google.protobuf import json_format

from cache_protocol.errors import CacheError, InvalidTicketError, LoadError, from_proto, to_proto
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.principals import Viewer
from cache_server.plan.pinned_version import PinnedVersion, split_to_proto
from cache_server.shards import checked_names, state_files
from cache_server.shards.disk import remove_file
from cache_server.shards.version_key import VersionKey

logger = logging.getLogger(__name__)

_FORMAT = 7  # of an entry; raise it with every addition
_T = TypeVar("_T")
Moves = Mapping[VersionKey, Mapping[int, tuple[str, ...]]]  # -> shard -> its homes
Kept = tuple[bool, int, tuple[float, ...], float | None]  # see `Keeping`
_WRONG = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True)
class DamagedEntry:
    """One entry.

    Attributes:
        path: where the file is now.
        reason: what is wrong with it.
    """

    path: Path
    reason: str

    def error(self, shown: str) -> LoadError:
        """The error for who asks for its dataset.

        Args:
            shown: what the caller calls the dataset.
        """
        return LoadError(
            f"the catalogue entry of dataset {shown!r} is damaged: {self.reason}. The coordinator "
            f"set it aside as {self.path.name}, and the nodes keep the rows. Put the file back and "
            "start the coordinator again, or load or write the dataset again, or drop it"
        )


class DamagedEntries(dict[VersionKey, DamagedEntry]):
    """The damaged entries, by the version that the file's name tells. One thread at a time."""

    def of(self, dataset: str) -> DamagedEntry | None:
        """A damaged entry of a dataset."""
        return next((entry for key, entry in self.items() if key.dataset == dataset), None)

    def among(self, infos: Iterable[pb.DatasetInfo], viewer: Viewer) -> list[pb.DatasetInfo]:
        """Adds the damaged datasets of a viewer's namespace as failed ones, by name.

        Args:
            infos: one for each dataset that has another version.
        """
        infos_by_name = {}
        for key, entry in self.items():
            if viewer.can_read(key.dataset, ()):
                name = viewer.shown(key.dataset)
                infos_by_name[name] = pb.DatasetInfo(
                    spec=pb.DatasetSpec(name=name),
                    fingerprint=key.fingerprint,
                    state=pb.DATASET_STATE_FAILED,
                    schema=pa.schema([]).serialize().to_pybytes(),
                    error=to_proto(entry.error(name)),
                )
        infos_by_name |= {info.spec.name: info for info in infos}
        return [infos_by_name[name] for name in sorted(infos_by_name)]


def key_of_entry(name: str) -> VersionKey | None:
    """The version that the name of an entry's file tells; None: it names none."""
    folder, _, fingerprint = name.removesuffix(".json").rpartition("@")
    key = VersionKey.of_folder(folder, fingerprint)
    try:
        return checked_names.version_key(key.dataset, key.fingerprint)
    except InvalidTicketError:
        return None


@dataclass(frozen=True)
class SealedSummary:
    """Size, checksum and nulls of a sealed shard; the same on every replica."""

    num_rows: int
    num_bytes: int
    checksum: str
    nulls: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class CatalogueLog:
    """The log of the load of one version; see `LoadLog`.

    Attributes:
        attempt: of the version.
        sealed: the shards of all groups.
    """

    log_id: str
    attempt: int
    groups: tuple[tuple[int, ...], ...]
    sealed: Mapping[int, SealedSummary]


@dataclass(frozen=True)
class CatalogueEntry:
    """One version.

    Attributes:
        sealed: one summary for each shard once all are sealed, else empty.
        created: grows with each request; the newest version of a dataset has the largest.
        was_ready: it was served once, possibly without any shard.
        failure: why its load failed; without secrets.
        owner: the principal that asked for the load; empty: this cache had no authentication.
        homes, holders, load_s: see `VersionRecord`.
        evicted: it has no shards until it is read.
        log: of this attempt; None if it has no group yet, or cannot be read.
    """

    pinned: PinnedVersion
    attempt: int
    sealed: tuple[SealedSummary, ...]
    created: int = 0
    was_ready: bool = False
    failure: CacheError | None = None
    owner: str = ""
    homes: Sequence[Sequence[str]] = ()
    holders: tuple[str, ...] = ()
    log: CatalogueLog | None = None
    evicted: bool = False
    load_s: float = 0.0


class Catalogue:
    """Files in ``directory``, each replaced atomically. One thread at a time.

    Attributes:
        damaged: the entries that `read` set aside, until `forget` or `write`.
    """

    def __init__(self, directory: Path) -> None:
        self.damaged = DamagedEntries()
        self._entries = directory / ".catalogue"
        self._members = directory / ".members.json"
        self._proven = directory / ".proven-members.json"
        self._drains = directory / ".drains.json"
        self._dropped = directory / ".dropped.json"
        self._keepings = directory / ".keepings.json"
        self._made = directory / ".catalogue-made"
        self._id = directory / ".catalogue-id.json"

    def exists(self) -> bool:
        """Whether a coordinator ever used this directory."""
        return any(path.exists() for path in (self._made, self._entries, self._members))

    def age_s(self) -> float:
        """Seconds since the first coordinator started here; 0 at that start.

        Raises:
            OSError: the start cannot be written.
        """
        if not self._made.exists():
            if self.exists():
                return math.inf  # of a release that did not write it
            self._made.parent.mkdir(parents=True, exist_ok=True)
            self._made.touch()
        return max(0.0, time.time() - self._made.stat().st_mtime)

    def id(self) -> str:
        """Eight hexadecimal digits that tell this catalogue from others; made at its first start.

        Raises:
            OSError: it cannot be written.
        """

        def decode(value: Any) -> str:
            if not re.fullmatch(r"[0-9a-f]{8}", value):
                raise ValueError("no id of a catalogue")
            return str(value)

        if not (known := _read_value(self._id, "id", decode, "")):
            known = secrets.token_hex(4)
            _write_value(self._id, "id", known)
        return known

    def write(
        self,
        pinned: PinnedVersion,
        attempt: int,
        sealed: Sequence[SealedSummary],
        created: int = 0,
        *,
        was_ready: bool = False,
        failure: CacheError | None = None,
        owner: str = "",
        homes: Sequence[Sequence[str]] = (),
        holders: Sequence[str] = (),
        evicted: bool = False,
        load_s: float = 0.0,
    ) -> None:
        """Writes one version; the arguments are the attributes of `CatalogueEntry`.

        Raises:
            OSError: the entry cannot be written; the one before stays.
        """
        entry = pb.CatalogueEntry(
            spec=pinned.spec.to_proto(),
            plan=pinned.to_load_plan(attempt),
            keeps_every_row=pinned.keeps_every_row,
            created=created,
            was_ready=was_ready,
            failure=None if failure is None else to_proto(failure),
            owner=owner,
            holders=holders,
            evicted=evicted,
            load_s=load_s,
        )
        for shard in pinned.shards or ():
            entry.shards.add(
                splits=[split_to_proto(split) for split in shard.splits],
                content=shard.content,
                homes=homes[shard.index] if homes else (),
            )
        for summary in sealed:
            entry.sealed.add(
                num_rows=summary.num_rows,
                num_bytes=summary.num_bytes,
                checksum=summary.checksum,
                nulls=summary.nulls,
            )
        _write_entry(self._path(pinned.key), entry)
        self._forget_damaged(pinned.key)

    def write_log(self, key: VersionKey, log: CatalogueLog) -> None:
        """Writes the log of one version.

        Raises:
            OSError: as `write`.
        """
        # Plain JSON: a message of 100,000 shards takes nine times as long.
        groups = [
            [
                (index, shard.num_rows, shard.num_bytes, shard.checksum, dict(shard.nulls))
                for index in group
                for shard in [log.sealed[index]]
            ]
            for group in log.groups
        ]
        content = {"id": log.log_id, "attempt": log.attempt, "groups": groups}
        state_files.write(_log_path(self._path(key)), json.dumps(content))

    def forget(self, key: VersionKey) -> None:
        """Removes one version; also a damaged one."""
        path = self._path(key)
        remove_file(path)
        remove_file(_log_path(path))
        self._forget_damaged(key)

    def _forget_damaged(self, key: VersionKey) -> None:
        self.damaged.pop(key, None)
        remove_file(_aside(self._path(key)))

    def read(self) -> list[CatalogueEntry]:
        """Every version, oldest first; damaged ones are set aside and in `damaged`.

        Entries that were set aside before are tried again: another release may have written them.

        Raises:
            ConfigError: this process may not open a file.
        """
        for aside in self._entries.glob(f"*.json{state_files.DAMAGED}"):
            path = aside.with_suffix("")
            if not path.exists():
                aside.rename(path)
        paths = self._entries.glob("*.json")
        read = map(self._read, sorted(paths, key=lambda path: path.lstat().st_mtime_ns))
        entries = (entry for entry in read if entry is not None)
        return sorted(entries, key=lambda entry: entry.created)

    def _read(self, path: Path) -> CatalogueEntry | None:
        """One entry, with a checksum from now on; None: it is damaged, and was set aside."""
        try:
            content, has_checksum = state_files.read(path)
        except (OSError, ValueError) as error:
            self._set_aside(path, error)
            return None
        try:
            message = _parse_entry(content)
            entry = _decode(message, _read_log(_log_path(path), message.plan.attempt))
            if path != self._path(entry.pinned.key):
                raise ValueError(f"it is of another version, {entry.pinned.key}")
        except (*_WRONG, json_format.ParseError, pa.ArrowException, CacheError) as error:
            self._set_aside(path, error)
            return None
        if not has_checksum:
            try:
                _write_entry(path, message)
            except OSError as error:
                logger.error("checksum not written path=%s reason=%s", path, error.strerror)
        remove_file(_aside(path))  # it was put back
        return entry

    def _set_aside(self, path: Path, error: Exception) -> None:
        reason = str(error).partition("\n")[0]
        aside = state_files.set_aside(path, reason)
        if (key := key_of_entry(path.name)) is not None:
            self.damaged[key] = DamagedEntry(aside, reason)

    def write_members(self, node_ids: Iterable[str]) -> None:
        """Writes the ids of the nodes.

        Raises:
            OSError: as `write`.
        """
        _write_value(self._members, "members", sorted(node_ids))

    def read_members(self) -> list[str]:
        """The ids of the nodes that ever joined; empty if the file cannot be read.

        The nodes join again, but shards may move in the meantime.
        """
        return _read_names(self._members, "members")

    def write_proven(self, node_ids: Iterable[str]) -> None:
        """Writes the ids of the nodes that hold a shard for certain.

        Raises:
            OSError: as `write`.
        """
        _write_value(self._proven, "proven", sorted(node_ids))

    def read_proven(self) -> list[str]:
        """Their ids; empty if the file cannot be read."""
        return _read_names(self._proven, "proven")

    def write_drains(self, drains: Mapping[str, tuple[str, Moves]]) -> None:
        """Writes the drained nodes, each with its process and the homes of moved shards.

        Raises:
            OSError: as `write`.
        """
        rows = [
            [node_id, process, _moves_to_json(moves)]
            for node_id, (process, moves) in drains.items()
        ]
        _write_value(self._drains, "drains", rows)

    def read_drains(self) -> dict[str, tuple[str, Moves]]:
        """The drained nodes; empty if the file cannot be read."""

        def decode(rows: Any) -> dict[str, tuple[str, Moves]]:
            return {str(n): (str(process), _moves_from_json(moves)) for n, process, moves in rows}

        return _read_value(self._drains, "drains", decode, {})

    def write_dropped(self, attempts: Mapping[VersionKey, int]) -> None:
        """Writes the dropped versions, with the last attempt of each, in this order.

        Raises:
            OSError: as `write`.
        """
        rows = [[key.dataset, key.fingerprint, attempt] for key, attempt in attempts.items()]
        _write_value(self._dropped, "dropped", rows)

    def read_dropped(self) -> dict[VersionKey, int]:
        """The dropped versions; empty if the file cannot be read.

        Then reports of nodes about a dropped version may count again.
        """

        def decode(rows: Any) -> dict[VersionKey, int]:
            return {
                VersionKey(str(dataset), str(fingerprint)): int(attempt)
                for dataset, fingerprint, attempt in rows
            }

        return _read_value(self._dropped, "dropped", decode, {})

    def write_keepings(self, keepings: Mapping[str, Kept]) -> None:
        """Writes pins, priorities and reads, by dataset.

        Raises:
            OSError: as `write`.
        """
        rows = [[name, *values] for name, values in keepings.items()]
        _write_value(self._keepings, "keepings", rows)

    def read_keepings(self) -> dict[str, Kept]:
        """Pins, priorities and reads; empty if the file cannot be read."""

        def decode(rows: Any) -> dict[str, Kept]:
            return {
                str(name): (
                    bool(pinned),
                    int(priority),
                    tuple(map(float, reads)),
                    None if last_read is None else float(last_read),
                )
                for name, pinned, priority, reads, last_read in rows
            }

        return _read_value(self._keepings, "keepings", decode, {})

    def _path(self, key: VersionKey) -> Path:
        return self._entries / f"{key.folder}@{key.fingerprint}.json"


def _moves_to_json(moves: Moves) -> list[Any]:
    return [
        [key.dataset, key.fingerprint, index, homes]
        for key, of_version in moves.items()
        for index, homes in of_version.items()
    ]


def _moves_from_json(rows: Any) -> Moves:
    moves: dict[VersionKey, dict[int, tuple[str, ...]]] = {}
    for dataset, fingerprint, index, homes in rows:
        key = VersionKey(str(dataset), str(fingerprint))
        moves.setdefault(key, {})[int(index)] = tuple(map(str, homes))
    return moves


def _read_names(path: Path, name: str) -> list[str]:
    def decode(names: Any) -> list[str]:
        if not isinstance(names, list):
            raise ValueError("not a list")
        return [str(each) for each in names]

    return _read_value(path, name, decode, [])


def _write_value(path: Path, name: str, value: object) -> None:
    """Writes a file of one value, under its name: so no file is taken for one of another kind."""
    state_files.write(path, json.dumps({name: value}))


def _read_value(path: Path, name: str, decode: Callable[[Any], _T], empty: _T) -> _T:
    """The value of a file; empty if there is none. A damaged file is set aside.

    Args:
        decode: checks the value; raises one of `_WRONG`.
    """
    if not path.exists():
        return empty
    try:
        content, has_checksum = state_files.read(path)
        if has_checksum or isinstance(content, dict):
            (key,) = content
            if key != name:
                raise ValueError(f"it has {key!r} in place of {name!r}")
            content = content[name]
        return decode(content)
    except (OSError, *_WRONG) as error:
        state_files.set_aside(path, error)
        return empty


def _write_entry(path: Path, entry: pb.CatalogueEntry) -> None:
    entry.format = _FORMAT
    state_files.write(path, json_format.MessageToJson(entry, indent=None))


def _parse_entry(content: Any) -> pb.CatalogueEntry:
    """The message of an entry.

    Raises:
        json_format.ParseError: it is no entry. One of `_WRONG`: a newer release wrote it, or it is
            no object.
    """
    if content.get("format", _FORMAT) > _FORMAT:
        raise ValueError(
            f"a newer release wrote it, in format {content['format']}, and this one knows {_FORMAT}"
        )
    return json_format.ParseDict(content, pb.CatalogueEntry())


def _decode(entry: pb.CatalogueEntry, log: CatalogueLog | None) -> CatalogueEntry:
    """The entry of a message; see `_read` for the errors."""
    homes = tuple(tuple(shard.homes) for shard in entry.shards)
    return CatalogueEntry(
        PinnedVersion.from_catalogue(entry),
        entry.plan.attempt,
        tuple(
            SealedSummary(s.num_rows, s.num_bytes, s.checksum, dict(s.nulls)) for s in entry.sealed
        ),
        entry.created,
        entry.was_ready,
        from_proto(entry.failure) if entry.HasField("failure") else None,
        entry.owner,
        homes if any(homes) else (),
        tuple(entry.holders),
        log,
        entry.evicted,
        entry.load_s,
    )


def _aside(path: Path) -> Path:
    return path.with_name(path.name + state_files.DAMAGED)


def _log_path(entry: Path) -> Path:
    return entry.with_suffix(".log")


def _read_log(path: Path, attempt: int) -> CatalogueLog | None:
    if not path.exists():
        return None
    try:
        content, _ = state_files.read(path)
        rows = [[_sealed_from_json(*shard) for shard in group] for group in content["groups"]]
        groups = tuple(tuple(index for index, _ in group) for group in rows)
        log = CatalogueLog(
            str(content["id"]), int(content["attempt"]), groups, dict(chain.from_iterable(rows))
        )
    except (OSError, *_WRONG) as error:
        state_files.set_aside(path, error)
        return None
    return log if log.attempt == attempt else None


def _sealed_from_json(
    index: int, num_rows: int, num_bytes: int, checksum: str, nulls: Mapping[str, int]
) -> tuple[int, SealedSummary]:
    return int(index), SealedSummary(int(num_rows), int(num_bytes), str(checksum), dict(nulls))
