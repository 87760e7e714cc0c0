"""Computes the functions of SQL for loads and views of a node, with the files that they name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa

from cache_protocol.datasets.dataset_spec import TABLE
from cache_protocol.errors import LoadError, RequestError, some_of
from cache_server.functions.declared import Function
from cache_server.node.desired import LoadPlan
from cache_server.node.loads.loading import Job
from cache_server.plan.planned_functions import Functions, result_type, type_in
from cache_server.sql.bound_functions import BoundFile, bound_function, bound_names
from cache_server.sql.function_calls import Binder, bind
from cache_server.sql.function_runs import FileTexts, FunctionWorkers, Run
from cache_server.tables.single_files import read_text


@dataclass(frozen=True)
class NodeFunctions:
    """The functions of a node. Thread-safe.

    Attributes:
        known: that SQL may call, by name.
        workers: compute them.
        check_source: refuses a file that the node may not touch.
    """

    known: Mapping[str, Function]
    workers: FunctionWorkers
    check_source: Callable[[str], None]
    texts: FileTexts = field(default_factory=FileTexts)

    def __enter__(self) -> NodeFunctions:
        return self

    def __exit__(self, *_: object) -> None:
        self.workers.close()

    def check(self, name: str) -> None:
        """Refuses a bound function that this node does not have as it was planned.

        Raises:
            LoadError: names the function and both versions.
        """
        bound = bound_function(name)
        if (function := self.known.get(bound.function)) is None:
            raise LoadError(
                f"this node has no function {bound.function}: install its package there, and "
                "allow it with --allow-function"
            )
        if function.version != bound.version:
            raise LoadError(
                f"this node has version {function.version} of {bound.function}, but the dataset "
                f"was planned with {bound.version}: install the same packages on every node"
            )

    def bound_expressions(
        self, expression: str, where: tuple[str, ...], schema: pa.Schema, plan: LoadPlan | None
    ) -> tuple[str, tuple[str, ...]]:
        """An expression and conditions of a view with their functions bound.

        Args:
            plan: of the version, whose files they may name.

        Raises:
            RequestError: a call is wrong, or names a file that the load has not pinned.
        """

        def file(source: str, kind: str) -> tuple[BoundFile, str]:
            names = [] if plan is None else bound_names(plan.sql)
            pinned = [each for name in names for each in bound_function(name).files.values()]
            for each in pinned:
                if plan is not None and (each.source, each.kind) == (source, kind):
                    return each, FunctionRun(self, plan).text(each)
            raise _no_file(source, pinned)

        binder = Binder(self.known, Functions(self.known).why_not, file, result_type)
        type_of = partial(type_in, {TABLE: schema})
        found = [bind(text, type_of, binder) for text in (expression, *where)]
        return found[0], tuple(found[1:])

    def run_for_rows(self, plan: LoadPlan | None, check: Callable[[], None]) -> Run:
        """What computes the functions of an expression of a view."""
        running = FunctionRun(self, plan, check)

        def run(name: str, batch: pa.RecordBatch) -> pa.Array:
            try:
                return running(name, batch)
            except LoadError as error:
                raise RequestError(str(error)) from None

        return run

    def run_for(self, job: Job) -> Run:
        """What computes the functions of one load, whose files are read by then.

        Raises:
            LoadError: this node lacks a function, has another version of it, or cannot read a file.
        """
        run = FunctionRun(self, job.plan, job.check_wanted)
        for name in bound_names(job.plan.sql):
            self.check(name)
            run.texts(name)
        return run


def _no_file(source: str, pinned: Iterable[BoundFile]) -> RequestError:
    known = some_of(dict.fromkeys(repr(each.source) for each in pinned)) or "none"
    return RequestError(
        f"an expression of a view may name the files that the load has pinned, {known}; got "
        f"{source!r}: name it in the `sql` of the load"
    )


class FunctionRun:
    """Computes the functions of one load, or of a view of it; see `sql.function_runs.Run`.

    Args:
        plan: of the load; None: it is not known, and there are no files.
        check: raises an error when the values are no longer needed.
    """

    def __init__(
        self,
        functions: NodeFunctions,
        plan: LoadPlan | None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._functions, self._plan, self._check = functions, plan, check
        self._rows: dict[str, int] = {}

    def __call__(self, name: str, batch: pa.RecordBatch) -> pa.Array:
        """The values of a bound function for a batch of its arguments."""
        self._functions.check(name)
        first_row = self._rows.get(name, 0)
        self._rows[name] = first_row + batch.num_rows
        return self._functions.workers.run(name, batch, self.texts, self._check, first_row)

    def texts(self, name: str) -> dict[str, str]:
        """The texts of the files of a bound function."""
        files = bound_function(name).files
        return {key: self.text(file) for key, file in files.items()}

    def text(self, file: BoundFile) -> str:
        """The text of a file that the load has pinned."""
        assert self._plan is not None
        table = next(table for table in self._plan.tables if table.name == file.table)
        secrets = self._plan.secrets.get(file.table, {})

        def read() -> str:
            options = table.options
            return read_text(file.source, file.kind, options, secrets, file.sha256)[1]

        self._functions.check_source(file.source)
        return self._functions.texts.get(file.sha256, read)
