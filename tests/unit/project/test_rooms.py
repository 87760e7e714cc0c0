"""Keeps the rooms apart: who may import what, and who may read the environment.

Reads the source, so that an import inside a function, under ``TYPE_CHECKING`` or behind an alias
counts like any other: a type that a module names is a thing that it knows.
"""

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("cache_server", "cache_client", "protos/cache_protocol", "runtimes/cache_runtimes")
GENERATED = ("_pb2.py", "_pb2_grpc.py")

# Numbers in, numbers out.
PURE_MODULES = (
    "cache_client/flight/routing.py",
    "cache_client/job/arguments.py",
    "cache_client/order/audit.py",
    "cache_client/order/audit_record.py",
    "cache_client/order/digests.py",
    "cache_client/order/due.py",
    "cache_client/order/erased.py",
    "cache_client/order/load_log.py",
    "cache_client/order/order.py",
    "cache_client/order/permutation.py",
    "cache_client/order/segments.py",
    "cache_client/order/states.py",
    "cache_client/order/view_text.py",
    "cache_client/reading/window_sizes.py",
    "cache_client/views/best_fit.py",
    "cache_client/views/buckets.py",
    "cache_client/views/groups.py",
    "cache_client/views/length_buckets.py",
    "cache_client/views/mixing.py",
    "cache_client/views/mixture_view.py",
    "cache_client/views/packing.py",
    "cache_client/views/patterns.py",
    "cache_client/views/sampling.py",
    "cache_client/views/set_weights.py",
    "cache_client/views/splits.py",
    "cache_client/views/successive.py",
    "cache_client/views/view.py",
    "cache_server/auth/kubernetes.py",
    "cache_server/auth/principals.py",
    "cache_server/auth/verbs.py",
    "cache_server/egress/addresses.py",
    "cache_server/sql/formats/csv_sample.py",
    "cache_server/sql/formats/first_bytes.py",
    "cache_server/sql/formats/text_values.py",
    "cache_server/rpc/flight_messages.py",
    "cache_server/scratch/sizes.py",
    "cache_server/sql/column_stats.py",
    "protos/cache_protocol/cli/facts.py",
    "protos/cache_protocol/storage/column_stats.py",
    "protos/cache_protocol/storage/decimals.py",
    "protos/cache_protocol/wire/zones.py",
    "cache_server/source/listings.py",
    "cache_server/coordination/members/ended_nodes.py",
    "cache_server/coordination/holdings/holder_checks.py",
    "cache_server/tables/common_types.py",
    "cache_server/shards/null_advice.py",
    "cache_server/shards/tombstones.py",
    "cache_server/sql/bound_functions.py",
    "cache_server/sql/ignored_sql.py",
    "cache_server/functions/declared.py",
    "cache_server/sql/lineage.py",
    "cache_server/coordination/members/drain_plan.py",
    "cache_server/coordination/members/placement.py",
    "cache_server/coordination/erasures.py",
    "cache_server/coordination/versions/eviction.py",
    "cache_server/coordination/versions/file_fates.py",
    "cache_server/coordination/versions/sealed_groups.py",
    "cache_server/coordination/versions/states.py",
    "cache_server/auth/etcd.py",
    "cache_server/election/lease.py",
    "cache_server/jobs/agreement.py",
    "cache_server/jobs/disagreements.py",
    "cache_server/jobs/history.py",
    "cache_server/jobs/ranks.py",
    "cache_server/jobs/shares.py",
    "cache_server/jobs/verdict.py",
    "cache_server/web/charts.py",
    "cache_server/web/html.py",
    "cache_server/web/style.py",
    "cache_server/node/desired.py",
    "cache_server/node/reconcile.py",
    "cache_server/plan/shard_plan.py",
    "cache_server/shards/checked_names.py",
    "cache_server/shards/put_key.py",
    "cache_server/shards/version_key.py",
    "cache_server/source/byte_ranges.py",
    "cache_server/source/outages.py",
    "cache_server/source/pinned.py",
    "cache_server/sql/plain_columns.py",
    "cache_server/sql/quoting.py",
    "cache_server/sql/select_list.py",
    "cache_server/sql/selection.py",
    "cache_server/sql/sql_size.py",
    "cache_server/secrets/redaction.py",
    "cache_server/object_stores/options.py",
    "cache_server/tables/postgres/quoting.py",
    "cache_server/tables/postgres/ranges.py",
    "protos/cache_protocol/storage/flat_columns.py",
    "protos/cache_protocol/storage/layout.py",
    "protos/cache_protocol/storage/nested_values.py",
    "protos/cache_protocol/storage/null_bits.py",
    "protos/cache_protocol/storage/exact_values.py",
    "protos/cache_protocol/storage/lossless.py",
    "protos/cache_protocol/storage/type_rules.py",
    "protos/cache_protocol/storage/offsets.py",
    "protos/cache_protocol/storage/memory_budget.py",
    "protos/cache_protocol/storage/pace.py",
    "protos/cache_protocol/storage/page_runs.py",
    "protos/cache_protocol/datasets/dataset_names.py",
    "protos/cache_protocol/datasets/values.py",
    "protos/cache_protocol/storage/row_index.py",
    "protos/cache_protocol/storage/row_sets.py",
    "protos/cache_protocol/datasets/secret_settings.py",
    "protos/cache_protocol/datasets/source_options.py",
    "runtimes/cache_runtimes/initializer/plan.py",
    *(
        f"runtimes/cache_runtimes/diagnosis/{name}.py"
        for name in ("causes", "findings", "owned", "remedies")
    ),
    "runtimes/cache_runtimes/initializer/cache_health.py",
    "runtimes/cache_runtimes/local/pods.py",
    "runtimes/cache_runtimes/local/policies.py",
    "runtimes/cache_runtimes/local/render.py",
    "runtimes/cache_runtimes/local/supported.py",
    *(
        f"runtimes/cache_runtimes/local/trainer/{name}.py"
        for name in (
            *("admission", "gangs", "info", "jax", "jobset", "mpi", "patches", "plainml"),
            *("quantities", "refusals", "torch", "xgboost"),
        )
    ),
)
# What a pure module may import: these, and other pure modules.
PURE_IMPORTS = (
    *("__future__", "abc", "array", "bisect", "collections", "copy", "dataclasses", "datetime"),
    *("decimal", "enum", "errno", "http.HTTPStatus"),
    *("fractions", "functools", "hashlib", "heapq", "ipaddress", "itertools", "math", "numbers"),
    *("operator",),
    *("csv", "html", "re", "statistics", "string", "struct", "textwrap", "types", "typing"),
    *(
        "base64",
        "difflib",
        "json",
        "numpy",
        "pathlib.PurePath",
        "pyarrow",
        "urllib.parse",
        "xxhash",
    ),
    *("cache_protocol.errors", "cache_runtimes.initializer.settings"),
    *("cache_runtimes.local.trainer", "kubernetes.utils.quantity"),
    *(
        file.removeprefix("protos/").removeprefix("runtimes/").removesuffix(".py").replace("/", ".")
        for file in PURE_MODULES
    ),
)
# Inside an allowed package, what reads or writes all the same.
IMPURE = (
    *("numpy.fromfile", "numpy.genfromtxt", "numpy.load", "numpy.loadtxt", "numpy.memmap"),
    *("numpy.save", "numpy.savetxt", "numpy.savez", "numpy.savez_compressed"),
    *("pyarrow.OSFile", "pyarrow.csv", "pyarrow.dataset", "pyarrow.feather", "pyarrow.flight"),
    *("pyarrow.fs", "pyarrow.memory_map", "pyarrow.parquet", "pyarrow.json"),
    *("numpy.lib.format", "numpy.lib.npyio", "numpy.random", "hashlib.file_digest"),
)
IMPURE_BUILTINS = ("breakpoint", "compile", "eval", "exec", "input", "open", "print")


