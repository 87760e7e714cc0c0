"""Without the packages of an extra: one line names the missing package and the pip command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_without(folder: Path, packages: tuple[str, ...], *command: str) -> str:
    """Runs Python where ``packages`` cannot be imported, in its children too; its last line."""
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in packages)
    (folder / "sitecustomize.py").write_text(f"import sys\n{blocked}")
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode != 0
    return done.stderr.rstrip().rpartition("\n")[2]


def message(what: str, package: str, extra: str) -> str:
    return f"{what} needs the package '{package}': pip install 'trainer-data-cache[{extra}]'"


def test_the_datasets_without_torch_name_the_client_extra(tmp_path: Path) -> None:
    program = "from cache_client import CacheClient\nfrom cache_client import CacheIterableDataset"
    line = run_without(tmp_path, ("torch",), "-c", program)
    expected = message("CacheIterableDataset", "torch", "client")
    assert line == f"cache_protocol.errors.ConfigError: {expected}"


@pytest.mark.parametrize("package", ["datafusion", "grpc_health"])
def test_a_local_cluster_without_a_package_names_the_server_extra(
    tmp_path: Path, package: str
) -> None:
    line = run_without(
        tmp_path, (package,), "-c", "from cache_server import LocalCluster\nLocalCluster()"
    )
    assert line == (
        "cache_protocol.errors.ConfigError: the cache node did not start: "
        f"cache-server: ConfigError: {message('a cache node', package, 'server')}"
    )


@pytest.mark.parametrize("package", ["kubernetes", "psutil"])
def test_run_local_without_a_package_names_the_extras(tmp_path: Path, package: str) -> None:
    line = run_without(tmp_path, (package,), "-m", "cache_client", "run-local", "job.yaml")
    expected = message("run-local", package, "server,kubernetes")
    assert line == f"cachectl: ConfigError: {expected}"


@pytest.mark.parametrize(
    ("module", "what", "package"),
    [("ray_data", "Ray Data", "ray"), ("spark_source", "Spark", "pyspark")],
)
def test_an_engine_without_its_library_names_its_extra(
    tmp_path: Path, module: str, what: str, package: str
) -> None:
    line = run_without(tmp_path, (package,), "-c", f"import cache_client.engines.{module}")
    expected = message(what, package, package.removeprefix("py"))
    assert line == f"cache_protocol.errors.ConfigError: {expected}"


SOURCES = {
    "pyiceberg": ("format iceberg", "iceberg", "TableSpec('t', ('t',), format='iceberg')"),
    "deltalake": ("format delta", "delta", "TableSpec('t', ('t',), format='delta')"),
    "adbc_driver_postgresql": ("format postgres", "postgres", "TableSpec('t', ('postgres://h',))"),
    "fsspec": ("store hf://", "hub", "TableSpec('t', ('hf://org/name/a.parquet',))"),
}


def test_every_source_without_its_library_names_its_extra(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from cache_protocol.errors import RequestError\n"
        "from cache_protocol.datasets.dataset_spec import TableSpec\n"
        "from cache_server import tables\n"
        "found = []\n"
    ) + "".join(
        f"try:\n    tables.pin({table})\n"
        "except RequestError as error:\n    found.append(str(error))\n"
        for _, _, table in SOURCES.values()
    )
    line = run_without(tmp_path, tuple(SOURCES), "-c", f"{program}sys.exit('; '.join(found))")
    assert line.split("; ") == [
        f"{message(what, package, extra)} on every node"
        for package, (what, extra, _) in SOURCES.items()
    ]


def test_the_hub_without_the_filesystem_of_fsspec_names_its_extra(tmp_path: Path) -> None:
    what, extra, table = SOURCES["fsspec"]
    program = (
        "from cache_protocol.datasets.dataset_spec import TableSpec\n"
        f"from cache_server import tables\ntables.pin({table})"
    )
    line = run_without(tmp_path, ("huggingface_hub",), "-c", program)
    expected = message(what, "huggingface_hub", extra)
    assert line == f"cache_protocol.errors.RequestError: {expected} on every node"
