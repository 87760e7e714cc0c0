"""The error tree of clients and nodes, and its mapping to the wire.

    CacheError
      ConfigError(ValueError)     bad settings or arguments; quotes all of them
        RanksDisagreeError        another rank of the job reads by other settings; names both
      RequestError                the request can never succeed: not retried
        DatasetNotFoundError
        InvalidRowsError          row ids or a row range outside the dataset
          ErasedRowsError         rows that were forgotten: ask for the erased rows again
        InvalidTicketError        a ticket or a command that cannot be parsed
        InvalidImageError         a column with bytes that are no image; names column and row
        InvalidTextError          a string column with bytes that are no UTF-8; names column and row
        SchemaError               rows to write do not fit their columns; names column and type
        UnauthenticatedError      no token, or one that the cache does not accept
        PermissionDeniedError     the caller lacks the role, or the dataset is not theirs
      NotReadyError               still loading; has the progress: retried until the deadline
      LengthUnknownError(TypeError)   an epoch of a version that loads has no known end yet
      StaleVersionError           another fingerprint than the requested one: read a new plan
      LoadError                   names the file, the split and the reason: the dataset failed
        TransientLoadError        a source did not answer, or changed meanwhile: load it again later
        LostPartitionsError       a node was lost before a commit; names the partitions to put again
      NodeUnavailableError        names node, dataset and step: retried, then raised

This module knows neither Flight nor gRPC. Modules that use them send a serialised `cache.v1.Error`
beside the message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import TypeVar

from cache_protocol.v1 import cache_pb2 as pb

EXIT_FAILURE = 1
EXIT_DATA = 65  # EX_DATAERR: it cannot get better by itself
EXIT_TRY_AGAIN = 75  # EX_TEMPFAIL: a source did not answer, or changed meanwhile
EXIT_CONFIG = 78  # EX_CONFIG

_T = TypeVar("_T")
_MOST_LISTED = 4  # items of a list in a message
_MOST_COMPARED = 10_000


class CacheError(Exception):
    """Any failure of the cache; raised itself only for a bug."""

    code: pb.ErrorCode.ValueType = pb.ERROR_CODE_UNSPECIFIED


class ConfigError(CacheError, ValueError):
    """Settings or arguments are bad; the message quotes each of them."""

    code = pb.ERROR_CODE_CONFIG


class RanksDisagreeError(ConfigError):
    """Another rank of this job reads by other settings, or is the same rank.

    The job would train on wrong rows. The message names both values and both hosts. The rank that
    began later raises it, within its first seconds. Only clients raise it, so it has no code.
    """


class RequestError(CacheError):
    """The request can never succeed, so it is never retried."""

    code = pb.ERROR_CODE_REQUEST


class DatasetNotFoundError(RequestError):
    """There is no dataset of that name; the message lists the existing names."""

    code = pb.ERROR_CODE_DATASET_NOT_FOUND


class InvalidRowsError(RequestError):
    """Row ids, or a row range, are outside the dataset."""

    code = pb.ERROR_CODE_INVALID_ROWS


class ErasedRowsError(InvalidRowsError):
    """Some of the rows were forgotten: `CacheClient.erased_rows` has their row ids.

    The reader's view is of before: an amendment, or a new pass, leaves them out.
    """

    code = pb.ERROR_CODE_ERASED_ROWS


class InvalidTicketError(RequestError):
    """A ticket, descriptor or command cannot be parsed."""

    code = pb.ERROR_CODE_INVALID_TICKET


class InvalidTextError(RequestError):
    """A string column holds bytes that are no UTF-8; the message names column and row.

    Only clients raise it, so it has no code.
    """


class InvalidImageError(RequestError):
    """A column to decode holds bytes that are no image; the message names column and row.

    Only clients raise it, so it has no code.
    """


class SchemaError(RequestError):
    """Rows do not fit the columns that they are written to, or a value has no Arrow type.

    The message names the column, its type and, where there is one, the value with its row.
    """

    code = pb.ERROR_CODE_SCHEMA


class UnauthenticatedError(RequestError):
    """The caller has no credentials, or the cache does not accept them; never quotes them."""

    code = pb.ERROR_CODE_UNAUTHENTICATED


class PermissionDeniedError(RequestError):
    """The caller is known and lacks a role, or the dataset is in another namespace."""

    code = pb.ERROR_CODE_PERMISSION_DENIED


class NotReadyError(CacheError):
    """The dataset, or a part of it, is still loading; retry until a deadline."""

    code = pb.ERROR_CODE_NOT_READY


class LengthUnknownError(CacheError, TypeError):
    """An epoch has no known number of steps yet, because its version is loading.

    A `TypeError`, as that of an object without a length: `list` and frameworks then do without
    one. Only clients raise it, so it has no code.
    """


class StaleVersionError(CacheError):
    """The dataset has another fingerprint than the requested one."""

    code = pb.ERROR_CODE_STALE_VERSION


class LoadError(CacheError):
    """A dataset could not be loaded; the message names the file, the split and the reason."""

    code = pb.ERROR_CODE_LOAD


class TransientLoadError(LoadError):
    """The same load may succeed later: a source did not answer, or changed while it was read.

    It has the code of a `LoadError`, which is what clients of an earlier release make of it.
    """


class LostPartitionsError(LoadError):
    """Rows of a write were lost before its commit, so nothing was committed.

    Put these partitions again, by other attempts, and commit again. Only clients raise it, so it
    has no code.

    Attributes:
        partitions: their numbers.
    """

    def __init__(self, message: str, partitions: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.partitions = tuple(partitions)


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
        ErasedRowsError,
        InvalidTicketError,
        SchemaError,
        UnauthenticatedError,
        PermissionDeniedError,
        NotReadyError,
        StaleVersionError,
        LoadError,
        NodeUnavailableError,
    )
}


def exit_code(error: CacheError) -> int:
    """78 for settings, 65 for data and queries, 75 for sources that may answer later, else 1."""
    if isinstance(error, ConfigError):
        return EXIT_CONFIG
    if isinstance(error, TransientLoadError):
        return EXIT_TRY_AGAIN
    return EXIT_DATA if isinstance(error, LoadError | RequestError) else EXIT_FAILURE


def to_proto(error: CacheError) -> pb.Error:
    """The wire form of `error`: code and message; what is no UTF-8 is escaped."""
    message = str(error).encode(errors="backslashreplace").decode()
    may_pass = isinstance(error, TransientLoadError)
    return pb.Error(code=error.code, message=message, may_pass=may_pass)


def from_proto(error: pb.Error) -> CacheError:
    """The exception of a wire error; a plain `CacheError` if its code is unknown."""
    found = _BY_CODE.get(error.code, CacheError)
    return (TransientLoadError if found is LoadError and error.may_pass else found)(error.message)


def require_ready(info: pb.DatasetInfo) -> pb.DatasetInfo:
    """Returns ``info`` if the dataset is ready.

    Raises:
        LoadError: it failed; has the reason.
        NodeUnavailableError: its rows lie on nodes that are away; names them.
        NotReadyError: it is loading, and has the progress; or it was evicted, and there is no room.
    """
    if info.state == pb.DATASET_STATE_READY:
        return info
    if info.state == pb.DATASET_STATE_FAILED:
        message = info.error.message
        raise TransientLoadError(message) if info.error.may_pass else LoadError(message)
    if info.HasField("error"):
        raise from_proto(info.error)
    if info.state == pb.DATASET_STATE_EVICTED:
        raise NotReadyError(
            f"dataset {info.spec.name!r} was evicted to make room: it loads again when it is read"
        )
    progress = info.progress
    raise NotReadyError(
        f"dataset {info.spec.name!r} is loading: {progress.shards_done} of "
        f"{progress.shards_total} shards, {progress.rows_done} rows so far"
    )


def some_of(items: Iterable[object], separator: str = ", ", *, like: str | None = None) -> str:
    """The first four of a list, and the number of the others: no message lists more.

    Args:
        like: a text that is none of them; of more than four, those that resemble it come first.
    """
    texts = list(map(str, items))
    if like is not None and len(texts) > _MOST_LISTED:
        close = get_close_matches(like, texts[:_MOST_COMPARED], _MOST_LISTED, 0.5)
        texts = [*close, *(text for text in texts if text not in close)]
    more = f" and {len(texts) - _MOST_LISTED} more" if len(texts) > _MOST_LISTED else ""
    return f"{separator.join(texts[:_MOST_LISTED]) or 'none'}{more}"


def short(text: str, length: int = 200) -> str:
    """The beginning of a text: gRPC loses errors of more than a few KiB."""
    return text if len(text) <= length else f"{text[:length]}..."


def without_middle(text: str, length: int = 400) -> str:
    """Begin and end of the message of a library: a long value may come before the reason."""
    half = length // 2
    return text if len(text) <= length else f"{text[:half]}...{text[-half:]}"


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
    """Calls ``make`` and collects its error, so that one error can report all problems.

    Args:
        problems: the message of the error is appended here.
        make: returns a checked value.
        refusal: class of the errors to collect; others are raised.

    Returns:
        The value; None after an error.
    """
    try:
        return make()
    except refusal as error:
        problems.append(str(error))
        return None
