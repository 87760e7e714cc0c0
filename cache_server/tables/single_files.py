"""Reads one whole file of text that a function of SQL names: a tokenizer, a chat template.

A file is data: JSON, or text. A function gets nothing else, so no file holds code for it.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickletools
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from cache_protocol.cli.output import size
from cache_protocol.errors import LoadError, TransientLoadError
from cache_server import object_stores
from cache_server.source.outages import load_error
from cache_server.tables import local_files

MAX_BYTES = 128 << 20


def read_text(
    source: str,
    kind: str,
    options: Mapping[str, str],
    secrets: Mapping[str, str],
    sha256: str = "",
) -> tuple[str, str]:
    """The digest of a file, and its text.

    Args:
        source: path or URI of one file.
        kind: ``json file`` or ``text file``.
        options, secrets: of its store.
        sha256: that it must have; empty: any.

    Raises:
        LoadError: it cannot be read, is too large, is not of its kind, or changed; names it.
    """
    content = _content(source, options, secrets)
    found = hashlib.sha256(content).hexdigest()
    if sha256 and found != sha256:
        raise TransientLoadError(
            f"file {source} changed since the dataset was planned: load the dataset again"
        )
    try:
        text = content.decode()
        if kind == "json file":
            json.loads(text)
    except (ValueError, RecursionError) as error:
        what = code_in(content) or str(error)
        raise LoadError(f"file {source} must be a {kind}: {what}") from None
    if what := code_in(content):
        raise LoadError(f"file {source} must be a {kind}: {what}")
    return found, text


def code_in(content: bytes) -> str:
    """What kind of code a file holds, by what it is; empty if none is known."""
    if zipfile.is_zipfile(io.BytesIO(content)):
        return "it is a zip archive, as torch.save writes with a pickle inside"
    if content.startswith((b"\x7fELF", b"MZ", b"#!")):
        return "it is a program"
    try:
        for operation, _, _ in pickletools.genops(content):
            if operation.name == "STOP":
                return "it is a pickle, which runs code when it is read"
    except Exception:  # whatever else it is
        return ""
    return ""


def _content(source: str, options: Mapping[str, str], secrets: Mapping[str, str]) -> bytes:
    if not object_stores.is_remote(source):
        _, paths = local_files.expand(source, (".json", ".jinja", ".txt"), ())
        path = Path(_only(source, paths))
        try:
            if (num_bytes := path.stat().st_size) <= MAX_BYTES:
                return path.read_bytes()
        except OSError as error:
            raise load_error(f"cannot read file {path}: {error.strerror}", error) from None
        raise _too_large(source, num_bytes)
    files = {file.path: file for file in object_stores.expand(source, (), options, secrets)}
    file = files[_only(source, list(files))]
    if file.size > MAX_BYTES:
        raise _too_large(source, file.size)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "file")
        object_stores.download(file, target, options, secrets)
        return target.read_bytes()


def _only(source: str, paths: list[str]) -> str:
    if len(paths) != 1:
        raise LoadError(f"source {source!r} of a function must be one file, it is {len(paths)}")
    return paths[0]


def _too_large(source: str, num_bytes: int) -> LoadError:
    return LoadError(
        f"file {source} has {size(num_bytes)}: a file of a function has at most {size(MAX_BYTES)}"
    )
