"""Records of messages: a field is declared by the message, and derived by its name elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from cache_protocol.v1 import cache_pb2 as pb

_R = TypeVar("_R")


def record(kind: type[_R], message: Message, **others: Any) -> _R:
    """The fields of a message as a dataclass that has fields of the same names.

    An optional field without a value is None, a list is a tuple, a map is a dict.

    Args:
        others: fields that are not those of the message.
    """
    names = [each.name for each in fields(kind) if each.name not in others]  # type: ignore[arg-type]
    return kind(**{name: _plain(message, name) for name in names}, **others)


def _plain(message: Message, name: str) -> Any:
    value = getattr(message, name)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return tuple(value)
    has_presence = message.DESCRIPTOR.fields_by_name[name].has_presence
    return None if has_presence and not message.HasField(name) else value


def _numbers(message: type[Message], *others: str) -> tuple[str, ...]:
    kinds = (FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_MESSAGE)
    names = (field.name for field in message.DESCRIPTOR.fields if field.cpp_type not in kinds)
    return tuple(name for name in names if name not in others)


# What a reader sums up since its run began: in all, and of each node.
REPORT_SUMS: Final = _numbers(
    pb.ReaderReport,
    *("rank", "world_size", "epoch", "step", "num_steps", "expires_s", "batch_size", "follows"),
    *("pid", "process_rank", "num_processes", "sent_s", "end"),
)
NODE_SUMS: Final = _numbers(pb.NodeReads)
