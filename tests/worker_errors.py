"""Errors of DataLoader workers, and what they would leave behind."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def raises_in_workers(kind: type[Exception], *, match: str) -> Iterator[None]:
    """`pytest.raises` for an error of a worker; the workers end with the block.

    The frame in which torch raises it again holds it, so that the iterator is part of a cycle. The
    garbage collector ends the iterator's queues before the iterator, which then waits 5 s for each
    worker: none is told to end. It would do so in whichever test comes next.
    """
    with pytest.raises(kind, match=match) as raised:
        yield
    traceback.clear_frames(raised.tb)
