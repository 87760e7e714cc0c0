"""What this machine gives a process: its memory, the limits of its cgroups, and file systems.

The kernel counts memory for each control group (cgroups(7)): also pages of a tmpfs and of cached
files. It ends a process when its group, or a group above that, passes its limit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MACHINE_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
_PROC = Path("/proc/self")
_LIMIT = {"cgroup2": "memory.max", "cgroup": "memory.limit_in_bytes"}  # by type of file system


class _Mount(NamedTuple):
    """A line of proc_pid_mountinfo(5)."""

    device: str
    root: str
    folder: Path
    kind: str
    options: str


def memory_limit_bytes(proc: Path = _PROC) -> int | None:
    """The least memory limit of the control groups of this process; None: there is none.

    Args:
        proc: the folder of the process.
    """
    found = [
        limit
        for folder, name in _group_folders(proc)
        if (limit := _limit(folder / name)) is not None and limit < MACHINE_BYTES
    ]
    return min(found, default=None)


def is_in_memory(directory: Path, proc: Path = _PROC) -> bool:
    """Whether a directory, or where it will be made, is on a tmpfs."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    device = directory.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    return any(mount.kind == "tmpfs" for mount in _mounts(proc) if mount.device == wanted)


def _group_folders(proc: Path) -> Iterator[tuple[Path, str]]:
    """Each folder of a group that this process is in, with the name of its file of the limit."""
    paths = _group_paths(proc)
    for mount in _mounts(proc):
        options = mount.options.split(",")
        if mount.kind not in _LIMIT or (mount.kind == "cgroup" and "memory" not in options):
            continue
        path = paths.get("memory" if mount.kind == "cgroup" else "")
        if path is None:
            continue
        folder = _seen_at(mount, path)
        while True:
            yield folder, _LIMIT[mount.kind]
            if folder == mount.folder:
                break
            folder = folder.parent


def _seen_at(mount: _Mount, path: str) -> Path:
    """The folder of a group below a mount; the mount itself where a container hides the rest."""
    inside = os.path.relpath(path, mount.root)
    folder = mount.folder / inside
    hidden = inside == "." or inside.startswith("..") or not folder.is_dir()
    return mount.folder if hidden else folder


def _group_paths(proc: Path) -> dict[str, str]:
    """Controller -> path of the group that has it; empty for the one hierarchy of version 2."""
    found = {}
    for line in _lines(proc / "cgroup"):
        _, controllers, path = line.split(":", 2)
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def _mounts(proc: Path) -> Iterator[_Mount]:
    for line in _lines(proc / "mountinfo"):
        mount, _, source = line.partition(" - ")
        _, _, device, root, folder, *_ = mount.split()
        kind, _, options = source.split(" ", 2)
        yield _Mount(device, root, Path(folder), kind, options)


def _limit(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # the root group has no file; "max"
        return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return []
