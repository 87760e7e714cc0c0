"""The documentation stays free of phrases that make a reader stop."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PHRASES = (
    *("as it has it", "by itself", "it is none", "nobody", "of its own", "of their own"),
    *("of which", "so are", "so is", "there is nothing to", "wants to be", "what is none"),
    *("goes on", "whoever", "whatever", "whichever", "is told", "are told"),
)
# Every Markdown file of these.
PAGES = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "examples"),
    *("runtimes/README.md", "tests/README.md"),
)
# Every docstring of these modules and folders.
DOCSTRINGS = (
    *("cache_client", "cache_server", "protos/cache_protocol", "runtimes/cache_runtimes"),
    *("benchmarks", "docs/site_hooks.py", "examples"),
)


def files_of(names: tuple[str, ...], suffix: str) -> list[Path]:
    found = []
    for path in (ROOT / name for name in names):
        found += sorted(path.rglob(f"*{suffix}")) if path.is_dir() else [path]
    return found


def phrases_in(text: str) -> list[str]:
    """Phrases outside of code, with the words around them."""
    text = re.sub(r"^```.*?^```|`[^`\n]+`", "``", text, flags=re.DOTALL | re.MULTILINE)
    words = " ".join(text.split())
    pattern = rf"\b(?:{'|'.join(PHRASES)})\b"
    return [
        words[max(0, found.start() - 30) : found.end() + 30]
        for found in re.finditer(pattern, words, re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", files_of(PAGES, ".md"), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_page_is_in_plain_english(page: Path) -> None:
    assert not phrases_in(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "module", files_of(DOCSTRINGS, ".py"), ids=lambda p: str(p.relative_to(ROOT))
)
def test_docstrings_are_in_plain_english(module: Path) -> None:
    tree = ast.parse(module.read_text(encoding="utf-8"))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    assert not phrases_in("\n\n".join(texts))


def test_a_phrase_is_found_over_lines_and_not_in_code() -> None:
    assert phrases_in("A runtime of its\nown.")
    assert not phrases_in("Run `of its own` and\n```\nwhoever\n```\n")
