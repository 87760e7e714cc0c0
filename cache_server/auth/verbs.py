"""The role that each verb of Flight, gRPC and HTTP needs. Pure.

A verb without a row is refused. A test compares the table with the verbs that a node serves.
"""

from __future__ import annotations

from collections.abc import Mapping

from cache_protocol.errors import PermissionDeniedError
from cache_server.auth.principals import Role

_COORDINATOR = "/cache.v1.Coordinator/"
_HEALTH = "/grpc.health.v1.Health/"
_HEARTBEAT = f"grpc {_COORDINATOR}Heartbeat"
_OURS = ("flight DO_EXCHANGE", "flight DO_ACTION", "flight DO_PUT")

# None: open to every caller.
ROLES: Mapping[str, Role | None] = {
    "flight HANDSHAKE": Role.READER,
    "flight LIST_FLIGHTS": Role.READER,
    "flight GET_FLIGHT_INFO": Role.READER,
    "flight GET_SCHEMA": Role.READER,
    "flight DO_GET": Role.READER,  # of a shard file: see SHARD_FILE
    "flight DO_PUT": Role.WRITER,
    "flight DO_ACTION": Role.READER,  # also of an order; of held shards: see HELD_SHARDS
    "flight LIST_ACTIONS": Role.READER,
    "flight DO_EXCHANGE": Role.READER,
    f"grpc {_COORDINATOR}CreateDataset": Role.WRITER,
    f"grpc {_COORDINATOR}PlanDataset": Role.WRITER,  # reads the source
    f"grpc {_COORDINATOR}GetDataset": Role.READER,
    f"grpc {_COORDINATOR}WatchDataset": Role.READER,
    f"grpc {_COORDINATOR}ListDatasets": Role.READER,
    f"grpc {_COORDINATOR}DeleteDataset": Role.WRITER,
    f"grpc {_COORDINATOR}KeepDataset": Role.WRITER,
    f"grpc {_COORDINATOR}BeginWrite": Role.WRITER,
    f"grpc {_COORDINATOR}CommitWrite": Role.WRITER,
    f"grpc {_COORDINATOR}AbortWrite": Role.WRITER,
    f"grpc {_COORDINATOR}GetWriteSchema": Role.NODE,
    f"grpc {_COORDINATOR}ForgetRows": Role.ADMIN,
    f"grpc {_COORDINATOR}ListForgotten": Role.READER,
    f"grpc {_COORDINATOR}GetErasedRows": Role.READER,
    f"grpc {_COORDINATOR}GetTombstones": Role.NODE,
    f"grpc {_COORDINATOR}ListNodes": Role.READER,
    f"grpc {_COORDINATOR}DrainNode": Role.ADMIN,
    f"grpc {_COORDINATOR}UndrainNode": Role.ADMIN,
    f"grpc {_COORDINATOR}ListJobs": Role.READER,
    _HEARTBEAT: Role.NODE,
    # Probes of Kubernetes send no token. The answers say only whether the node lives or is ready.
    f"grpc {_HEALTH}Check": None,
    f"grpc {_HEALTH}List": None,
    f"grpc {_HEALTH}Watch": None,
    "http /live": None,
    "http /ready": None,
    "http /metrics/node": None,  # names no dataset
    "http /": Role.READER,
    "http /metrics": Role.READER,
}
SHARD_FILE, HELD_SHARDS = "DoGet of a shard file", "action 'held-shards'"
FIND_ROWS = "action 'find-rows'"


def is_open(verb: str) -> bool:
    """Whether every caller may use a verb."""
    return verb in ROLES and ROLES[verb] is None


def is_ours(verb: str) -> bool:
    """Whether only programs of this project use a verb; others are standards that any may use."""
    return verb.startswith(f"grpc {_COORDINATOR}") or verb in _OURS


def caller_of(verb: str) -> str:
    """What kind of process calls a verb first, for people."""
    return "node" if verb == _HEARTBEAT else "client"


def role_of(verb: str) -> Role | None:
    """The role that a verb needs; None if it is open.

    Raises:
        PermissionDeniedError: the verb has no row.
    """
    try:
        return ROLES[verb]
    except KeyError:
        raise PermissionDeniedError(f"{verb} has no rule, so it is refused") from None
