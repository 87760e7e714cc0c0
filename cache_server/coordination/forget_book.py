"""The acts that forget rows, and the tombstones of datasets, as documents of the catalogue.

.forgets/<number>.json               one act: its rows until it is done, then its attestation
.tombstones/<dataset>.json           hashes of the rows that no version of a dataset may have
.forget-keys.json                    the key of these hashes, and that of the attestations
"""

from __future__ import annotations

import base64
import json
import secrets
from typing import Any

from cache_protocol.errors import ConfigError
from cache_protocol.wire import attestations
from cache_server.coordination.catalogue_store import CatalogueStore
from cache_server.shards import state_files
from cache_server.shards.version_key import VersionKey

_ACTS, _TOMBSTONES, _KEYS = ".forgets", ".tombstones", ".forget-keys.json"


class ForgetBook:
    """Documents of a store. One thread at a time. A damaged one is an error: rows could come back.

    Args:
        store: of the documents.
    """

    def __init__(self, store: CatalogueStore) -> None:
        self._store = store
        self._keys: dict[str, bytes] | None = None

    def keys(self, *, make: bool = True) -> dict[str, bytes]:
        """The key of the hashes, ``hash``, and that of the attestations, ``sign``; or none.

        Raises:
            OSError: they cannot be written. ConfigError: they cannot be read.
        """
        if self._keys is None:
            found = self._read(_KEYS)
            if found is None and not make:
                return {}
            if found is None:
                made = {"hash": secrets.token_hex(32), "sign": attestations.new_key().hex()}
                self._write(_KEYS, {"keys": made})
                found = {"keys": made}
            self._keys = {name: bytes.fromhex(key) for name, key in found["keys"].items()}
        return self._keys

    def write_act(self, number: int, act: dict[str, Any]) -> None:
        """Writes one act.

        Raises:
            OSError: it cannot be written; the one before stays.
        """
        self._write(f"{_ACTS}/{number}.json", {"act": act})

    def acts(self) -> dict[int, dict[str, Any]]:
        """Every act, by number.

        Raises:
            ConfigError: one cannot be read.
        """
        found = {}
        for name in self._store.names(_ACTS):
            act = self._read(name)
            if act is not None and name.endswith(".json"):
                found[int(name.rpartition("/")[2].removesuffix(".json"))] = act["act"]
        return dict(sorted(found.items()))

    def write_tombstones(self, dataset: str, number: int, known: bytes) -> None:
        """Writes the tombstones of a dataset.

        Raises:
            OSError: as `write_act`.
        """
        rows = [dataset, number, base64.b64encode(known).decode()]
        folder = VersionKey(dataset, "").folder
        self._write(f"{_TOMBSTONES}/{folder}.json", {"tombstones": rows})

    def tombstones(self) -> dict[str, tuple[int, bytes]]:
        """Dataset -> the number of its last act, and its tombstones.

        Raises:
            ConfigError: one cannot be read.
        """
        found = {}
        for name in self._store.names(_TOMBSTONES):
            if (content := self._read(name)) is not None and name.endswith(".json"):
                dataset, number, known = content["tombstones"]
                found[str(dataset)] = int(number), base64.b64decode(known)
        return found

    def _write(self, name: str, content: dict[str, Any]) -> None:
        self._store.write(name, state_files.encode(json.dumps(content)))

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            data = self._store.read(name)
            return None if data is None else state_files.decode(data)[0]
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self._store.shown(name)} says which rows were forgotten, and cannot be read: "
                f"{error}: put back its bytes from a backup, or rows may come back"
            ) from None
