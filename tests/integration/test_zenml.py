"""A step of ZenML trains from the cache: its TrainJob has no initializer and no torchrun."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import cache_runtimes
from cache_client.job import ranks
from cache_protocol.errors import ConfigError
from cache_runtimes.local import read_manifests, render
from cache_runtimes.local.trainer.info import containers, pod_spec
from tests.kubeflow_backend import EXAMPLES, assert_every_row_once, lineitem, run_locally
from tests.zenml_replica import SETTINGS, mapped, train_job

Json = dict[str, Any]

FLAGSHIP = "torch-distributed-data-cache"
NAME = "a1b2c3d4-train-trainer"
ENTRYPOINT = [
    *("python", "-m", "tests.zenml_replica"),
    *("--step_file", str(EXAMPLES / "zenml_step.py")),
]
PET = {
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "3",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}


def settings_of_the_example() -> Json:
    """SETTINGS of examples/zenml_step.py, and the SQL in it."""
    found: Json = {}
    for node in ast.parse((EXAMPLES / "zenml_step.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            code = compile(ast.Expression(node.value), "example", "eval")
            found[node.targets[0].id] = eval(code, {}, found)
    settings: Json = found["SETTINGS"]
    return settings


@pytest.mark.timeout(240)
def test_a_step_loads_what_its_settings_name_and_each_rank_gets_its_rows(tmp_path: Path) -> None:
    table = lineitem(tmp_path)
    settings = settings_of_the_example()
    # One node of two processes, which ZenML makes two nodes of one.
    variables = {**settings["trainer_env"], "STORAGE_URI": table.as_uri()}
    job = train_job(
        NAME,
        {**settings, "num_nodes": 1, "num_proc_per_node": 2, "trainer_env": variables},
        ENTRYPOINT,
        environment={"ZENML_STEP": "train", "PYTHONPATH": str(EXAMPLES.parent)},
    )
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    done = run_locally(file)
    assert done.code == 0, str(done)
    assert_every_row_once(done.of("node-0-0"), table, epochs=2, ranks=2, order_weight=8)
    for rank, rows in ((0, 3002), (1, 3003)):
        lines = [line for line in done.of(f"node-0-{rank}") if "had" in line]
        assert lines == [f"epoch {epoch}: rank {rank} had {rows} rows" for epoch in range(2)]
    (artifact,) = (line for line in done.of("node") if line.startswith("artifact"))
    assert math.isfinite(float(artifact.split()[1]))
    assert any("dataset ready name=lineitem" in line for line in done.of("initializer-0-0"))


def test_zenmls_mapping_makes_one_rank_of_a_pod() -> None:
    added = mapped(PET)
    assert added == {
        "MASTER_ADDR": "job-node-0-0.job",
        "MASTER_PORT": "29500",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
    }
    assert ranks.find_rank_in({**PET, **added}) == ranks.Rank(3, 4)
    # The client finds the same without it.
    assert ranks.find_rank_in(PET) == ranks.Rank(3, 4)


def test_zenmls_mapping_keeps_existing_variables() -> None:
    assert mapped({**PET, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}).keys() == {
        "MASTER_ADDR",
        "MASTER_PORT",
    }


@pytest.mark.parametrize("processes", ["auto", "gpu", "0"])
def test_an_incomplete_mapping_is_an_error_that_names_it(processes: str) -> None:
    environ = {**PET, "PET_NPROC_PER_NODE": processes}
    added = mapped(environ)
    assert added["RANK"] == "3"
    assert "WORLD_SIZE" not in added
    with pytest.raises(ConfigError, match="RANK='3', WORLD_SIZE is not set"):
        ranks.find_rank_in({**environ, **added})


def made(resources: Json | None = None, **settings: Any) -> Json:
    """The TrainJob of a step with these settings."""
    given = {"runtime_ref_name": FLAGSHIP, **settings}
    return train_job(NAME, given, ENTRYPOINT, environment={"ZENML": "1"}, resources=resources)


def pods_of(job: Json, folder: Path) -> dict[str, Json]:
    """The template of the pods of each replicated job."""
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    manifests = read_manifests(file, cache_runtimes.MANIFESTS)
    jobset = render(manifests.train_job, manifests.runtime)
    return {job["name"]: job for job in jobset["spec"]["replicatedJobs"]}


def environment_of(job: Json) -> dict[str, str]:
    (container,) = containers(job)
    return {item["name"]: item["value"] for item in container["env"] if "value" in item}


def test_the_example_says_how_many_processes_a_pod_runs(tmp_path: Path) -> None:
    def world_size(processes: int | None) -> str:
        job = made({"cpu": "2"}, num_nodes=2, num_proc_per_node=processes)
        return mapped(environment_of(pods_of(job, tmp_path)["node"]))["WORLD_SIZE"]

    assert world_size(settings_of_the_example()["num_proc_per_node"]) == "2"
    # Else Trainer counts CPUs, and ZenML takes them for processes: ranks that never come.
    assert world_size(None) == "4"


OVERRIDE = {
    "targetJobs": [{"name": "node"}],
    "spec": {"nodeSelector": {"pool": "gpu"}, "serviceAccountName": "trainer"},
}
# Field -> a value, and what it changes below `spec` of the TrainJob of a step with one node.
FIELDS: dict[str, tuple[Any, Json]] = {
    "runtime_ref_name": ("other", {"runtimeRef.name": "other"}),
    "runtime_ref_kind": ("TrainingRuntime", {"runtimeRef.kind": "TrainingRuntime"}),
    "runtime_ref_api_group": ("example.com", {"runtimeRef.apiGroup": "example.com"}),
    "num_nodes": (3, {"trainer.numNodes": 3}),
    "num_proc_per_node": (2, {"trainer.numNodes": 2, "trainer.numProcPerNode": 1}),
    "trainer_overrides": (
        {"numNodes": 2, "numProcPerNode": 3, "resourcesPerNode": {"limits": {"cpu": "4"}}},
        {
            "trainer.numNodes": 6,
            "trainer.numProcPerNode": 1,
            "trainer.resourcesPerNode.limits.cpu": "4",
        },
    ),
    "trainer_env": (
        {"ZENML": "2", "CACHE_SQL": "SELECT 1"},
        {
            "trainer.env": [
                {"name": "CACHE_SQL", "value": "SELECT 1"},
                {"name": "ZENML", "value": "2"},
            ]
        },
    ),
    "pod_template_overrides": ([OVERRIDE], {"podTemplateOverrides": [OVERRIDE]}),
    # These are about ZenML's calls, not about the TrainJob.
    "poll_interval_seconds": (1.0, {}),
    "timeout_seconds": (60, {}),
    "delete_trainjob_after_completion": (True, {}),
    "kubernetes_namespace": ("team", {}),
    "incluster": (True, {}),
    "kubernetes_context": ("here", {}),
    "image": ("example.com/own:1", {"trainer.image": "example.com/own:1"}),
}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, f"{path}.{name}" if path else name)
    else:
        yield path, value


def test_every_field_of_zenmls_page_changes_what_it_says() -> None:
    assert FIELDS.keys() == SETTINGS.keys()
    plain = [*leaves(made()["spec"])]
    for name, (value, changes) in FIELDS.items():
        changed = dict(leaves(made(**{name: value})["spec"]))
        assert {path: changed[path] for path in changed if (path, changed[path]) not in plain} == (
            changes
        ), name


def test_settings_reach_the_pods_of_the_runtime(tmp_path: Path) -> None:
    found = pods_of(
        made(
            {"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": "1"},
            num_nodes=2,
            num_proc_per_node=2,
            trainer_env={"STORAGE_URI": "s3://warehouse/lineitem/"},
            image="example.com/own:1",
        ),
        tmp_path,
    )
    (node,) = containers(found["node"])
    assert found["node"]["template"]["spec"]["parallelism"] == 4
    assert node["image"] == "example.com/own:1"
    assert node["resources"]["limits"] == {"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": "1"}
    variables = environment_of(found["node"])
    assert variables["STORAGE_URI"] == "s3://warehouse/lineitem/"
    assert mapped(variables)["WORLD_SIZE"] == "4"
    # The cache starts empty: rank 0 loads what the variables say.
    assert "STORAGE_URI" not in environment_of(found["dataset-initializer"])


@pytest.mark.parametrize("processes", ["auto", "cpu", "gpu"])
def test_words_for_processes_are_refused_by_trainer(tmp_path: Path, processes: str) -> None:
    with pytest.raises(ConfigError, match=r"spec\.trainer\.numProcPerNode"):
        pods_of(made(num_proc_per_node=processes), tmp_path)


def test_overrides_of_pods_are_named_with_what_trainer_reads_in_their_place(
    tmp_path: Path,
) -> None:
    """A cluster with Trainer 2.2 or newer drops them and says nothing."""
    with pytest.raises(ConfigError, match=r"podTemplateOverrides.*spec\.runtimePatches"):
        pods_of(made(pod_template_overrides=[OVERRIDE]), tmp_path)


def test_the_same_as_runtime_patches_reaches_the_pods_that_it_names(tmp_path: Path) -> None:
    job = made()
    patched = {"name": "node", "template": {"spec": {"template": {"spec": OVERRIDE["spec"]}}}}
    job["spec"]["runtimePatches"] = [
        {
            "manager": "example.com/platform",
            "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patched]}}},
        }
    ]
    found = pods_of(job, tmp_path)
    assert pod_spec(found["node"])["nodeSelector"] == {"pool": "gpu"}
    assert pod_spec(found["node"])["serviceAccountName"] == "trainer"
    assert "nodeSelector" not in pod_spec(found["dataset-initializer"])
