"""``cache-server``: its signals, its exit codes, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import Request, urlopen

import psutil
import pyarrow as pa
import pyarrow.flight as flight
import pyarrow.parquet as pq
import pytest

from cache_client import CacheClient, DatasetSpec, NodeUnavailableError
from cache_protocol.v1 import cache_pb2 as pb
from tests import forked_python
from tests.conftest import write_numbered
from tests.flight_clients import connect
from tests.store_stubs import HubStub, Served
from tests.waiting import suspend, wait_until

WAIT_S = 30.0
FREE_PORTS = ["--flight-port", "0", "--control-port", "0", "--http-port", "0"]
EVERY_SOURCE = ["--allow-source", ""]
ROW_SCHEMA = pa.schema([pa.field("row", pa.int64())])


class Server:
    """A running ``cache-server``, and the line that it printed when it listened."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.process = forked_python.Popen(
            [sys.executable, "-m", "cache_server", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )

    def wait_until_listening(self) -> dict[str, object]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        ready = json.loads(line)
        assert ready["event"] == "listening"
        return dict(ready)

    def end(self, number: signal.Signals, timeout_s: float = WAIT_S) -> tuple[int, str, str]:
        """Exit code, and the rest of standard output and error."""
        self.process.send_signal(number)
        output, errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output, errors


