"""`LocalCluster`: cache nodes as local processes, for a laptop, a test or a notebook."""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from cache_protocol.datasets.values import as_integer, as_number
from cache_protocol.errors import CacheError, ConfigError, NodeUnavailableError
from cache_protocol.wire.credentials import Credentials, publish_token, withdraw_token
from cache_server.config import NodeConfig
from cache_server.node.links.coordinator_link import RemoteCoordinator

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 15.0
_MEMORY_DIR = Path("/dev/shm")
_HEARTBEAT_INTERVAL_S = 0.1
_NODES_SHARE = 0.75  # of the memory; the rest is for the caller of a cluster


class LocalNode:
    """One node process, made by `LocalCluster`.

    Its standard input is a pipe from this process. The node ends when the pipe closes, so it never
    outlives its parent. A fork of this process closes its copy of the pipe.

    This process reserves the ports of the node, so that no other program gets them while the node
    is down. Linux picks no bound port as a free one, and lets the node listen on a port whose other
    socket does not listen.

    Args:
        cache_dir: of the node.
        arguments: more options of ``cache-server serve``.
        token: shared with the other nodes; None: every caller may do everything.
    """

    def __init__(self, cache_dir: Path, arguments: Sequence[str], token: str | None = None) -> None:
        self.cache_dir = cache_dir
        self.log = cache_dir / ".log"  # a name of a dataset never begins with a dot
        self._arguments = list(arguments)
        self.token_file = cache_dir / ".token"
        self._arguments += (
            ["--no-token-from-env"] if token is None else ["--token-file", str(self.token_file)]
        )
        self.token = token
        self._process: subprocess.Popen[str] | None = None
        self._spawning = threading.Lock()
        self._attempt: object = None  # of the latest start; None after `kill`
        self._reserved_ports: list[socket.socket] = []
        self._log_start = 0  # offset of the running process's lines, in bytes
        self.endpoint = ""
        self.control_location = ""
        self.page = ""
        self.node_id = ""
        _nodes.add(self)

    @property
    def pid(self) -> int:
        """Process id of the running node."""
        if self._process is None:
            raise CacheError("the node is not running")
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code of a process that ended, negative for a signal; None while it runs."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Starts the process and waits until it listens. Its ports never change.

        Raises:
            ConfigError: its directory cannot be used, or the process ended at once; quotes its log.
            NodeUnavailableError: it did not listen in time.
            CacheError: it is running already.
        """
        self.begin()
        self.wait_until_listening()

    def begin(self) -> None:
        """Starts the process and sets ``control_location``.

        Raises:
            ConfigError: its directory cannot be used. CacheError: it is running already.
        """
        if self._process is not None and self._process.poll() is None:
            raise CacheError(f"the node is running already, as process {self._process.pid}")
        if not self._reserved_ports:
            self._reserved_ports = [_reserve_port(), _reserve_port()]
            if self.token is not None:
                publish_token(self.token, *self._locations())
        flight_port, control_port = (reserved.getsockname()[1] for reserved in self._reserved_ports)
        self.control_location = f"127.0.0.1:{control_port}"
        with self._open_log() as log_file:
            self._log_start = log_file.tell()
            command = [
                sys.executable, "-m", "cache_server", "serve", "--exit-with-stdin",
                "--cache-dir", str(self.cache_dir),
                "--flight-port", str(flight_port), "--control-port", str(control_port),
                "--http-port", "0",
                *self._arguments,
            ]  # fmt: skip
            # In a thread: a signal in the main thread could otherwise interrupt Popen after the
            # process has started, and leak it. It may still interrupt the start of the thread.
            self._attempt = attempt = object()
            with ThreadPoolExecutor(1) as thread:
                thread.submit(self._spawn_unless_killed, attempt, command, log_file).result()

    def wait_until_listening(self) -> None:
        """Waits until the process of `begin` listens.

        Raises:
            ConfigError: it ended at once; quotes its log.
            NodeUnavailableError: it did not listen in time.
        """
        assert self._process is not None and self._process.stdout is not None
        line = _first_line(self._process.stdout, _START_TIMEOUT_S)
        if not line:
            self.kill()
            log = self.log_tail(since=self._log_start).strip()
            if line is None:
                raise NodeUnavailableError(
                    f"the cache node did not listen within {_START_TIMEOUT_S:g} s: {log}"
                )
            raise ConfigError(f"the cache node did not start: {log}")
        ready = json.loads(line)
        self.endpoint, self.node_id, self.page = ready["flight"], ready["node_id"], ready["http"]

    def kill(self) -> None:
        """Kills the process (SIGKILL), like a crash."""
        with self._spawning:
            self._attempt = None
        if self._process is not None:
            self._process.kill()
            self._reap()

    def stop(self) -> int:
        """Stops the process (SIGTERM) and returns its exit code."""
        if self._process is None:
            return 0
        self._process.terminate()
        try:
            return self._reap()
        except subprocess.TimeoutExpired:
            self.kill()
            raise NodeUnavailableError(
                f"node {self.node_id} did not stop within {_STOP_TIMEOUT_S} s"
            ) from None

    def restart(self) -> None:
        """Stops the process if it runs, and starts it on the same directory and ports."""
        self.stop()
        self.start()

    def disown(self) -> None:
        """Closes a fork's copy of the pipe and the ports."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._release_ports()

    def close(self) -> None:
        """Kills the process and releases its ports."""
        self.kill()
        if self.token is not None:
            withdraw_token(*self._locations())
        self._release_ports()

    def log_tail(self, max_bytes: int = 4096, *, since: int = 0) -> str:
        """The end of the node's log, without the bytes before ``since``."""
        log = self.log.read_bytes()[since:] if self.log.exists() else b""
        return log[-max_bytes:].decode("utf-8", "replace")

    def _spawn_unless_killed(
        self, attempt: object, command: Sequence[str], log_file: IO[bytes]
    ) -> None:
        with self._spawning:
            if self._attempt is attempt:
                self._spawn(command, log_file)

    def _spawn(self, command: Sequence[str], log_file: IO[bytes]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log_file, text=True
        )

    def _locations(self) -> list[str]:
        ports = (reserved.getsockname()[1] for reserved in self._reserved_ports)
        return [f"127.0.0.1:{port}" for port in ports]

    def _release_ports(self) -> None:
        for reserved in self._reserved_ports:
            reserved.close()
        self._reserved_ports = []

    def _open_log(self) -> IO[bytes]:
        try:
            self.cache_dir.mkdir(parents=True, exist_ok=True)
            self._write_token()
            return self.log.open("ab")
        except OSError as error:
            raise ConfigError(f"cannot use cache_dir {self.cache_dir}: {error.strerror}") from None

    def _write_token(self) -> None:
        """Writes a file that only this user can read."""
        if self.token is not None:
            self.token_file.unlink(missing_ok=True)
            self.token_file.touch(0o600)
            self.token_file.write_text(self.token, encoding="utf-8")

    def _reap(self) -> int:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        code = process.wait(_STOP_TIMEOUT_S)
        process.stdin.close()
        process.stdout.close()
        self._process = None
        return code


