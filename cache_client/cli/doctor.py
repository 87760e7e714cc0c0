"""Checks what a reader needs of its machine and its cache, and says how to mend it."""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from cache_client.control.client import CacheClient
from cache_client.control.infos import NodeInfo
from cache_client.job.ranks import find_credentials
from cache_protocol.cli.output import size
from cache_protocol.errors import CacheError, some_of

_SHM: Final = Path("/dev/shm")
_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_PIDS: Final = (Path("/sys/fs/cgroup/pids.max"), Path("/sys/fs/cgroup/pids/pids.max"))
_MAX_MAPS: Final = Path("/proc/sys/vm/max_map_count")

_CLOCK_S: Final = 2.0
_SLOW_S: Final = 0.5
_MIN_SHM_BYTES: Final = 1024**3
_MIN_FILES, _MIN_THREADS, _MIN_MAPS = 1024, 512, 65_530
_FULL: Final = 0.95


@dataclass(frozen=True)
class Check:
    """The outcome of one check.

    Attributes:
        outcome: ``ok``; ``warning``: it works, but not well; ``bad``: reads fail.
        found: the facts.
        advice: what to do; empty if nothing is wrong.
    """

    name: str
    outcome: Literal["ok", "warning", "bad"]
    found: str
    advice: str = ""


def examine(client: CacheClient, version: str) -> list[Check]:
    """Every check, of this machine and of the cache.

    Args:
        client: of the cache.
        version: of this package.
    """
    return [*_of_cache(client, version), *of_machine()]


def _of_cache(client: CacheClient, version: str) -> Iterator[Check]:
    asked_at, asked_time = time.monotonic(), time.time()
    try:
        status = client.cache_status()
    except CacheError as error:
        yield Check(
            "endpoint",
            "bad",
            f"{client.endpoint}: {error}",
            "give the Flight port of a running node, by --endpoint or CACHE_ENDPOINT",
        )
        return
    took_s = time.monotonic() - asked_at
    yield Check(
        "endpoint",
        "warning" if took_s > _SLOW_S else "ok",
        f"{client.endpoint} and its coordinator answered in {took_s * 1000:.0f} ms",
        "look at the load of the coordinator and at the network" if took_s > _SLOW_S else "",
    )
    yield Check("tls", "ok" if client.endpoint.startswith("grpc+tls") else "warning", *(
        ("connections are encrypted", "")
        if client.endpoint.startswith("grpc+tls")
        else ("connections are not encrypted", "keep the cache in a network that you trust")
    ))  # fmt: skip
    others = sorted({node.version or "unknown" for node in status.nodes} - {version})
    yield Check(
        "versions",
        "warning" if others else "ok",
        f"this program {version}" + (f", nodes {', '.join(others)}" if others else ", nodes same"),
        "install the same version in the jobs and in the cache" if others else "",
    )
    offset_s = status.now_s - (asked_time + took_s / 2)
    is_off = abs(offset_s) > _CLOCK_S + took_s
    yield Check(
        "clock",
        "warning" if is_off else "ok",
        f"the coordinator's clock differs by {offset_s:+.1f} s",
        "run a time service, such as chrony: certificates and tokens depend on the clock"
        if is_off
        else "",
    )
    lost = [node.id for node in status.nodes if not node.alive]
    yield Check(
        "nodes",
        "bad" if lost else "ok",
        f"{len(status.nodes) - len(lost)} of {len(status.nodes)} answer"
        + (f"; lost: {', '.join(lost)}" if lost else ""),
        "look at the logs of the lost nodes; start them again with the same directory"
        if lost
        else "",
    )
    yield from _of_zones(status.nodes, find_credentials(client.endpoint).zone)
    full = [
        f"{node.id} holds {size(node.stored_bytes)} of {size(node.memory_limit_bytes)}"
        for node in status.nodes
        if node.memory_limit_bytes and node.stored_bytes > _FULL * node.memory_limit_bytes
    ]
    yield Check(
        "memory of nodes",
        "warning" if full else "ok",
        "; ".join(full) or "every node has room",
        "drop datasets, or add nodes" if full else "",
    )


