"""Standard output of both commands: where it cannot be written, they say so in one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from cache_protocol.errors import CacheError


@contextmanager
def checked_output() -> Iterator[None]:
    """What a command prints within it was written when it ends.

    Raises:
        CacheError: with the reason, where it could not be written, as on a full disk.
        SystemExit: 1, where nobody reads it any more; nothing is said, as by other commands.
    """
    if sys.stdout is None:  # it was closed by whoever started the command
        yield
        return
    output = _Output(sys.stdout)
    sys.stdout = cast(TextIO, output)
    try:
        try:
            yield
        except SystemExit:  # as typer ends; what was printed may not be written yet
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
    """A text stream that remembers how it failed.

    Attributes:
        failure: the error of the last write or flush that failed.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        """As of the stream."""
        with self._remembered():
            return self._stream.write(text)

    def flush(self) -> None:
        """As of the stream."""
        with self._remembered():
            self._stream.flush()

    def discard(self) -> None:
        """Drops what is not written: the interpreter would fail with it again as it ends."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    @contextmanager
    def _remembered(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
