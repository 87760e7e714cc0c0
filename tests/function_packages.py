"""A package of functions as a node has it installed: modules, and the entry points of its wheel."""

from __future__ import annotations

from pathlib import Path

GROUP = "trainer_data_cache.functions"

# Each ends, hangs or lies at the text "bad"; the others are its length.
MISBEHAVING = """
import os, time
import pyarrow as pa
from cache_server.functions import Column, Function

def function(name, act, version="1"):
    def make(options):
        def compute(text):
            values = text.to_pylist()
            if "bad" in values:
                found = act(values)
                if found is not None:
                    return found
            return pa.array([len(value) for value in values], pa.int32())
        return compute
    return Function(name, version, {"text": Column(pa.string())}, make, pa.int32(), text=name)

def raise_it(values):
    raise KeyError("no such word")

def hog(values):
    kept = []
    while True:
        kept.append(bytearray(64 << 20))

raises = function("raises", raise_it)
dies = function("dies", lambda values: os.kill(os.getpid(), 9))
exits = function("exits", lambda values: os._exit(3))
too_short = function("too_short", lambda values: pa.array([1] * (len(values) - 1), pa.int32()))
other_type = function("other_type", lambda values: pa.array([1.5] * len(values)))
no_array = function("no_array", lambda values: [1] * len(values))
hangs = function("hangs", lambda values: time.sleep(3600))
hogs = function("hogs", hog)
def hog_when_made(options):
    hog([])

hogs_when_made = Function(
    "hogs_when_made", "1", {"text": Column(pa.string())}, hog_when_made, pa.int32()
)
good = function("good", lambda values: None, version="VERSION")
"""
LATE = ("hogs_when_made",)  # that fails before it gets a row
NAMES = ("raises", "dies", "exits", "too_short", "other_type", "no_array", "hangs", "hogs", "good")


def install(folder: Path, *, version: str = "1") -> Path:
    """Puts `MISBEHAVING` into a folder that is then one of ``sys.path``.

    Args:
        version: of the function ``good``.
    """
    metadata = folder / "misbehaving-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "misbehaving.py").write_text(MISBEHAVING.replace("VERSION", version))
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: misbehaving\nVersion: 1.0\n")
    points = "".join(f"{name} = misbehaving:{name}\n" for name in (*NAMES, *LATE))
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{points}")
    return folder
