"""The server: imports the libraries once, then forks for each request.

It is two processes: the programs of nodes are forks of the one without torch, whose memory takes a
third of the time to copy. A fork whose request says so is killed when the client's connection
closes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import multiprocessing
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import threading
import types
import weakref
from pathlib import Path

from tests import forked_python
from tests.forked_python.messages import receive, send_number
from tests.rank_ends import sitecustomize  # noqa: F401  # runs at the end of a rank, after all others

_ASIDE = 512  # the first number above those that a program knows
_M_ARENA_MAX = -8  # of malloc.h
LIBRARIES = [
    "cache_client.__main__",
    "cache_server.__main__",
    "cache_server.server",
    "cache_server.sql.loader",
    "deltalake",
    "pyiceberg.catalog.sql",
]
TORCH = ["torch", "torch.distributed.run"]


def main() -> None:
    """Serves on listening sockets until standard input ends: of nodes, of all other programs.

    The arguments are their numbers.
    """
    nodes, others = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    folder = Path(nodes.getsockname()).parent
    sys.path.pop(0)  # this project's folder: a program looks for its modules elsewhere
    _import(LIBRARIES)
    with contextlib.suppress(ImportError):  # without the libraries of nodes there are none
        forked_python.serve_forks(str(folder))
    if (with_torch := os.fork()) == 0:
        nodes.close()
        _serve(others, TORCH)
        os._exit(0)
    others.close()
    _serve(nodes, [])
    with contextlib.suppress(ChildProcessError):  # it ended before
        os.waitpid(with_torch, 0)
    shutil.rmtree(folder, ignore_errors=True)


def _serve(listener: socket.socket, libraries: list[str]) -> None:
    """Forks for each request; imports the libraries at the first one."""
    clients: dict[int, socket.socket] = {}  # by process id
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the tests as well
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    with selectors.DefaultSelector() as selector:
        for source in (0, listener, woken):
            selector.register(source, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if 0 in ready:
                break
            if woken in ready:
                woken.recv(4096)
                _tell_of_ended(clients, selector)
            for pid in [pid for pid, client in clients.items() if client in ready]:
                selector.unregister(clients[pid])
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if listener in ready:
                client, _ = listener.accept()
                try:
                    (*program, numbers, new_session, tied), fds = receive(client)
                except (EOFError, OSError):  # it was killed
                    client.close()
                    continue
                _import([*libraries, *program[2].get("FORKED_PYTHON_IMPORTS", "").split()])
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)  # before its socket closes
                    for of_server in (listener, client, woken, wake, *clients.values()):
                        of_server.close()
                    selector.close()
                    if new_session:
                        os.setsid()
                    _take(fds, numbers)
                    _become(*program)
                for fd in fds:
                    os.close(fd)
                clients[pid] = client
                if tied:
                    selector.register(client, selectors.EVENT_READ)
                with contextlib.suppress(OSError):
                    send_number(client, pid)
        signal.set_wakeup_fd(-1)  # its socket closes with this function


def _import(names: list[str]) -> None:
    missing = [name for name in names if name not in sys.modules]
    for name in missing:
        with contextlib.suppress(ImportError):  # the program says so, where it needs it
            importlib.import_module(name)
    if missing:
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            finalizer.atexit = False  # of a module: it stays, and torch has thousands
        gc.collect()
        gc.freeze()  # otherwise the first collection in a fork copies every page


def _tell_of_ended(clients: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    while clients:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            break
        if (client := clients.pop(pid, None)) is None:
            continue
        with contextlib.suppress(KeyError):  # the client has gone
            selector.unregister(client)
        with contextlib.suppress(OSError):
            send_number(client, os.waitstatus_to_exitcode(status))
        client.close()


def _take(fds: list[int], numbers: list[int]) -> None:
    """Gives the file descriptors of a request the numbers that its program knows them by."""
    aside = [fcntl.fcntl(fd, fcntl.F_DUPFD, _ASIDE) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(aside, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def _become(arguments: list[str], cwd: str, environ: dict[str, str]) -> None:
    """Runs the program in this process, and ends it as the interpreter does."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if environ.get("HF_ENDPOINT") != os.environ.get("HF_ENDPOINT"):
        _forget("huggingface_hub")  # accelerate imports it, and it reads the variable at its import
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    sys.executable = environ.get("FORKED_PYTHON", sys.executable)
    multiprocessing.set_executable(sys.executable)
    if environ.get("PYTHONUNBUFFERED"):
        _unbuffer()
    _allocate_as(environ)
    sys.path[:0] = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    code = 0
    try:
        _run(arguments)
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    if "FORKED_PYTHON_FINALIZES" in environ:
        ctypes.pythonapi.Py_Exit(code)
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = 120
    os._exit(code)


def _allocate_as(environ: dict[str, str]) -> None:
    """Follows variables that are read when a program starts, and decide its address space."""
    if arenas := environ.get("MALLOC_ARENA_MAX"):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, int(arenas))
    if environ.get("ARROW_DEFAULT_MEMORY_POOL") == "system":
        pyarrow = importlib.import_module("pyarrow")
        pyarrow.set_memory_pool(pyarrow.system_memory_pool())


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


def _run(arguments: list[str]) -> None:
    options = set()
    while arguments[0].startswith("-") and arguments[0] not in ("-m", "-c"):
        options.add(arguments[0])
        arguments = arguments[1:]
    if "-u" in options:
        _unbuffer()
    first, *rest = arguments
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        for name in (rest[0], f"{rest[0]}.__main__"):
            if not hasattr(sys.modules.get(name), "__path__"):
                sys.modules.pop(name, None)  # what was imported is run again
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = [first, *rest]
        if "-P" not in options:
            sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")


def _unbuffer() -> None:
    raw = io.FileIO(1, "w", closefd=False)
    sys.stdout = io.TextIOWrapper(raw, encoding="utf-8", write_through=True)  # type: ignore[type-var]


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    main()
