"""What a release is made of: workflows and forms that GitHub accepts, one version everywhere."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
GITHUB = ROOT / ".github"
RELEASE = GITHUB / "workflows" / "release.yml"
FORMS = [path for path in (GITHUB / "ISSUE_TEMPLATE").iterdir() if path.name != "config.yml"]
SCHEMAS = {
    "vendor.github-workflows": list((GITHUB / "workflows").iterdir()),
    "custom.github-workflows-require-timeout": list((GITHUB / "workflows").iterdir()),
    "vendor.github-issue-forms": FORMS,
    "vendor.github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
    "vendor.dependabot": [GITHUB / "dependabot.yml"],
}
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]


def jobs() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(RELEASE.read_text("utf-8"))["jobs"]
    return found


@pytest.mark.parametrize("schema", SCHEMAS)
def test_github_accepts_the_file(schema: str) -> None:
    files = [str(path) for path in SCHEMAS[schema]]
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *files],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout


def test_nothing_is_published_before_the_checks_and_each_job_has_only_its_rights() -> None:
    workflow = yaml.safe_load(RELEASE.read_text("utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    needs = {name: job.get("needs", []) for name, job in jobs().items()}
    assert needs == {
        "checks": [],
        "package": "checks",
        "images": "checks",
        "publish": ["package", "images"],
        "page": "publish",
    }
    writes = {
        name: sorted(key for key, right in job.get("permissions", {}).items() if right == "write")
        for name, job in jobs().items()
    }
    assert writes == {
        "checks": [],
        "package": ["attestations", "id-token"],
        "images": ["attestations", "id-token", "packages"],
        "publish": ["id-token"],  # PyPI trusts the workflow
        "page": ["contents"],
    }


def test_every_image_of_the_build_program_is_released() -> None:
    from build_images import IMAGES

    released = {each["image"] for each in jobs()["images"]["strategy"]["matrix"]["include"]}
    assert released == set(IMAGES)


def test_the_notes_of_the_release_are_its_part_of_the_changelog(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "CHANGELOG.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    (step,) = [step for step in jobs()["package"]["steps"] if "awk" in step.get("run", "")]
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", step["run"]],
        cwd=tmp_path,
        env={
            "PATH": f"{sysconfig.get_path('scripts')}:/usr/bin:/bin",
            "GITHUB_REF_NAME": f"v{VERSION}",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    notes = (tmp_path / "notes" / "notes.md").read_text("utf-8")
    assert "### Added" in notes and "\n## " not in notes


def test_the_version_has_a_dated_part_of_the_changelog() -> None:
    heads = re.findall(r"^## \[(.+?)\](?: - (.+))?$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert heads[0] == ("Unreleased", "")
    assert heads[1][0] == VERSION and date.fromisoformat(heads[1][1])


def test_every_manifest_and_page_names_the_images_of_this_version() -> None:
    files = [*(ROOT / "runtimes").rglob("*.yaml"), *(ROOT / "docs").glob("*.md")]
    tags = {
        (path.name, tag)
        for path in files
        for tag in re.findall(r"ghcr\.io/trainer-data-cache/[\w-]+:([\w.-]+)", path.read_text())
    }
    assert len(tags) >= 5
    assert {tag.removesuffix("-cuda") for _, tag in tags} == {VERSION}


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "decisions").glob("0*.md")), ids=lambda page: page.stem
)
def test_a_decision_has_a_status_and_a_date(page: Path) -> None:
    lines = page.read_text("utf-8").splitlines()
    assert lines[0].startswith(f"# {page.stem[:4]}") and lines[1] == ""
    found = re.fullmatch(
        r"Status: (?:accepted|superseded by \[\d{4}\]\(\S+\.md\))\. Date: (\S+)\.", lines[2]
    )
    assert found, "write: Status: accepted. Date: YYYY-MM-DD."
    assert date.fromisoformat(found[1])
