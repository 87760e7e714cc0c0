"""What the kernel allows a process is found, and divided between a node's processes and shards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cache_protocol.storage.machine import MACHINE_BYTES, is_in_memory, memory_limit_bytes
from cache_protocol.storage.memory_budget import MIN_SHARD_BYTES, memory_of_machine

GIB, MIB = 1 << 30, 1 << 20
ROOT = "/sys/fs/cgroup"


def proc_of(folder: Path, groups: str, mounts: list[tuple[str, str, str, str]]) -> Path:
    """A folder as that of a process: its groups, and mounts of (root, at, type, options)."""
    proc = folder / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(groups)
    (proc / "mountinfo").write_text(
        "22 1 0:21 / /proc rw shared:5 - proc proc rw\n"
        + "".join(
            f"{number} 1 0:{number} {root} {folder}{at} rw - {kind} {kind} {options}\n"
            for number, (root, at, kind, options) in enumerate(mounts, 30)
        )
    )
    return proc


def limit(folder: Path, name: str, value: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"{value}\n")


V2, V1 = "memory.max", "memory.limit_in_bytes"
V2_MOUNT = [("/", ROOT, "cgroup2", "rw,nsdelegate")]
V1_MOUNTS = [
    ("/", f"{ROOT}/cpu", "cgroup", "rw,cpu"),
    ("/", f"{ROOT}/memory", "cgroup", "rw,memory"),
    ("/", f"{ROOT}/unified", "cgroup2", "rw"),
]
_ANY = 9223372036854771712


@pytest.mark.parametrize(
    ("groups", "mounts", "limits", "found"),
    [
        ("0::/a/b\n", V2_MOUNT, {f"{ROOT}/a/b/{V2}": 700 * MIB, f"{ROOT}/a/{V2}": "max"}, 700),
        ("0::/a/b\n", V2_MOUNT, {f"{ROOT}/a/b/{V2}": "max", f"{ROOT}/a/{V2}": 600 * MIB}, 600),
        ("0::/a/b\n", V2_MOUNT, {f"{ROOT}/a/b/{V2}": "max", f"{ROOT}/a/{V2}": "max"}, None),
        ("0::/\n", V2_MOUNT, {f"{ROOT}/{V2}": 500 * MIB}, 500),  # a namespace of its own
        ("0::/\n", V2_MOUNT, {}, None),  # no container
        ("0::/kube/pod\n", V2_MOUNT, {f"{ROOT}/{V2}": 500 * MIB}, 500),  # the host's path
        (
            "0::/kube/pod\n",
            [("/kube/pod", ROOT, "cgroup2", "rw")],
            {f"{ROOT}/{V2}": 400 * MIB},
            400,
        ),
        (
            "4:memory:/a/b\n1:cpu,cpuacct:/\n0::/\n",
            V1_MOUNTS,
            {f"{ROOT}/memory/a/b/{V1}": _ANY, f"{ROOT}/memory/a/{V1}": 300 * MIB},
            300,
        ),
        ("4:memory:/a\n0::/\n", V1_MOUNTS, {f"{ROOT}/memory/a/{V1}": _ANY}, None),
        ("4:memory:/docker/x\n", V1_MOUNTS, {f"{ROOT}/memory/{V1}": 200 * MIB}, 200),
        ("4:memory:/a\n", V1_MOUNTS, {f"{ROOT}/memory/a/{V1}": MACHINE_BYTES * 2}, None),
    ],
)
def test_the_least_limit_of_the_groups_of_a_process_and_of_those_above_is_found(
    tmp_path: Path,
    groups: str,
    mounts: list[tuple[str, str, str, str]],
    limits: dict[str, object],
    found: int | None,
) -> None:
    for place, value in limits.items():
        file = Path(f"{tmp_path}{place}")
        limit(file.parent, file.name, value)
    proc = proc_of(tmp_path, groups, mounts)

    assert memory_limit_bytes(proc) == (None if found is None else found * MIB)


def test_a_system_without_these_files_has_no_limit(tmp_path: Path) -> None:
    assert memory_limit_bytes(tmp_path) is None


@pytest.mark.parametrize(("kind", "found"), [("tmpfs", True), ("ext4", False)])
def test_what_lies_in_memory_is_known_by_its_mount(tmp_path: Path, kind: str, found: bool) -> None:
    device = tmp_path.stat().st_dev
    (tmp_path / "mountinfo").write_text(
        "22 1 0:21 / /proc rw shared:5 - proc proc rw\n"
        f"30 1 {os.major(device)}:{os.minor(device)} / {tmp_path} rw - {kind} {kind} rw\n"
    )

    assert is_in_memory(tmp_path, tmp_path) is found
    assert is_in_memory(tmp_path / "not" / "yet", tmp_path) is found


@pytest.mark.parametrize("limit_bytes", [200 * MIB, 900 * MIB, 2 * GIB, 64 * GIB, None])
@pytest.mark.parametrize("stated", [None, 100 * MIB])
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_processes_and_shards_in_memory_fit_together(
    limit_bytes: int | None, stated: int | None, share: float
) -> None:
    memory = memory_of_machine(16 * GIB, limit_bytes, stated, share=share, in_memory=True)

    assert memory.all_bytes <= (limit_bytes or 16 * GIB) * share
    assert 0 < memory.most_shard_bytes < memory.all_bytes
    assert memory.loading_bytes + memory.most_shard_bytes < memory.all_bytes
    if limit_bytes is not None:  # beyond, the kernel ends the node
        assert memory.shard_limit_bytes is not None
    if stated is not None:
        assert memory.shard_limit_bytes == stated


def test_shards_on_a_disk_have_no_limit_and_leave_all_memory_to_loads() -> None:
    memory = memory_of_machine(16 * GIB, 900 * MIB, None, share=1.0, in_memory=False)

    assert memory.shard_limit_bytes is None
    assert memory.loading_bytes > 900 * MIB - 2 * MIN_SHARD_BYTES - MIB
