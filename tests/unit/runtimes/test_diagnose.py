"""``cachectl diagnose`` against an API server of this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cache_client import __main__
from cache_protocol.errors import ConfigError, NodeUnavailableError
from tests.api_server import ApiServer
from tests.train_jobs import train_job

Json = dict[str, Any]


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as running:
        yield running


def run(server: ApiServer, tmp_path: Path, *arguments: str, code: int = 1) -> str:
    kubeconfig = server.write_kubeconfig(tmp_path / "kubeconfig", namespace="a")
    arguments = ("diagnose", *arguments, "--kubeconfig", str(kubeconfig))
    done = CliRunner().invoke(__main__.app, arguments, catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.stdout


def refuse_a_job(server: ApiServer) -> None:
    made = server.store.create("trainjobs", train_job("job"), "a")
    uid = made["metadata"]["uid"]
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "e"},
        "involvedObject": {"kind": "TrainJob", "name": "job", "uid": uid},
        "reason": "TrainJobResourcesCreationFailed",
        "message": "cpu request must be less than or equal to cpu limit of 2",
    }
    server.store.create("events", event, "a")


def test_it_prints_the_state_each_cause_and_what_to_do(server: ApiServer, tmp_path: Path) -> None:
    refuse_a_job(server)
    state, _, cause, remedy = run(server, tmp_path, "job").splitlines()
    assert state == "TrainJob job has no JobSet yet: Trainer has not created it"
    assert cause.startswith("TrainJob/job: TrainJobResourcesCreationFailed: cpu request must be")
    assert remedy.startswith("  The requests of `spec.trainer.resourcesPerNode`")
    assert json.loads(run(server, tmp_path, "job", "--json"))["state"] == state
    assert {verb for verb, _ in server.verbs} == {"list"}


def test_a_job_that_only_waits_ends_with_0(server: ApiServer, tmp_path: Path) -> None:
    server.store.create("trainjobs", train_job("job"), "a")
    assert run(server, tmp_path, "job", code=0).count("\n") == 1


def test_it_says_which_kinds_the_caller_may_not_read(server: ApiServer, tmp_path: Path) -> None:
    refuse_a_job(server)
    server.permissions = {("list", "trainjobs"), ("list", "jobsets"), ("list", "pods")}
    told = run(server, tmp_path, "job")
    assert "events: 403" in told
    assert "jobs: 403" in told


def test_it_reads_the_pod_group_that_a_waiting_pod_names(server: ApiServer, tmp_path: Path) -> None:
    store, owner = server.store, ""
    things: list[tuple[str, Json]] = [
        ("trainjobs", train_job("job")),
        ("jobsets", {"kind": "JobSet", "spec": {"replicatedJobs": []}}),
        ("jobs", {"kind": "Job", "spec": {"parallelism": 1}}),
        ("pods", {"kind": "Pod", "spec": {"schedulerName": "volcano"}, "status": {}}),
    ]
    for plural, thing in things:
        metadata = {"name": "job", **thing.get("metadata", {})}
        metadata["labels"] = {"jobset.sigs.k8s.io/jobset-name": "job"}
        metadata["annotations"] = {"scheduling.k8s.io/group-name": "job"}
        metadata["ownerReferences"] = [{"uid": owner}] if owner else []
        owner = store.create(plural, {**thing, "metadata": metadata}, "a")["metadata"]["uid"]
    why = {"reason": "NotEnoughResources", "message": "queue resource quota insufficient"}
    condition = {"type": "Unschedulable", "status": "True", **why}
    for name in ("job", "job-2"):  # the other one is of no pod of the job
        group = {"metadata": {"name": name}, "status": {"conditions": [condition]}}
        store.create("podgroups", group, "a")
    told = run(server, tmp_path, "job")
    assert "PodGroup/job: NotEnoughResources: queue resource quota insufficient" in told
    assert "job-2" not in told
    server.permissions = {("list", each) for each in ("trainjobs", "jobsets", "jobs", "pods")}
    assert "podgroups: 403" in run(server, tmp_path, "job")


def test_a_namespace_without_the_job_lists_the_jobs_there(
    server: ApiServer, tmp_path: Path
) -> None:
    refuse_a_job(server)
    assert "TrainJobs there: job" in run(server, tmp_path, "jbo")
    assert "TrainJobs there: none" in run(server, tmp_path, "job", "--namespace", "b")


def test_a_server_that_does_not_answer_and_a_missing_kubeconfig_are_named(tmp_path: Path) -> None:
    with ApiServer() as ended:
        kubeconfig = ended.write_kubeconfig(tmp_path / "kubeconfig")
    for path, error, words in (
        (kubeconfig, NodeUnavailableError, "does not answer"),
        (tmp_path / "absent", ConfigError, "no cluster to ask"),
    ):
        with pytest.raises(error, match=words):
            CliRunner().invoke(
                __main__.app, ["diagnose", "job", "--kubeconfig", str(path)], catch_exceptions=False
            )
