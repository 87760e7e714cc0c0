"""A catalogue that all nodes reach, and that refuses what a former coordinator writes.

<name>-catalogue             the root: which parts each document is made of, and the term
<name>-catalogue-<term>-<n>  a document, compressed, or a part of one; never changed

A part is an object of an `ElectionStore`, such as a ConfigMap. A coordinator begins a term by
replacing the root. Each change writes new parts, and then replaces the root by the version of it
that this term wrote last. So it happens as a whole or not at all, and never in an earlier term: the
store refuses the version of the root.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace

from cache_server.coordination.catalogue_store import CatalogueLostError
from cache_server.election.objects import ConflictError, ElectionStore, RefusedError, StoredMap

logger = logging.getLogger(__name__)

MAX_BYTES = 400_000  # of a part; etcd takes a request of 1.5 MB
_TERM, _CHANGE = "trainer-data-cache/term", "trainer-data-cache/change"
_DOCUMENT = "trainer-data-cache/document"
_RETRY_S = 0.2
_PATIENCE_S = 8.0  # to learn whether a change happened, below the time for which a lease is valid

_Documents = Mapping[str, list[str]]  # by name: the parts, in order


class SharedCatalogue:
    """A `CatalogueStore`; it begins a term. Thread-safe.

    Args:
        objects: of the cache.
        leads: whether this process holds the lease.
        on_lost: called once it is known that another coordinator has the catalogue, or may have it.

    Raises:
        OSError: the store does not answer.
        CatalogueLostError: this process does not hold the lease any more.
        ValueError: the root is damaged.

    Attributes:
        term: of this coordinator; larger than that of each before.
    """

    def __init__(
        self, objects: ElectionStore, leads: Callable[[], bool], on_lost: Callable[[], None]
    ) -> None:
        self._objects = objects
        self._on_lost = on_lost
        self._lock = threading.RLock()
        self._is_lost = False
        self._made = 0  # parts in this term
        self._root = self._begin(leads)
        self.term = _term_of(self._root)
        self._documents = _decoded(self._root.content)
        self._read = {each.name: each.content for each in objects.maps()}
        known = {self._root.name}.union(*self._documents.values())
        self._discard(*(self._read.keys() - known))

    def _begin(self, leads: Callable[[], bool]) -> StoredMap:
        """Takes the root over, or makes it."""
        name = f"{self._objects.name}-catalogue"
        while True:
            before = self._objects.read_map(name) or StoredMap(name, _encoded({}))
            # Of a new catalogue, later than any of one that was deleted: nodes know its terms.
            term = _term_of(before) + 1 if before.version else int(time.time())
            # After the read: the next holder of the lease replaces the root later than this.
            if not leads():
                raise CatalogueLostError
            try:
                return self._objects.write_map(replace(before, notes=_notes(term)))
            except ConflictError:
                continue

    def exists(self) -> bool:
        """See `CatalogueStore`."""
        return True

    def age_s(self) -> float:
        """See `CatalogueStore`."""
        return max(0.0, time.time() - self._root.made_s)

    def names(self, folder: str) -> list[str]:
        """See `CatalogueStore`."""
        with self._lock:
            return [name for name in self._documents if name.startswith(f"{folder}/")]

    def read(self, name: str) -> bytes | None:
        """See `CatalogueStore`."""
        with self._lock:
            if (parts := self._documents.get(name)) is None:
                return None
            try:
                return zlib.decompress(b"".join(map(self._content_of, parts)))
            except zlib.error as error:
                raise ValueError(f"its bytes have changed since it was written: {error}") from None

    def _content_of(self, part: str) -> bytes:
        if part not in self._read:
            found = self._objects.read_map(part)
            self._read[part] = b"" if found is None else found.content
        return self._read[part]

    def write(self, name: str, content: str) -> None:
        """See `CatalogueStore`."""
        data = zlib.compress(content.encode())
        with self._lock:
            parts = [
                self._add(name, data[start : start + MAX_BYTES])
                for start in range(0, len(data), MAX_BYTES)
            ]
            others = {known: of for known, of in self._documents.items() if known != name}
            self._change({**others, name: parts})  # the last one was written last

    def remove(self, *names: str) -> None:
        """See `CatalogueStore`."""
        with self._lock:
            left = {name: of for name, of in self._documents.items() if name not in names}
            if len(left) < len(self._documents):
                self._change(left)

    def rename(self, name: str, new: str) -> None:
        """See `CatalogueStore`."""
        with self._lock:
            others = {n: of for n, of in self._documents.items() if n not in (name, new)}
            self._change({**others, new: self._documents[name]})

    def shown(self, name: str) -> str:
        """See `CatalogueStore`."""
        return f"{self._objects.kind}/{self._root.name}:{name}"

    def _add(self, document: str, content: bytes) -> str:
        """Makes a part that nothing refers to yet; returns its name."""
        self._require_not_lost()
        notes = {_DOCUMENT: document, _CHANGE: uuid.uuid4().hex}
        until = time.monotonic() + _PATIENCE_S
        name = self._new_name()
        while True:
            try:
                if self._is_added(StoredMap(name, content, notes)):
                    return name
                name = self._new_name()
            except RefusedError:
                raise
            except OSError as error:
                if time.monotonic() > until:
                    self._lose(error)
                    raise CatalogueLostError from None
                time.sleep(_RETRY_S)

    def _is_added(self, wanted: StoredMap) -> bool:
        """Makes a part, if an attempt before did not; False: a person took its name."""
        try:
            self._objects.write_map(wanted)
            return True
        except ConflictError:
            found = self._objects.read_map(wanted.name)
            return found is not None and found.notes == wanted.notes

    def _new_name(self) -> str:
        self._made += 1
        return f"{self._root.name}-{self.term}-{self._made}"

    def _change(self, documents: _Documents) -> None:
        """Makes the documents those of the catalogue, or raises and changes nothing.

        If it cannot be learned which of both, the catalogue counts as lost.
        """
        notes = _notes(self.term)
        content = _encoded(documents)
        until = time.monotonic() + _PATIENCE_S
        while True:
            self._require_not_lost()
            try:
                self._root = self._objects.write_map(
                    replace(self._root, content=content, notes=notes)
                )
                break
            except RefusedError:
                raise
            except OSError as error:
                reason = error
            try:
                found = self._objects.read_map(self._root.name)
            except OSError:
                if time.monotonic() > until:
                    self._lose(reason)
                time.sleep(_RETRY_S)
                continue
            if found is None or _term_of(found) != self.term:
                self._lose(reason)
                continue
            self._root = found
            if found.notes.get(_CHANGE) == notes[_CHANGE]:
                break
        before, self._documents = self._documents, dict(documents)
        used = {part for parts in documents.values() for part in parts}
        self._discard(*({part for parts in before.values() for part in parts} - used))

    def _discard(self, *parts: str) -> None:
        """Removes parts that nothing refers to; those that stay go when a term begins."""
        for part in parts:
            self._read.pop(part, None)
            try:
                self._objects.remove_map(part)
            except OSError as error:
                logger.warning("part not removed name=%s reason=%s", part, error.strerror)

    def _lose(self, reason: OSError) -> None:
        logger.error("catalogue lost term=%d reason=%s", self.term, reason.strerror)
        self._is_lost = True
        self._on_lost()

    def _require_not_lost(self) -> None:
        if self._is_lost:
            raise CatalogueLostError


def _notes(term: int) -> dict[str, str]:
    return {_TERM: str(term), _CHANGE: uuid.uuid4().hex}


def _term_of(root: StoredMap) -> int:
    return int(root.notes.get(_TERM, "0"))


def _encoded(documents: _Documents) -> bytes:
    return zlib.compress(json.dumps(documents).encode())


def _decoded(content: bytes) -> dict[str, list[str]]:
    return {str(name): [*map(str, of)] for name, of in json.loads(zlib.decompress(content)).items()}
