"""What mkdocs adds to the pages of docs/: pages from other folders, and the help of the commands.

Every page is written for the forge. Links between pages become links of the site here. Links to
other files of the repository become absolute.
"""

from __future__ import annotations

import posixpath
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from typer.main import get_command
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/trainer-data-cache/trainer-data-cache"
RAW = "https://raw.githubusercontent.com/trainer-data-cache/trainer-data-cache/main/"
# Files outside of docs/ -> where the site has them.
ADDED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
    "benchmarks/results/README.md": "results.md",
    "benchmarks/results/history.md": "results-history.md",
    "benchmarks/results/scale.md": "results-scale.md",
    "benchmarks/results/shuffle.png": "images/shuffle.png",
    "benchmarks/results/simulation.png": "images/simulation.png",
    "examples/README.md": "examples.md",
    "runtimes/README.md": "runtimes.md",
}
COMMANDS = {"cachectl": "cache_client.__main__", "cache-server": "cache_server.__main__"}
COMMANDS_MARK = "<!-- commands -->"
_LINK = re.compile(r"(?P<before>\]\(|^\[[^\]]+\]: )(?P<target>[^)\s]+)", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Adds the files that lie outside of docs/."""
    for source, target in ADDED.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces the mark of the commands, and the links."""
    if COMMANDS_MARK in markdown:
        markdown = markdown.replace(COMMANDS_MARK, "\n".join(map(_help, COMMANDS)))
    return with_site_links(markdown, page.file.src_uri)


def with_site_links(markdown: str, page: str) -> str:
    """Replaces links of the repository by links of the site.

    Args:
        page: its path in the site, such as ``sources/files.md``.
    """
    sources = {target: source for source, target in ADDED.items()}
    source = sources.get(page, f"docs/{page}")

    def site_link(match: re.Match[str]) -> str:
        return match["before"] + _site_target(match["target"], source, page)

    return _LINK.sub(site_link, markdown)


def _site_target(target: str, source: str, page: str) -> str:
    path, mark, anchor = target.partition("#")
    if path.startswith(RAW):
        path = path.removeprefix(RAW)
    elif found := re.fullmatch(rf"{REPOSITORY}/(?:blob|tree)/main/(.*)", path):
        path = found[1]
    elif "://" in path or not path:
        return target
    else:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if not (ROOT / path).is_file():
        path = next((file for file in (f"{path}/README.md",) if file in ADDED), path)
    if path in ADDED or path.startswith("docs/"):
        inside = ADDED.get(path, path.removeprefix("docs/"))
        return posixpath.relpath(inside, posixpath.dirname(page) or ".") + mark + anchor
    kind = "blob" if (ROOT / path).is_file() else "tree"
    return f"{REPOSITORY}/{kind}/main/{path}{mark}{anchor}"


def _help(command: str) -> str:
    """The help of a command and of each of its verbs, as Markdown."""
    app = import_module(COMMANDS[command]).app
    verbs = list(get_command(app).commands)  # type: ignore[attr-defined]
    parts = []
    for words in [[], *([verb] for verb in verbs)]:
        done = CliRunner().invoke(app, [*words, "--help"], prog_name=command, env={"COLUMNS": "80"})
        if done.exit_code:
            raise RuntimeError(f"{command} {words} --help failed: {done.output}")
        level = "###" if words else "##"
        parts.append(
            f"{level} {' '.join([command, *words])}\n\n```text\n{done.output.strip()}\n```\n"
        )
    return "\n".join(parts)
