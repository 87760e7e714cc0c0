"""``cache-server``: reads argv, the environment and signals."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from cache_protocol.cli.exits import tell
from cache_protocol.cli.load_bar import progress_bar
from cache_protocol.cli.output import checked_output, version_option
from cache_protocol.datasets.dataset_spec import DatasetSpec, parse_bytes
from cache_protocol.datasets.job_options import JobOptions, with_annotations
from cache_protocol.datasets.job_settings import asks_for_dataset, spec_from_env
from cache_protocol.errors import (
    CacheError,
    ConfigError,
    checked,
    exit_code,
    missing_package,
)
from cache_protocol.wire import lineage, zones
from cache_server.auth.etcd import Etcd
from cache_server.auth.kubernetes import SERVICE_ACCOUNT_DIR, Cluster
from cache_server.config import NodeConfig
from cache_server.local import LocalCluster, checked_settings, describe_nodes
from cache_server.setting_options import given, with_settings_of
from cache_server.telemetry import set_up_logging, set_up_spans

_PROGRAM = "cache-server"
_PURGE_DELAY_MS = 1000
EXIT_INTERRUPTED = 130  # the code of shells for SIGINT

app = typer.Typer(
    name="cache-server",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # its tables truncate long options at 80 columns
    pretty_exceptions_enable=False,
)

logger = logging.getLogger(__name__)

LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]
LogFormat = Annotated[
    str, typer.Option(help="text, or json: a JSON object a line, with trace ids.")
]


@app.callback()
def _options(
    show_version: Annotated[bool, version_option("cache-server")] = False,
) -> None:
    """Cache nodes that load tables once and serve random rows over Arrow Flight."""


@app.command()
@with_settings_of(NodeConfig)
def serve(
    *,
    token_from_env: Annotated[
        bool, typer.Option(help="Read CACHE_TOKEN and CACHE_TOKEN_FILE.")
    ] = True,
    service_account_dir: Annotated[
        Path,
        typer.Option(
            metavar="<path>",
            help="Directory of token and ca.crt, for the public keys of the cluster.",
        ),
    ] = Path(SERVICE_ACCOUNT_DIR),
    load_from_env: Annotated[
        bool,
        typer.Option(
            help="On the coordinator: load the dataset that STORAGE_URI and the other variables of "
            "a TrainJob describe. The node is ready when the dataset is loaded."
        ),
    ] = False,
    exit_with_stdin: Annotated[
        bool, typer.Option(help="Exit when standard input closes (for a parent process).")
    ] = False,
    ephemeral: Annotated[
        bool,
        typer.Option(
            help="With --exit-with-stdin: remove the cache directory when standard input closes."
        ),
    ] = False,
    signal_exit_code: Annotated[
        int,
        typer.Option(
            help="Exit code after SIGTERM or SIGINT. Use 143 in a Kubernetes Job: it counts a pod "
            "that exits 0 as finished and does not replace it."
        ),
    ] = 0,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
    **settings: Any,
) -> None:
    """Run one cache node. Prints one line of JSON when it listens."""
    environ, options = with_annotations(os.environ if load_from_env else {})
    problems: list[str] = []
    checked(problems, lambda: set_up_logging(log_level, log_format))
    checked(problems, lambda: _check_exit_code(signal_exit_code))
    checked(problems, lambda: _check_ephemeral(ephemeral, exit_with_stdin))
    config = checked(
        problems,
        lambda: NodeConfig.build(
            **{
                # What a job asks of its own cache, its own pods may read.
                "allow_source": [""] if load_from_env else None,
                "cluster": Cluster.from_env(os.environ, service_account_dir),
                "zone": os.environ.get(zones.VARIABLE) or None,
                **_etcd_from_env(settings["leader_election"]),
                **(_token_from_env() if token_from_env and not settings["token_file"] else {}),
                **given(settings),
            }
        ),
    )
    config = config and _with_options(config, options)
    if config is not None and config.leader_election and load_from_env:
        problems.append(
            f"--load-from-env needs a fixed --coordinator, got --leader-election "
            f"{config.leader_election}"
        )
    loads = load_from_env and (config is None or config.is_coordinator)
    spec = None
    if loads and asks_for_dataset(environ):
        spec = checked(problems, lambda: spec_from_env(environ))
    if problems or config is None:
        raise ConfigError("; ".join(problems))
    if loads and spec is None:
        logger.info("no dataset in the environment")
    stop = _Stop(with_stdin=exit_with_stdin)
    if config.memory().may_keep_freed:
        # DataFusion's allocator reads this when it is imported. By default it returns freed memory
        # to the kernel after 10 ms, and the same load soon needs it again.
        os.environ.setdefault("MIMALLOC_PURGE_DELAY", str(_PURGE_DELAY_MS))
    try:
        from cache_server.server import CacheServer
    except ModuleNotFoundError as error:
        raise ConfigError(missing_package(error, "a cache node", "server")) from None

    send_spans = set_up_spans(os.environ)
    lineage.sender()  # now: it takes a while
    server = CacheServer(config, load=spec, on_load_failure=stop.fail)
    line = {
        "event": "listening",
        "flight": server.endpoints.flight_location,
        "control": server.endpoints.control_location,
        "http": server.page,
        "node_id": server.node_id,
        "pid": os.getpid(),
    }
    try:
        _print_line(json.dumps(line))
    except OSError as error:
        if not (exit_with_stdin and isinstance(error, BrokenPipeError)):
            server.close()
            raise
        # The parent is gone, so standard input ends too.
    stop.wait()
    if stop.by_signal and config.leave_timeout_s:
        stop.wait_for(server.leave)
    drained = server.close()
    send_spans()
    lineage.flush()
    if ephemeral and stop.parent_is_gone:
        _remove(config.cache_dir)
    if not drained:
        # An open Flight stream or a source that hangs would block the exit of the interpreter.
        _exit_at_once(stop.failure, signal_exit_code if stop.by_signal else 0)
    if stop.failure is not None:
        raise stop.failure
    if stop.by_signal:
        raise typer.Exit(signal_exit_code)


def _print_line(text: str) -> None:
    """Prints a line by one write: unbuffered, a log line could come before its end."""
    print(f"{text}\n", end="", flush=True)


@app.command()
def local(
    nodes: Annotated[int, typer.Option(help="Number of node processes.")] = 1,
    load: Annotated[Path | None, typer.Option(help="YAML file of a dataset to load.")] = None,
    load_from_env: Annotated[
        bool,
        typer.Option(
            help="Load the dataset that STORAGE_URI and the other variables of a TrainJob describe."
        ),
    ] = False,
    cache_dir: Annotated[
        str | None,
        typer.Option(
            metavar="<path>",
            help="Directory of the shards, kept afterwards; default: a temporary one in memory.",
        ),
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            help="Limit of the bytes of all shards on each node, such as 8GiB; default: none."
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Use no token, for clients that cannot send one: every user of this machine can "
            "read, load and drop.",
        ),
    ] = False,
    log_level: LogLevel = "warning",
) -> None:
    """Run a cache on this machine until interrupted. Prints its endpoint as one line of JSON."""
    problems: list[str] = []
    checked(problems, lambda: set_up_logging(log_level))
    spec = checked(problems, lambda: _spec_to_load(load, load_from_env))
    limit = checked(problems, lambda: _memory_limit(memory_limit))
    checked(problems, lambda: checked_settings(nodes, cache_dir, limit))
    if problems:
        raise ConfigError("; ".join(problems))
    # From the start: so the cluster always stops its processes.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    listening = False
    try:
        with LocalCluster(nodes, cache_dir, memory_limit_bytes=limit, insecure=insecure) as cluster:
            if spec is not None:
                with (
                    cluster.coordinator() as coordinator,
                    progress_bar(spec.name, lambda line: logger.info("%s", line)) as show,
                ):
                    coordinator.load(spec, show)
            listening = True
            print(describe_nodes(cluster.nodes), flush=True)
            _log_ended_nodes(cluster)
    except KeyboardInterrupt:
        if not listening:
            raise typer.Exit(EXIT_INTERRUPTED) from None


def _log_ended_nodes(cluster: LocalCluster) -> NoReturn:
    """Logs each node that ends, for example for lack of memory, until interrupted.

    The other nodes continue and load its shards again.
    """
    signals = _Signals()
    # Not before: beside another signal, the kernel may give SIGTERM to a thread that does not wait.
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # wakes `_Signals.wait`
    running = list(cluster.nodes)
    while True:
        for node in [node for node in running if node.exit_code is not None]:
            running.remove(node)
            role = " and was the coordinator" if node is cluster.nodes[0] else ""
            logger.error(
                "node %s at %s ended with exit code %s%s log=%s",
                node.node_id, node.endpoint, node.exit_code, role, node.log,
            )  # fmt: skip
        signals.wait()


def main() -> None:
    """Entry point: turns a `CacheError` into one line and an exit code.

    78 (EX_CONFIG) for settings, 65 (EX_DATAERR) for data and queries, 75 (EX_TEMPFAIL) for sources
    that do not answer, 1 for other errors.
    """
    try:
        with checked_output():
            app()
    except CacheError as error:
        tell(_PROGRAM, error, os.environ)
        sys.exit(exit_code(error))


def _exit_at_once(error: CacheError | None, code: int) -> NoReturn:
    logging.shutdown()
    if error is not None:
        tell(_PROGRAM, error, os.environ)
        code = exit_code(error)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the reader is gone
            stream.flush()
    os._exit(code)


def _with_options(config: NodeConfig, options: JobOptions) -> NodeConfig:
    """The settings of a node with the size that its job gave it."""
    options.fits(nodes=config.num_nodes, memory_bytes=config.container_memory_limit_bytes)
    memory = options.memory_bytes
    return config.model_copy(update={"container_memory_limit_bytes": memory}) if memory else config


def _spec_to_load(path: Path | None, from_env: bool) -> DatasetSpec | None:
    if path is not None and from_env:
        raise ConfigError("--load and --load-from-env cannot be combined")
    if from_env:
        return spec_from_env(os.environ)
    return DatasetSpec.from_yaml(path) if path is not None else None


def _memory_limit(text: str | None) -> int | None:
    try:
        return parse_bytes(text) if text is not None else None
    except ValueError as error:
        raise ConfigError(f"--memory-limit {error}") from None


def _etcd_from_env(leader_election: str | None) -> dict[str, Etcd]:
    """Where etcd is, if it elects."""
    elects = leader_election is not None and leader_election.startswith("etcd:")
    return {"etcd": Etcd.from_env(os.environ)} if elects else {}


def _token_from_env() -> dict[str, str | None]:
    return {
        "token": os.environ.get("CACHE_TOKEN") or None,
        "token_file": os.environ.get("CACHE_TOKEN_FILE") or None,
    }


def _check_exit_code(code: int) -> None:
    if not 0 <= code <= 255:
        raise ConfigError(f"--signal-exit-code must be between 0 and 255, got {code}")


def _check_ephemeral(ephemeral: bool, exit_with_stdin: bool) -> None:
    if ephemeral and not exit_with_stdin:
        raise ConfigError(
            "--ephemeral needs --exit-with-stdin: the cache directory is removed when standard "
            "input closes"
        )


def _remove(cache_dir: Path) -> None:
    shutil.rmtree(cache_dir, ignore_errors=True)
    with suppress(OSError):  # only the last node of a local cluster finds the folder empty
        cache_dir.parent.rmdir()


class _Signals:
    """Waits for a signal, also for one that comes just before `wait`.

    A lock could miss it: Python runs a handler between two instructions, and then blocks.
    """

    def __init__(self) -> None:
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)

    def wait(self) -> None:
        """Waits for a signal or a call of `wake` since the last `wait`."""
        self._woken.recv(1)

    def wake(self) -> None:
        """Ends `wait`, from any thread."""
        self._wake.send(b"\0")


class _Stop:
    """Waits for SIGTERM or SIGINT, a failure or, with ``with_stdin``, the end of standard input.

    With ``with_stdin``, SIGINT is ignored: a terminal sends it to the parent too.

    Attributes:
        by_signal: a signal came.
        parent_is_gone: standard input ended.
        failure: the error that ends the process.
    """

    def __init__(self, *, with_stdin: bool) -> None:
        self.by_signal = False
        self.parent_is_gone = False
        self.failure: CacheError | None = None
        self._signals = _Signals()
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN if with_stdin else self._on_signal)
        if with_stdin:
            threading.Thread(target=self._wait_for_parent, name="parent", daemon=True).start()

    def wait(self) -> None:
        """Waits for a reason to stop."""
        self._signals.wait()

    def wait_for(self, action: Callable[[], None]) -> None:
        """Waits for an action in another thread, or for another reason to stop."""

        def act() -> None:
            try:
                action()
            finally:
                self._signals.wake()

        threading.Thread(target=act, name="leave", daemon=True).start()
        self._signals.wait()

    def fail(self, error: CacheError) -> None:
        """Ends `wait`, from any thread, with an error."""
        self.failure = error
        self._signals.wake()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.by_signal = True  # the file descriptor of signals ends `wait`

    def _wait_for_parent(self) -> None:
        # Not sys.stdin: a thread that holds its lock would abort the exit of the interpreter.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        self.parent_is_gone = True
        self._signals.wake()


if __name__ == "__main__":
    main()