_nodes: weakref.WeakSet[LocalNode] = weakref.WeakSet()


def _disown_nodes() -> None:
    for node in list(_nodes):
        node.disown()


os.register_at_fork(after_in_child=_disown_nodes)


class LocalCluster:
    """Cache nodes on this machine, on ports of 127.0.0.1. A context manager.

    Args:
        nodes: how many processes; the first is the coordinator.
        cache_dir: directory of the shards, with one folder for each node; kept afterwards. Default:
            a temporary one, in ``/dev/shm`` if possible, removed afterwards.
        memory_limit_bytes: of the shards of each node. In any case the nodes together keep to three
            quarters of the memory limit of this process (a cgroup), else of the machine's share.
        huge_pages: move shards in memory to huge pages while nothing is loading.
        node_timeout_s: a node without a heartbeat for this long counts as lost.
        lease_s: how long a version is kept after its last read, though it is replaced, or others
            have no room.
        insecure: use no token, so that every user of this machine can read, load and drop.

    Raises:
        ConfigError: quotes a bad argument.
        NodeUnavailableError: a node did not start in time.

    Attributes:
        endpoint: ``grpc://127.0.0.1:PORT`` of the coordinator.
        nodes: the processes.
        token: of the cluster; None if it is insecure. Clients of the same user and machine find
            it; for others set ``CACHE_TOKEN``.
    """

    def __init__(
        self,
        nodes: int = 1,
        cache_dir: str | os.PathLike[str] | None = None,
        *,
        memory_limit_bytes: int | None = None,
        huge_pages: bool = True,
        node_timeout_s: float = 10.0,
        lease_s: float = 600.0,
        insecure: bool = False,
    ) -> None:
        count, settings = checked_settings(
            nodes, cache_dir, memory_limit_bytes, huge_pages,
            node_timeout_s=node_timeout_s, lease_s=lease_s,
        )  # fmt: skip
        self._parent = os.getpid()
        self._temporary = cache_dir is None
        self.cache_dir = _temporary_dir() if cache_dir is None else Path(cache_dir).absolute()
        self._arguments = [
            "--heartbeat-interval-s", str(settings.heartbeat_interval_s),
            "--node-timeout-s", str(settings.node_timeout_s),
            "--lease-s", str(settings.lease_s),
            "--allow-source", "",
            f"--memory-share={_NODES_SHARE / count}",
        ]  # fmt: skip
        if not settings.huge_pages:
            self._arguments.append("--no-huge-pages")
        if self._temporary:
            self._arguments.append("--ephemeral")
        if settings.memory_limit_bytes is not None:
            self._arguments += ["--memory-limit", str(settings.memory_limit_bytes)]
        self.token = None if insecure else secrets.token_urlsafe(32)
        self.nodes: list[LocalNode] = []
        try:
            for index in range(count):
                arguments = list(self._arguments)
                if self.nodes:
                    arguments += ["--coordinator", self.nodes[0].control_location]
                node = LocalNode(self.cache_dir / f"node-{index}", arguments, self.token)
                self.nodes.append(node)
                node.begin()  # in parallel: most of the start is imports
            for node in self.nodes:
                node.wait_until_listening()
            self.wait_for_nodes()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<LocalCluster of {len(self.nodes)} at {self.endpoint}>"

    @property
    def endpoint(self) -> str:
        """Flight endpoint of the coordinator."""
        return self.nodes[0].endpoint

    def coordinator(self) -> RemoteCoordinator:
        """A link to the coordinator; the caller closes it."""
        return RemoteCoordinator(self.nodes[0].control_location, Credentials(self.token))

    def wait_for_nodes(self, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Waits until the coordinator has heard from every node.

        Raises:
            ConfigError: quotes a bad ``timeout_s``.
            NodeUnavailableError: names the nodes that did not report in time.
        """
        limit = as_number(timeout_s)
        if limit is None or not limit >= 0:
            raise ConfigError(f"timeout_s must be a number of seconds, got {timeout_s!r}")
        deadline = time.monotonic() + limit
        with self.coordinator() as coordinator:
            while True:
                missing = {node.node_id for node in self.nodes} - _reported(coordinator)
                if not missing:
                    return
                if time.monotonic() > deadline:
                    raise NodeUnavailableError(f"nodes {sorted(missing)} did not join in time")
                time.sleep(_HEARTBEAT_INTERVAL_S / 4)

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills every node; removes a temporary directory. Does nothing in a fork."""
        if os.getpid() != self._parent:
            return
        threads = [threading.Thread(target=node.close) for node in self.nodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._temporary:
            shutil.rmtree(self.cache_dir, ignore_errors=True)


def checked_settings(
    nodes: object,
    cache_dir: object,
    memory_limit_bytes: object,
    huge_pages: object = True,
    **seconds: object,
) -> tuple[int, NodeConfig]:
    """The number of nodes, and their settings. Raises a ConfigError that quotes every bad value."""
    problems: list[str] = []
    count = as_integer(nodes)
    if count is None:
        problems.append(f"nodes must be a number of nodes, got {nodes!r}")
    elif count < 1:
        problems.append(f"nodes must be at least 1, got {count}")
    if not isinstance(cache_dir, str | os.PathLike | None) or cache_dir == "":
        problems.append(f"cache_dir must be a path, got {cache_dir!r}")
    if not isinstance(huge_pages, bool):
        problems.append(f"huge_pages must be True or False, got {huge_pages!r}")
    limits = {name: as_number(value) for name, value in seconds.items()}
    problems += [
        f"{name} must be a number of seconds, got {seconds[name]!r}"
        for name, limit in limits.items()
        if limit is None
    ]
    try:
        settings = NodeConfig.build(
            cache_dir=Path(),  # not used
            heartbeat_interval_s=_HEARTBEAT_INTERVAL_S,
            memory_limit_bytes=memory_limit_bytes,
            huge_pages=huge_pages is True,
            **{name: limit for name, limit in limits.items() if limit is not None},
        )
    except ConfigError as error:
        problems.append(str(error))
    if problems or count is None:
        raise ConfigError("; ".join(problems))
    return count, settings


def _reported(coordinator: RemoteCoordinator) -> set[str]:
    return {node.id for node in coordinator.nodes() if node.alive and node.flight_location}


def _temporary_dir() -> Path:
    parent = _MEMORY_DIR if os.access(_MEMORY_DIR, os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="data-cache-", dir=parent))


def _first_line(stream: IO[str], timeout_s: float) -> str | None:
    """The first line of ``stream``; empty if it ends before, None after the timeout.

    Without a thread: a signal that the kernel gives to it would not end the wait of this one.
    """
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    return stream.readline() if poll.poll(timeout_s * 1000) else None


def _reserve_port() -> socket.socket:
    """A socket bound to a free port; it does not listen."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def describe_nodes(nodes: Sequence[LocalNode]) -> str:
    """One line of JSON about running nodes."""
    return json.dumps(
        {
            "event": "listening",
            "endpoint": nodes[0].endpoint,
            "page": nodes[0].page,
            **({} if nodes[0].token is None else {"token_file": str(nodes[0].token_file)}),
            "nodes": [{"node_id": n.node_id, "pid": n.pid, "flight": n.endpoint} for n in nodes],
        }
    )
