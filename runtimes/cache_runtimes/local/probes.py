"""Probes of a container, as a kubelet makes them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cache_runtimes.local.handlers import port_number

Json = dict[str, Any]

_DIRECT = (("grpc.enable_http_proxy", 0),)  # no proxy knows this machine's loopback addresses


# Runs a command in the container within so many seconds: its exit code, None when it took longer.
Execute = Callable[[Sequence[str], float], Awaitable[int | None]]


async def probe(wanted: Json, container: Json, address: str, execute: Execute) -> bool:
    """Whether a probe succeeds within its timeout.

    Args:
        wanted: a startupProbe, livenessProbe or readinessProbe, as `check_handlers` lets it pass.
        address: of the pod.
    """
    timeout_s = float(wanted.get("timeoutSeconds", 1))
    if "grpc" in wanted:
        return await _grpc(address, wanted["grpc"], timeout_s)
    if "tcpSocket" in wanted:
        return await _tcp(address, port_number(wanted["tcpSocket"]["port"], container), timeout_s)
    if "httpGet" in wanted:
        port = port_number(wanted["httpGet"]["port"], container)
        return await _http(address, port, wanted["httpGet"].get("path", "/"), timeout_s)
    try:
        return await execute(wanted["exec"]["command"], timeout_s) == 0
    except OSError:
        return False


async def _grpc(address: str, wanted: Json, timeout_s: float) -> bool:
    async with grpc.aio.insecure_channel(f"{address}:{wanted['port']}", _DIRECT) as channel:
        request = health_pb2.HealthCheckRequest(service=wanted.get("service") or "")
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(request, timeout=timeout_s)  # type: ignore[attr-defined]
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def _tcp(address: str, port: int, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(address, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def _http(address: str, port: int, path: str, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(address, port)
            with contextlib.closing(writer):
                request = f"GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n"
                writer.write(request.encode())
                status = (await reader.readline()).split()
    except (OSError, TimeoutError):
        return False
    return len(status) > 1 and status[1].isdigit() and 200 <= int(status[1]) < 400
