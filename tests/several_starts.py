"""Several starts of a script, one after the other, of which each is a process of its own.

    python several_starts.py '{"script": ..., "imports": [...], "starts": [[...], ...]}'

Importing Lightning takes seconds of a core. Here it is imported once, and each start forks from
that: it has all modules, and nothing else, of what was there before. It works under torchrun too,
where a start begins when that before has ended on every rank; two ranks is what it is made for.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

END = "-- the end of a start --\n"


def main() -> None:
    """Runs every start; rank 0 prints `END` after each. Ends with the first that fails."""
    plan: dict[str, Any] = json.loads(sys.argv[1])
    sys.path[0] = str(Path(plan["script"]).parent)  # as Python itself does
    for module in plan["imports"]:
        importlib.import_module(module)
    threads = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    assert len(threads) == 1, f"only one thread would come along: {threads}"
    gc.freeze()  # a start neither looks through it nor copies it when it ends
    rank = int(os.environ.get("RANK", "0"))
    for number, arguments in enumerate(plan["starts"]):
        if number and "RANK" in os.environ:
            # The store of torchrun still has the addresses of the start before.
            os.environ["MASTER_PORT"] = str(plan["ports"][number])
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        child = os.fork()
        if child == 0:
            sys.argv = [plan["script"], *arguments]
            runpy.run_path(plan["script"], run_name="__main__")
            return
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit(f"start {number} ended with {os.waitstatus_to_exitcode(status)}")
        if "RANK" in os.environ:
            _meet(plan["meetings"][number], rank)
        if rank == 0:
            print(END, end="", flush=True)


def _meet(pipe: str, rank: int) -> None:
    """Returns when both ranks are here: a named pipe opens when it has two ends."""
    os.close(os.open(pipe, os.O_RDONLY if rank == 0 else os.O_WRONLY))


if __name__ == "__main__":
    main()
