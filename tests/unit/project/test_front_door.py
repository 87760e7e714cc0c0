"""What a newcomer meets first: the pages, the hooks, the workflow; all of it is true and valid."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
REPOSITORY = "https://github.com/trainer-data-cache/trainer-data-cache"
RAW = "https://raw.githubusercontent.com/trainer-data-cache/trainer-data-cache/main/"
WORKFLOW = ROOT / ".github/workflows/ci.yml"
HOOKS = ROOT / ".pre-commit-config.yaml"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *(ROOT / "examples").glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
]


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def run(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def links(page: Path) -> list[str]:
    content = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"(?:\]\(|^\[[^\]]+\]: )([^)\s]+)", content, re.MULTILINE)


# -- links -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for link in links(page):
        target = link.partition("#")[0]
        inside = re.fullmatch(rf"(?:{REPOSITORY}/(?:blob|tree)/main/|{RAW})(.+)", target)
        if inside:
            assert (ROOT / inside[1]).exists(), link
        elif target and "://" not in target:
            assert (page.parent / target).exists(), link


def test_the_readme_has_absolute_links_only_as_a_package_index_shows_it() -> None:
    assert len(links(ROOT / "README.md")) > 10
    assert [link for link in links(ROOT / "README.md") if not link.startswith("https://")] == []


def test_the_files_that_contributing_names_are_there() -> None:
    named = re.findall(r"`([\w.-]+/[\w./-]+)`", text("CONTRIBUTING.md"))
    found = [name for name in named if "NAME" not in name and not name.startswith("build/")]
    assert len(found) > 20
    assert [name for name in found if not list(ROOT.glob(name))] == []


# -- continuous integration ------------------------------------------------------------------------


def test_the_workflow_has_least_rights_and_pinned_majors_and_calls_targets_that_exist() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text("utf-8"))
    jobs: dict[str, Any] = workflow["jobs"]
    assert set(jobs) == {"lint", "types", "tests", "docs", "floor", "build"}
    assert workflow["permissions"] == {"contents": "read"}
    assert not [name for name, job in jobs.items() if "permissions" in job]
    versions = jobs["tests"]["strategy"]["matrix"]["python-version"]
    assert versions == ["3.11", "3.12", "3.13", "3.14"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert [
        s["uses"] for s in steps if not re.fullmatch(r"[^@]+@v\d+", s.get("uses", "a@v1"))
    ] == []
    targets = {found for s in steps for found in re.findall(r"make (\S+)", s.get("run", ""))}
    assert targets <= set(re.findall(r"^([\w-]+):", text("Makefile"), re.MULTILINE))


def test_the_hooks_are_ones_that_pre_commit_accepts() -> None:
    run("pre_commit", "validate-config", str(HOOKS))


# -- troubleshooting -------------------------------------------------------------------------------


@cache
def strings_of_the_code() -> tuple[str, ...]:
    """Every string of the code; what an f-string fills in is a NUL."""
    found: list[str] = []
    for folder in ("cache_client", "cache_server", "protos/cache_protocol"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    found.append("".join(map(_constant, node.values)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return tuple(found)


def _constant(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "\0"


def messages() -> list[str]:
    """Messages that tests/integration/test_sources_guide.py does not cause."""
    page = text("docs/troubleshooting.md").partition("## A load is refused")[0]
    return re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)


@pytest.mark.parametrize("message", messages())
def test_a_message_of_the_troubleshooting_page_is_one_of_the_code(message: str) -> None:
    pattern = re.compile(".*".join(map(re.escape, message.split("..."))), re.DOTALL)
    assert any(pattern.search(string) for string in strings_of_the_code())


# -- the site --------------------------------------------------------------------------------------


@cache
def site_hooks() -> ModuleType:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    spec = spec_from_file_location("site_hooks", ROOT / "docs/site_hooks.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("link", "page", "in_site"),
    [
        ("[a](files.md#csv)", "sources/index.md", "[a](files.md#csv)"),
        (f"[a]({REPOSITORY}/blob/main/SECURITY.md)", "sources/loads.md", "[a](../reporting.md)"),
        (f"[a]: {REPOSITORY}/blob/main/docs/order.md", "index.md", "[a]: order.md"),
        (f"[a]({REPOSITORY}/tree/main/examples)", "reading.md", "[a](examples.md)"),
        (f"![a]({RAW}benchmarks/results/shuffle.png)", "index.md", "![a](images/shuffle.png)"),
        ("[a](docs/architecture.md#tree)", "contributing.md", "[a](architecture.md#tree)"),
        ("[a](demo.py)", "examples.md", f"[a]({REPOSITORY}/blob/main/examples/demo.py)"),
        ("[a](#top)", "order.md", "[a](#top)"),
        ("[a](https://example.org/x.md)", "order.md", "[a](https://example.org/x.md)"),
    ],
)
def test_a_link_of_the_repository_becomes_one_of_the_site(
    link: str, page: str, in_site: str
) -> None:
    assert site_hooks().with_site_links(link, page) == in_site


def test_every_public_name_is_in_the_reference() -> None:
    import cache_client
    import cache_server

    reference = "".join(page.read_text("utf-8") for page in (ROOT / "docs/reference").glob("*.md"))
    for name in (*cache_client.__all__, *cache_server.__all__):
        assert re.search(rf"(?:::: \w+\.|- ){name}\b", reference), name
