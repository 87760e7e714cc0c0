"""Standard output of both commands, with failed writes as one-line errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
