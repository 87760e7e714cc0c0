"""Frozen settings of a cache node. Reads no environment: `__main__` does."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
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

from cache_protocol.datasets.dataset_spec import parse_bytes
from cache_protocol.errors import ConfigError
from cache_protocol.storage.machine import MACHINE_BYTES, is_in_memory, memory_limit_bytes
from cache_protocol.storage.memory_budget import (
    MIN_SHARD_BYTES,
    NodeMemory,
    memory_of_container,
    memory_of_machine,
    shard_bytes,
)
from cache_protocol.wire import zones
from cache_protocol.wire.credentials import Credentials
from cache_server.auth.etcd import Etcd
from cache_server.auth.kubernetes import Cluster
from cache_server.auth.namespace_shares import NamespaceShare, parse_share

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


def _is_zone(value: str) -> str:
    if not zones.is_zone(value):
        raise ValueError
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


Zone = Annotated[str, AfterValidator(_is_zone), _described_as(zones.RULE)]
Share = Annotated[NamespaceShare, BeforeValidator(parse_share)]


@dataclass(frozen=True)
class Flag:
    """Marks a setting that is an option of the command, with its text.

    Attributes:
        text: for people.
        name: of the option; default: that of the setting.
        metavar: what stands for the value in the help; default: the type.
    """

    text: str
    name: str = ""
    metavar: str = ""


class NodeConfig(BaseModel):
    """Settings of one cache node; `cache-server serve` has an option for each with a text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cache_dir: Annotated[
        Path,
        BeforeValidator(_not_empty),
        _described_as("a path"),
        Flag("Directory of the shards: on tmpfs or NVMe.", metavar="<path>"),
    ]
    catalogue_dir: Annotated[
        Path | None,
        BeforeValidator(_not_empty),
        _described_as("a path"),
        Flag(
            "On the coordinator: directory of what it must know after a restart, a few megabytes, "
            "where the cache directory does not outlive the node. Default: the cache directory.",
            metavar="<path>",
        ),
    ] = None
    bind: Annotated[Host, Flag("Address to listen on.")] = "127.0.0.1"
    insecure: Annotated[
        bool,
        Flag(
            "Let every caller read, load and drop, on any address. A node without tokens listens "
            "on loopback addresses only, unless you give this."
        ),
    ] = False
    auth_tokens: Annotated[
        Path | None,
        Flag(
            "YAML file of the callers: name, SHA-256 of the token, namespace, roles. It is read "
            "again when it changes. Without it and --auth-jwt, the token of this node is shared by "
            "all nodes and clients.",
            metavar="<path>",
        ),
    ] = None
    token: str | None = Field(default=None, repr=False)
    token_file: Annotated[
        str | None,
        Flag(
            "File of the token of this node; default: CACHE_TOKEN or CACHE_TOKEN_FILE.",
            metavar="<path>",
        ),
    ] = None
    auth_jwt: Annotated[
        Path | None,
        Flag(
            "YAML file of an issuer of JSON web tokens: issuer, audience, jwks, rules. In a pod, "
            "the rules are enough.",
            metavar="<path>",
        ),
    ] = None
    auth_pods: Annotated[
        tuple[str, ...],
        Flag(
            "In a pod, instead of --auth-jwt: roles of the pods of its namespace whose names "
            "match, with wildcards; repeat it, the first match counts. They show ServiceAccount "
            "tokens with the audience data-cache.",
            metavar="<role>[,<role>]:<pod>",
        ),
    ] = ()
    audit_log: Annotated[
        str | None,
        BeforeValidator(_not_empty),
        Flag(
            "File for a JSON line about each load, write, drop, drain and refusal, and the first "
            "read of a version by a caller; '-': standard output. A file that is moved away is "
            "made anew.",
            metavar="<path>",
        ),
    ] = None
    cluster: Cluster = Cluster()  # where this pod finds the API server
    etcd: Etcd = Etcd()  # where etcd is
    tls_cert: Annotated[
        str | None,
        Flag(
            "Certificate of this node, with --tls-key: every port serves TLS. Other nodes see it "
            "too.",
            metavar="<path>",
        ),
    ] = None
    tls_key: Annotated[str | None, Flag("Key of --tls-cert.", metavar="<path>")] = None
    tls_ca: Annotated[
        str | None,
        Flag("Certificates that sign those of other nodes and of callers.", metavar="<path>"),
    ] = None
    require_client_cert: Annotated[
        bool, Flag("Refuse callers without a certificate of --tls-ca.")
    ] = False
    advertise: Annotated[
        Host | None,
        Flag(
            "Host name at which clients and other nodes reach this one; default: --bind, or the "
            "name of this machine if --bind is a wildcard."
        ),
    ] = None
    zone: Annotated[
        Zone | None,
        Flag(
            "Failure domain of this node, such as a zone of a cloud: replicas of a shard are in "
            "different zones, and readers prefer nodes of theirs. Default: CACHE_ZONE."
        ),
    ] = None
    flight_port: Annotated[Port, Flag("Port of Arrow Flight; 0: a free one.")] = 50_051
    control_port: Annotated[Port, Flag("Port of gRPC; 0: a free one.")] = 50_052
    http_port: Annotated[
        Port, Flag("Port of the status page, /metrics and /ready; 0: a free one.")
    ] = 8080
    coordinator: Annotated[
        str | None,
        BeforeValidator(_host_port),
        Flag(
            "HOST:PORT of the coordinator's control port. This node may name itself, so all pods "
            "of a cache can have equal arguments; default: this node."
        ),
    ] = None
    leader_election: Annotated[
        str | None,
        Field(pattern=r"^(kubernetes:[a-z0-9-]{1,63}/|etcd:)[a-z0-9-]{1,63}$"),
        _described_as("kubernetes:NAMESPACE/NAME of a Lease, or etcd:NAME"),
        Flag(
            "Instead of --coordinator: the nodes elect it, and another one when it is lost, by the "
            "Lease NAME of a namespace of Kubernetes, or by etcd, which they find as etcdctl does. "
            "The catalogue is there, too.",
            metavar="kubernetes:<namespace>/<name>|etcd:<name>",
        ),
    ] = None
    num_nodes: Annotated[
        Count, Flag("With --load-from-env: nodes to wait for before the load.")
    ] = 1
    join_timeout_s: Annotated[Seconds, Flag("Seconds to wait for --num-nodes.")] = 300.0
    memory_limit_bytes: Annotated[
        Bytes | None,
        Flag(
            "Limit of the bytes of all shards on this node, such as 8GiB. Default: where the "
            "kernel limits the node (a cgroup) and the shards are on a tmpfs, its part of that.",
            name="--memory-limit",
            metavar="<size>",
        ),
    ] = None
    container_memory_limit_bytes: Annotated[
        Bytes | None,
        Flag(
            "Memory of the container, instead of --memory-limit. Shards get all of it except 1 GiB "
            "or a quarter, whichever is more. Default: the limit that the kernel has for this "
            "process, else three quarters of the machine; loads wait or are refused beyond it.",
            name="--container-memory-limit",
            metavar="<size>",
        ),
    ] = None
    scratch_limit_bytes: Annotated[
        Bytes | None,
        Flag(
            "Most bytes of the scratch disk: tables on a disk that do not fit in memory are laid "
            "out there in the orders that jobs will read. A job needs about the size of its part "
            "of the table on this node, twice that to prepare an epoch while another is read. "
            "Default: none, and shuffled rows are read from the shards at random.",
            name="--scratch-limit",
            metavar="<size>",
        ),
    ] = None
    scratch_dir: Annotated[
        Path | None,
        BeforeValidator(_not_empty),
        _described_as("a path"),
        Flag(
            "Directory of the scratch disk, with --scratch-limit; default: below the cache "
            "directory.",
            metavar="<path>",
        ),
    ] = None
    memory_share: Annotated[
        float,
        Field(gt=0, le=1),
        _described_as("a share, more than 0 and at most 1"),
        Flag("Part of that default for this node, where several share a machine."),
    ] = 1.0
    load_threads: Annotated[
        Count | None,
        Flag(
            "Shards that load at once; default: one for each processor, from 2 to 8. Fewer load at "
            "once if --container-memory-limit leaves too little for their row groups."
        ),
    ] = None
    huge_pages: Annotated[
        bool,
        Flag(
            "Move shards on a tmpfs to huge pages while nothing is loading. This makes random "
            "reads of gigabytes faster. It takes one processor 0.3 to 4 s for each GB, once."
        ),
    ] = True
    allow_source: Annotated[
        tuple[str, ...] | None,
        Flag(
            "Prefix of paths or URIs that datasets may be loaded from; repeat it for more. "
            "'/data/' allows the files below it, '' everything. Default: every URI, but no path of "
            "this machine and no address that is not public; a prefix such as "
            "'http://minio:9000/' names a host that may be private. With --load-from-env "
            "everything.",
            metavar="<prefix>",
        ),
    ] = ("",)
    allow_function: Annotated[
        tuple[str, ...] | None,
        Flag(
            "Function that SQL of loads and views may call; repeat it for more. Default: those of "
            "this package, as far as their libraries are installed.",
            metavar="<name>",
        ),
    ] = None
    function_workers: Annotated[
        Count | None,
        Flag(
            "Processes that compute the functions of SQL; default: one for each processor, up to "
            "8. Each has the memory limit of a row expression, at least 384 MiB."
        ),
    ] = None
    scrub_interval_s: Annotated[
        Lease,
        Flag(
            "Seconds between two passes that read every shard file again, at 256 MiB a second at "
            "most, and repair damaged ones; 0: none."
        ),
    ] = 3600.0
    slow_reader_timeout_s: Annotated[
        Seconds,
        Flag("A connection is cut off when its reader takes no message for this many seconds."),
    ] = 60.0
    heartbeat_interval_s: Annotated[
        Seconds, Flag("On the coordinator: seconds between heartbeats of a node.")
    ] = 0.5
    node_timeout_s: Annotated[
        Seconds,
        Flag("On the coordinator: a node without a heartbeat for this many seconds is lost."),
    ] = 10.0
    lease_s: Annotated[
        Lease,
        Flag(
            "On the coordinator: seconds to keep a version after its last read, though it is "
            "replaced, or others have no room."
        ),
    ] = 600.0
    namespace_share: Annotated[
        tuple[Share, ...],
        Flag(
            "On the coordinator: the bytes that others leave a namespace when they need room, and "
            "the most that it may hold, such as team=100GiB..400GiB; repeat it for more. Either "
            "size may be left out.",
            metavar="<namespace>=<guaranteed>..<largest>",
        ),
    ] = ()
    keep_orphans_s: Annotated[
        Lease | None,
        Flag(
            "Seconds to keep shards that no dataset of the coordinator has; default: until they "
            "are dropped with cachectl drop-orphans.",
            name="--keep-orphans",
            metavar="<seconds>",
        ),
    ] = None
    drain_timeout_s: Annotated[Seconds, Flag("Seconds to wait for running calls at shutdown.")] = (
        5.0
    )
    leave_timeout_s: Annotated[
        Lease,
        Flag(
            "Seconds after SIGTERM in which other nodes may take over the shards of this node, "
            "before it stops; 0: it stops at once. A second SIGTERM also stops it at once."
        ),
    ] = 0.0

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

    @field_validator("leader_election")
    @classmethod
    def _has_no_fixed_coordinator(cls, value: str | None, info: ValidationInfo) -> str | None:
        for other in ("coordinator", "catalogue_dir"):
            if value and info.data.get(other) is not None:
                raise ValueError(
                    f"cannot be combined with {other}, got {value} and {info.data[other]}"
                )
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
        return Credentials(
            self.token, self.token_file, self.tls_ca, self.tls_cert, self.tls_key, self.zone
        )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the node."""
        try:
            return ipaddress.ip_address(self.bind.strip("[]")).is_loopback
        except ValueError:
            return self.bind == "localhost"

    @property
    def is_coordinator(self) -> bool:
        """Whether this node coordinates the cache, and no election says so."""
        if self.leader_election is not None:
            return False
        if self.coordinator is None:
            return True
        host, _, port = self.coordinator.rpartition(":")
        return int(port) == self.control_port and _same_host(host, self.host)

    @property
    def lease(self) -> tuple[str, str]:
        """Namespace and name of the lease of ``leader_election``; etcd has no namespaces: ""."""
        namespace, _, name = (self.leader_election or "").partition(":")[2].rpartition("/")
        return namespace, name

    def memory(self) -> NodeMemory:
        """The memory of this node: as stated, else what this machine gives the process."""
        if self.container_memory_limit_bytes is not None:
            return memory_of_container(self.container_memory_limit_bytes)
        return memory_of_machine(
            MACHINE_BYTES,
            memory_limit_bytes(),
            self.memory_limit_bytes,
            share=self.memory_share,
            in_memory=is_in_memory(self.cache_dir.absolute()),
        )

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
