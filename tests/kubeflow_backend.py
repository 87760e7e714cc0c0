"""A cluster with Kubeflow Trainer as its clients see it: the API of `tests.api_server`, and
``cachectl run-local`` for everything behind it.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

import cache_runtimes
from cache_runtimes.local import read_manifests, render
from cache_runtimes.local.pods import Pod, pods
from tests import forked_python
from tests.api_objects import Store
from tests.api_server import ApiServer
from tests.manifests import is_runtime, read

Json = dict[str, Any]

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NAMESPACE = "default"
_GROUP = "trainer.kubeflow.org"
_PLURALS = {
    "ClusterTrainingRuntime": "clustertrainingruntimes",
    "TrainingRuntime": "trainingruntimes",
}
_REPORT = re.compile(
    r"epoch (\d+): loss (\S+), (\d+) of (\d+) rows seen exactly once by (\d+) ranks, "
    r"their keys add up to (\d+)"
)


def import_sdk() -> Any:
    """``kubeflow.trainer``, whose models use what pydantic deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module("kubeflow.trainer")


class TrainerStore(Store):
    """Gives TrainJobs the defaults of ``trainer.kubeflow.org_trainjobs.yaml``."""

    def create(self, plural: str, body: Json, namespace: str = "") -> Json:
        if plural == "trainjobs":
            spec = body["spec"]
            reference = {"apiGroup": _GROUP, "kind": "ClusterTrainingRuntime", **spec["runtimeRef"]}
            defaults = {"managedBy": f"{_GROUP}/trainjob-controller", "suspend": False}
            body = {**body, "spec": {**defaults, **spec, "runtimeRef": reference}}
        return super().create(plural, body, namespace)


@dataclass(frozen=True)
class Finished:
    """A run of ``cachectl run-local``.

    Attributes:
        lines: of all containers, with the name of their pod.
        events: what happened to the job.
    """

    code: int
    lines: tuple[tuple[str, str], ...]
    events: str

    def of(self, pod: str) -> list[str]:
        """The lines of the pods with ``pod`` in their name."""
        return [text for name, text in self.lines if pod in name]

    def __str__(self) -> str:
        return "\n".join([*(f"{pod} | {text}" for pod, text in self.lines), self.events])


class TrainerCluster:
    """An API server with the runtimes of this project, and what happens to its TrainJobs.

    Attributes:
        folder: for the kubeconfig and the files of jobs.
        kubeconfig: of a user who may do everything.
    """

    def __init__(self, api: ApiServer, folder: Path) -> None:
        self.api = api
        self.folder = folder
        self.kubeconfig = api.write_kubeconfig(folder / "kubeconfig", NAMESPACE)

    def wait_for_job(self, timeout_s: float) -> str:
        """The name of the only TrainJob, as soon as there is one; empty at the deadline."""
        store = self.api.store
        with store.changed:
            store.changed.wait_for(lambda: store.find("trainjobs"), timeout_s)
            names = [job["metadata"]["name"] for job in store.find("trainjobs")]
        assert len(names) < 2, names
        return "".join(names)

    def job(self, name: str) -> Json:
        """The TrainJob as the API has it."""
        return self.api.store.get("trainjobs", name, NAMESPACE)

    def create_pods(self, name: str, phases: Mapping[str, str]) -> list[str]:
        """The pods that the JobSet controller would make; ``phases`` is by replicated job."""
        manifests = read_manifests(self._file_of(name), cache_runtimes.MANIFESTS)
        jobset = render(manifests.train_job, manifests.runtime)
        made = [pod for pod in pods(jobset, str) if pod.job["name"] in phases]
        for pod in made:
            body = {
                "metadata": {"name": f"{pod.name}-x7f2k", "labels": labels_of(pod)},
                "spec": pod.spec,
                "status": {"phase": phases[pod.job["name"]]},
            }
            self.api.store.create("pods", body, NAMESPACE)
        return [f"{pod.name}-x7f2k" for pod in made]

    def run(self, name: str, timeout_s: float = 150, **environment: str) -> Finished:
        """Runs a TrainJob to its end, and tells the API how it ended."""
        done = run_locally(self._file_of(name), timeout_s=timeout_s, **environment)
        end, phase = ("Failed", "Failed") if done.code else ("Complete", "Succeeded")
        for pod in self.create_pods(name, {"dataset-initializer": "Running", "node": phase}):
            of = pod.removesuffix("-x7f2k")
            self.api.logs[pod] = "".join(f"{line}\n" for line in done.of(of))
        condition = {"type": end, "status": "True", "reason": "Jobs" + end, "message": ""}
        condition["lastTransitionTime"] = "2026-01-01T00:00:00Z"
        self.api.store.patch("trainjobs", name, {"status": {"conditions": [condition]}}, NAMESPACE)
        return done

    def _file_of(self, name: str) -> Path:
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(self.job(name)), encoding="utf-8")
        return path


