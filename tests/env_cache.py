"""Cache nodes as a TrainJob starts them: each has an address, and all else in common."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests import forked_python
from tests.free_ports import free_ports
from tests.waiting import wait_until

WAIT_S = 30.0
SERVING = health_pb2.HealthCheckResponse.SERVING
_ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")


def clean_environ(**variables: str) -> dict[str, str]:
    """This process's environment without what a cache or a store would take from it."""
    prefixes = ("AWS_", "GOOGLE_", "AZURE_", "CACHE_", "KUBEFLOW_", "STORAGE_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    return {
        **kept,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        **variables,
    }


class EnvNode:
    """One node; `start` again after it ended is a restart in place."""

    def __init__(
        self, address: str, directory: Path, arguments: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        self.address = address
        self.cache_dir = directory / address
        self.environ = dict(environ)
        self.arguments = [*arguments, "--bind", address, "--cache-dir", str(self.cache_dir)]
        self._log = directory / f"{address}.log"
        self._process: subprocess.Popen[str] | None = None
        self.endpoint = self.control_location = self.node_id = ""

    def start(self, *, listening: bool = True) -> None:
        """Starts the process; waits for its line unless told not to."""
        with self._log.open("ab") as log:
            self._process = forked_python.Popen(
                [sys.executable, "-m", "cache_server", "serve", *self.arguments],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
                env=self.environ,
            )  # fmt: skip
        if listening:
            self.wait_until_listening()

    def wait_until_listening(self) -> None:
        """Waits for the line of the process."""
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self.log()
        told = json.loads(line)
        self.endpoint, self.control_location = told["flight"], told["control"]
        self.node_id = told["node_id"]

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._process is not None
        return self._process.pid

    def log(self) -> str:
        """What it wrote to standard error, in all its lives."""
        return self._log.read_text()

    def wait_for_log(self, words: str, timeout_s: float = WAIT_S) -> None:
        """Until the log has these words."""
        wait_until(lambda: words in self.log(), timeout_s, f"{words!r} in {self.log()[-2000:]}")

    def is_ready(self) -> bool:
        """What the health service says."""
        with grpc.insecure_channel(self.control_location) as channel:
            request = health_pb2.HealthCheckRequest(service="ready")
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=30)
        return bool(answer.status == SERVING)

    def wait_until_ready(self) -> None:
        """Until its health service says so."""
        wait_until(self.is_ready, WAIT_S, f"{self.address} is ready")

    def wait_for_exit(self, timeout_s: float = WAIT_S) -> tuple[int, str]:
        """Its exit code, and the last line of its log."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.address} does not end: {self.log()[-2000:]}") from None
        self._process.communicate()
        self._process = None
        return code, self.log().splitlines()[-1]

    def end(self, number: signal.Signals, timeout_s: float = WAIT_S) -> tuple[int, str]:
        """Sends a signal and waits."""
        assert self._process is not None
        self._process.send_signal(number)
        return self.wait_for_exit(timeout_s)

    def close(self) -> None:
        """Kills what still runs."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


@contextmanager
def env_nodes(
    directory: Path, num_nodes: int, *arguments: str, **variables: str
) -> Iterator[list[EnvNode]]:
    """Nodes that are not started yet; the first one coordinates. They are killed at the end.

    Args:
        arguments: of each, besides those that every runtime gives.
        variables: of their environment.
    """
    flight_port, control_port = free_ports(2, _ADDRESSES[:num_nodes])
    common = [
        "--flight-port", str(flight_port), "--control-port", str(control_port),
        "--http-port", "0",
        "--coordinator", f"{_ADDRESSES[0]}:{control_port}", "--num-nodes", str(num_nodes),
        "--heartbeat-interval-s", "0.1", "--load-from-env", *arguments,
    ]  # fmt: skip
    with ExitStack() as stack:
        nodes = []
        for address in _ADDRESSES[:num_nodes]:
            node = EnvNode(address, directory, common, clean_environ(**variables))
            stack.callback(node.close)
            nodes.append(node)
        yield nodes
