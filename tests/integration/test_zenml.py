"""A step of ZenML trains from the cache: its TrainJob has no initializer and no torchrun."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

import cache_runtimes
from cache_client.ranks import Rank, find_rank_in
from cache_protocol.errors import ConfigError
from cache_runtimes.local import read_manifests, render
from cache_runtimes.local.trainer.info import containers
from tests.kubeflow_backend import EXAMPLES, assert_every_row_once, lineitem, run_locally
from tests.zenml_replica import mapped, train_job

Json = dict[str, Any]

FLAGSHIP = "torch-distributed-data-cache"
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
    job = train_job(
        "a1b2c3d4-train-trainer",
        settings["runtime_ref_name"],
        ENTRYPOINT,
        num_nodes=1,
        num_proc_per_node=2,
        environment={"ZENML_STEP": "train", "PYTHONPATH": str(EXAMPLES.parent)},
        trainer_env={**settings["trainer_env"], "STORAGE_URI": table.as_uri()},
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
    assert find_rank_in({**PET, **added}) == Rank(3, 4)
    # The client finds the same without it.
    assert find_rank_in(PET) == Rank(3, 4)


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
        find_rank_in({**environ, **added})


def pet_of_nodes(folder: Path, num_proc_per_node: int | None) -> dict[str, str]:
    """The variables that Trainer gives to the pods of a step on two nodes of two CPUs."""
    job = train_job(
        "a1b2c3d4-train-trainer",
        FLAGSHIP,
        ENTRYPOINT,
        num_nodes=2,
        num_proc_per_node=num_proc_per_node,
        environment={},
        trainer_env={},
    )
    job["spec"]["trainer"]["resourcesPerNode"] = {"limits": {"cpu": "2"}}
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    manifests = read_manifests(file, cache_runtimes.MANIFESTS)
    node = render(manifests.train_job, manifests.runtime)["spec"]["replicatedJobs"][-1]
    (container,) = containers(node)
    return {
        item["name"]: item["value"]
        for item in container["env"]
        if item["name"].startswith("PET_") and "value" in item
    }


def test_the_example_says_how_many_processes_a_pod_runs(tmp_path: Path) -> None:
    processes = settings_of_the_example()["num_proc_per_node"]
    assert mapped(pet_of_nodes(tmp_path, processes))["WORLD_SIZE"] == "2"
    # Else Trainer counts CPUs, and ZenML takes them for processes: ranks that never come.
    assert mapped(pet_of_nodes(tmp_path, None))["WORLD_SIZE"] == "4"
