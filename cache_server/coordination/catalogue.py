"""The state that a coordinator keeps, to decide the same after a restart, or in another node.

.catalogue/<dataset>@<fingerprint>.json    one version: its plan and its shards
.catalogue/*.json.damaged                  one that cannot be read; set aside
.catalogue/<dataset>@<fingerprint>.log     the groups in which its shards were sealed
.catalogue/<dataset>@<fingerprint>.erased  its rows that were forgotten, by act
.members.json                              the nodes that ever joined
.zones.json                                the zones of those that have one
.proven-members.json                       those that hold a shard for certain
.drains.json                               those that are drained
.dropped.json                              dropped versions, with their attempts
.keepings.json                             pins, priorities and reads of datasets
.catalogue-id.json                         random; write ids begin with it

These are the documents of a `CatalogueStore`: files, or objects of Kubernetes. Each has a checksum:
see `state_files`. A damaged one is never taken for another.
"""

from __future__ import annotations

import base64
import json
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from google.protobuf import json_format

from cache_protocol.errors import (
    CacheError,
    ConfigError,
    InvalidTicketError,
    from_proto,
    to_proto,
)
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.coordination.catalogue_store import CatalogueStore, FileStore
from cache_server.coordination.damaged_entries import DamagedEntries, DamagedEntry
from cache_server.coordination.erasures import ErasedRows
from cache_server.coordination.forget_book import ForgetBook
from cache_server.plan.pinned_version import PinnedVersion, split_to_proto
from cache_server.shards import checked_names, state_files
from cache_server.shards.state_files import DAMAGED
from cache_server.shards.version_key import Moves, VersionKey

logger = logging.getLogger(__name__)

_ENTRIES = ".catalogue"
_MEMBERS, _PROVEN, _KEEPINGS = ".members.json", ".proven-members.json", ".keepings.json"
_DRAINS, _DROPPED, _ID = ".drains.json", ".dropped.json", ".catalogue-id.json"
_ZONES = ".zones.json"  # apart from the members: earlier releases read those as a list of names
_FORMAT = 8  # of an entry; raise it with every addition
_FORMAT_MEMBER = re.compile(rb'"format":\s*(\d+)')
_T = TypeVar("_T")
Kept = tuple[bool, int, tuple[float, ...], float | None]  # see `Keeping`
_WRONG = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


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
        erased: its rows that were forgotten, by act.
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
    erased: tuple[ErasedRows, ...] = ()


