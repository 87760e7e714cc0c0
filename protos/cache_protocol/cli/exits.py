"""How a program ends for an error: its last line, and what Kubernetes keeps of it.

`kubectl describe` shows the termination message of a container, and so does ``cachectl diagnose``.
Without one, as for a killed process, Kubernetes shows the end of the log
(``terminationMessagePolicy: FallbackToLogsOnError``).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from cache_protocol.errors import CacheError, without_middle

_VARIABLE = "CACHE_TERMINATION_LOG"  # the terminationMessagePath of a pod that sets another one
_DEFAULT = "/dev/termination-log"
_MOST = 500  # characters of a termination message


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
