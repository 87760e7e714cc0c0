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

logger = logging.getLogger(__name__)

DAMAGED = ".damaged"  # follows the name of a file that was set aside
_CHECKSUM = "sha256"
_START = re.compile(rb'\{"sha256": "([0-9a-f]{64})", ')


def encode(content: str) -> str:
    """A JSON object with its checksum.

    Args:
        content: text of an object with at least one member, without spaces at its ends.
    """
    checksum = hashlib.sha256(content.encode()).hexdigest()
    return f'{{"{_CHECKSUM}": "{checksum}", {content[1:]}'


def decode(data: bytes) -> tuple[Any, bool]:
    """The content of a file, and whether it has a checksum.

    Raises:
        ValueError: it is damaged; says how.
    """
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