class Catalogue:
    """Documents of a store. One thread at a time, except `write_proven`.

    Args:
        store: of the documents; a directory: files in it.

    Attributes:
        damaged: the entries that `read` set aside, until `forget` or `write`.
        forget_book: the acts that forget rows, and tombstones.
    """

    def __init__(self, store: CatalogueStore | Path) -> None:
        self.damaged = DamagedEntries()
        self._store = FileStore(store) if isinstance(store, Path) else store
        self.forget_book = ForgetBook(self._store)

    def exists(self) -> bool:
        """Whether a coordinator ever used this store."""
        return self._store.exists()

    def age_s(self) -> float:
        """Seconds since the first coordinator used it; 0 at that start.

        Raises:
            OSError: the start cannot be written.
        """
        return self._store.age_s()

    def id(self) -> str:
        """Eight hexadecimal digits that tell this catalogue from others; made at its first start.

        Raises:
            OSError: it cannot be written.
        """

        def decode(value: Any) -> str:
            if not re.fullmatch(r"[0-9a-f]{8}", value):
                raise ValueError("no id of a catalogue")
            return str(value)

        if not (known := self._read_value(_ID, "id", decode, "")):
            known = secrets.token_hex(4)
            self._write_value(_ID, "id", known)
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
        self._write_entry(_name_of(pinned.key), entry)
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
        self._store.write(_log_of(_name_of(key)), state_files.encode(json.dumps(content)))

    def write_erased(self, key: VersionKey, acts: Iterable[ErasedRows]) -> None:
        """Writes the rows of one version that were forgotten.

        Raises:
            OSError: as `write`.
        """
        rows = [[act.number, base64.b64encode(act.rows).decode()] for act in acts]
        self._write_value(_erased_of(_name_of(key)), "erased", rows)

    def _read_erased(self, name: str) -> tuple[ErasedRows, ...]:
        """The rows of an entry that were forgotten.

        Raises:
            ValueError: they cannot be read: then the version must not be served.
        """
        try:
            if (data := self._store.read(name)) is None:
                return ()
        except OSError as error:
            raise ValueError(f"its erased rows cannot be read: {error.strerror}") from None
        content, _ = state_files.decode(data)
        return tuple(
            ErasedRows(int(number), base64.b64decode(rows, validate=True))
            for number, rows in content["erased"]
        )

    def forget(self, key: VersionKey) -> None:
        """Removes one version; also a damaged one."""
        name = _name_of(key)
        self.damaged.pop(key, None)
        self._store.remove(name, _log_of(name), _erased_of(name), _aside(name))

    def _forget_damaged(self, key: VersionKey) -> None:
        self.damaged.pop(key, None)
        self._store.remove(_aside(_name_of(key)))

    def read(self) -> list[CatalogueEntry]:
        """Every version, oldest first; damaged ones are set aside and in `damaged`.

        Entries that were set aside before are tried again: a person may have put back the bytes.

        Raises:
            ConfigError: this process may not open a file, or a newer release wrote one. Then
                nothing was changed.
        """
        self._refuse_newer()
        names = self._store.names(_ENTRIES)
        for name in names:
            put_back = name.removesuffix(DAMAGED)
            if name.endswith(_aside(".json")) and put_back not in names:
                self._store.rename(name, put_back)
        read = (self._read(n) for n in self._store.names(_ENTRIES) if n.endswith(".json"))
        entries = (entry for entry in read if entry is not None)
        return sorted(entries, key=lambda entry: entry.created)

    def _refuse_newer(self) -> None:
        for name in self._store.names(_ENTRIES):
            try:
                written = self._store.read(name) or b""
                if max(map(int, _FORMAT_MEMBER.findall(written)), default=0) > _FORMAT:
                    content, _ = state_files.decode(written)
                    _require_known(content["format"], self._store.shown(_ENTRIES))
            except (OSError, *_WRONG) as error:
                if isinstance(error, ConfigError):
                    raise
                continue  # it is damaged

    def _read(self, name: str) -> CatalogueEntry | None:
        """One entry, with a checksum from now on; None: it is damaged, and was set aside."""
        try:
            content, has_checksum = self._decoded(name)
        except (OSError, ValueError) as error:
            self._set_aside_entry(name, error)
            return None
        try:
            message = _parse_entry(content)
            log = self._read_log(_log_of(name), message.plan.attempt)
            entry = _decode(message, log, self._read_erased(_erased_of(name)))
            if name != _name_of(entry.pinned.key):
                raise ValueError(f"it is of another version, {entry.pinned.key}")
        except (*_WRONG, json_format.ParseError, pa.ArrowException, CacheError) as error:
            self._set_aside_entry(name, error)
            return None
        if not has_checksum:
            try:
                self._write_entry(name, message)
            except OSError as error:
                logger.error(
                    "checksum not written path=%s reason=%s",
                    self._store.shown(name), error.strerror,
                )  # fmt: skip
        self._store.remove(_aside(name))  # it was put back
        return entry

    def _decoded(self, name: str) -> tuple[Any, bool]:
        """The content of a document that is there, and whether it has a checksum.

        Raises:
            ValueError: it is damaged. OSError, ConfigError: see `CatalogueStore.read`.
        """
        return state_files.decode(self._store.read(name) or b"")

    def _set_aside_entry(self, name: str, error: Exception) -> None:
        reason = str(error).partition("\n")[0]
        aside = self._set_aside(name, reason)
        file = name.partition("/")[2]
        if (key := key_of_entry(file)) is not None:
            self.damaged[key] = DamagedEntry(aside.partition("/")[2], reason)

    def _set_aside(self, name: str, reason: object) -> str:
        """Renames a damaged document, so that a person can read it; returns its new name."""
        aside = _aside(name)
        logger.error("damaged file set aside path=%s reason=%s", self._store.shown(aside), reason)
        try:
            self._store.rename(name, aside)
        except OSError as error:
            logger.error(
                "damaged file not renamed path=%s reason=%s",
                self._store.shown(name), error.strerror,
            )  # fmt: skip
            return name
        return aside

    def _read_log(self, name: str, attempt: int) -> CatalogueLog | None:
        try:
            if self._store.read(name) is None:
                return None
            content, _ = self._decoded(name)
            rows = [[_sealed_from_json(*shard) for shard in group] for group in content["groups"]]
            groups = tuple(tuple(index for index, _ in group) for group in rows)
            log = CatalogueLog(
                str(content["id"]), int(content["attempt"]), groups, dict(chain.from_iterable(rows))
            )
        except (OSError, *_WRONG) as error:
            self._set_aside(name, error)
            return None
        return log if log.attempt == attempt else None

    def _write_entry(self, name: str, entry: pb.CatalogueEntry) -> None:
        entry.format = _FORMAT
        text = json_format.MessageToJson(entry, indent=None)
        self._store.write(name, state_files.encode(text))

    def _read_names(self, document: str, name: str) -> list[str]:
        def decode(names: Any) -> list[str]:
            if not isinstance(names, list):
                raise ValueError("not a list")
            return [str(each) for each in names]

        return self._read_value(document, name, decode, [])

    def _write_value(self, document: str, name: str, value: object) -> None:
        """Writes one value, under its name: so no document is taken for one of another kind."""
        self._store.write(document, state_files.encode(json.dumps({name: value})))

    def _read_value(self, document: str, name: str, decode: Callable[[Any], _T], empty: _T) -> _T:
        """The value of a document; empty if there is none. A damaged one is set aside.

        Args:
            decode: checks the value; raises one of `_WRONG`.
        """
        try:
            if (data := self._store.read(document)) is None:
                return empty
            content, has_checksum = state_files.decode(data)
            if has_checksum or isinstance(content, dict):
                (key,) = content
                if key != name:
                    raise ValueError(f"it has {key!r} in place of {name!r}")
                content = content[name]
            return decode(content)
        except (OSError, *_WRONG) as error:
            self._set_aside(document, error)
            return empty

    def write_members(self, node_ids: Iterable[str]) -> None:
        """Writes the ids of the nodes; raises OSError as `write`."""
        self._write_value(_MEMBERS, "members", sorted(node_ids))

    def read_members(self) -> list[str]:
        """The ids of the nodes that ever joined; empty if the file cannot be read.

        The nodes join again, but shards may move in the meantime.
        """
        return self._read_names(_MEMBERS, "members")

    def write_zones(self, zones: Mapping[str, str]) -> None:
        """Writes the zones of nodes that have one; raises OSError as `write`."""
        self._write_value(_ZONES, "zones", dict(sorted(zones.items())))

    def read_zones(self) -> dict[str, str]:
        """The zones; empty if the file cannot be read: replicas may move until nodes tell them."""

        def decode(zones: Any) -> dict[str, str]:
            return {str(n): str(zone) for n, zone in zones.items()}

        return self._read_value(_ZONES, "zones", decode, {})

    def write_proven(self, node_ids: Iterable[str]) -> None:
        """Writes the ids of nodes that hold a shard for certain; raises OSError as `write`."""
        self._write_value(_PROVEN, "proven", sorted(node_ids))

    def read_proven(self) -> list[str]:
        """Their ids; empty if the file cannot be read."""
        return self._read_names(_PROVEN, "proven")

    def write_drains(self, drains: Mapping[str, tuple[str, Moves]]) -> None:
        """Writes the drained nodes, each with its process and moves; raises OSError as `write`."""
        rows = [
            [node_id, process, _moves_to_json(moves)]
            for node_id, (process, moves) in drains.items()
        ]
        self._write_value(_DRAINS, "drains", rows)

    def read_drains(self) -> dict[str, tuple[str, Moves]]:
        """The drained nodes; empty if the file cannot be read."""

        def decode(rows: Any) -> dict[str, tuple[str, Moves]]:
            return {str(n): (str(process), _moves_from_json(moves)) for n, process, moves in rows}

        return self._read_value(_DRAINS, "drains", decode, {})

    def write_dropped(self, attempts: Mapping[VersionKey, int]) -> None:
        """Writes dropped versions and their last attempts, in order; raises OSError as `write`."""
        rows = [[key.dataset, key.fingerprint, attempt] for key, attempt in attempts.items()]
        self._write_value(_DROPPED, "dropped", rows)

    def read_dropped(self) -> dict[VersionKey, int]:
        """The dropped versions; empty if the file cannot be read.

        Then reports of nodes about a dropped version may count again.
        """

        def decode(rows: Any) -> dict[VersionKey, int]:
            return {
                VersionKey(str(dataset), str(fingerprint)): int(attempt)
                for dataset, fingerprint, attempt in rows
            }

        return self._read_value(_DROPPED, "dropped", decode, {})

    def write_keepings(self, keepings: Mapping[str, Kept]) -> None:
        """Writes pins, priorities and reads, by dataset; raises OSError as `write`."""
        rows = [[name, *values] for name, values in keepings.items()]
        self._write_value(_KEEPINGS, "keepings", rows)

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

        return self._read_value(_KEEPINGS, "keepings", decode, {})


