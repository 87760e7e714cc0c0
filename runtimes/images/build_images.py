"""Builds the images with the builder of this machine, and tries them out.

``make images`` runs it; it needs Python and one of docker, podman and buildah::

    python runtimes/images/build_images.py                       # server, server-full, trainer
    python runtimes/images/build_images.py server --base registry.example.com/python:3.11
    python runtimes/images/build_images.py server --option=--network=host

Each image has a bill of materials, which is copied to ``build/images/NAME.cdx.json``. Docker and
podman also run the smoke test of `try_server`; buildah starts no containers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from try_server import SmokeError, try_server

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "ghcr.io/trainer-data-cache"
VERSION = "0.2.0"
# Those that can run what they build come first.
BUILDERS = ("docker", "podman", "buildah")
BUILD_TIMEOUT_S = 3600.0
CALL_TIMEOUT_S = 300.0
BILL = "/opt/bill-of-materials.cdx.json"


@dataclass(frozen=True)
class Image:
    """How an image is built.

    Attributes:
        folder: of its Dockerfile, below ``runtimes/images``.
        arguments: build arguments.
        target: the stage; "" for the last one.
        max_bytes: a larger image is an error; None for no limit.
    """

    folder: str
    arguments: tuple[str, ...] = ()
    target: str = ""
    max_bytes: int | None = None


IMAGES = {
    "server": Image("server", max_bytes=600_000_000),
    "server-full": Image("server", ("EXTRAS=sources,kubernetes,llm",)),
    "trainer": Image("trainer"),
    "trainer-jax": Image("trainer", ("PACKAGES=jax[cuda12]==0.10.2",)),
    "trainer-mlx": Image("trainer", ("PACKAGES=mlx[cpu]==0.32.4",), "mpi"),
    "trainer-mpi": Image("trainer", ("PACKAGES=deepspeed==0.19.8 mpi4py==4.1.2",), "mpi"),
    "trainer-xgboost": Image("trainer", ("PACKAGES=xgboost-cpu==3.2.0",)),
}


class ImageError(Exception):
    """An image that cannot be built, or that does not do what it must."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Builds the images that the arguments name."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("images", nargs="*", metavar="IMAGE", help=f"of {', '.join(IMAGES)}")
    parser.add_argument("--base", help="image with Python to build on, instead of docker.io's")
    parser.add_argument("--repository", default=REPOSITORY)
    parser.add_argument("--tag", default=VERSION)
    parser.add_argument(
        "--option", action="append", default=[], help="for the builder; repeat it for more"
    )
    given = parser.parse_args(arguments)
    names = given.images or ["server", "server-full", "trainer"]
    if unknown := [name for name in names if name not in IMAGES]:
        parser.error(f"no image {', '.join(unknown)}; images: {', '.join(IMAGES)}")
    try:
        builder = find_builder(shutil.which, _answers)
        for name in names:
            reference = f"{given.repository}/{name}:{given.tag}"
            options = [*given.option, *([f"--build-arg=BASE={given.base}"] if given.base else [])]
            _run(build_command(builder, IMAGES[name], reference, options))
            _check(builder, name, reference)
    except (ImageError, SmokeError) as error:
        sys.exit(f"images: {error}")


def find_builder(which: Callable[[str], str | None], answers: Callable[[str], bool]) -> str:
    """The first builder that is installed and works.

    Raises:
        ImageError: there is none.
    """
    for builder in BUILDERS:
        if which(builder) and answers(builder):
            return builder
    raise ImageError(f"no image builder works here: install one of {', '.join(BUILDERS)}")


def build_command(
    builder: str, image: Image, reference: str, options: Sequence[str] = ()
) -> list[str]:
    """The command that builds an image from the root of the repository."""
    command = [builder, "build", f"--file=runtimes/images/{image.folder}/Dockerfile"]
    command += [f"--build-arg={argument}" for argument in image.arguments]
    command += [f"--target={image.target}"] if image.target else []
    return [*command, *options, f"--tag={reference}", "."]


def _answers(builder: str) -> bool:
    """Whether a builder works: docker's client also needs its server."""
    try:
        _output(builder, "info")
    except ImageError:
        return False
    return True


def _check(builder: str, name: str, reference: str) -> None:
    """Writes the bill of materials of an image; checks its size and that it works."""
    target = ROOT / "build" / "images" / f"{name}.cdx.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    if builder == "buildah":
        container = _output(builder, "from", reference)
        try:
            bill = _output(builder, "run", "--isolation=chroot", container, "cat", BILL)
        finally:
            _run([builder, "rm", container])
        manifest = _output(builder, "inspect", "--type=image", "--format={{.Manifest}}", reference)
        size = sum(layer["size"] for layer in json.loads(manifest)["layers"])
    else:
        bill = _output(builder, "run", "--rm", reference, "cat", BILL)
        size = int(_output(builder, "image", "inspect", "--format={{.Size}}", reference))
    target.write_text(bill, encoding="utf-8")
    print(f"{reference}: {size / 1e6:.0f} MB; {target}")
    limit = IMAGES[name].max_bytes
    if limit is not None and size > limit:
        raise ImageError(f"{reference} has {size} bytes, more than {limit}")
    if builder == "buildah":
        print(f"{reference}: buildah starts no containers, so nothing was tried out")
    elif IMAGES[name].folder == "server":
        print(f"{reference}: {try_server(builder, reference)}")


def _run(command: Sequence[str]) -> None:
    print("+", *command, flush=True)
    _finished(command, BUILD_TIMEOUT_S)


def _output(*command: str) -> str:
    return _finished(command, CALL_TIMEOUT_S, capture_output=True).stdout.strip()


def _finished(
    command: Sequence[str], timeout_s: float, *, capture_output: bool = False
) -> subprocess.CompletedProcess[str]:
    """A command that succeeded.

    Raises:
        ImageError: it failed, or took longer.
    """
    what = " ".join(command)
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=capture_output,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise ImageError(f"{what} did not end within {timeout_s:.0f} s") from None
    if done.returncode != 0:
        raise ImageError(f"{what} ended with {done.returncode}: {done.stderr or 'see above'}")
    return done


if __name__ == "__main__":
    main()
