"""The code, tables and commands of docs/kubernetes.md are right."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

import cache_runtimes
from cache_protocol.datasets.job_options import JobOptions
from cache_protocol.datasets.job_settings import VARIABLES
from cache_runtimes.initializer.settings import from_env
from cache_runtimes.local import read_manifests, render
from cache_runtimes.local.pods import pods
from tests.kubeflow_backend import labels_of
from tests.manifests import env_of, job_named, memory_bytes, pod_of, read

ROOT = Path(__file__).resolve().parents[3]
WITH_CACHE = read(cache_runtimes.MANIFESTS / "torch-distributed-with-cache/runtime.yaml")
GUIDE = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE, flags=re.DOTALL | re.MULTILINE)


def section(title: str) -> str:
    return GUIDE.partition(f"### {title}\n")[2].partition("\n#")[0]


def test_its_train_job_renders_with_the_shipped_runtime(tmp_path: Path) -> None:
    assert [job["name"] for job in guide_jobset(tmp_path)["spec"]["replicatedJobs"]] == [
        "dataset-initializer",
        "node",
    ]


def test_its_table_names_every_variable() -> None:
    named = set(re.findall(r"`([A-Z][A-Z_]+)`", section("What to cache")))
    assert set(VARIABLES) <= named
    assert named - set(VARIABLES) == {"CACHE_SQ"}  # the slip of the pen that it shows


def test_its_options_of_the_sdk_are_those_of_a_job() -> None:
    named = re.findall(r"`trainer-data-cache/([a-z]+)`", section("With the SDK"))
    assert named == [each.name for each in fields(JobOptions)]
    (block,) = [text for text in blocks("yaml") if "annotations:" in text]
    patch = yaml.safe_load(block)["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]
    (job,) = patch["template"]["spec"]["replicatedJobs"]
    annotations = job["template"]["spec"]["template"]["metadata"]["annotations"]
    assert JobOptions.from_annotations(annotations).annotations() == annotations


def test_its_defaults_of_sizes_are_right() -> None:
    rows = re.findall(r"^\| `([A-Z_]+)` \| (\S+) \|", GUIDE, flags=re.MULTILINE)
    told = {"TRAIN_JOB_NAME": "train-1", "POD_NAMESPACE": "team-a", "CACHE_IMAGE": "server:1"}
    defaults = from_env(told)
    assert from_env(told | dict(rows)) == defaults
    assert dict(rows).keys() == {
        *("CLUSTER_SIZE", "WORKER_CPU", "WORKER_MEM", "CACHE_READY_DEADLINE_S"),
    }
    assert defaults.shard_bytes == memory_bytes("1Gi")
    backoff_limit = job_named(WITH_CACHE, "dataset-initializer")["template"]["spec"]["backoffLimit"]
    assert backoff_limit + 1 == 3


def test_the_runtimes_it_names_are_shipped() -> None:
    names = {
        yaml.safe_load(path.read_text(encoding="utf-8"))["metadata"]["name"]
        for path in cache_runtimes.MANIFESTS.glob("*/runtime.yaml")
    }
    named = set(re.findall(r"`([a-z0-9.-]+)`", section("Which runtime")))
    assert named - {"-4", "-8"} == names


def guide_jobset(folder: Path) -> Any:
    """The JobSet of its TrainJob."""
    (block,) = [text for text in blocks("yaml") if "kind: TrainJob" in text]
    file = folder / "job.yaml"
    file.write_text(block, encoding="utf-8")
    manifests = read_manifests(file, cache_runtimes.MANIFESTS)
    return render(manifests.train_job, manifests.runtime)


def commands() -> list[list[str]]:
    """The words of its console commands, as a shell splits them."""
    lines = "".join(blocks("console")).replace("\\\n", "").splitlines()
    return [shlex.split(line, comments=True) for line in lines]


def test_the_logs_it_shows_are_those_of_the_coordinating_pod(tmp_path: Path) -> None:
    ((*_, selector),) = [words for words in commands() if words[:2] == ["kubectl", "logs"]]
    wanted = dict(each.split("=") for each in selector.split(","))
    found = [
        pod.name
        for pod in pods(guide_jobset(tmp_path), lambda number: f"127.0.0.{number}")
        if wanted.items() <= labels_of(pod).items()
    ]
    assert found == ["lineitem-dataset-initializer-0-0"]


def test_its_commands_expand_variables_in_the_pod_only(tmp_path: Path) -> None:
    (words,) = [words for words in commands() if words[:2] == ["kubectl", "exec"]]
    assert words[3:6] == ["--", "sh", "-c"]
    cache = guide_jobset(tmp_path)["spec"]["replicatedJobs"][0]
    (container,) = pod_of(cache)["spec"]["containers"]
    assert set(re.findall(r"\$(\w+)", words[6])) <= env_of(container).keys()
    assert "--bind=$(POD_IP)" in container["args"]
    assert words[6] == "cachectl ls --endpoint grpc://$POD_IP:50051"
    shown = "".join(line for line in "".join(blocks("console")).splitlines() if "'" not in line)
    assert "$" not in shown  # a reader's shell fills in nothing


def test_its_python_compiles() -> None:
    for block in blocks("python"):
        compile(block, "docs/kubernetes.md", "exec")
