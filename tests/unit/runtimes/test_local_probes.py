"""Probes of run-local by TCP; those by gRPC are in the tests of runs."""

from __future__ import annotations

import asyncio
import socket

from cache_runtimes.local.kubelet import probe_succeeds
from cache_runtimes.local.pods import Pod


def test_a_probe_by_tcp_succeeds_while_its_port_accepts_connections() -> None:
    pod = Pod("job", "default", "job-node-0-0", "127.0.0.1", {"name": "node"}, 0)
    with socket.create_server((pod.address, 0)) as server:
        probe = {"tcpSocket": {"port": server.getsockname()[1]}}
        assert asyncio.run(probe_succeeds(pod, {"name": "node"}, probe))
    assert not asyncio.run(probe_succeeds(pod, {"name": "node"}, probe))
