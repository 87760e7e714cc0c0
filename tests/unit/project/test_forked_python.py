"""The server of forks, which runs the programs of tests."""

from __future__ import annotations

import socket

import pytest

from tests.forked_python import messages


@pytest.mark.parametrize("sent", [b"", (8).to_bytes(8, "big") + b"[1, 2"])
def test_a_client_that_ends_before_it_has_sent_all_is_told_from_a_request(sent: bytes) -> None:
    client, server = socket.socketpair()
    with server:
        with client:
            client.sendall(sent)
        with pytest.raises(EOFError):
            messages.receive(server)
