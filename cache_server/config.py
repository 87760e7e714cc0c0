"""Frozen settings of a cache node. Reads no environment: `__main__` does."""

from __future__ import annotations

import ipaddress
import re
import socket
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from protos.errors import ConfigError
from protos.spec import parse_bytes

_HOST_PORT = re.compile(r"(?:grpc://)?(?P<host>[^\s:/]+|\[[0-9a-fA-F:]+\]):(?P<port>\d{1,5})")


def _host_port(value: object) -> object:
    match = _HOST_PORT.fullmatch(value) if isinstance(value, str) else None
    if value is None:
        return None
    if match is None or not 0 < int(match["port"]) < 65_536:
        raise ValueError(f"must be HOST:PORT of the coordinator's control port, got {value!r}")
    return f"{match['host']}:{match['port']}"


Port = Annotated[int, Field(ge=0, le=65_535)]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Host = Annotated[str, Field(min_length=1)]


class NodeConfig(BaseModel):
    """Settings of one cache node.

    Attributes:
        cache_dir: where the shard files go: a tmpfs for memory speed, NVMe for more rows.
        bind: address to listen on.
        advertise: host name under which others reach this node; default: ``bind``, or the host
            name of the machine when ``bind`` is a wildcard.
        flight_port, control_port: 0 picks a free one.
        coordinator: ``HOST:PORT`` of the coordinator's control port; None: this node is it.
        memory_limit_bytes: of all shard files of this node together.
        load_threads: shards loaded at once.
        heartbeat_interval_s: how often the nodes of this coordinator report.
        node_timeout_s: after so long without a heartbeat a node counts as lost.
        lease_s: how long this coordinator keeps a version that was replaced after its rows were
            last read.
        drain_timeout_s: how long a stopping node waits for running calls.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cache_dir: Path
    bind: Host = "127.0.0.1"
    advertise: Host | None = None
    flight_port: Port = 50_051
    control_port: Port = 50_052
    coordinator: Annotated[str | None, BeforeValidator(_host_port)] = None
    memory_limit_bytes: Bytes | None = None
    load_threads: Annotated[int, Field(ge=1)] = 2
    heartbeat_interval_s: Seconds = 0.5
    node_timeout_s: Seconds = 10.0
    lease_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 600.0
    drain_timeout_s: Seconds = 5.0

    @property
    def host(self) -> str:
        """The host name to give to others."""
        if self.advertise:
            return self.advertise
        try:
            wildcard = ipaddress.ip_address(self.bind).is_unspecified
        except ValueError:
            wildcard = False
        return socket.getfqdn() if wildcard else self.bind

    @classmethod
    def build(cls, **values: Any) -> NodeConfig:
        """The settings, or one `ConfigError` that quotes every bad one."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError("; ".join(map(_problem, error.errors()))) from None


def _problem(error: ErrorDetails) -> str:
    setting = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"{setting} is missing"
    if error["type"] == "extra_forbidden":
        return f"unknown setting {setting}, got {error['input']!r}"
    if error["type"] == "value_error":  # of the validators above, which quote the value themselves
        return f"{setting} {error['ctx']['error']}"
    return f"{setting}: {error['msg']}, got {error['input']!r}"
