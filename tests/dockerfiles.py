"""The Dockerfiles of runtimes/images, read."""

from __future__ import annotations

import re
from pathlib import Path

from cache_runtimes import MANIFESTS

DOCKERFILES = sorted((MANIFESTS / "images").glob("*/Dockerfile"))


def instructions(path: Path) -> list[tuple[str, str]]:
    """Keyword and arguments of each instruction, with its lines joined."""
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found = [line.partition(" ") for line in text.splitlines() if line.strip()]
    return [(keyword, arguments.strip()) for keyword, _, arguments in found]


def stages(path: Path) -> list[list[tuple[str, str]]]:
    """The instructions of each stage, from its FROM on."""
    found: list[list[tuple[str, str]]] = []
    for keyword, arguments in instructions(path):
        if keyword == "FROM":
            found.append([])
        if found:
            found[-1].append((keyword, arguments))
    return found


def copied(stage: list[tuple[str, str]]) -> list[str]:
    """The paths of the context that a stage copies."""
    return [
        word
        for keyword, arguments in stage
        if keyword == "COPY" and not arguments.startswith("--from=")
        for word in arguments.split()[:-1]
        if not word.startswith("--")
    ]


def copied_for_the_wheel(path: Path) -> list[str]:
    """The paths that the stage of the wheel copies."""
    (found,) = [copied(stage) for stage in stages(path) if stage[0][1].endswith(" AS wheel")]
    return found