@contextmanager
def server(*arguments: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    made = Server(*arguments, env=env)
    try:
        yield made
    finally:
        made.process.kill()  # nothing, if it has ended
        made.process.communicate()


def refused(*arguments: str, code: int) -> str:
    """The one line that a command says before it exits with ``code``."""
    done = forked_python.run(
        [sys.executable, "-m", "cache_server", *arguments],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
        env=forked_python.environ(),
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    line = done.stderr.splitlines()[-1]
    assert line.startswith("cache-server: ")
    assert "Traceback" not in done.stderr
    return line


# -- serve -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_node_in_order_and_what_it_printed_was_one_line(
    tmp_path: Path, number: signal.Signals
) -> None:
    with server("serve", "--cache-dir", str(tmp_path / "cache"), *FREE_PORTS) as node:
        ready = node.wait_until_listening()
        assert ready["pid"] == node.process.pid
        code, output, errors = node.end(number)

    assert set(ready) == {"event", "flight", "control", "http", "node_id", "pid"}
    assert (code, output) == (0, "")
    assert "drained=True" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_a_node_ends_with_after_a_signal_is_its_callers_choice(
    tmp_path: Path, number: signal.Signals
) -> None:
    arguments = ["--cache-dir", str(tmp_path / "cache"), "--signal-exit-code", "143", *FREE_PORTS]
    with server("serve", *arguments) as node:
        node.wait_until_listening()
        code, output, errors = node.end(number)

    assert (code, output) == (143, "")
    assert "drained=True" in errors
    assert "Traceback" not in errors


def test_an_end_by_standard_input_is_no_signal(tmp_path: Path) -> None:
    done = forked_python.run(
        [sys.executable, "-m", "cache_server", "serve", "--cache-dir", str(tmp_path / "cache"),
         "--exit-with-stdin", "--signal-exit-code", "143", *FREE_PORTS],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("wanted", [[], ["--signal-exit-code", "143"]], ids=["0", "143"])
def test_sigterm_ends_a_node_in_time_though_a_stream_is_open(
    tmp_path: Path, wanted: list[str]
) -> None:
    source = write_numbered(tmp_path / "source", 20)
    arguments = [
        "--cache-dir",
        str(tmp_path / "cache"),
        "--drain-timeout-s",
        "1",
        *FREE_PORTS,
        *EVERY_SOURCE,
    ]
    arguments += wanted
    with server("serve", *arguments) as node:
        endpoint = str(node.wait_until_listening()["flight"])
        info = CacheClient(endpoint).load(DatasetSpec("table", source))
        request = pb.GatherRequest(dataset="table", fingerprint=info.fingerprint)
        with connect(endpoint) as client:
            writer, reader = client.do_exchange(
                flight.FlightDescriptor.for_command(request.SerializeToString())
            )
            writer.begin(ROW_SCHEMA)
            writer.write_batch(pa.RecordBatch.from_arrays([pa.array([3])], schema=ROW_SCHEMA))
            assert reader.read_chunk().data.num_rows == 1
            begun = time.monotonic()

            code, _, errors = node.end(signal.SIGTERM)

            assert time.monotonic() - begun < WAIT_S
            reader.cancel()
    assert code == (143 if wanted else 0)
    assert "drained=False" in errors
    assert "Traceback" not in errors and "Fatal" not in errors
    assert [*(tmp_path / "cache" / "table").rglob("shard-*.arrow")]


def test_sigterm_ends_a_node_in_time_though_the_source_of_a_plan_never_answers(
    tmp_path: Path,
) -> None:
    arguments = [
        "--cache-dir",
        str(tmp_path / "cache"),
        "--drain-timeout-s",
        "1",
        *FREE_PORTS,
        *EVERY_SOURCE,
    ]
    with socket.create_server(("127.0.0.1", 0)) as silent, server("serve", *arguments) as node:
        endpoint = str(node.wait_until_listening()["flight"])
        spec = DatasetSpec("table", f"http://127.0.0.1:{silent.getsockname()[1]}/a.parquet")
        failed: list[Exception] = []

        def load() -> None:
            try:
                CacheClient(endpoint).load(spec, wait=False)
            except NodeUnavailableError as error:
                failed.append(error)

        asking = threading.Thread(target=load)
        asking.start()
        silent.settimeout(WAIT_S)
        with silent.accept()[0]:  # the node asks, and waits
            begun = time.monotonic()
            code, _, errors = node.end(signal.SIGTERM)
            assert time.monotonic() - begun < WAIT_S
        asking.join(WAIT_S)

    assert code == 0
    assert len(failed) == 1
    assert "plans did not end in time" in errors and "drained=False" in errors
    assert "Traceback" not in errors and "Fatal" not in errors


def test_a_signal_at_the_very_moment_a_node_listens_is_not_lost(tmp_path: Path) -> None:
    with server("serve", "--cache-dir", str(tmp_path / "cache"), *FREE_PORTS) as node:
        node.wait_until_listening()
        for _ in range(20):
            node.process.send_signal(signal.SIGTERM)
        assert node.end(signal.SIGTERM)[0] == 0


def test_a_node_joins_the_coordinator_that_it_is_given(tmp_path: Path) -> None:
    with server("serve", "--cache-dir", str(tmp_path / "one"), *FREE_PORTS) as first:
        coordinator = first.wait_until_listening()
        second_arguments = ["--coordinator", str(coordinator["control"])]
        with server(
            "serve", "--cache-dir", str(tmp_path / "two"), *FREE_PORTS, *second_arguments
        ) as second:
            joined = second.wait_until_listening()
            client = CacheClient(str(coordinator["flight"]))
            wait_until(lambda: len(client.nodes()) == 2, WAIT_S, "two nodes")
            assert {node.id for node in client.nodes()} == {
                coordinator["node_id"],
                joined["node_id"],
            }


@pytest.mark.parametrize("level", ["info", "debug"])
def test_a_log_shows_no_address_that_a_store_has_signed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    class Signing(HubStub):
        def do_GET(self) -> None:
            path, _, signature = self.path.partition("?")
            if "/resolve/" in path and not signature:
                self._answer(302, b"", {"Location": f"{path}?X-Amz-Signature=hush-signed"})
                return
            if signature:
                self.path = path
                self.headers["Authorization"] = "Bearer hush-hush"
            super().do_GET()

        do_POST = do_HEAD = do_GET

    (file,) = write_numbered(tmp_path / "source", 5).iterdir()
    monkeypatch.setattr(HubStub, "files", {"a.parquet": file.read_bytes()})
    arguments = ["serve", "--cache-dir", str(tmp_path / "cache"), *FREE_PORTS, *EVERY_SOURCE]
    with Served(Signing) as endpoint, server(*arguments, "--log-level", level) as node:
        client = CacheClient(str(node.wait_until_listening()["flight"]))
        options = {"endpoint": endpoint, "hf_token": "hush-hush", "max_retries": "0"}
        spec = DatasetSpec("t", "hf://tatsu-lab/alpaca/a.parquet", storage_options=options)
        assert client.load(spec).num_rows == 5
        _, _, log = node.end(signal.SIGTERM)

    assert "dataset ready name=t" in log
    assert "hush" not in log


@pytest.mark.parametrize(
    ("arguments", "quotes"),
    [
        (["--flight-port", "70000"], ["flight_port", "70000"]),
        (["--control-port", "-1"], ["control_port", "-1"]),
        (["--memory-limit", "plenty"], ["memory_limit_bytes", "'plenty'"]),
        (["--memory-limit", "0"], ["memory_limit_bytes", "0"]),
        (["--coordinator", "nowhere"], ["coordinator", "'nowhere'"]),
        (["--coordinator", "host:0"], ["coordinator", "'host:0'"]),
        (["--load-threads", "0"], ["load_threads", "0"]),
        (["--node-timeout-s", "-3"], ["node_timeout_s", "-3"]),
        (["--signal-exit-code", "256"], ["--signal-exit-code", "256"]),
        (["--signal-exit-code", "-15"], ["--signal-exit-code", "-15"]),
        (["--ephemeral"], ["--ephemeral needs --exit-with-stdin", "standard input closes"]),
        (["--log-level", "loud"], ["--log-level", "'loud'"]),
        (["--bind", "999.1.1.1"], ["999.1.1.1"]),
        (["--require-client-cert"], ["require_client_cert", "tls_cert"]),
        (["--auth-tokens", "/nowhere"], ["cannot read /nowhere"]),
        (
            ["--flight-port", "70000", "--load-threads", "0", "--drain-timeout-s", "0"],
            ["flight_port", "70000", "load_threads", "drain_timeout_s"],
        ),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_a_bad_setting_is_quoted_and_exits_with_78(
    tmp_path: Path, arguments: list[str], quotes: list[str]
) -> None:
    line = refused("serve", "--cache-dir", str(tmp_path / "cache"), *arguments, code=78)

    for quote in quotes:
        assert quote in line


def test_other_machines_reach_only_a_node_that_knows_its_callers_or_is_told_to_be_insecure(
    tmp_path: Path,
) -> None:
    arguments = ["serve", "--cache-dir", str(tmp_path / "cache"), *FREE_PORTS, "--bind", "0.0.0.0"]

    line = refused(*arguments, code=78)

    for advice in ("--bind 0.0.0.0", "CACHE_TOKEN", "--auth-tokens", "--auth-jwt", "--insecure"):
        assert advice in line
    with server(*arguments, "--advertise", "127.0.0.1", "--insecure") as node:
        ready = node.wait_until_listening()
        assert CacheClient(str(ready["flight"])).datasets() == []


def test_a_port_in_use_is_named_and_exits_with_78(tmp_path: Path) -> None:
    cache_dir = ["--cache-dir", str(tmp_path / "cache")]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        lines = {
            kind: refused("serve", *cache_dir, *FREE_PORTS, f"--{kind}-port", port, code=78)
            for kind in ("flight", "control", "http")
        }
    assert f"Flight port 127.0.0.1:{port}" in lines["flight"]
    assert f"control port 127.0.0.1:{port}" in lines["control"]
    assert f"HTTP port 127.0.0.1:{port}" in lines["http"]


def test_a_cache_dir_that_cannot_be_used_is_named_and_exits_with_78(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = refused("serve", "--cache-dir", str(tmp_path / "file" / "x"), *FREE_PORTS, code=78)
    assert str(tmp_path / "file" / "x") in line

    with server("serve", "--cache-dir", str(tmp_path / "cache"), *FREE_PORTS) as first:
        first.wait_until_listening()
        line = refused("serve", "--cache-dir", str(tmp_path / "cache"), *FREE_PORTS, code=78)
    assert str(tmp_path / "cache") in line and "another cache node" in line


# -- local -----------------------------------------------------------------------------------------


def node_processes(parent: int) -> list[psutil.Process]:
    """Those that are nodes already: for a moment a child is a copy of its parent."""
    children = psutil.Process(parent).children()
    return [child for child in children if child.is_running() and "--cache-dir" in child.cmdline()]


def cache_dirs(nodes: list[psutil.Process]) -> list[Path]:
    lines = [node.cmdline() for node in nodes]
    return [Path(line[line.index("--cache-dir") + 1]) for line in lines]


def all_gone(nodes: list[psutil.Process]) -> bool:
    return not any(n.is_running() and n.status() != psutil.STATUS_ZOMBIE for n in nodes)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_local_cache_ends_without_a_process_or_a_file_left(
    tmp_path: Path, number: signal.Signals
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(f"name: table\nsource: {write_numbered(tmp_path / 'source', 20)}\n")
    with server("local", "--nodes", "2", "--load", str(spec), env=forked_python.environ()) as local:
        ready = local.wait_until_listening()
        nodes = node_processes(local.process.pid)
        directories = cache_dirs(nodes)
        assert CacheClient(str(ready["endpoint"])).head("table", 3).num_rows == 3
        token = Path(str(ready["token_file"])).read_text()
        headers = {"Authorization": f"Bearer {token}"}
        with urlopen(Request(str(ready["page"]), headers=headers), timeout=WAIT_S) as page:
            assert b"<td>table</td><td>ready</td>" in page.read()
        assert {node.pid for node in nodes} == {node["pid"] for node in ready["nodes"]}  # type: ignore[attr-defined]
        assert all(directory.exists() for directory in directories)

        code, output, errors = local.end(number)

    assert (code, output, errors) == (0, "", "")
    assert all_gone(nodes)
    assert not any(directory.parent.exists() for directory in directories)


@pytest.mark.parametrize(("index", "role"), [(0, " and was the coordinator"), (1, "")])
def test_a_local_cache_tells_of_a_node_that_ends_and_goes_on(
    tmp_path: Path, index: int, role: str
) -> None:
    with server(
        "local", "--nodes", "2", "--cache-dir", str(tmp_path), env=forked_python.environ()
    ) as local:
        node = local.wait_until_listening()["nodes"][index]  # type: ignore[index]
        assert local.process.stderr is not None
        os.kill(node["pid"], signal.SIGKILL)

        line = local.process.stderr.readline()
        code, output, errors = local.end(signal.SIGTERM)

    told = f"node {node['node_id']} at {node['flight']} ended with exit code -9{role}"
    assert f"{told} log={tmp_path / f'node-{index}' / '.log'}" in line
    assert (code, output, errors) == (0, "", "")


def test_a_local_cache_shows_on_a_terminal_how_far_its_load_is(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(f"name: table\nsource: {write_numbered(tmp_path / 'source', 20)}\n")
    terminal, standard_error = os.openpty()
    command = [sys.executable, "-m", "cache_server", "local", "--load", str(spec)]
    screen = bytearray()

    def read_screen() -> None:
        with suppress(OSError):  # as Linux says that nobody has the terminal open any more
            while piece := os.read(terminal, 4096):
                screen.extend(piece)

    with forked_python.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=standard_error,
        env=forked_python.environ(),
    ) as process:  # fmt: skip
        os.close(standard_error)
        reader = threading.Thread(target=read_screen)
        reader.start()
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["event"] == "listening"
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()
    reader.join(WAIT_S)
    os.close(terminal)
    assert b"load table" in screen and b"1/1" in screen and b"20 rows" in screen


def test_a_local_cache_that_is_interrupted_while_it_loads_ends_at_once(tmp_path: Path) -> None:
    rows = 2_000_000
    pq.write_table(pa.table({"x": pa.array(range(rows), pa.int64())}), tmp_path / "t.parquet")
    spec = tmp_path / "spec.yaml"
    spec.write_text(f"name: table\nsource: {tmp_path / 't.parquet'}\n")
    # An executed node: to suspend one that is forked suspends only what stands for it.
    with server("local", "--nodes", "1", "--load", str(spec)) as local:
        nodes = wait_until(lambda: node_processes(local.process.pid), WAIT_S, "a node")
        suspend(nodes[0])  # whatever it does, it does not come to an end
        directory = cache_dirs(nodes)[0].parent

        code, output, errors = local.end(signal.SIGTERM)

    assert (code, output) == (130, "")
    assert "Traceback" not in errors
    wait_until(lambda: all_gone(nodes), WAIT_S, "no process is left")
    wait_until(lambda: not directory.exists(), WAIT_S, "no file is left")


@pytest.mark.parametrize(
    ("text", "code", "quotes"),
    [
        ("name: table\nsource: /not/there.parquet\n", 65, ["LoadError", "/not/there.parquet"]),
        ("name: a b\nsource: []\n", 78, ["ConfigError", "spec.yaml", "'a b'", "empty list"]),
        ("name: [\n", 78, ["ConfigError", "spec.yaml", "not YAML"]),
        ("name: t\nsource: x.csv\ncolour: red\n", 78, ["'colour'"]),
        ("name: t\nsource: SOURCE\nsql: SELECT row FROM source LIMIT 3\n", 65, ["LIMIT"]),
    ],
    ids=["missing source", "bad fields", "no YAML", "unknown key", "bad query"],
)
def test_a_local_cache_whose_spec_is_bad_says_why_in_one_line_and_leaves_nothing(
    tmp_path: Path, text: str, code: int, quotes: list[str]
) -> None:
    source = write_numbered(tmp_path / "source", 3)
    spec = tmp_path / "spec.yaml"
    spec.write_text(text.replace("SOURCE", str(source)))

    line = refused("local", "--load", str(spec), code=code)

    for quote in quotes:
        assert quote in line


def test_a_local_cache_of_no_nodes_or_an_odd_limit_is_refused_with_78() -> None:
    assert "nodes must be at least 1, got 0" in refused("local", "--nodes", "0", code=78)
    assert "'lots'" in refused("local", "--memory-limit", "lots", code=78)


def test_every_bad_setting_of_a_local_cache_is_named_at_once() -> None:
    line = refused(
        *("local", "--nodes", "0", "--memory-limit", "lots"),
        *("--log-level", "loud", "--load", "/not/there.yaml"),
        code=78,
    )

    for quote in ("nodes must be at least 1, got 0", "'lots'", "'loud'", "/not/there.yaml"):
        assert quote in line


def test_a_local_cache_keeps_the_directory_it_is_given(tmp_path: Path) -> None:
    with server(
        "local", "--cache-dir", str(tmp_path / "cache"), env=forked_python.environ()
    ) as local:
        local.wait_until_listening()
        assert local.end(signal.SIGINT)[0] == 0
    assert (tmp_path / "cache" / "node-0" / ".node-id").exists()


def test_both_commands_explain_themselves() -> None:
    for arguments in (["--help"], ["serve", "--help"], ["local", "--help"]):
        done = forked_python.run(
            [sys.executable, "-m", "cache_server", *arguments],
            capture_output=True, text=True, timeout=60, check=True,
            env={**os.environ, "COLUMNS": "100"},
        )  # fmt: skip
        assert "Usage:" in done.stdout
