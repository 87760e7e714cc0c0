"""Says at the end of a rank which threads of gloo are left; Python imports it before a script.

Such a thread may abort the process, though it seldom does: see "The end of a rank" in
examples/README.md. A test puts this directory on the PYTHONPATH of its ranks and looks for that
line.
"""

import atexit
import os
import sys
from pathlib import Path


def say_what_is_left() -> None:
    """Registered before all others, so it runs after them, just before the interpreter ends."""
    if "RANK" not in os.environ and "OMPI_COMM_WORLD_RANK" not in os.environ:
        return
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    if left := [name for name in names if name.startswith("pt_gloo_runl")]:
        print(f"threads of gloo are left: {left}", file=sys.stderr, flush=True)


atexit.register(say_what_is_left)
