"""The two command line programs, and the processes they start, as a person meets them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer

from cache_client import CacheClient, DatasetSpec, LoadError, __main__
from cache_server import LocalCluster
from cache_server.__main__ import app as server_app
from tests import forked_python
from tests.conftest import write_numbered
from tests.waiting import wait_until

SERVER = [sys.executable, "-m", "cache_server"]
CACHECTL = [sys.executable, "-m", "cache_client"]
FREE_PORTS = ["--flight-port", "0", "--control-port", "0", "--http-port", "0"]


def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in forked_python.environ().items() if k != "CACHE_ENDPOINT"}
    run_program = forked_python.run if arguments[0] == sys.executable else subprocess.run
    done = run_program(
        arguments, capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.returncode == code, done.stderr
    return done


@pytest.mark.parametrize(("begun", "listening"), [(1, 0), (2, 0), (2, 1)])
def test_nodes_and_their_files_do_not_outlive_a_parent_that_is_killed_while_it_starts_them(
    begun: int, listening: int
) -> None:
    # Nobody reads the line then that the last of them prints when it listens.
    program = f"""
import json, os, signal
from cache_server.local import LocalCluster, LocalNode

def begin(node):
    really_begin(node)
    nodes.append(node)
    end_if_it_is_time()

def wait(node):
    end_if_it_is_time()
    really_wait(node)
    listening.append(node)

