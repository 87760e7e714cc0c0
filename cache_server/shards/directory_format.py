"""The format of a cache directory, which says whether an older release can read it.

<cache_dir>/.format.json    none: 1
"""

from __future__ import annotations

import json
import threading
from pathlib import Path

from cache_protocol.errors import ConfigError
from cache_server.shards import state_files
from cache_server.shards.disk import fsync, replace_file

_PLAIN = 1  # manifests and shard files; raise it if older releases cannot read them
_ERASED = 2  # the same, and some rows are erased: older releases would load them again


class DirectoryFormat:
    """The format of one cache directory. Thread-safe.

    Raises:
        ConfigError: a newer release wrote it, and nothing was changed; or it cannot be read or
            written.
    """

    def __init__(self, cache_dir: Path) -> None:
        self._path = cache_dir / ".format.json"
        self._lock = threading.Lock()
        self._format = self._read()
        if self._format > _ERASED:
            raise ConfigError(
                f"a newer release wrote the shards in {cache_dir}, in format {self._format}, and "
                f"this one knows {_ERASED}: nothing was changed. Start that release or a later "
                "one again, or give another --cache-dir"
            )
        try:
            self._raise_to(_PLAIN)
        except OSError as error:
            raise ConfigError(f"cannot write {self._path}: {error.strerror}") from None

    def note_erased(self) -> None:
        """Keeps releases away that know nothing of erased rows; call it before the first is.

        Raises:
            OSError: it cannot be written.
        """
        self._raise_to(_ERASED)

    def _read(self) -> int:
        try:
            if self._path.exists():
                content, _ = state_files.decode(self._path.read_bytes())
                return int(content["format"])
        except (ArithmeticError, ValueError, TypeError, LookupError) as error:
            state_files.set_aside(self._path, error)
        except OSError as error:
            raise ConfigError(f"cannot read {self._path}: {error.strerror}") from None
        return 0

    def _raise_to(self, wanted: int) -> None:
        with self._lock:
            if self._format < wanted:
                replace_file(self._path, state_files.encode(json.dumps({"format": wanted})))
                fsync(self._path.parent)
                self._format = wanted