@dataclass(frozen=True)
class Barrier:
    """Within ``room``, only the files of ``allowed`` may import ``module``; ``x/`` is all of x."""

    room: str
    module: str
    allowed: tuple[str, ...] = ()

    def lets_in(self, file: str) -> bool:
        return any(
            file.startswith(name) if name.endswith("/") else file == name for name in self.allowed
        )

    def __str__(self) -> str:
        return f"{self.module} in {self.room}"


_ELECTION = ("cache_server/election/cluster_objects.py", "cache_server/election/etcd.py")
_POSTGRES = ("cache_server/tables/postgres/",)
_HUB = ("cache_server/object_stores/hub.py",)
# Who speaks with the world, with nodes or with clients: a table or a store is read for them.
_OUTSIDE = ("coordination", "local", "node", "plan", "rpc", "server", "web")
_KNOW_THE_READER = ("reading/", "control/row_reads.py", "training/random_access.py")
_CALL_THE_COORDINATOR = ("coordinator", "loads")
_RUN_PODS = ("containers", "controller", "kubelet", "run")
BARRIERS = (
    Barrier("cache_server", "cache_client"),
    Barrier("cache_client", "cache_server"),
    Barrier("protos/cache_protocol", "cache_client"),
    Barrier("protos/cache_protocol", "cache_server"),
    Barrier(
        "cache_server",
        "datafusion",
        tuple(
            f"cache_server/sql/{name}.py"
            for name in (
                *("bounded", "exactness", "implicit_zones", "loader", "local_tables"),
                *("planned_types", "queries", "session"),
            )
        ),
    ),
    Barrier("cache_client", "datafusion"),
    Barrier("protos/cache_protocol", "datafusion"),
    Barrier(
        "cache_server",
        "pyarrow.flight",
        (
            "cache_server/rpc/flight_service.py",
            "cache_server/rpc/flight_infos.py",
            "cache_server/rpc/flight_calls.py",
            "cache_server/node/peer_files.py",
        ),
    ),
    Barrier(
        "cache_client",
        "pyarrow.flight",
        ("cache_client/flight/connections.py", "cache_client/flight/shared_handle.py"),
    ),
    Barrier("protos/cache_protocol", "pyarrow.flight"),
    *(
        Barrier(room, "ctypes", ("protos/cache_protocol/storage/virtual_memory.py",))
        for room in ROOMS
    ),
    Barrier(
        "cache_server",
        "grpc",
        (
            "cache_server/rpc/control_service.py",
            "cache_server/rpc/callbacks.py",
            "cache_server/rpc/control_calls.py",
            "cache_server/node/links/coordinator_link.py",
        ),
    ),
    Barrier(
        "cache_client", "grpc", tuple(f"cache_client/control/{n}.py" for n in _CALL_THE_COORDINATOR)
    ),
    # Each way to the data has its own room, and each library one importer.
    Barrier("cache_server", "obstore", ("cache_server/object_stores/",)),
    Barrier("cache_server", "boto3", ("cache_server/object_stores/aws_credentials.py",)),
    Barrier("cache_server", "botocore", ("cache_server/object_stores/aws_credentials.py",)),
    Barrier("cache_server", "jwt", ("cache_server/auth/jwt_tokens.py",)),
    # Who calls is decided apart from how: each protocol has one place that asks.
    *(Barrier("cache_server/auth", f"cache_server.{name}") for name in _OUTSIDE),
    Barrier("cache_server", "prometheus_client", ("cache_server/web/metrics.py",)),
    Barrier("cache_server", "opentelemetry", ("cache_server/telemetry.py",)),
    Barrier("cache_server", "http.server", ("cache_server/web/service.py",)),
    Barrier("cache_server", "fsspec", _HUB),
    Barrier("cache_server", "huggingface_hub", _HUB),
    Barrier(
        "cache_server",
        "pyiceberg",
        (
            "cache_server/tables/iceberg.py",
            "cache_server/tables/iceberg_avro.py",
            "cache_server/tables/iceberg_catalogs.py",
            "cache_server/tables/iceberg_files.py",
            "cache_server/tables/iceberg_lookup.py",
            "cache_server/tables/iceberg_rows.py",
        ),
    ),
    Barrier("cache_server", "kubernetes", ("cache_server/election/cluster_objects.py",)),
    Barrier(
        "cache_server",
        "urllib3",
        _ELECTION,
    ),
    Barrier("cache_server", "deltalake", ("cache_server/tables/delta.py",)),
    Barrier("cache_server", "adbc_driver_manager", _POSTGRES),
    Barrier("cache_server", "adbc_driver_postgresql", _POSTGRES),
    Barrier("cache_server/object_stores", "cache_server.tables"),
    Barrier("cache_server/object_stores", "pyarrow"),
    *(
        Barrier(f"cache_server/{room}", f"cache_server.{name}")
        for room in ("object_stores", "secrets", "shards", "source", "sql", "tables")
        for name in _OUTSIDE
    ),
    # Users of an engine import its module, and other users no engine.
    Barrier("cache_client", "ray", ("cache_client/engines/ray_data.py",)),
    Barrier("cache_client", "pyspark", ("cache_client/engines/spark_source.py",)),
    # Who knows rows and nodes; `device.py`, for one, does not.
    Barrier(
        "cache_client",
        "cache_client.reading.reader",
        tuple(f"cache_client/{n}" for n in _KNOW_THE_READER),
    ),
    # What runs beside a cache is no part of it: `cachectl run-local` is the one door.
    Barrier("cache_server", "cache_runtimes"),
    Barrier("cache_client", "cache_runtimes", ("cache_client/__main__.py",)),
    Barrier("protos/cache_protocol", "cache_runtimes"),
    Barrier("runtimes/cache_runtimes", "cache_client"),
    Barrier("runtimes/cache_runtimes", "cache_server"),
    Barrier(
        "runtimes/cache_runtimes",
        "kubernetes.client",
        (
            "runtimes/cache_runtimes/diagnosis/objects.py",
            "runtimes/cache_runtimes/initializer/cluster.py",
        ),
    ),
    Barrier("runtimes/cache_runtimes", "grpc", ("runtimes/cache_runtimes/local/kubelet.py",)),
    Barrier(
        "runtimes", "asyncio", tuple(f"runtimes/cache_runtimes/local/{n}.py" for n in _RUN_PODS)
    ),
    Barrier("cache_server", "torch"),
    Barrier("protos/cache_protocol", "torch"),
    # Training scripts seed it: pauses by chance are those of `cache_protocol.wire.channels`.
    *(
        Barrier(
            room,
            module,
            ("protos/cache_protocol/wire/channels.py", "runtimes/cache_runtimes/local/run.py"),
        )
        for room in ROOMS
        for module in (
            *("random", "tenacity.wait_random", "tenacity.wait_random_exponential"),
            "tenacity.wait_exponential_jitter",
        )
    ),
    # Before Python 3.12 it has a lock, which a fork in another thread would leave locked.
    Barrier("cache_client", "functools.cached_property"),
    Barrier("protos/cache_protocol", "functools.cached_property"),
)