def _name_of(key: VersionKey) -> str:
    return f"{_ENTRIES}/{key.folder}@{key.fingerprint}.json"


def _log_of(entry: str) -> str:
    return f"{entry.removesuffix('.json')}.log"


def _erased_of(entry: str) -> str:
    return f"{entry.removesuffix('.json')}.erased"


def _aside(name: str) -> str:
    return f"{name}{DAMAGED}"


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


def _parse_entry(content: Any) -> pb.CatalogueEntry:
    """The message of an entry.

    Raises:
        json_format.ParseError: it is no entry.
    """
    return json_format.ParseDict(content, pb.CatalogueEntry())


def _require_known(found: int, directory: str) -> None:
    if found > _FORMAT:
        raise ConfigError(
            f"a newer release wrote the catalogue {directory}, in format {found}, and this one "
            f"knows {_FORMAT}: nothing was changed. Start that release or a later one again, or "
            "put back the catalogue that you saved before the upgrade"
        )


def _decode(
    entry: pb.CatalogueEntry, log: CatalogueLog | None, erased: tuple[ErasedRows, ...]
) -> CatalogueEntry:
    """The entry of a message; see `Catalogue._read` for the errors."""
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
        erased,
    )


def _sealed_from_json(
    index: int, num_rows: int, num_bytes: int, checksum: str, nulls: Mapping[str, int]
) -> tuple[int, SealedSummary]:
    return int(index), SealedSummary(int(num_rows), int(num_bytes), str(checksum), dict(nulls))
