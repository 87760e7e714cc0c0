"""Shard files from another node that stops, hangs or is slow."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cache_protocol.errors import NodeUnavailableError
from cache_server.node import peer_files
from cache_server.shards.version_key import VersionKey

KEY = VersionKey("t", "0" * 32)
SOON_S = 60.0  # of ten minutes
# Gives one chunk, does what it is told, and gives another one.
PEER = """
import os, signal, sys, time
import pyarrow as pa, pyarrow.flight as flight

class Peer(flight.FlightServerBase):
    def do_get(self, context, ticket):
        def chunks():
            for text in (b"one", b"two"):
                yield pa.record_batch({"chunk": pa.array([text], pa.large_binary())})
                exec(sys.argv[1])
        return flight.GeneratorStream(pa.schema([("chunk", pa.large_binary())]), chunks())

peer = Peer("grpc://127.0.0.1:0")
print(peer.port, flush=True)
peer.serve()
"""


@contextmanager
def peer(action: str) -> Iterator[str]:
    """The location of a peer."""
    command = [sys.executable, "-c", PEER, action]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"grpc://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def test_a_peer_that_is_stopped_in_the_middle_of_a_file_is_noticed() -> None:
    with peer("os.kill(os.getpid(), signal.SIGSTOP); time.sleep(600)") as location:
        chunks = peer_files.shard_file(location, KEY, 3, keepalive_s=0.5, keepalive_timeout_s=0.5)
        assert next(chunks).to_pybytes() == b"one"
        start = time.monotonic()
        with pytest.raises(NodeUnavailableError, match=f"node {location} did not give shard 3 of"):
            next(chunks)
        assert time.monotonic() - start < SOON_S


def test_a_peer_that_does_not_say_a_word_is_noticed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        location = f"grpc://127.0.0.1:{mute.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(NodeUnavailableError, match=f"node {location} did not give shard 3 of"):
            next(peer_files.shard_file(location, KEY, 3, keepalive_s=0.5, keepalive_timeout_s=0.5))
        assert time.monotonic() - start < SOON_S


def test_a_slow_peer_is_waited_for() -> None:
    with peer("time.sleep(2)") as location:
        chunks = peer_files.shard_file(
            location, KEY, 3, keepalive_s=0.1, keepalive_timeout_s=SOON_S
        )
        assert [chunk.to_pybytes() for chunk in chunks] == [b"one", b"two"]