ENVIRONMENT = ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv")
ENVIRONMENT_READERS = (
    "cache_server/__main__.py",
    "cache_client/__main__.py",
    "cache_client/job/ranks.py",
    "runtimes/cache_runtimes/initializer/__main__.py",
)
ENVIRONMENT_FUNCTION = "from_env"


# Each room of a folder, and the rooms that it imports: only ones above it in its table.
HOUSES: dict[str, dict[str, tuple[str, ...]]] = {
    "cache_client": {
        "order": (),
        "flight": ("order",),
        "job": ("order",),
        "views": ("order",),
        "reading": ("flight", "views"),
        "writing": ("flight", "reading"),
        "batches": ("job", "reading"),
        "epochs": ("order", "flight", "reading"),
        "control": ("order", "flight", "job", "reading", "writing"),
        "view_options": ("order", "flight", "job", "views", "reading", "batches"),
        "training": (
            *("order", "flight", "job", "views", "reading", "batches", "epochs", "control"),
            "view_options",
        ),
        "engines": ("job", "writing", "control"),
        "cli": ("order", "flight", "job", "views", "control", "view_options"),
    },
    "cache_server": {
        "auth": (),
        "secrets": (),
        "source": (),
        "egress": ("source",),
        "config": ("auth",),
        "setting_options": ("config",),
        "telemetry": (),
        "functions": (),
        "sql": ("functions", "source"),
        "shards": ("secrets", "sql"),
        "scratch": ("secrets", "shards"),
        "object_stores": ("egress", "secrets", "source"),
        "tables": ("egress", "object_stores", "secrets", "source", "sql"),
        "plan": ("functions", "object_stores", "shards", "source", "sql", "tables"),
        "jobs": ("auth",),
        "coordination": (
            *("auth", "egress", "functions", "jobs", "plan", "secrets", "shards", "source"),
        ),
        "node": (
            *("auth", "coordination", "egress", "functions", "jobs", "object_stores"),
            *("plan", "scratch", "secrets", "shards", "source", "sql", "tables"),
        ),
        "coordinating": ("coordination", "node"),
        "election": ("auth", "coordinating", "coordination", "node", "shards"),
        "rpc": (*("auth", "coordination", "egress", "jobs", "node", "secrets", "shards"),),
        "web": ("auth", "node"),
        "local": ("config", "node"),
        "server": (
            *("auth", "config", "coordinating", "coordination", "egress", "election"),
            *("functions", "node", "rpc", "scratch", "shards", "sql", "web"),
        ),
    },
    "cache_server/node": {
        "desired": (),
        "leaving": (),
        "peer_files": (),
        "sent_files": (),
        "traffic": (),
        "turns": (),
        "reconcile": ("desired",),
        "links": ("desired", "reconcile"),
        "second_reader": ("peer_files",),
        "reader_reports": (),
        "loads": ("desired", "links", "peer_files", "reconcile"),
        "puts": ("desired", "links", "loads"),
        "row_values": ("desired", "loads", "turns"),
        "status": ("loads", "traffic"),
        "forgetting": ("desired", "loads", "row_values"),
        "node": (
            *("desired", "forgetting", "leaving", "links", "loads", "puts", "reader_reports"),
            *("reconcile", "row_values", "sent_files", "status"),
        ),
    },
    "cache_server/coordination": {
        "catalogue_store": (),
        "damaged_entries": (),
        "erasures": (),
        "forget_book": ("catalogue_store",),
        "catalogue": ("catalogue_store", "damaged_entries", "erasures", "forget_book"),
        "members": ("catalogue",),
        "versions": ("catalogue", "catalogue_store", "damaged_entries", "erasures", "members"),
        "forgets": ("catalogue", "forget_book", "members", "versions"),
        "holdings": ("members", "versions"),
        "cache_state": ("catalogue", "forgets", "members", "versions", "holdings"),
        "claims": ("cache_state", "members", "versions", "holdings"),
        "evictions": ("cache_state", "members", "versions", "holdings"),
        "forgetting": ("cache_state", "evictions", "forgets", "versions"),
        "loads": ("cache_state", "claims", "evictions", "members", "versions"),
        "commits": ("cache_state", "claims", "loads", "versions"),
        "readers": ("cache_state", "evictions", "versions", "holdings"),
        "draining": ("cache_state", "members", "versions", "holdings"),
        "heartbeats": ("cache_state", "claims", "draining", "evictions", "members", "versions"),
        "coordinator": (
            *("catalogue", "holdings", "cache_state", "claims", "loads", "commits", "readers"),
            *("draining", "evictions", "forgetting", "heartbeats"),
        ),
        "environment_load": ("coordinator",),
    },
    "protos/cache_protocol": {
        "v1": (),
        "errors": ("v1",),
        "datasets": ("errors", "v1"),
        "storage": ("errors",),
        "wire": ("errors", "v1"),
        "cli": ("errors", "wire"),
    },
}
MOST_ENTRIES = 16  # of the client's folder


