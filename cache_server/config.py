"""Frozen settings of a cache node. Reads no environment: `__main__` does."""

from __future__ import annotations

import ipaddress
import re
import socket
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)
from pydantic_core import ErrorDetails

from cache_protocol.errors import ConfigError
from cache_protocol.spec.dataset_spec import parse_bytes
from cache_protocol.storage.memory_budget import MIN_SHARD_BYTES, shard_bytes
from cache_protocol.wire.credentials import Credentials
from cache_server.auth.kubernetes import Cluster

_HOST_PORT = re.compile(
    r"(?:grpc(?:\+tls)?://)?(?P<host>[^\s:/]+|\[[0-9a-fA-F:]+\]):(?P<port>\d{1,5})"
)
_HOST = re.compile(r"[^\s:/\[\]]+")


def _host_port(value: object) -> object:
    match = _HOST_PORT.fullmatch(value) if isinstance(value, str) else None
    if value is None:
        return None
    if match is None or not 0 < int(match["port"]) < 65_536:
        raise ValueError(f"must be HOST:PORT of the coordinator's control port, got {value!r}")
    return f"{match['host']}:{match['port']}"


def _not_empty(value: object) -> object:
    if value == "":  # from an unset variable; pathlib reads it as the working directory
        raise ValueError
    return value


def _is_host(value: str) -> str:
    """A host name or an address, with or without brackets."""
    if not _HOST.fullmatch(value):
        ipaddress.IPv6Address(value[1:-1] if value.startswith("[") else value)
    return value


def _described_as(rule: str) -> WrapValidator:
    """Replaces the errors of a setting by the rule that it must follow."""

    def check(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"must be {rule}, got {value!r}") from None

    return WrapValidator(check)


Port = Annotated[int, Field(ge=0, le=65_535), _described_as("a port, from 0 to 65535")]
Bytes = Annotated[
    int, BeforeValidator(parse_bytes), Field(ge=1), _described_as("a size in bytes such as 64MiB")
]
Count = Annotated[int, Field(ge=1), _described_as("an integer of at least 1")]
Seconds = Annotated[
    float, Field(gt=0, allow_inf_nan=False), _described_as("a number of seconds, more than 0")
]
Lease = Annotated[
    float, Field(ge=0, allow_inf_nan=False), _described_as("a number of seconds, at least 0")
]
Host = Annotated[
    str, AfterValidator(_is_host), _described_as("a host name or address without a port")
]


