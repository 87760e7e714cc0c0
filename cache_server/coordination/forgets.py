"""The acts that forget rows: each is recorded first, and done when no live node has the rows."""

from __future__ import annotations

import base64
import hashlib
import logging
import time
from collections.abc import Iterable
from operator import itemgetter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cache_protocol.errors import ConfigError
from cache_protocol.storage.row_sets import decode_rows
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire import attestations
from cache_protocol.wire.protocol_version import ERASES_ROWS, told
from cache_server.coordination.catalogue import Catalogue
from cache_server.coordination.forget_book import ForgetBook
from cache_server.coordination.members.membership import Membership
from cache_server.coordination.versions.version_record import VersionRecord
from cache_server.coordination.versions.versions import Versions
from cache_server.shards.put_key import PutKey
from cache_server.shards.tombstones import BYTES, joined
from cache_server.shards.version_key import VersionKey

logger = logging.getLogger(__name__)

_ASKED = ("dataset", "by", "reason", "condition_mac")
_ATTESTED = ("number", *_ASKED, "begun_s", "versions")


class Cache(Protocol):
    """What acts change: a `CacheState`, inside its lock."""

    versions: Versions
    membership: Membership
    catalogue: Catalogue

    def mark_changed(self, key: VersionKey | None = None) -> None:
        """Wakes watchers, after a version changed."""