@contextmanager
def trainer_cluster(folder: Path) -> Iterator[TrainerCluster]:
    """The API of a cluster where Trainer and every runtime of this project are installed."""
    store = TrainerStore()
    version = {"metadata": {"name": "kubeflow-trainer-public"}}
    store.create(
        "configmaps", {**version, "data": {"kubeflow_trainer_version": "v2.3.0"}}, "kubeflow-system"
    )
    for path in sorted(cache_runtimes.MANIFESTS.glob("*/runtime.yaml")):
        made = read(path)
        assert is_runtime(made), path
        store.create(_PLURALS[made["kind"]], made, NAMESPACE)
    with ApiServer(store) as api:
        yield TrainerCluster(api, folder)


def labels_of(pod: Pod) -> dict[str, str]:
    """The labels of its template, of the JobSet and of the Job."""
    template = pod.job["template"]["spec"]["template"].get("metadata") or {}
    return {
        **(template.get("labels") or {}),
        "jobset.sigs.k8s.io/jobset-name": pod.jobset,
        "jobset.sigs.k8s.io/replicatedjob-name": pod.job["name"],
        "jobset.sigs.k8s.io/job-index": "0",
        "batch.kubernetes.io/job-completion-index": str(pod.index),
    }


def run_locally(file: Path, timeout_s: float = 150, **environment: str) -> Finished:
    """``cachectl run-local`` of a TrainJob with the runtimes of this project.

    Args:
        environment: of every container, besides what the manifests say.
    """
    command = [sys.executable, "-m", "cache_client", "run-local", str(file)]
    for variable, value in environment.items():
        command += ["--env", f"{variable}={value}"]
    with forked_python.Popen(
        command,
        env={
            **os.environ,
            "FORKED_PYTHON": forked_python.executable(),
            "FORKED_PYTHON_IMPORTS": "torch._dynamo",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        stop = threading.Timer(timeout_s, process.terminate)  # it ends its pods, then itself
        stop.start()
        try:
            output, events = process.communicate()
        finally:
            stop.cancel()
            process.terminate()
    split = [line.partition(" | ") for line in output.splitlines()]
    lines = tuple((pod.partition("/")[0], text) for pod, _, text in split)
    return Finished(process.returncode, lines, events)


def lineitem(folder: Path, scale_factor: float = 0.001) -> Path:
    """TPC-H ``lineitem`` in four Parquet files below ``folder``; 0.001 is 6,005 rows."""
    subprocess.run(
        [
            *(str(Path(sys.executable).parent / "tpchgen-cli"), "parquet"),
            *("-s", str(scale_factor), "--tables", "lineitem", "--parts", "4"),
            *("--output-dir", str(folder)),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=60,
    )
    return folder / "lineitem"


def assert_every_row_once(
    lines: list[str], table: Path, *, epochs: int, ranks: int, order_weight: int = 1
) -> None:
    """The reports of an example's trainers agree with ``lineitem`` itself.

    Args:
        order_weight: the number of an order counts so many times in the sum of a row's keys.
    """
    rows = pq.read_table(table, columns=["l_orderkey", "l_linenumber"])
    orders, numbers = (sum(column.to_pylist()) for column in rows.columns)
    reports = [match for line in lines if (match := _REPORT.fullmatch(line))]
    assert [int(report[1]) for report in reports] == [*range(epochs)], lines
    for report in reports:
        assert math.isfinite(float(report[2]))
        assert int(report[3]) == int(report[4]) == rows.num_rows
        assert int(report[5]) == ranks
        assert int(report[6]) == orders * order_weight + numbers
