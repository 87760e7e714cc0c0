"""Calls of installed functions in SQL, found and bound."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from cache_protocol.errors import ConfigError, RequestError
from cache_server.functions import Column, Function, Option
from cache_server.sql.bound_functions import BoundFile, as_written, bound_function, bound_names
from cache_server.sql.function_calls import Binder, bind

FUNCTION = Function(
    "shout",
    "3",
    {
        "text": Column(pa.string()),
        "words": Option("json file"),
        "times": Option("integer", 1),
        "loud": Option("boolean", True),
        "sign": Option("text", "!"),
        "other": Column(is_optional=True),
    },
    lambda options: lambda text, other=None: text,
    pa.string(),
)
BINDER = Binder(
    {"shout": FUNCTION},
    lambda name: "whisper is not allowed" if name == "whisper" else "",
    lambda source, kind: (BoundFile(source, "source", kind, f"digest of {source}"), "{}"),
    lambda function, types, options: pa.list_(pa.int8()) if options["loud"] else pa.string(),
)


def bound(sql: str) -> str:
    return bind(sql, lambda expression: pa.large_string(), BINDER)


def the_call(sql: str) -> Any:
    (name,) = bound_names(bound(sql))
    return bound_function(name)


def test_a_name_tells_literals_digests_and_types_and_comes_back() -> None:
    found = the_call("SELECT shout(upper(a), '/w''s.json', 3, sign => '?', other => b.c) FROM t")
    assert (found.function, found.version) == ("shout", "3")
    assert found.columns == {"text": pa.string(), "other": pa.large_string()}
    assert found.result == pa.list_(pa.int8())
    assert found.options == {"times": 3, "sign": "?"}
    assert found.files == {
        "words": BoundFile("/w's.json", "source", "json file", "digest of /w's.json")
    }
    assert bound_function(found.name) == found


@pytest.mark.parametrize(
    ("sql", "written"),
    [
        ("shout(a, 'w')", "shout(a, words => 'w')"),
        ("SHOUT ( a , 'w' ), b", "shout(a, words => 'w'), b"),
        ("shout(concat(a, ')', \"b'\"), 'w')", "shout(concat(a, ')', \"b'\"), words => 'w')"),
        ("shout([a, b][1], 'w''s')", "shout([a, b][1], words => 'w''s')"),
        ("shout(shout(a, 'w'), 'v')", "shout(shout(a, words => 'w'), words => 'v')"),
        ("shout(a, 'w', 2, false, '?', b)",
         "shout(a, other => b, words => 'w', loud => false, sign => '?', times => 2)"),
        ("'shout(a)', \"shout\", x.shout", None),
        ("shout -- shout(\n", None),
        ("shouts(a)", None),
    ],
)  # fmt: skip
def test_calls_are_found_where_they_are_and_not_in_texts_names_and_comments(
    sql: str, written: str | None
) -> None:
    found = bound(f"SELECT {sql} FROM t")
    assert as_written(found) == f"SELECT {sql if written is None else written} FROM t"
    if written is not None:
        assert bound(as_written(found)) == found


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("shout(a)", "words is missing"),
        ("shout()", "text is missing"),
        ("shout(a, b)", "words must be a literal, a text in single quotes, got b"),
        ("shout(a, '')", "words must be a literal"),
        ("shout(a, 'w', 1.5)", "times must be a literal, integer, got 1.5"),
        ("shout(a, 'w', loud => 1)", "loud must be a literal, boolean, got 1"),
        ("shout(a, 'w', volume => 1)", "it has no argument 'volume'"),
        ("shout(a, 'w', text => b)", "text is given twice"),
        ("shout(a, words => 'w', 1)", "an argument without a name follows one with a name"),
        ("shout(a, 'w', 1, true, '!', b, c)", "it got 7 arguments"),
        ("shout(a, 'w'", "without its partner"),
        ("whisper(a)", "whisper is not allowed"),
    ],
)
def test_a_wrong_call_is_refused_with_the_signature(sql: str, reason: str) -> None:
    with pytest.raises(RequestError) as refused:
        bound(f"SELECT {sql} FROM t")
    assert reason in str(refused.value)
    if "partner" not in reason and "whisper" not in reason:
        assert FUNCTION.signature in str(refused.value)


def test_no_user_writes_the_name_of_a_bound_function() -> None:
    written = bound("SELECT shout(a, 'w') FROM t")
    with pytest.raises(RequestError, match="is no function: write its call as documented"):
        bound(written)


def test_a_name_of_a_person_is_not_one_of_a_bound_function() -> None:
    for sql in (
        "SELECT upper_bound_price, lower_bound_abc(a) FROM t",
        f"SELECT a_bound_{'a' * 99}",
    ):
        assert bound(sql) == as_written(sql) == sql
    garbage = f"SELECT a_bound_{'a' * 120}(b) FROM t"
    assert as_written(garbage) == "SELECT a(b) FROM t"
    with pytest.raises(RequestError, match="is no function"):
        bound(garbage)


def test_a_signature_shows_types_and_defaults() -> None:
    assert FUNCTION.signature == (
        "shout(text: string, words: json file, times: integer = 1, loud: boolean = true, "
        "sign: text = '!', other: any = null) -> string"
    )


@pytest.mark.parametrize(
    ("name", "version", "arguments"),
    [
        ("Upper", "1", {"a": Column()}),
        ("f", "", {"a": Column()}),
        ("f", "1", {"a": Option("text")}),
        ("f", "1", {"a b": Column()}),
    ],
)
def test_a_bad_declaration_is_refused(name: str, version: str, arguments: Any) -> None:
    with pytest.raises(ConfigError):
        Function(name, version, arguments, lambda options: lambda a: a, pa.int8())
