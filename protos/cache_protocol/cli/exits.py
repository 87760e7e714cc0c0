"""How a program ends for an error: its last line, its exit code, and what Kubernetes keeps.

`kubectl describe` shows the termination message of a container, and so does ``cachectl diagnose``.
Without one, as for a killed process, Kubernetes shows the end of the log
(``terminationMessagePolicy: FallbackToLogsOnError``).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from cache_protocol.errors import (
    CacheError,
    ConfigError,
    LoadError,
    RequestError,
    TransientLoadError,
    without_middle,
)

EXIT_FAILURE = 1
EXIT_DATA = 65  # EX_DATAERR: it cannot get better by itself
EXIT_TRY_AGAIN = 75  # EX_TEMPFAIL: a source did not answer, or changed meanwhile
EXIT_CONFIG = 78  # EX_CONFIG

_VARIABLE = "CACHE_TERMINATION_LOG"  # the terminationMessagePath of a pod that sets another one
_DEFAULT = "/dev/termination-log"
_MOST = 500  # characters of a termination message


def exit_code(error: CacheError) -> int:
    """78 for settings, 65 for data and queries, 75 for sources that may answer later, else 1."""
    if isinstance(error, ConfigError):
        return EXIT_CONFIG
    if isinstance(error, TransientLoadError):
        return EXIT_TRY_AGAIN
    return EXIT_DATA if isinstance(error, LoadError | RequestError) else EXIT_FAILURE


def tell(program: str, reason: CacheError | str, environ: Mapping[str, str]) -> None:
    """Prints why a program ends, as its last line, and leaves it as the termination message.

    Args:
        environ: may name the file of the message. Only Kubernetes makes that file.
    """
    text = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
    text = " ".join(text.split("\n"))
    sys.stderr.write(f"{program}: {text}\n")
    path = Path(environ.get(_VARIABLE) or _DEFAULT)
    with suppress(OSError):
        if path.is_file():
            path.write_text(without_middle(text, _MOST - 4), encoding="utf-8", errors="replace")