def _of_zones(nodes: Sequence[NodeInfo], here: str | None) -> Iterator[Check]:
    """Whether nodes and this process are in zones that fit each other; nothing without zones."""
    zones = sorted({node.zone for node in nodes if node.zone})
    if not zones and here is None:
        return
    without = [node.id for node in nodes if not node.zone]
    found = f"nodes in {', '.join(zones) or 'no zone'}; this process in {here or 'none'}"
    if without:
        advice = f"give node {some_of(without)} its zone: cache-server serve --zone, or CACHE_ZONE"
    elif here is None:
        advice = "set CACHE_ZONE, so that reads stay in the zone of this machine"
    elif here not in zones:
        advice = (
            f"set CACHE_ZONE to the name that a node has; no node is in {here}: all reads cross"
        )
    else:
        advice = ""
    yield Check("zones", "warning" if advice else "ok", found, advice)


def of_machine() -> Iterator[Check]:
    """The checks of this machine."""
    checks: tuple[Callable[[], Check | None], ...] = (
        _shared_memory, _huge_pages, _open_files, _threads, _memory_maps,
    )  # fmt: skip
    for check in checks:
        found = check()
        if found is not None:
            yield found


def _shared_memory() -> Check | None:
    if not _SHM.is_dir():
        return None
    usage = shutil.disk_usage(_SHM)
    is_small = usage.total < _MIN_SHM_BYTES
    return Check(
        "shared memory",
        "warning" if is_small else "ok",
        f"{_SHM} has {size(usage.total)}, {size(usage.free)} free",
        "DataLoader workers pass batches through it: docker run --shm-size=8g, or in Kubernetes "
        "an emptyDir with medium Memory at /dev/shm"
        if is_small
        else "",
    )


def _huge_pages() -> Check | None:
    text = _read(_HUGE_PAGES)
    if text is None:
        return None
    chosen = text.partition("[")[2].partition("]")[0]
    is_off = chosen in ("never", "deny")
    return Check(
        "huge pages",
        "warning" if is_off else "ok",
        f"{_HUGE_PAGES.name} is {chosen}",
        f"echo advise > {_HUGE_PAGES}, as root: random reads of shards in memory become faster"
        if is_off
        else "",
    )


def _open_files() -> Check:
    return _limit("open files", resource.RLIMIT_NOFILE, _MIN_FILES, "ulimit -n 65536")


def _threads() -> Check:
    for path in _PIDS:
        text = _read(path)
        if text is not None and text.isdigit() and int(text) < _MIN_THREADS:
            return Check(
                "processes and threads",
                "warning",
                f"the container may have {text}",
                "raise its limit of pids (docker run --pids-limit; kubelet podPidsLimit)",
            )
    return _limit("processes and threads", resource.RLIMIT_NPROC, _MIN_THREADS, "ulimit -u 4096")


def _limit(name: str, which: int, minimum: int, advice: str) -> Check:
    soft, _ = resource.getrlimit(which)
    is_low = soft != resource.RLIM_INFINITY and soft < minimum
    found = "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft:,}"
    return Check(name, "warning" if is_low else "ok", found, advice if is_low else "")


def _memory_maps() -> Check | None:
    text = _read(_MAX_MAPS)
    if text is None or not text.isdigit():
        return None
    is_low = int(text) < _MIN_MAPS
    return Check(
        "memory maps",
        "warning" if is_low else "ok",
        f"vm.max_map_count is {int(text):,}",
        "sysctl -w vm.max_map_count=262144: each shard takes a few maps" if is_low else "",
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip() if os.access(path, os.R_OK) else None
    except (OSError, ValueError):
        return None
