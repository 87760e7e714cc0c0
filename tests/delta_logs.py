"""Entries of a Delta table's log that deltalake does not write."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def inline_vector(rows: list[int]) -> dict[str, Any]:
    """A deletion vector of one roaring array container, as Delta's protocol lays it out."""
    bitmap = struct.pack(f"<IIHHI{len(rows)}H", 12346, 1, 0, len(rows) - 1, 16, *rows)
    data = struct.pack("<IqI", 1681511377, 1, 0) + bitmap
    text = ""
    for (word,) in struct.iter_unpack(">I", data + bytes(-len(data) % 4)):
        text += "".join(_Z85[word // 85**power % 85] for power in (4, 3, 2, 1, 0))
    return {
        "storageType": "i",
        "pathOrInlineDv": text,
        "sizeInBytes": len(data),
        "cardinality": len(rows),
    }


def commit(uri: Path, version: int, *actions: dict[str, Any]) -> None:
    """Writes a version of the log."""
    path = uri / "_delta_log" / f"{version:020}.json"
    path.write_text("\n".join(map(json.dumps, actions)))


def protocol(*features: str) -> dict[str, Any]:
    """The action that demands features of readers and writers."""
    names = list(features)
    return {
        "protocol": {
            "minReaderVersion": 3,
            "minWriterVersion": 7,
            "readerFeatures": names,
            "writerFeatures": names,
        }
    }


def delete_by_vector(uri: Path, rows: list[int]) -> None:
    """Version 1: rows of the only file are deleted by a vector."""
    first = (uri / "_delta_log" / f"{0:020}.json").read_text().splitlines()
    add = next(json.loads(line)["add"] for line in first if "add" in json.loads(line))
    remove = {"path": add["path"], "dataChange": True, "deletionTimestamp": 1}
    kept = {**add, "deletionVector": inline_vector(rows)}
    commit(uri, 1, protocol("deletionVectors"), {"remove": remove}, {"add": kept})
