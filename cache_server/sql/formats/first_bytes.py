"""File kinds by their first bytes. Pure.

Refuses a file of another kind than its name or spec says. Otherwise it might be read as a nonsense
table, or fail without a clear reason.
"""

from __future__ import annotations

FIRST_BYTES = 256  # bytes of a file that are enough to tell
_KINDS = (  # how files begin, their format, the message
    (b"\x1f\x8b", "", "it is compressed by gzip, which is not read: unpack it"),
    (b"\x28\xb5\x2f\xfd", "", "it is compressed by zstd, which is not read: unpack it"),
    (b"BZh91AY&SY", "", "it is compressed by bzip2, which is not read: unpack it"),
    (b"\xfd7zXZ\x00", "", "it is compressed by xz, which is not read: unpack it"),
    (b"\x04\x22\x4d\x18", "", "it is compressed by lz4, which is not read: unpack it"),
    (b"PK\x03\x04", "", "it is a ZIP archive, as files of Excel are"),
    (b"PAR1\x15", "parquet", "it is Parquet: say format: parquet"),
    (b"ARROW1\x00\x00", "arrow", "it is an Arrow file: say format: arrow"),
    (b"FEA1\x00\x00\x00\x00", "", "it is Feather of version 1, which is not read: write version 2"),
    (b"\xff\xfe", "", "it is in UTF-16 or UTF-32: write it as UTF-8"),
    (b"\xfe\xff", "", "it is in UTF-16: write it as UTF-8"),
)
_BOM = b"\xef\xbb\xbf"
_PAGES = (b"<!doctype html", b"<html", b"<head", b"<body", b"<!--")
_TEXTS = ("csv", "json")


def objection(head: bytes, format: str) -> str | None:
    """Why a file is not of ``format``; None if it may be.

    Args:
        head: its first `FIRST_BYTES` bytes, or all of a shorter file.
    """
    for magic, own, what in _KINDS:
        if head.startswith(magic) and own != format:
            return what
    text = head.removeprefix(_BOM).lstrip().lower()
    if text.startswith(_PAGES):
        return "it is an HTML page, such as that of a login or of an error"
    if text.startswith(b"<?xml"):
        return "it is XML"
    if format in _TEXTS and b"\x00" in head[:4]:
        return "it holds null characters, as UTF-16 does: write it as UTF-8"
    if format == "json" and head.startswith(_BOM):
        return "it begins with a byte order mark, which JSON must not have: remove it"
    return None