@dataclass(frozen=True)
class Use:
    """A dotted name that a file imports or reaches through an import."""

    name: str
    line: int
    functions: tuple[str, ...]
    is_import: bool

    def within(self, module: str) -> bool:
        return self.name == module or self.name.startswith(module + ".")


class _Reader(ast.NodeVisitor):
    """Collects the uses of one file, in source order.

    ``import a.b``, ``from a import b`` and ``import_module("a.b")`` use ``a.b``, and so does
    ``x.b`` after ``import a as x``. Names are not followed through assignments.
    """

    def __init__(self, package: str) -> None:
        self.uses: list[Use] = []
        self._package = package
        self._functions: list[str] = []
        self._bound: dict[str, str] = {}

    def read(self, tree: ast.Module) -> list[Use]:
        # Imports first: a function may use a name that is imported further down.
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.name if alias.asname else alias.name.partition(".")[0]
                    self._bound[alias.asname or name] = name
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    name = f"{self._module(node)}.{alias.name}"
                    self._bound[alias.asname or alias.name] = name
        self.visit(tree)
        return self.uses

    def _use(self, name: str, node: ast.stmt | ast.expr, *, is_import: bool) -> None:
        self.uses.append(Use(name, node.lineno, tuple(self._functions), is_import))

    def _module(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        parents = self._package.split(".")
        parents = parents[: len(parents) - node.level + 1]
        return ".".join([*parents, *([node.module] if node.module else [])])

    def _resolve(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self._bound.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._resolve(node.value)
            return f"{owner}.{node.attr}" if owner else None
        return None

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        # Decorators, defaults and annotations belong to the scope around it.
        for part in (*node.decorator_list, node.args, *([node.returns] if node.returns else [])):
            self.visit(part)
        self._functions.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._functions.pop()

    visit_FunctionDef = _function
    visit_AsyncFunctionDef = _function

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._use(alias.name, node, is_import=True)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            module = self._module(node)
            self._use(
                module if alias.name == "*" else f"{module}.{alias.name}", node, is_import=True
            )

    def visit_Call(self, node: ast.Call) -> None:
        called = self._resolve(node.func) or (
            node.func.id if isinstance(node.func, ast.Name) else None
        )
        if called in ("importlib.import_module", "__import__") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                self._use(name.value, node, is_import=True)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self._resolve(node)
        if name is None:
            self.generic_visit(node)
        else:
            self._use(name, node, is_import=False)

    def visit_Name(self, node: ast.Name) -> None:
        name = self._bound.get(node.id)
        if name is not None:
            self._use(name, node, is_import=False)
        elif node.id in IMPURE_BUILTINS and isinstance(node.ctx, ast.Load):
            self._use(f"builtins.{node.id}", node, is_import=False)


def uses_in(source: str, package: str = "") -> list[Use]:
    return _Reader(package).read(ast.parse(source))


def python_files(room: str) -> Iterator[str]:
    """The hand-written modules of a room, relative to the repository root."""
    for path in sorted((ROOT / room).rglob("*.py")):
        if not path.name.endswith(GENERATED):
            yield path.relative_to(ROOT).as_posix()


@cache  # every barrier asks
def uses_of(file: str) -> list[Use]:
    path = Path(file)
    parts = [part for part in path.parent.parts if part not in ("protos", "runtimes")]
    return uses_in((ROOT / path).read_text(encoding="utf-8"), ".".join(parts))


def trespasses(barrier: Barrier, file: str, uses: list[Use]) -> list[str]:
    if barrier.lets_in(file):
        return []
    allowed = f"only {' and '.join(barrier.allowed)} may" if barrier.allowed else "nothing may"
    return [
        f"{file}:{use.line} {'imports' if use.is_import else 'uses'} {use.name}: "
        f"in {barrier.room} {allowed} import {barrier.module}"
        for use in uses
        if use.within(barrier.module)
    ]


def impurities(file: str, uses: list[Use]) -> list[str]:
    found = []
    for use in uses:
        allowed = use.name.startswith("builtins.") or any(use.within(name) for name in PURE_IMPORTS)
        if use.is_import and not allowed:
            found.append(f"{file}:{use.line} imports {use.name}, which is not on the pure list")
        elif use.name.startswith("builtins.") or any(use.within(name) for name in IMPURE):
            found.append(f"{file}:{use.line} uses {use.name}: a pure module does no I/O")
    return found


def environment_reads(file: str, uses: list[Use]) -> list[str]:
    if file in ENVIRONMENT_READERS:
        return []
    return [
        f"{file}:{use.line} uses {use.name}: only {', '.join(ENVIRONMENT_READERS)} and functions "
        f"named {ENVIRONMENT_FUNCTION} read the environment"
        for use in uses
        if any(use.within(name) for name in ENVIRONMENT)
        and ENVIRONMENT_FUNCTION not in use.functions
    ]


def report(problems: list[str]) -> str:
    return "\n" + "\n".join(problems)


@pytest.mark.parametrize("barrier", BARRIERS, ids=str)
def test_only_the_named_files_import(barrier: Barrier) -> None:
    problems = [
        problem
        for file in python_files(barrier.room)
        for problem in trespasses(barrier, file, uses_of(file))
    ]
    assert not problems, report(problems)


def room_of(parts: Sequence[str]) -> str:
    """The folder of a module, or the module where it stands at the root of its package."""
    return ".".join(parts[:2])


def test_no_file_imports_a_file_of_tests() -> None:
    of_tests = re.compile(r"^\s*(from|import) tests\b.*[. ]test_\w+", re.M)
    files = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    assert [path for path in files if of_tests.search(path.read_text("utf-8"))] == []


def test_no_room_imports_a_room_that_imports_it_in_turn() -> None:
    """`graphlib` raises a CycleError that names the rooms."""
    arrows: dict[str, set[str]] = {}
    for folder in ROOMS:
        package = Path(folder).name
        for file in python_files(folder):
            if file.endswith("__init__.py") and Path(file).parent == Path(folder):
                continue  # the public names of a package, from any room
            below = Path(file).relative_to(folder).with_suffix("").parts
            room = room_of((package, *below))
            for use in uses_of(file):
                parts = use.name.split(".")
                if use.is_import and parts[0] == package and len(parts) > 1:
                    arrows.setdefault(room, set()).add(room_of(parts))
            arrows.get(room, set()).discard(room)
    tuple(graphlib.TopologicalSorter(arrows).static_order())


@pytest.mark.parametrize("folder", HOUSES)
def test_rooms_import_what_the_table_says_and_no_room_below_them(folder: str) -> None:
    table = HOUSES[folder]
    package = folder.removeprefix("protos/").replace("/", ".")
    imported: dict[str, set[str]] = {}
    for file in python_files(folder):
        room = Path(file).relative_to(folder).with_suffix("").parts[0]
        if room in ("__init__", "__main__"):
            continue  # the faces of the package
        names = (use.name for use in uses_of(file) if use.is_import and use.within(package))
        below = {name.removeprefix(package).split(".")[1] for name in names if name != package}
        imported.setdefault(room, set()).update(below & table.keys() - {room})
    assert imported == {room: set(below) for room, below in table.items()}
    rooms = list(table)
    for room, below in table.items():
        assert {*below} <= {*rooms[: rooms.index(room)]}, f"{room} imports a room below it"


def test_the_folder_of_the_client_is_read_at_a_glance() -> None:
    entries = {path.name for path in (ROOT / "cache_client").iterdir()} - {"__pycache__"}
    assert len(entries) <= MOST_ENTRIES, sorted(entries)


@pytest.mark.parametrize("file", PURE_MODULES)
def test_pure_modules_do_no_io(file: str) -> None:
    if not (ROOT / file).exists():
        pytest.skip(f"{file} does not exist")
    problems = impurities(file, uses_of(file))
    assert not problems, report(problems)


def test_the_modules_that_the_architecture_page_calls_pure_are_these() -> None:
    tree = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("```")[1]
    folders: list[str] = []
    found = []
    for indent, name, says in re.findall(r"^( *)(\S+) *(.*)$", tree, re.MULTILINE):
        folders = [*folders[: len(indent) // 2], name]
        if re.search(r"\bpure\b", says):
            found.append("".join(folders))
    named_as_a_whole = "cache_server/tables/postgres/"
    assert sorted(found) == sorted(m for m in PURE_MODULES if not m.startswith(named_as_a_whole))


@pytest.mark.parametrize("room", ROOMS)
def test_the_environment_is_read_where_it_is_announced(room: str) -> None:
    problems = [
        problem for file in python_files(room) for problem in environment_reads(file, uses_of(file))
    ]
    assert not problems, report(problems)


def run_python(source: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"\n{source}\n{done.stdout}{done.stderr}"


def test_the_server_starts_without_torch_and_imports_rich_when_it_is_used() -> None:
    run_python(
        "import sys; sys.modules['torch'] = None\n"
        "import cache_server, cache_server.node.node, cache_server.server\n"
        "assert 'rich' not in sys.modules\n"
        "import cache_server.__main__"
    )


def test_whoever_only_loads_datasets_needs_neither_the_server_nor_torch() -> None:
    run_python(
        "import sys; sys.modules['torch'] = None\n"
        "import cache_client\n"
        "found = {'datafusion', 'cache_server'} & sys.modules.keys()\n"
        "assert not found, f'import cache_client imports {found}'\n"
        "import cache_client.__main__\n"
        "assert cache_client.CacheClient"
    )


def test_datafusion_is_loaded_when_a_node_starts_and_its_allocator_has_been_told_how() -> None:
    run_python("import sys; sys.modules['datafusion'] = None; import cache_server.__main__")


def test_a_dataset_imports_what_most_processes_never_use_when_it_is_used() -> None:
    run_python(
        "import sys, cache_client.training.dataset\n"
        "found = {'pydantic', 'rich'} & sys.modules.keys()\n"
        "assert not found, f'import cache_client.training.dataset imports {found}'"
    )


@pytest.mark.parametrize(
    "source",
    [
        "import pyarrow.flight",
        "import pyarrow.flight as flight",
        "from pyarrow import flight",
        "from pyarrow import ipc, flight as fl",
        "from pyarrow.flight import FlightClient",
        "from pyarrow.flight import *",
        "def f():\n    def g():\n        from pyarrow import flight",
        "class A:\n    async def f(self):\n        import pyarrow.flight",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pyarrow.flight",
        "try:\n    import pyarrow.flight\nexcept ImportError:\n    pass",
        "import pyarrow as pa\nclient = pa.flight.connect('x')",
        "import importlib\nflight = importlib.import_module('pyarrow.flight')",
        "from importlib import import_module\nflight = import_module('pyarrow.flight')",
        "flight = __import__('pyarrow.flight')",
    ],
)
def test_every_form_of_import_is_seen(source: str) -> None:
    barrier = Barrier("cache_server", "pyarrow.flight", ("cache_server/rpc/flight_service.py",))
    problems = trespasses(barrier, "cache_server/node/node.py", uses_in(source))
    assert problems, source
    assert "cache_server/node/node.py:" in problems[0]
    assert "pyarrow.flight" in problems[0]
    assert not trespasses(barrier, "cache_server/rpc/flight_service.py", uses_in(source))


@pytest.mark.parametrize(
    "source",
    ["import pyarrow", "import pyarrow.flights", "from pyarrow import ipc", "import flight"],
)
def test_other_imports_are_let_through(source: str) -> None:
    barrier = Barrier("cache_server", "pyarrow.flight")
    assert not trespasses(barrier, "cache_server/node/node.py", uses_in(source))


def test_a_folder_that_is_let_in_is_all_of_it_and_nothing_else() -> None:
    barrier = Barrier("cache_server", "obstore", ("cache_server/object_stores/",))
    uses = uses_in("import obstore")
    assert not trespasses(barrier, "cache_server/object_stores/client.py", uses)
    assert trespasses(barrier, "cache_server/shards/store.py", uses)
    assert trespasses(barrier, "cache_server/tables/files.py", uses)


@pytest.mark.parametrize(
    ("source", "package", "name"),
    [
        ("from . import store", "cache_server.shards", "cache_server.shards.store"),
        ("from .store import Shard", "cache_server.shards", "cache_server.shards.store.Shard"),
        (
            "from ..errors import CacheError",
            "cache_protocol.datasets",
            "cache_protocol.errors.CacheError",
        ),
    ],
)
def test_relative_imports_are_resolved(source: str, package: str, name: str) -> None:
    assert [use.name for use in uses_in(source, package)] == [name]


@pytest.mark.parametrize(
    "source",
    [
        "import os",
        "from pathlib import Path",
        "import pyarrow.parquet as pq",
        "from cache_client import reader",
        "from cache_protocol import datasets",
        "import cache_protocol.v1.cache_pb2",
        "open('x')",
        "import numpy as np\nnp.load('x')",
        "from numpy import memmap",
        "from numpy.random import default_rng",
    ],
)
def test_impurity_is_seen(source: str) -> None:
    assert impurities("cache_client/order/order.py", uses_in(source))


@pytest.mark.parametrize(
    "source",
    [
        "from __future__ import annotations",
        "import numpy as np\nnp.arange(3)",
        "from numpy.typing import NDArray",
        "from collections.abc import Iterator",
        "from cache_protocol.errors import ConfigError",
        "from cache_protocol import errors",
    ],
)
def test_pure_imports_are_let_through(source: str) -> None:
    assert not impurities("cache_client/order/order.py", uses_in(source))


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['A']",
        "import os as system\nsystem.environ.get('A')",
        "import os\ndef f():\n    return os.getenv('A')",
        "from os import environ\nenviron['A']",
        "from os import getenv as read\nread('A')",
        "import os\ndef from_env(environ=os.environ): ...",
    ],
)
def test_environment_reads_are_seen(source: str) -> None:
    assert environment_reads("cache_server/config.py", uses_in(source))
    assert not environment_reads("cache_server/__main__.py", uses_in(source))


@pytest.mark.parametrize(
    "source",
    [
        "import os\ndef from_env(environ=None):\n    return environ or os.environ",
        "import os\nos.path.join('environ')",
        "def f(environ):\n    return environ['A']",
    ],
)
def test_announced_environment_reads_are_let_through(source: str) -> None:
    assert not environment_reads("cache_server/config.py", uses_in(source))
