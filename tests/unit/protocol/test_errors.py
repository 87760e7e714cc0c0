import inspect

import pytest

from cache_protocol import errors
from cache_protocol.errors import (
    CacheError,
    ConfigError,
    LoadError,
    RequestError,
    from_proto,
    some_of,
    to_proto,
)
from cache_protocol.v1 import cache_pb2 as pb

TREE = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, CacheError)
]

OF_THE_WIRE = [kind for kind in TREE if "code" in vars(kind)]  # others are raised by clients only


@pytest.mark.parametrize("kind", OF_THE_WIRE, ids=lambda kind: kind.__name__)
def test_an_error_keeps_its_class_and_message_over_the_wire(kind: type[CacheError]) -> None:
    wire = pb.Error.FromString(to_proto(kind("no 'x' in [0, 3)")).SerializeToString())

    error = from_proto(wire)

    assert type(error) is kind
    assert str(error) == "no 'x' in [0, 3)"


def test_a_name_that_is_no_utf_8_is_told_with_its_bytes_escaped() -> None:
    assert to_proto(LoadError("cannot read b\udcff.csv")).message == "cannot read b\\udcff.csv"


def test_every_code_of_the_wire_is_exactly_one_class() -> None:
    assert sorted(kind.code for kind in OF_THE_WIRE) == sorted(pb.ErrorCode.values())


def test_a_code_from_the_future_is_a_plain_cache_error() -> None:
    error = from_proto(pb.Error(code=4711, message="newer"))  # type: ignore[arg-type]

    assert type(error) is CacheError
    assert str(error) == "newer"


def test_the_tree_is_as_its_docstring_draws_it() -> None:
    drawn = errors.__doc__ or ""
    for kind in TREE:
        parent = kind.__mro__[1]
        depth = len([base for base in kind.__mro__ if issubclass(base, CacheError)])
        lines = [line for line in drawn.splitlines() if line.strip().startswith(kind.__name__)]
        assert [len(line) - len(line.lstrip()) for line in lines] == [2 + 2 * depth], kind
        assert parent in (*TREE, Exception)


def test_a_bad_setting_is_a_value_error_too() -> None:
    assert issubclass(ConfigError, ValueError)


def test_only_errors_that_are_never_retried_are_request_errors() -> None:
    names = {kind.__name__ for kind in TREE if issubclass(kind, RequestError)}

    assert names == {
        *("RequestError", "DatasetNotFoundError", "InvalidRowsError", "InvalidTicketError"),
        "ErasedRowsError",
        "InvalidImageError",
        "InvalidTextError",
        "SchemaError",
        *("UnauthenticatedError", "PermissionDeniedError"),
    }


@pytest.mark.parametrize(
    ("items", "shown"),
    [
        ([], "none"),
        (["b", "a"], "b, a"),
        (range(4), "0, 1, 2, 3"),
        (range(1000), "0, 1, 2, 3 and 996 more"),
    ],
)
def test_a_message_lists_at_most_four_of_many(items: list[object], shown: str) -> None:
    assert some_of(items) == shown


def test_of_many_names_a_message_lists_those_like_the_wrong_one() -> None:
    known = [f"column {number}" for number in range(1000)] + ["price", "pricey"]

    assert some_of(known, like="prise") == "price, pricey, column 0, column 1 and 998 more"
    assert some_of(["b", "price"], like="prise") == "b, price"
