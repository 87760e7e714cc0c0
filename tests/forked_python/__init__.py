"""Python programs as forks of one process that has imported their libraries.

A new interpreter imports for 0.4 s (`cachectl`), 0.6 s (a cache node) or 2 s (torch). A fork starts
in 20 ms. A fork is a process: it has an environment, standard streams, signals and an exit code.
Use `subprocess` where a test needs what a fork does not have:

- ``/proc`` shows the environment and the command line of the server, which is its parent.
- No interpreter starts.
- No interpreter ends: threads are joined and `atexit` functions run, but modules stay.

Variables in the environment of a fork:

- ``FORKED_PYTHON`` becomes its ``sys.executable``, see `executable`.
- ``FORKED_PYTHON_IMPORTS``: modules that the server imports before, for this fork and later ones.
  They must not read the environment when they are imported, as ``kubernetes`` does.
- ``MALLOC_ARENA_MAX`` and ``ARROW_DEFAULT_MEMORY_POOL=system`` are followed, too.
- ``FORKED_PYTHON_FINALIZES``: the interpreter ends, which takes 0.3 s.
"""

from __future__ import annotations

import atexit
import os
import select
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tests.forked_python.messages import read_number, send

_ROOT = Path(__file__).resolve().parents[2]


class Popen(subprocess.Popen[Any]):
    """A `subprocess.Popen` of ``[sys.executable, ...]`` that is forked, not executed.

    The command is ``-m MODULE``, ``-c CODE`` or a script, with arguments. Of the options it takes
    ``cwd``, ``env``, ``start_new_session`` and those of the standard streams.
    """

    def _execute_child(  # type: ignore[override, unused-ignore]
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any,
        cwd: Any, env: Any, startupinfo: Any, creationflags: Any, shell: Any,
        p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int,
        restore_signals: Any, gid: Any, gids: Any, uid: Any, umask: Any, start_new_session: bool,
        *_: Any,
    ) -> None:  # fmt: skip
        assert args[0] == sys.executable, args
        given = (p2cread, c2pwrite, errwrite)
        self._server = socket.socket(socket.AF_UNIX)
        arguments = [os.fspath(argument) for argument in args[1:]]
        self._server.connect(f"{_server_folder()}/{_socket_for(arguments)}")
        request = [
            arguments,
            os.fspath(cwd or Path.cwd()),
            dict(os.environ if env is None else env),
            [0, 1, 2],
            start_new_session,
            False,
        ]
        send(self._server, request, [i if fd == -1 else fd for i, fd in enumerate(given)])
        self.pid = read_number(self._server)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        with self._waitpid_lock:  # type: ignore[attr-defined]
            self._take_exit_code(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        with self._waitpid_lock:  # type: ignore[attr-defined]
            self._take_exit_code(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def _take_exit_code(self, timeout: float | None) -> None:
        if self.returncode is None and select.select([self._server], [], [], timeout)[0]:
            self.returncode = read_number(self._server)
            self._server.close()


def run(
    arguments: list[Any],
    *,
    input: str | None = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` by `Popen`."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(arguments, **options) as process:
        try:
            output, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    from tests import error_rules  # not in the server, which imports this module

    error_rules.note_output(errors)
    done = subprocess.CompletedProcess(process.args, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


def executable() -> str:
    """A python for the PATH, beside torchrun, cachectl and cache-server: each is forked.

    It is executed itself, so it has an environment, a command line and a parent.
    """
    return f"{_server_folder()}/bin/python"


def environ() -> dict[str, str]:
    """The environment of a fork whose own Python processes, such as nodes, are forks too.

    Each has two processes: `executable`, whose process id its parent knows, and the fork.
    """
    return {**os.environ, "FORKED_PYTHON": executable()}


def _socket_for(arguments: list[str]) -> str:
    program = next(argument for argument in arguments if not argument.startswith("-"))
    return "nodes" if "cache_server" in program.split(os.sep) else "socket"


def serve_forks(folder: str) -> None:
    """Lets nodes that are forks fork the processes that read their footers and run their SQL.

    Args:
        folder: of the server, in which this is called.
    """
    from cache_server.sql import sql_process
    from cache_server.tables import footers

    global _server_folder
    _server_folder = cache(lambda: folder)
    for starter in (footers, sql_process):
        vars(starter)["Popen"] = Popen


@cache
def _server_folder() -> str:
    """Starts the server of this process: it ends with its standard input, so with this process."""
    folder = Path(tempfile.mkdtemp(prefix="forked-python-"))
    source = Path(_ROOT, "tests/forked_python/shim.py").read_text(encoding="utf-8")
    (folder / "bin").mkdir()
    for name in ("python", "torchrun", "cachectl", "cache-server"):
        (folder / "bin" / name).write_text(f"#!{sys.executable} -IS\n{source}", encoding="utf-8")
        (folder / "bin" / name).chmod(0o755)
    listeners = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    for listener, name in zip(listeners, ("nodes", "socket"), strict=True):
        listener.bind(str(folder / name))
        listener.listen(64)
    numbers = [listener.fileno() for listener in listeners]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.forked_python.server", *map(str, numbers)],
        cwd=_ROOT, stdin=subprocess.PIPE, pass_fds=numbers,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MIMALLOC_PURGE_DELAY": "1000"},
    )  # fmt: skip
    for listener in listeners:
        listener.close()

    parent = os.getpid()

    def end() -> None:
        if os.getpid() == parent:
            process.communicate()

    atexit.register(end)
    return str(folder)
