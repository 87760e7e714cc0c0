"""Regenerates the code beside ``protos/cache/v1/*.proto``, or checks that it is up to date.

``make proto`` and ``make check`` run it in the environment of ``protos/requirements.txt``::

    python protos/generate.py            # rewrite what differs, remove what has no source
    python protos/generate.py --check    # write nothing; exit 1 and name what differs

The generated code is committed, so that an installation needs no compiler.
"""

import argparse
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path("protos/cache/v1")
PACKAGE = Path("cache_protocol/v1")  # the import name, and so the path that the compiler is told
GENERATED = Path("protos") / PACKAGE
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def generate(root: Path, out: Path) -> None:
    """Compiles every ``.proto`` file of the package.

    Args:
        root: The directory that holds ``protos/``.
        out: An existing directory that receives ``cache_protocol/v1/*``.

    Raises:
        RuntimeError: The package has no ``.proto`` file, or the compiler refused one; what it said
            is on standard error.
    """
    sources = sorted((PACKAGE / p.name).as_posix() for p in (root / SOURCE).glob("*.proto"))
    if not sources:
        raise RuntimeError(f"no .proto file in {root / SOURCE}")
    # The plugins are scripts of this environment, which need not be on the PATH.
    scripts = Path(sysconfig.get_path("scripts"))
    status = protoc.main(
        [
            "protoc",
            f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
            f"--proto_path={PACKAGE.as_posix()}={root / SOURCE}",
            f"--proto_path={files('grpc_tools') / '_proto'}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--mypy_grpc_out=quiet,only_sync:{out}",
            *sources,
        ]
    )
    if status != 0:
        raise RuntimeError(f"protoc failed with exit status {status} on {', '.join(sources)}")


def generated_files(directory: Path) -> dict[str, bytes]:
    """Reads the generated files of ``directory``, by file name."""
    return {
        path.name: path.read_bytes()
        for path in sorted(directory.glob("*"))
        if path.name.endswith(SUFFIXES)
    }


def differences(committed: dict[str, bytes], fresh: dict[str, bytes]) -> dict[str, str]:
    """Says in what way each file that differs does, by file name."""
    found = {}
    for name in sorted(committed.keys() | fresh.keys()):
        if name not in committed:
            found[name] = "missing"
        elif name not in fresh:
            found[name] = "no longer generated"
        elif committed[name] != fresh[name]:
            found[name] = "out of date"
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    parser = argparse.ArgumentParser(description="Regenerate the protobuf code under protos/.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on a change")
    check = parser.parse_args(argv).check

    with tempfile.TemporaryDirectory(prefix="protos-") as out:
        try:
            generate(ROOT, Path(out))
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        fresh = generated_files(Path(out) / PACKAGE)
    found = differences(generated_files(ROOT / GENERATED), fresh)

    if check:
        for name, how in found.items():
            print(f"{GENERATED / name}: {how}", file=sys.stderr)
        if found:
            print("run: make proto", file=sys.stderr)
        return 1 if found else 0

    for name, how in found.items():
        if name in fresh:
            (ROOT / GENERATED / name).write_bytes(fresh[name])
        else:
            (ROOT / GENERATED / name).unlink()
        print(f"{GENERATED / name}: {how}, {'written' if name in fresh else 'removed'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
