"""The error tree that clients and nodes share, and its mapping to the wire.

    CacheError
      ConfigError(ValueError)     a setting or argument is bad; every bad one is quoted at once
      RequestError                the request can never succeed: not retried
        DatasetNotFoundError
        InvalidRowsError          row ids or a row range outside the dataset
        InvalidTicketError        a ticket or a command that is not one of ours
      NotReadyError               still loading; says how far: retried until the deadline
      StaleVersionError           another fingerprint than the one asked for: plan again
      LoadError                   names the file, the split and the reason: the dataset failed
      NodeUnavailableError        names node, dataset and step: retried, then raised

The tree stands here, and not in `cache_server` and `cache_client`, because a code on the wire and
the class it becomes are one fact. This module knows neither Flight nor gRPC; the modules that
speak those protocols carry a serialised `cache.v1.Error` beside the message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from cache_protocol.v1 import cache_pb2 as pb

_T = TypeVar("_T")


class CacheError(Exception):
    """Any failure of the cache. Raised bare only for a defect inside a server."""

    code: pb.ErrorCode.ValueType = pb.ERROR_CODE_UNSPECIFIED


class ConfigError(CacheError, ValueError):
    """One or more settings or arguments are bad; the message quotes each of them."""

    code = pb.ERROR_CODE_CONFIG


class RequestError(CacheError):
    """The request can never succeed as it stands, so it is never retried."""

    code = pb.ERROR_CODE_REQUEST


class DatasetNotFoundError(RequestError):
    """No dataset of that name; the message lists the names there are."""

    code = pb.ERROR_CODE_DATASET_NOT_FOUND


class InvalidRowsError(RequestError):
    """Row ids, or a row range, outside the dataset."""

    code = pb.ERROR_CODE_INVALID_ROWS


class InvalidTicketError(RequestError):
    """A ticket, descriptor or command that cannot be understood."""

    code = pb.ERROR_CODE_INVALID_TICKET


class NotReadyError(CacheError):
    """The dataset, or a part of it, is still loading. Worth retrying until a deadline."""

    code = pb.ERROR_CODE_NOT_READY


class StaleVersionError(CacheError):
    """The dataset has another fingerprint than the one asked for."""

    code = pb.ERROR_CODE_STALE_VERSION


class LoadError(CacheError):
    """A dataset could not be loaded; the message names the file, the split and the reason."""

    code = pb.ERROR_CODE_LOAD


class NodeUnavailableError(CacheError):
    """A node did not answer in time; the message names the node, the dataset and the step."""

    code = pb.ERROR_CODE_NODE_UNAVAILABLE


_BY_CODE: dict[int, type[CacheError]] = {
    cls.code: cls
    for cls in (
        CacheError,
        ConfigError,
        RequestError,
        DatasetNotFoundError,
        InvalidRowsError,
        InvalidTicketError,
        NotReadyError,
        StaleVersionError,
        LoadError,
        NodeUnavailableError,
    )
}


def to_proto(error: CacheError) -> pb.Error:
    """The wire form of `error`: its code and its message; of a name that is no UTF-8, escaped."""
    message = str(error).encode(errors="backslashreplace").decode()
    return pb.Error(code=error.code, message=message)


def from_proto(error: pb.Error) -> CacheError:
    """The exception that `error` stands for; an unknown code becomes a plain `CacheError`."""
    return _BY_CODE.get(error.code, CacheError)(error.message)


def require_ready(info: pb.DatasetInfo) -> pb.DatasetInfo:
    """``info`` itself when the dataset is ready.

    Raises:
        LoadError: it failed, with the reason. NotReadyError: it is loading; says how far.
    """
    if info.state == pb.DATASET_STATE_READY:
        return info
    if info.state == pb.DATASET_STATE_FAILED:
        raise LoadError(info.error.message)
    progress = info.progress
    raise NotReadyError(
        f"dataset {info.spec.name!r} is loading: {progress.shards_done} of "
        f"{progress.shards_total} shards, {progress.rows_done} rows so far"
    )


def missing_package(error: ImportError, what: str, extra: str) -> str:
    """The message for a package that an extra of this distribution brings.

    Args:
        error: raised by the import.
        what: needs the package.
        extra: its name; several are separated by commas.
    """
    package = (error.name or "").partition(".")[0]
    return f"{what} needs the package {package!r}: pip install 'trainer-data-cache[{extra}]'"


def checked(
    problems: list[str], make: Callable[[], _T], refusal: type[ValueError] = ConfigError
) -> _T | None:
    """What ``make`` returns. What it refuses becomes one more problem: all are said at once.

    Args:
        problems: added to.
        refusal: by which it refuses; anything else is raised.

    Returns:
        None where it refused.
    """
    try:
        return make()
    except refusal as error:
        problems.append(str(error))
        return None
