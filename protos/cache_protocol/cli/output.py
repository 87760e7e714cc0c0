"""What both commands print: checked writes, sizes, ``--version``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, TextIO, cast

from cache_protocol.errors import CacheError


@contextmanager
def checked_output() -> Iterator[None]:
    """Makes sure that everything printed inside was written.

    Raises:
        CacheError: a write failed, for example on a full disk; has the reason.
        SystemExit: 1, silently, if the reader has closed the pipe.
    """
    if sys.stdout is None:  # the parent process closed it
        yield
        return
    output = _Output(sys.stdout)
    sys.stdout = cast(TextIO, output)
    try:
        try:
            yield
        except SystemExit:  # typer ends so; printed text may not be written yet
            sys.stdout.flush()
            raise
    except OSError as error:
        if error is not output.failure:
            raise
        output.discard()
        if isinstance(error, BrokenPipeError):
            raise SystemExit(1) from None
        raise CacheError(f"cannot write to standard output: {error.strerror}") from None


class _Output:
    """A stream that records its failure.

    Attributes:
        failure: the error of the last write or flush that failed.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        """As the same method of the stream."""
        with self._recording_failure():
            return self._stream.write(text)

    def flush(self) -> None:
        """As the same method of the stream."""
        with self._recording_failure():
            self._stream.flush()

    def discard(self) -> None:
        """Drops unwritten text, which the interpreter would fail to write at its end."""
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, self._stream.fileno())
        os.close(devnull)

    @contextmanager
    def _recording_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def node_label(name: str, node_id: str) -> str:
    """What people call a node: the name of its machine or pod, then its id."""
    return f"{name[:63]} ({node_id})" if name else node_id


def with_labels(verdict: str, labels: Mapping[str, str]) -> str:
    """A verdict with the label of the node whose id it has.

    Args:
        labels: by id.
    """
    for node_id, label in labels.items():
        verdict = verdict.replace(f"node {node_id} ", f"node {label} ")
    return verdict


def size(num_bytes: int) -> str:
    """A number of bytes with a unit, such as ``1.5 MiB``."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(size, 1) < 1024:
            return f"{size:.1f} {unit}" if unit != "B" else f"{num_bytes} B"
        size /= 1024
    return f"{size:.1f} TiB"


def version_option(program: str) -> Any:
    """The option that prints the version of ``program`` and exits; for `typing.Annotated`."""
    import typer  # here, because nodes and readers print sizes alone

    def show(wanted: bool) -> None:
        if wanted:
            typer.echo(f"{program} {version('trainer-data-cache')}")
            raise typer.Exit

    return typer.Option("--version", is_eager=True, callback=show, help="Show the version.")
