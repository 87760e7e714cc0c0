"""Small JSON files of state, each with a checksum of its bytes.

    {"sha256": "<of the rest, with a brace in front>", <the rest of one object>

A file without a checksum was edited by a person: its reader must check it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

from cache_protocol.errors import ConfigError
from cache_server.shards.disk import NOT_THE_FILES_FAULT, replace_file

logger = logging.getLogger(__name__)

DAMAGED = ".damaged"  # follows the name of a file that was set aside
_CHECKSUM = "sha256"
_START = re.compile(rb'\{"sha256": "([0-9a-f]{64})", ')


def write(path: Path, content: str) -> None:
    """Replaces a file atomically by a JSON object and its checksum.

    Args:
        content: text of an object with at least one member, without spaces at its ends.

    Raises:
        OSError: it cannot be written; the old file stays.
    """
    checksum = hashlib.sha256(content.encode()).hexdigest()
    replace_file(path, f'{{"{_CHECKSUM}": "{checksum}", {content[1:]}')


def read(path: Path) -> tuple[Any, bool]:
    """The content of a file, and whether it has a checksum.

    Raises:
        ValueError: it is damaged; says how. OSError: it cannot be read.
        ConfigError: this process may not open it, or has no memory or handle left for it.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        if error.errno in NOT_THE_FILES_FAULT:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from None
        raise
    if found := _START.match(data):
        data = b"{" + data[found.end() :]
        if hashlib.sha256(data).hexdigest().encode() != found[1]:
            raise ValueError("its bytes have changed since it was written: the checksum differs")
    try:
        content = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if isinstance(content, dict) and _CHECKSUM in content:
        raise ValueError("its checksum is damaged")
    return content, found is not None


def set_aside(path: Path, reason: object) -> Path:
    """Renames a damaged file, so that nothing reads it and a person can; returns its new path."""
    aside = path.with_name(path.name + DAMAGED)
    logger.error("damaged file set aside path=%s reason=%s", aside, reason)
    try:
        os.replace(path, aside)
    except OSError as error:
        logger.error("damaged file not renamed path=%s reason=%s", path, error.strerror)
        return path
    return aside
