"""Probes of a container, as a kubelet makes them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.errors import ConfigError

Json = dict[str, Any]


async def probe(wanted: Json, container: Json, address: str, environment: dict[str, str]) -> bool:
    """Whether a probe succeeds within its timeout.

    Args:
        wanted: a startupProbe, livenessProbe or readinessProbe.
        address: of the pod.
        environment: of the container, for a probe that is a command in it.
    """
    timeout_s = float(wanted.get("timeoutSeconds", 1))
    if "grpc" in wanted:
        return await _grpc(address, wanted["grpc"], timeout_s)
    if "tcpSocket" in wanted:
        return await _tcp(address, port_number(wanted["tcpSocket"]["port"], container), timeout_s)
    if "httpGet" in wanted:
        port = port_number(wanted["httpGet"]["port"], container)
        return await _http(address, port, wanted["httpGet"].get("path", "/"), timeout_s)
    if "exec" in wanted:
        return await _exec(wanted["exec"]["command"], environment, timeout_s)
    raise ConfigError(f"container {container['name']}: a probe without an action: {wanted!r}")


def port_number(port: int | str, container: Json) -> int:
    """The number of a port that may be given by its name."""
    if isinstance(port, int):
        return port
    for known in container.get("ports") or ():
        if known.get("name") == port:
            return int(known["containerPort"])
    raise ConfigError(f"container {container['name']} has no port {port!r}")


async def _grpc(address: str, wanted: Json, timeout_s: float) -> bool:
    async with grpc.aio.insecure_channel(f"{address}:{wanted['port']}") as channel:
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


async def _exec(command: list[str], environment: dict[str, str], timeout_s: float) -> bool:
    nowhere = asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, stdin=nowhere, stdout=nowhere, stderr=nowhere
        )
    except OSError:
        return False
    try:
        async with asyncio.timeout(timeout_s):
            return await process.wait() == 0
    except TimeoutError:
        return False
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
