"""The lasting id of a node, in a file of its cache directory.

<cache_dir>/.node-id           the id alone: clients on the same machine read it
<cache_dir>/.node-id.sha256    its checksum
"""

from __future__ import annotations

import errno
import hashlib
import os
import uuid
from pathlib import Path

from cache_protocol.errors import ConfigError, InvalidTicketError
from cache_protocol.storage.shard_files import NODE_ID_FILE
from cache_server.shards import checked_names, state_files
from cache_server.shards.disk import remove_file, replace_file


def load(cache_dir: Path, address: str | None) -> str:
    """The id of the node with this directory; made at its first start.

    A damaged id is set aside: the node joins under a new name, and adopts its shards as before.

    Args:
        address: gives the id of a node with a lasting address; None: a random one.

    Raises:
        ConfigError: the file cannot be read or written.
    """
    path = cache_dir / NODE_ID_FILE
    try:
        return _known(path) or _new(path, address)
    except OSError as error:
        raise ConfigError(
            f"cannot use the name of the node in {path}: {error.strerror or error}; if the file is "
            "lost, remove it, and the node joins under another name"
        ) from None


def _known(path: Path) -> str | None:
    checksum = _checksum_of(path)
    if not path.exists():
        return None
    if path.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    data = path.read_bytes()
    try:
        node_id = checked_names.token(data.decode().strip(), "id of a node")
        written = checksum.read_bytes().decode() if checksum.exists() else _checksum(node_id)
        if written != _checksum(node_id):
            raise ValueError("its bytes have changed since it was written: the checksum differs")
    except (ValueError, InvalidTicketError) as error:
        if data:  # a node that was killed at its first start left an empty one
            state_files.set_aside(path, error)
        return None
    if not checksum.exists():
        replace_file(checksum, _checksum(node_id))
    return node_id


def _new(path: Path, address: str | None) -> str:
    node_id = uuid.uuid4().hex[:12]
    if address:
        node_id = hashlib.blake2b(address.encode(), digest_size=6).hexdigest()
    remove_file(_checksum_of(path))  # an id without one counts
    replace_file(path, node_id)
    replace_file(_checksum_of(path), _checksum(node_id))
    return node_id


def _checksum_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _checksum(node_id: str) -> str:
    return hashlib.sha256(node_id.encode()).hexdigest()