def end_if_it_is_time():
    if (len(nodes), len(listening)) != ({begun}, {listening}):
        return
    pids = [node.pid for node in nodes]
    print(json.dumps([str(nodes[0].cache_dir.parent), pids]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

nodes, listening = [], []
really_begin, really_wait = LocalNode.begin, LocalNode.wait_until_listening
LocalNode.begin, LocalNode.wait_until_listening = begin, wait
LocalCluster(2)
"""
    done = forked_python.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60, check=False,
        env=forked_python.environ(),
    )  # fmt: skip
    directory, pids = json.loads(done.stdout)
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), 30.0, "the nodes end")
    assert not Path(directory).exists()


def test_nodes_and_their_files_do_not_outlive_a_killed_parent_though_its_forks_do() -> None:
    program = (
        "from cache_server import LocalCluster; c = LocalCluster(1); import json, os, time; "
        "fork = os.fork() or time.sleep(600); "
        "print(json.dumps([str(c.cache_dir), c.nodes[0].pid, fork]), flush=True); time.sleep(600)"
    )
    with forked_python.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True,
        env=forked_python.environ(),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        directory, node, fork = json.loads(process.stdout.readline())
        process.kill()
        try:
            wait_until(lambda: not psutil.pid_exists(node), 30.0, "the node ends")
            wait_until(lambda: not Path(directory).exists(), 10.0, "its directory is gone")
            assert psutil.pid_exists(fork)
        finally:
            os.kill(fork, signal.SIGKILL)


def test_a_fork_of_the_parent_that_leaves_a_cluster_stops_nothing_and_removes_nothing() -> None:
    program = """
import os
from cache_server import LocalCluster
with LocalCluster(1) as cluster:
    if fork := os.fork():
        os.waitpid(fork, 0)
        (node,) = cluster.nodes
        os.kill(node.pid, 0)
        assert (node.cache_dir / ".log").exists()
        node.restart()
"""
    run(sys.executable, "-c", program)


def test_cachectl_loads_lists_shows_and_drops(
    cluster: LocalCluster, dataset_name: str, tmp_path: Path
) -> None:
    source = write_numbered(tmp_path / "t", 50, files=2)
    spec = tmp_path / "spec.yaml"
    spec.write_text(f"name: {dataset_name}\nsource: {source}\nfilter: row >= 10\n")
    at = ["--endpoint", cluster.endpoint]
    loaded = json.loads(run(*CACHECTL, "load", str(spec), "--json", *at).stdout)
    assert (loaded["state"], loaded["num_rows"]) == ("ready", 40)
    assert dataset_name in run(*CACHECTL, "ls", *at).stdout
    shown = run(*CACHECTL, "describe", dataset_name, *at).stdout
    assert "40" in shown and "label" in shown
    head = json.loads(run(*CACHECTL, "head", dataset_name, "-n", "2", "--json", *at).stdout)
    assert [row["row"] for row in head] == [10, 11]
    assert len(json.loads(run(*CACHECTL, "nodes", "--json", *at).stdout)) == 2
    run(*CACHECTL, "drop", dataset_name, *at)
    missing = run(*CACHECTL, "describe", dataset_name, *at, code=65)
    assert missing.stderr.count("\n") == 1 and dataset_name in missing.stderr


def test_a_list_with_a_dataset_that_failed_says_where_the_reason_is(
    cluster: LocalCluster, client: CacheClient, dataset_name: str, tmp_path: Path
) -> None:
    at = ["--endpoint", cluster.endpoint]
    hint = f"for the reason: cachectl describe {dataset_name}"
    assert hint not in run(*CACHECTL, "ls", *at).stdout
    pq.write_table(pa.table({"x": pa.array([1, None])}), tmp_path / "t.parquet")
    sql = "SELECT 1 / (x - 1) AS x FROM source"
    with pytest.raises(LoadError, match="Divide by zero"):
        client.load(DatasetSpec(dataset_name, tmp_path / "t.parquet", sql=sql))
    assert f"{dataset_name} failed; {hint}" in run(*CACHECTL, "ls", *at).stdout
    assert "Divide by zero" in run(*CACHECTL, "describe", dataset_name, *at).stdout


def test_floats_of_32_bits_are_shown_as_such(
    cluster: LocalCluster, client: CacheClient, dataset_name: str, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"x": pa.array([0.1], pa.float32())}), tmp_path / "t.parquet")
    client.load(DatasetSpec(dataset_name, tmp_path / "t.parquet"))
    at = ["--endpoint", cluster.endpoint]
    assert run(*CACHECTL, "head", dataset_name, *at).stdout.split() == ["x", "0.1"]
    assert "float32" in run(*CACHECTL, "describe", dataset_name, *at).stdout


@pytest.mark.parametrize(("program", "name"), [(SERVER, "cache-server"), (CACHECTL, "cachectl")])
def test_both_programs_say_their_version(program: list[str], name: str) -> None:
    shown = run(*program, "--version").stdout
    assert re.fullmatch(rf"{name} \d+\.\d+\.\d+\n", shown)


@pytest.mark.parametrize(
    ("program", "app"), [(SERVER, server_app), (CACHECTL, __main__.app)], ids=["server", "cachectl"]
)
def test_help_at_80_columns_cuts_nothing_off(
    program: list[str], app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    overview = run(*program, "--help").stdout
    assert "..." not in overview.partition("Commands:")[2]
    for name, command in commands.items():
        text = run(*program, name, "--help").stdout
        assert max(map(len, text.splitlines())) <= 80
        assert "…" not in text
        for parameter in command.params:
            for option in (*parameter.opts, *parameter.secondary_opts):
                assert option in text.lower()  # arguments are shown in capitals


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["ls"], 78, "CACHE_ENDPOINT"),
        (["load", "/not/there.yaml", "--endpoint", "grpc://127.0.0.1:9"], 78, "/not/there.yaml"),
        (["ls", "--endpoint", "grpc://127.0.0.1:9", "--timeout-s", "2"], 1, "127.0.0.1:9"),
    ],
)
def test_cachectl_says_what_is_wrong_in_one_line(
    arguments: list[str], code: int, words: str
) -> None:
    done = run(*CACHECTL, *arguments, code=code)
    assert words in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "quotes"),
    [("load", ()), ("explain", ()), ("plan", ("--memory-limit", "much"))],
)
def test_cachectl_names_every_bad_setting_at_once(command: str, quotes: tuple[str, ...]) -> None:
    bad = ["/not/there.yaml", "--endpoint", "nowhere", "--timeout-s", "-1", *quotes]
    done = run(*CACHECTL, command, *bad, code=78)
    for quote in ("/not/there.yaml", "'nowhere'", "got -1.0", *quotes):
        assert quote in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "command",
    [
        [*CACHECTL, "ls"],
        [*CACHECTL, "nodes", "--json"],
        [*CACHECTL, "--version"],
        [*SERVER, "serve", "--help"],
        [*SERVER, "serve", *FREE_PORTS, "--cache-dir"],
        [*SERVER, "local"],
    ],
    ids=lambda command: " ".join(command[2:4]),
)
def test_an_output_that_cannot_be_written_is_said_in_one_line(
    cluster: LocalCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    unbuffered: str,
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    monkeypatch.setenv("CACHE_ENDPOINT", cluster.endpoint)
    where = [str(tmp_path / "cache")] if command[-1] == "--cache-dir" else []
    with Path("/dev/full").open("w") as full:
        done = forked_python.run(
            [*command, *where],
            stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
            check=False,
        )  # fmt: skip
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if " INFO " not in line]
    program = command[2].replace("cache_server", "cache-server").replace("cache_client", "cachectl")
    reason = "cannot write to standard output: No space left on device"
    assert told == [f"{program}: CacheError: {reason}"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_cachectl_says_nothing_where_nobody_reads_it_any_more(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, unbuffered: str
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*CACHECTL, "nodes", "--json", "--endpoint", cluster.endpoint],
        stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_cachectl_works_without_a_standard_output(
    cluster: LocalCluster, as_json: list[str]
) -> None:
    command = [*CACHECTL, "nodes", "--endpoint", cluster.endpoint, *as_json]
    run("sh", "-c", 'exec "$@" >&-', "sh", *command)
