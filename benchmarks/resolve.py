"""Does the client resolve beside common stacks? Run by hand; asks the package index.

    python -m benchmarks.resolve              # every stack
    python -m benchmarks.resolve "mlflow>=3"  # one

Each stack gets a new environment in which pip resolves it together with ``.[client]`` and installs
nothing. torch is held at the version of ``constraints.txt``, so that no CUDA libraries are fetched.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STACKS = (
    "mlflow>=3",
    "kfp>=2.17",
    "sagemaker>=3",
    "snowflake-connector-python>=5.2",
    "awswrangler>=3.17",
    "feast>=0.67",
    "apache-beam>=2.77",
    "datasets>=5",
)
SHOWN = ("pyarrow", "protobuf", "grpcio", "numpy", "pydantic", "rich", "tenacity", "typer")
TIMEOUT_S = 1800


def resolve(stack: str, extra: str, directory: Path) -> tuple[dict[str, str], str]:
    """Resolves ``stack`` with this project in a new environment below ``directory``.

    Args:
        stack: A requirement, such as ``mlflow>=3``.
        extra: The extra of this project, such as ``client``.
        directory: Receives the environment and pip's report.

    Returns:
        The version of each package by normalized name, and pip's reason where it found none.
    """
    environment = directory / "environment"
    venv.create(environment, clear=True, with_pip=True)
    report = directory / "report.json"
    pins = (ROOT / "constraints.txt").read_text("utf-8")
    constraints = directory / "constraints.txt"
    constraints.write_text("".join(re.findall(r"^torch==.*\n", pins, re.MULTILINE)))
    command = [
        str(environment / "bin/python"), "-m", "pip", "install", "--quiet", "--dry-run",
        "--prefer-binary", "--report", str(report), "--constraint", str(constraints),
        f"{ROOT}[{extra}]", stack,
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL
    )
    if done.returncode != 0:
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        return {}, (reasons or [done.stderr.strip()])[-1]
    chosen = [entry["metadata"] for entry in json.loads(report.read_text("utf-8"))["install"]]
    return {re.sub(r"[-_.]+", "-", one["name"]).lower(): one["version"] for one in chosen}, ""


def main() -> int:
    """Prints a table of the chosen versions; returns 1 if a stack does not resolve."""
    parser = argparse.ArgumentParser(description="Resolve the client beside common stacks.")
    parser.add_argument("stacks", nargs="*", default=STACKS, help="requirements; default: all")
    parser.add_argument("--extra", default="client", help="extra of this project")
    arguments = parser.parse_args()
    print("| stack | " + " | ".join(SHOWN) + " |", "|---" * (1 + len(SHOWN)) + "|", sep="\n")
    failed = 0
    for stack in arguments.stacks:
        with tempfile.TemporaryDirectory(prefix="resolve-") as directory:
            versions, reason = resolve(stack, arguments.extra, Path(directory))
        cells = [reason] if reason else [versions.get(name, "") for name in SHOWN]
        failed += bool(reason)
        name = re.split("[<>=!~]", stack)[0]
        print(
            f"| {name} {versions.get(name, stack.removeprefix(name))} | "
            + " | ".join(cells)
            + " |",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
