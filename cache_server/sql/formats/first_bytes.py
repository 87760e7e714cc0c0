"""Pure: what a file is by its first bytes, where that is not what its name or its spec says.

A file that is of another kind is refused by name: some would be read as a table of nonsense, and of
the others the library underneath does not say what they are.
"""

from __future__ import annotations

FIRST_BYTES = 256  # of a file that tell
_KINDS = (  # how files begin, the format that they are of, what is said of them
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
    """Why a file that begins so is none of ``format``; None where nothing speaks against it.

    Args:
        head: its first `FIRST_BYTES` bytes, or all of a shorter one.
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
        return "it begins with a byte order mark, which JSON has none of: write it without"
    return None
