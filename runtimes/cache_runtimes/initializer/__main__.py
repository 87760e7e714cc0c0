"""``python -m cache_runtimes.initializer``: reads the environment and signals; no arguments.

Exit codes, never 0; the last line on standard error is the reason:

- 143 after SIGTERM or SIGINT: every object is removed, or left for the next pod after an eviction
- 78 (EX_CONFIG): a bad setting, of this pod or of a cache pod
- 65 (EX_DATAERR): bad data, of this pod or of a cache pod; a bad annotation of this pod
- 1: any other error
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path

from cache_protocol.cli.exits import tell
from cache_protocol.errors import CacheError, exit_code
from cache_runtimes.initializer.cluster import Cluster, connect
from cache_runtimes.initializer.program import run
from cache_runtimes.initializer.settings import from_env

_PROGRAM = "initializer"
EXIT_TERMINATED = 128 + signal.SIGTERM
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main() -> None:
    """Entry point: an error of the tree becomes the last line and an exit code."""
    stop = _stop_on_signals()
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    try:
        own = _NAMESPACE_FILE.read_text().strip() if _NAMESPACE_FILE.exists() else None
        settings = from_env(os.environ, own_namespace=own)
        api = connect(os.environ.get("KUBECONFIG") or None)
        ending = run(settings, Cluster(api, settings.namespace), stop)
    except CacheError as error:
        tell(_PROGRAM, error, os.environ)
        sys.exit(exit_code(error))
    tell(_PROGRAM, ending.value, os.environ)
    # Never 0: the Job would count a deleted pod as finished, and not replace it.
    sys.exit(EXIT_TERMINATED)


def _stop_on_signals() -> threading.Event:
    """An event that the first signal sets.

    A thread sets it, not a handler: a handler may run while the main thread holds the lock of that
    event. Threads that start later block the signals too.
    """
    stop = threading.Event()
    for number in _SIGNALS:
        # The kernel sends the first process of a container no signal without a handler.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def wait() -> None:
        number = signal.sigwait(_SIGNALS)
        logging.getLogger(__name__).info("told to end: %s", signal.Signals(number).name)
        stop.set()

    threading.Thread(target=wait, name="signals", daemon=True).start()
    return stop


if __name__ == "__main__":
    main()