class NodeConfig(BaseModel):
    """Settings of one cache node.

    Attributes:
        cache_dir: directory of the shard files: a tmpfs for memory speed, NVMe for more rows.
        bind: address to listen on.
        insecure: let every caller do everything, on any address. Without it, a node that knows no
            callers must listen on a loopback address.
        auth_tokens: file of principals, see `cache_server.auth.token_file`.
        auth_jwt: file of an issuer of JSON web tokens, see `cache_server.auth.jwt_tokens`.
        auth_pods: instead of ``auth_jwt``, rules for pods of the namespace of this pod.
        cluster: where this pod finds the API server.
        tls_cert, tls_key: files of the certificate for every port; also shown to other nodes.
        tls_ca: file of the certificates that sign those of nodes and callers.
        require_client_cert: refuse callers without a certificate of ``tls_ca``.
        token, token_file: of this node, for calls to other nodes. Without ``auth_tokens`` and
            ``auth_jwt`` it is shared by the whole cache.
        advertise: host name at which others reach this node; default: ``bind``, or the host name of
            the machine if ``bind`` is a wildcard.
        flight_port, control_port, http_port: 0 picks a free one.
        coordinator: ``HOST:PORT`` of the coordinator's control port. None, or the address of this
            node, makes this node the coordinator. So all pods of a cache can have equal arguments.
        num_nodes: the nodes to wait for before this coordinator loads the dataset of its
            environment.
        join_timeout_s: longest wait for these nodes.
        memory_limit_bytes: of all shard files of this node together.
        container_memory_limit_bytes: memory of the container, instead of ``memory_limit_bytes``.
            The shards get the part that the process does not need.
        load_threads: the most shards that load at once; None: by processors.
        huge_pages: move shards in memory to huge pages while nothing is loading.
        allow_source: prefixes of the sources that the node may touch, see `AllowedSources`.
        scrub_interval_s: between two passes that read every shard file again; 0: none.
        slow_reader_timeout_s: how long a message may wait for its reader.
        heartbeat_interval_s: between the reports of a node.
        node_timeout_s: a node without a heartbeat for this long counts as lost.
        lease_s: how long a replaced version is kept after its last read.
        drain_timeout_s: how long a stopping node waits for running calls.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cache_dir: Annotated[Path, BeforeValidator(_not_empty), _described_as("a path")]
    bind: Host = "127.0.0.1"
    insecure: bool = False
    auth_tokens: Path | None = None
    auth_jwt: Path | None = None
    auth_pods: tuple[str, ...] = ()
    cluster: Cluster = Cluster()
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    require_client_cert: bool = False
    token: str | None = Field(default=None, repr=False)
    token_file: str | None = None
    advertise: Host | None = None
    flight_port: Port = 50_051
    control_port: Port = 50_052
    http_port: Port = 8080
    coordinator: Annotated[str | None, BeforeValidator(_host_port)] = None
    num_nodes: Count = 1
    join_timeout_s: Seconds = 300.0
    memory_limit_bytes: Bytes | None = None
    container_memory_limit_bytes: Bytes | None = None
    load_threads: Count | None = None
    huge_pages: bool = True
    allow_source: tuple[str, ...] | None = ("",)
    scrub_interval_s: Lease = 3600.0
    slow_reader_timeout_s: Seconds = 60.0
    heartbeat_interval_s: Seconds = 0.5
    node_timeout_s: Seconds = 10.0
    lease_s: Lease = 600.0
    drain_timeout_s: Seconds = 5.0

    @property
    def host(self) -> str:
        """The host name at which others reach this node."""
        if self.advertise:
            return _in_brackets(self.advertise)
        try:
            wildcard = ipaddress.ip_address(self.bind).is_unspecified
        except ValueError:
            wildcard = False
        if not wildcard:
            return self.listen_host
        name = socket.getfqdn()
        # A machine named localhost: others may know its host name.
        return socket.gethostname() if name.partition(".")[0] == "localhost" else name

    @property
    def lasting_address(self) -> str | None:
        """The address that this node keeps, even with a new, empty directory.

        None if the port or the host is chosen at the start.
        """
        return f"{self.host}:{self.flight_port}" if self.advertise and self.flight_port else None

    @property
    def listen_host(self) -> str:
        """``bind`` as written before a port."""
        return _in_brackets(self.bind)

    @field_validator("container_memory_limit_bytes")
    @classmethod
    def _leaves_room(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is None:
            return None
        if info.data.get("memory_limit_bytes") is not None:
            raise ValueError(
                f"cannot be combined with memory_limit_bytes, got {value} and "
                f"{info.data['memory_limit_bytes']}"
            )
        if (left := shard_bytes(value)) < MIN_SHARD_BYTES:
            raise ValueError(
                f"must leave at least {MIN_SHARD_BYTES} bytes for shards, leaves {max(0, left)} "
                f"beside the {value - left} of the process: give the container more memory, "
                f"got {value}"
            )
        return value

    @field_validator("node_timeout_s")
    @classmethod
    def _outlasts_heartbeats(cls, value: float, info: ValidationInfo) -> float:
        interval = info.data.get("heartbeat_interval_s")
        if interval is not None and value < 2 * interval:
            raise ValueError(
                f"must be at least two heartbeats, or healthy nodes count as lost, got "
                f"{value:g} and heartbeat_interval_s={interval:g}"
            )
        return value

    @field_validator("auth_pods")
    @classmethod
    def _has_no_file(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if value and info.data.get("auth_jwt") is not None:
            raise ValueError(f"cannot be combined with auth_jwt, got {', '.join(value)}")
        return value

    @field_validator("require_client_cert")
    @classmethod
    def _has_certificates(cls, value: bool, info: ValidationInfo) -> bool:
        if value and not (info.data.get("tls_cert") and info.data.get("tls_ca")):
            raise ValueError("needs tls_cert, tls_key and tls_ca")
        return value

    @property
    def credentials(self) -> Credentials:
        """What this node shows to others, and its certificate for every port.

        Raises:
            ConfigError: a file cannot be read, or two settings exclude each other.
        """
        return Credentials(self.token, self.token_file, self.tls_ca, self.tls_cert, self.tls_key)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the node."""
        try:
            return ipaddress.ip_address(self.bind.strip("[]")).is_loopback
        except ValueError:
            return self.bind == "localhost"

    @property
    def is_coordinator(self) -> bool:
        """Whether this node coordinates the cache."""
        if self.coordinator is None:
            return True
        host, _, port = self.coordinator.rpartition(":")
        return int(port) == self.control_port and _same_host(host, self.host)

    @property
    def shard_limit_bytes(self) -> int | None:
        """Limit of the bytes of all shards of this node; None without a limit."""
        if self.container_memory_limit_bytes is not None:
            return shard_bytes(self.container_memory_limit_bytes)
        return self.memory_limit_bytes

    @classmethod
    def build(cls, **values: Any) -> NodeConfig:
        """The settings. Raises one `ConfigError` that quotes every bad value."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError("; ".join(map(_problem, error.errors()))) from None


def _in_brackets(host: str) -> str:
    """A host as written before a port. IPv6 pods get addresses without brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _same_host(one: str, other: str) -> bool:
    return one.strip("[]").rstrip(".").lower() == other.strip("[]").rstrip(".").lower()


def _problem(error: ErrorDetails) -> str:
    setting = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"{setting} is missing"
    if error["type"] == "extra_forbidden":
        return f"unknown setting {setting}, got {error['input']!r}"
    if error["type"] == "value_error":  # from the validators above, which quote the value
        return f"{setting} {error['ctx']['error']}"  # pyright: ignore
    return f"{setting}: {error['msg']}, got {error['input']!r}"
