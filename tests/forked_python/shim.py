"""Stands for a program on the PATH: asks the server for a fork, and ends as that ends.

It is run by an interpreter without ``site``, with the name of a program and its arguments.
"""

import _socket
import array
import json
import os
import signal
import sys

_PROGRAMS = {
    "cache-server": ["-m", "cache_server"],
    "cachectl": ["-m", "cache_client"],
    "torchrun": ["-m", "torch.distributed.run"],
}
_RELAYED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


def main() -> None:
    """Runs ``sys.argv``; the server's socket lies beside the folder of the program."""
    program = sys.argv[0]
    folder, name = os.path.split(program)
    numbers = [int(fd) for fd in os.listdir("/proc/self/fd")]
    numbers = [fd for fd in numbers if os.path.exists(f"/proc/self/fd/{fd}")]  # not of the listing
    arguments = [*_PROGRAMS.get(name, []), *sys.argv[1:]]
    environ = {**os.environ, "FORKED_PYTHON": os.path.join(folder, "python")}
    message = json.dumps([arguments, os.getcwd(), environ, numbers, False, True]).encode()
    server = _socket.socket(_socket.AF_UNIX)
    listener = "nodes" if name == "cache-server" else "socket"
    server.connect(os.path.join(os.path.dirname(folder), listener))
    fds = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", numbers))]
    server.sendmsg([len(message).to_bytes(8, "big")], fds)
    while message:
        message = message[server.send(message) :]
    pid = int.from_bytes(server.recv(8, _socket.MSG_WAITALL), "big", signed=True)
    for number in _RELAYED:
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    for fd in numbers:
        os.close(fd)
    code = int.from_bytes(server.recv(8, _socket.MSG_WAITALL), "big", signed=True)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
