"""Binds the functions that the query of a spec calls, with the files that they name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from cache_protocol.datasets.dataset_spec import DatasetSpec, TableSpec
from cache_protocol.errors import CacheError, LoadError, RequestError
from cache_server import object_stores
from cache_server.functions.declared import Function
from cache_server.functions.installed import SHIPPED, installed, why_not_installed
from cache_server.sql import function_worker, queries, sql_process
from cache_server.sql.bound_functions import BoundFile, bound_function, bound_names
from cache_server.sql.function_calls import Binder, bind
from cache_server.tables.single_files import read_text


@dataclass(frozen=True)
class Functions:
    """The functions that the loads of a coordinator may call.

    Attributes:
        known: by name.
        check_source: refuses a file that this node may not touch.
        check_nodes: refuses a function, by name and version, that other nodes lack.
    """

    known: Mapping[str, Function] = field(default_factory=installed)
    check_source: Callable[[str], None] = lambda source: None
    check_nodes: Callable[[str, str], None] = lambda name, version: None

    def why_not(self, name: str) -> str:
        """Why a function that is not known cannot be called; empty if it is any other name."""
        return why_not_installed(name) if name in SHIPPED else ""


def bound_query(
    text: str, spec: DatasetSpec, schemas: Mapping[str, pa.Schema], functions: Functions
) -> str:
    """The query of a spec with its functions bound; see `bound_functions`.

    Raises:
        RequestError: a call is wrong, or nodes lack the function. LoadError: a file cannot be read.
    """

    def file(source: str, kind: str) -> tuple[BoundFile, str]:
        functions.check_source(source)
        table = _table_of(source, spec)
        sha256, content = read_text(source, kind, table.options, table.secrets)
        return BoundFile(source, table.name, kind, sha256), content

    def type_of(expression: str) -> pa.DataType:
        return type_in(schemas, expression)

    bound = bind(text, type_of, Binder(functions.known, functions.why_not, file, result_type))
    for name in bound_names(bound):
        found = bound_function(name)
        functions.check_nodes(found.function, found.version)
    return bound


def result_type(
    function: Function, types: dict[str, pa.DataType], options: dict[str, Any]
) -> pa.DataType:
    """The type of a function's values, from a process apart."""
    try:
        return sql_process.call(
            function_worker.result_type,
            *(function.name, types, options),
            failure=partial(_died, function.name),
        )
    except CacheError as error:
        raise RequestError(f"a call of {function.name} is wrong: {error}") from None


def type_in(schemas: Mapping[str, pa.Schema], expression: str) -> pa.DataType:
    """The type of an expression of columns of one table; a process apart plans it.

    Raises:
        RequestError: it has none, or several.
    """
    dtype: pa.DataType = sql_process.call(
        queries.type_of_expression,
        *(expression, dict(schemas)),
        failure=lambda reason: RequestError(f"an argument of a function {reason}"),
    )
    return dtype


def _died(name: str, reason: str) -> LoadError:
    return LoadError(f"{name} {reason} before it saw a row")


def _table_of(source: str, spec: DatasetSpec) -> TableSpec:
    """The table whose store has a file: the first with a source of the same scheme."""
    scheme = source.partition("://")[0]
    remote = object_stores.is_remote(source)
    for table in spec.tables:
        if remote and any(other.startswith(f"{scheme}://") for other in table.source):
            return table
    return spec.tables[0]
