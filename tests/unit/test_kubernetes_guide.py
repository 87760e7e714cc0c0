"""docs/kubernetes.md says what is so."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

import runtimes
from protos.job_settings import VARIABLES
from runtimes.local import read_manifests, render

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE, flags=re.DOTALL | re.MULTILINE)


def section(title: str) -> str:
    return GUIDE.partition(f"### {title}\n")[2].partition("\n#")[0]


def test_its_train_job_renders_with_the_shipped_runtime(tmp_path: Path) -> None:
    (block,) = [text for text in blocks("yaml") if "kind: TrainJob" in text]
    file = tmp_path / "job.yaml"
    file.write_text(block, encoding="utf-8")
    manifests = read_manifests(file, runtimes.MANIFESTS)
    jobset = render(manifests.train_job, manifests.runtime)
    assert [job["name"] for job in jobset["spec"]["replicatedJobs"]] == [
        "dataset-initializer",
        "node",
    ]


def test_its_table_of_variables_is_whole() -> None:
    named = set(re.findall(r"`([A-Z][A-Z_]+)`", section("What to cache")))
    assert set(VARIABLES) - named == {"CACHE_TARGET_SHARD_BYTES", "IAM_ROLE"}
    assert named <= set(VARIABLES)


def test_the_runtimes_it_names_are_shipped() -> None:
    names = {
        yaml.safe_load(path.read_text(encoding="utf-8"))["metadata"]["name"]
        for path in runtimes.MANIFESTS.glob("*/runtime.yaml")
    }
    named = set(re.findall(r"`([a-z0-9.-]+)`", section("Which runtime")))
    assert named - {"-4", "-8"} == names


def test_its_code_is_code() -> None:
    for block in blocks("python"):
        compile(block, "docs/kubernetes.md", "exec")