class Forgets:
    """The acts. Inside the lock of the coordinator, whose `CacheState` methods are given.

    Args:
        book: where they are kept.

    Attributes:
        open_acts: the acts that are not done, by number.
    """

    def __init__(self, book: ForgetBook) -> None:
        self._book = book
        self._acts = book.acts()
        self._tombstones = book.tombstones()
        self.open_acts = {n: act for n, act in self._acts.items() if not act.get("attestation")}
        self._is_applied = not self.open_acts

    def number(self, dataset: str) -> int:
        """The number of the last act on a dataset; 0: there was none."""
        return self._tombstones.get(dataset, (0, b""))[0]

    def key(self) -> bytes:
        """The key of the tombstones; made at the first act."""
        return self._book.keys()["hash"]

    def tombstones(self, dataset: str) -> pb.GetTombstonesResponse:
        """What loads of a dataset leave out."""
        number, known = self._tombstones.get(dataset, (0, b""))
        key = self._book.keys(make=False).get("hash", b"")
        return pb.GetTombstonesResponse(number=number, key=key, tombstones=known)

    def public_key(self) -> bytes:
        """Of the attestations; empty before the first act."""
        private = self._book.keys(make=False).get("sign")
        return b"" if private is None else attestations.public_key(private)

    def require_erasing(self, node: pb.Node) -> None:
        """Refuses a node of a release that would keep rows that were forgotten.

        Raises:
            ConfigError: names it.
        """
        if self._acts and told(node.protocol) < ERASES_ROWS:
            raise ConfigError(
                f"node {node.id} is of a release that cannot erase rows, and rows of this cache "
                "were forgotten: update the node"
            )

    def begin(
        self,
        state: Cache,
        about: dict[str, Any],
        rows: dict[str, bytes],
        tombstones: Iterable[bytes],
    ) -> int:
        """Records an act, and begins it; returns its number.

        Args:
            about: dataset, by, reason, condition digest; for the attestation.
            rows: fingerprint -> a row set.

        Raises:
            OSError: it cannot be recorded. Then nothing was begun.
        """
        number = max(self._acts, default=0) + 1
        versions: dict[str, Any] = {}
        for fingerprint, ids in rows.items():
            version = state.versions[VersionKey(about["dataset"], fingerprint)]
            erased = version.erasures.with_act(number, decode_rows(ids), version.row_starts() or ())
            changed = {
                i for i, places in erased.places.items() if places != version.erasures.places.get(i)
            }
            versions[fingerprint] = {
                "num_rows": (version.row_starts() or (0,))[-1],
                "erased_rows": len(decode_rows(ids)),
                "rows_sha256": hashlib.sha256(ids).hexdigest(),
                "shards": {str(i): {"before": version.sealed[i].checksum} for i in sorted(changed)},
            }
        act = {
            **about,
            "number": number,
            "begun_s": time.time(),
            "versions": versions,
            "rows": {name: base64.b64encode(ids).decode() for name, ids in rows.items()},
            "tombstones": base64.b64encode(joined(tombstones)).decode(),
        }
        self._book.write_act(number, act)
        self._acts[number] = self.open_acts[number] = act
        self._is_applied = False
        logger.info(
            "rows forgotten act=%d dataset=%s rows=%d by=%s",
            number, about["dataset"], sum(each["erased_rows"] for each in versions.values()),
            about["by"],
        )  # fmt: skip
        return number

    def asked_before(self, about: dict[str, Any]) -> int:
        """The number of the last act that the same was asked of; 0: there was none."""
        same = [n for n, act in self._acts.items() if all(act[k] == about[k] for k in _ASKED)]
        return max(same, default=0)

    def open_of(self, dataset: str) -> list[int]:
        """The acts on a dataset that are not done."""
        return [number for number, act in self.open_acts.items() if act["dataset"] == dataset]

    def settle(self, state: Cache) -> None:
        """Takes every act as far as it can go."""
        try:
            if not self._is_applied:
                for number, act in self.open_acts.items():
                    self._apply(state, number, act)
                self._is_applied = True
            for key, version in state.versions.items() if self._tombstones else ():
                if version.tombstones != (number := self.number(key.dataset)):
                    version.tombstones = number
                    state.mark_changed(key)
                if version.tombstones and not version.state.has_failed:
                    before = version.erasures
                    version.erase_noted(state.catalogue)
                    if before is not version.erasures:
                        state.mark_changed(key)
            for number, act in list(self.open_acts.items()):
                if not self.waits(state, number):
                    self._finish(state, number, act)
        except OSError as error:
            logger.error("act not written reason=%s", error.strerror)

    def _apply(self, state: Cache, number: int, act: dict[str, Any]) -> None:
        """Makes what an act says true, also for the second time."""
        dataset = act["dataset"]
        last, known = self._tombstones.get(dataset, (0, b""))
        if last < number:
            new = base64.b64decode(act["tombstones"])
            each = [known[i : i + BYTES] for i in range(0, len(known), BYTES)]
            each += [new[i : i + BYTES] for i in range(0, len(new), BYTES)]
            self._book.write_tombstones(dataset, number, joined(each))
            self._tombstones[dataset] = number, joined(each)
        for fingerprint, ids in act["rows"].items():
            key = VersionKey(dataset, fingerprint)
            if (version := state.versions.get(key)) is not None:
                version.erase(number, decode_rows(base64.b64decode(ids)), state.catalogue)
                state.mark_changed(key)

    def waits(self, state: Cache, number: int) -> list[str]:
        """What an act waits for: nodes that answer and may still have the rows."""
        act = self.open_acts.get(number)
        if act is None:
            return []
        dataset, waits = act["dataset"], []
        alive = state.membership.alive()
        for node_id in sorted(alive):
            member = state.membership.members[node_id]
            if not member.node.flight_location:
                waits.append(f"node {node_id} has not reported yet")
            for key, actual in member.actual.items():
                if key.dataset != dataset or member.untrusted:
                    continue
                version = state.versions.get(key)
                if version is None or PutKey.of(key.fingerprint) is not None:
                    waits.append(f"node {node_id} removes files of {key.fingerprint}")
                elif actual.forgot < number or any(
                    bool(shard.sealed and version.is_outdated(shard)) for shard in actual.shards
                ):
                    waits.append(f"node {node_id} erases rows of {key.fingerprint}")
        return waits

    def _finish(self, state: Cache, number: int, act: dict[str, Any]) -> None:
        """Writes and signs what was done."""
        dataset = act["dataset"]
        alive = state.membership.alive()
        away = []
        for node_id, member in state.membership.members.items():
            if node_id not in alive and any(key.dataset == dataset for key in member.actual):
                away.append(node_id)
        for fingerprint, about in act["versions"].items():
            version = state.versions.get(VersionKey(dataset, fingerprint))
            if version is not None:
                version.save(state.catalogue)
                for index, shard in about["shards"].items():
                    sealed = version.sealed.get(int(index))
                    shard["after"] = sealed.checksum if sealed else ""  # it is loaded again
        done = {name: act[name] for name in _ATTESTED}
        if "conditions" in act:
            done["conditions"] = act["conditions"]
        signed_before = [each for each in self._acts.values() if "attestation" in each]
        last = max(signed_before, key=itemgetter("place"), default=None)  # acts overtake each other
        done |= {
            "format": 1,
            "done_s": time.time(),
            "cache": state.catalogue.id(),
            "nodes": sorted(alive),
            "away": sorted(away),
            "previous": attestations.digest(last["attestation"]) if last else "",
        }
        signed = attestations.sign(done, self._book.keys()["sign"])
        kept = {k: v for k, v in act.items() if k not in ("rows", "tombstones")}
        kept |= {"attestation": signed, "place": len(signed_before)}
        self._book.write_act(number, kept)
        self._acts[number] = kept
        del self.open_acts[number]
        logger.info("act done number=%d dataset=%s", number, dataset)

    def messages(self, state: Cache, dataset: str, number: int = 0) -> list[pb.ForgetAct]:
        """The acts of a dataset, the latest first.

        Args:
            dataset: empty: all.
            number: only this one; 0: all.
        """
        found = []
        for each, act in sorted(self._acts.items(), reverse=True):
            if (dataset and act["dataset"] != dataset) or (number and each != number):
                continue
            message = pb.ForgetAct(
                number=each,
                dataset=act["dataset"],
                by=act["by"],
                reason=act["reason"],
                begun_s=act["begun_s"],
                done="attestation" in act,
                waits=self.waits(state, each),
                attestation=act.get("attestation", ""),
            )
            for fingerprint, about in act["versions"].items():
                message.versions.add(
                    fingerprint=fingerprint,
                    erased_rows=about["erased_rows"],
                    num_rows=about["num_rows"],
                )
            found.append(message)
        return found


def row_ids(places: dict[int, bytes], version: VersionRecord) -> npt.NDArray[np.int64]:
    """The row ids of places in shards of a version, ascending."""
    starts = version.row_starts() or ()
    found = [decode_rows(rows) + starts[index] for index, rows in sorted(places.items())]
    return np.sort(np.concatenate([*found, np.empty(0, np.int64)]))
