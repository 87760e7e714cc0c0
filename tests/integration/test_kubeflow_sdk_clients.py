"""What other clients of the Kubeflow SDK make of the runtimes: TorchTune, containers, trials."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import socket
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from cache_client import CacheClient, DatasetSpec
from cache_protocol.errors import ConfigError
from cache_runtimes import MANIFESTS
from cache_runtimes.local import read_manifests, render
from tests import forked_python
from tests.conftest import write_numbered
from tests.kubeflow_backend import NAMESPACE, TrainerCluster, import_sdk, trainer_cluster
from tests.manifests import container_named, env_of, job_named, pod_of, read
from tests.waiting import wait_until

Json = dict[str, Any]

FLAGSHIP = "torch-distributed-data-cache"
SHARED = "torch-distributed-shared-data-cache"
TORCHTUNE = "torchtune-qwen2.5-1.5b"


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[TrainerCluster]:
    with trainer_cluster(tmp_path) as running:
        yield running


def config_of(trainer: TrainerCluster) -> Any:
    sdk = import_sdk()
    return sdk.KubernetesBackendConfig(config_file=str(trainer.kubeconfig), namespace=NAMESPACE)


def jobs_of(train_job: Json, folder: Path) -> dict[str, Json]:
    """The replicated jobs that Trainer makes of a TrainJob."""
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(train_job))
    manifests = read_manifests(file, MANIFESTS)
    jobset = render(manifests.train_job, manifests.runtime)
    return {job["name"]: job for job in jobset["spec"]["replicatedJobs"]}


def container_of(jobs: dict[str, Json], job: str, name: str = "") -> Json:
    return container_named(pod_of(jobs[job]), name or job)


def test_torchtune_of_the_sdk_tunes_on_the_files_that_the_cache_exports(
    trainer: TrainerCluster, tmp_path: Path
) -> None:
    sdk = import_sdk()
    client = sdk.TrainerClient(config_of(trainer))
    with closing(client.backend.custom_api.api_client):
        name = client.train(
            runtime=TORCHTUNE,
            initializer=sdk.Initializer(
                dataset=sdk.HuggingFaceDatasetInitializer(storage_uri="hf://tatsu-lab/alpaca/data"),
                model=sdk.HuggingFaceModelInitializer(
                    storage_uri="hf://Qwen/Qwen2.5-1.5B-Instruct"
                ),
            ),
            trainer=sdk.BuiltinTrainer(
                config=sdk.TorchTuneConfig(
                    epochs=1,
                    batch_size=8,
                    dataset_preprocess_config=sdk.TorchTuneInstructDataset(
                        source=sdk.DataFormat.PARQUET,
                        column_map={"input": "instruction", "output": "output"},
                    ),
                    peft_config=sdk.LoraConfig(lora_rank=8),
                    resources_per_node={"gpu": 1, "memory": "32Gi"},
                )
            ),
        )
    jobs = jobs_of(trainer.job(name), tmp_path)
    node = container_of(jobs, "node")
    told = node["command"] + node["args"]
    assert told[:2] == ["tune", "run"]
    assert "lora_finetune_single_device" in told
    assert {"epochs=1", "batch_size=8", "model.lora_rank=8", "dataset.source=parquet"} <= {*told}
    # TorchTune looks where the init container writes.
    exported = env_of(container_of(jobs, "node", "export-dataset"))["EXPORT_DIR"]
    assert f"dataset.data_dir={exported}" in told
    cache = env_of(container_of(jobs, "dataset-initializer"))
    assert cache["STORAGE_URI"] == "hf://tatsu-lab/alpaca/data"
    model = env_of(container_of(jobs, "model-initializer"))
    assert model["STORAGE_URI"] == "hf://Qwen/Qwen2.5-1.5B-Instruct"


class Engine:
    """Docker's place in the SDK: starts nothing, and keeps what it was told to start."""

    _runtime_type = "docker"
    started: list[Json]

    def __init__(self, host: str | None) -> None:
        Engine.started = []

    def ping(self) -> None:
        """It is there."""

    def image_exists(self, image: str) -> bool:
        return True

    def create_network(self, name: str, labels: Json) -> str:
        return name

    def delete_network(self, network_id: str) -> None:
        """There is nothing to delete."""

    def create_and_start_container(self, **container: Any) -> str:
        Engine.started.append(container)
        return f"id-of-{container['name']}"


@pytest.fixture
def container_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The SDK's client for containers, with the runtime of a folder of this project."""
    sdk = import_sdk()
    package = "kubeflow.trainer.backends.container"
    backend = importlib.import_module(f"{package}.backend")
    types = importlib.import_module(f"{package}.types")
    monkeypatch.setattr(backend, "DockerClientAdapter", Engine)
    monkeypatch.setenv("HOME", str(tmp_path))
    logging.getLogger("kubeflow").setLevel(logging.CRITICAL)
    runtimes = types.TrainingRuntimeSource(sources=[f"file://{MANIFESTS / FLAGSHIP}/runtime.yaml"])
    config = sdk.ContainerBackendConfig(container_runtime="docker", runtime_source=runtimes)
    return sdk.TrainerClient(config)


def print_rows(dataset: str) -> None:
    """A function that the SDK can ship."""
    import json

    from cache_client import CacheIterableDataset

    rows = CacheIterableDataset(dataset, batch_size=64, shuffle=True)
    seen = [int(row) for batch in rows for row in batch["row"]]
    print(json.dumps({"rank": rows.rank, "world": rows.world_size, "rows": seen}))


# What a container finds in its image as torchrun, for one process a node.
TORCHRUN = """#!/bin/sh
for each; do
    case $each in
        --nnodes=*) export WORLD_SIZE=${each#*=};;
        --node-rank=*) export RANK=${each#*=};;
    esac
    program=$each
done
exec python "$program"
"""


def run_container(container: Json, folder: Path, port: int) -> Json:
    """Runs the command of a container as a process of this machine; what it printed.

    Args:
        port: where a listener takes the place of the first container's.
    """
    login, flag, script = container["command"]
    assert (login, flag) == ("bash", "-lc")
    torchrun = folder / "torchrun"
    torchrun.write_text(TORCHRUN)
    torchrun.chmod(0o755)
    script = script.replace("/tmp/train.py", str(folder / f"{container['name']}.py"))
    script = re.sub(r"/dev/tcp/[\w-]+/29500", f"/dev/tcp/127.0.0.1/{port}", script)
    python = Path(forked_python.executable()).parent
    path = os.pathsep.join((str(folder), str(python), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": path, **container["environment"]},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_containers_of_the_sdk_read_a_cache_that_their_environment_names(
    container_client: Any, client: CacheClient, dataset_name: str, tmp_path: Path
) -> None:
    client.load(DatasetSpec(dataset_name, write_numbered(tmp_path / "rows", 500)))
    sdk = import_sdk()
    variables = {"CACHE_ENDPOINT": client.endpoint, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    name = container_client.train(
        runtime=FLAGSHIP,
        trainer=sdk.CustomTrainer(
            func=print_rows, func_args={"dataset": dataset_name}, num_nodes=2, env=variables
        ),
    )
    image = container_named(
        pod_of(job_named(read(MANIFESTS / FLAGSHIP / "runtime.yaml"), "node")), "node"
    )["image"]
    assert [each["name"] for each in Engine.started] == [f"{name}-node-0", f"{name}-node-1"]
    assert {each["image"] for each in Engine.started} == {image}
    for each in Engine.started:  # nothing of Trainer: ranks come from torchrun
        assert each["environment"] == variables
        assert f"--rdzv-endpoint={name}-node-0:29500" in each["command"][-1]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        told = [run_container(each, tmp_path, port) for each in Engine.started]
    assert [(each["rank"], each["world"]) for each in told] == [(0, 2), (1, 2)]
    assert sorted(row for each in told for row in each["rows"]) == [*range(500)]


def test_containers_of_the_sdk_start_no_cache(container_client: Any) -> None:
    sdk = import_sdk()
    with pytest.raises(ValueError, match="DataCacheInitializer"):
        container_client.train(
            runtime=FLAGSHIP,
            initializer=sdk.Initializer(
                dataset=sdk.DataCacheInitializer(
                    storage_uri="cache://tpch/lineitem", metadata_loc="s3a://b/m", num_data_nodes=2
                )
            ),
            trainer=sdk.CustomTrainer(func=print_rows),
        )
    assert Engine.started == []


def fit(learning_rate: str) -> None:
    """A function that the SDK can ship; a parameter of a trial is text."""
    print(f"loss={1 / float(learning_rate)}")


def study_of(trainer: TrainerCluster, runtime: str, uri: str) -> tuple[Any, str]:
    """A client of the SDK, and the name of a study of two trials that it has created."""
    sdk = import_sdk()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        optimizer = importlib.import_module("kubeflow.optimizer")
    client = optimizer.OptimizerClient(config_of(trainer))
    name = client.optimize(
        optimizer.TrainJobTemplate(
            runtime=runtime,
            initializer=sdk.Initializer(dataset=sdk.S3DatasetInitializer(storage_uri=uri)),
            trainer=sdk.CustomTrainer(func=fit, num_nodes=2, resources_per_node={"cpu": 1}),
        ),
        search_space={"learning_rate": optimizer.Search.loguniform(0.001, 0.1)},
        trial_config=optimizer.TrialConfig(num_trials=2, parallel_trials=2),
    )
    return client, name


def test_the_dataset_of_a_study_is_held_for_its_trials_and_goes_with_it(
    trainer: TrainerCluster, client: CacheClient, dataset_name: str, tmp_path: Path
) -> None:
    optimizer, name = study_of(trainer, SHARED, f"s3://warehouse/{dataset_name}/")
    from cache_runtimes.study import dataset_goes_with  # after the SDK, which warns

    with closing(optimizer.backend.custom_api.api_client):
        job = dataset_goes_with(optimizer, name)
    made = trainer.api.store.get("jobs", job, NAMESPACE)
    study = trainer.api.store.get("experiments", name, NAMESPACE)
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("Experiment", study["metadata"]["uid"])
    container = container_named(pod_of({"template": made}), "dataset-initializer")
    variables = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    assert variables["CACHE_DATASET"] == dataset_name
    assert variables["CACHE_ENDPOINT"] == "grpc://data-cache.data-cache-system:50051"
    source = write_numbered(tmp_path / "rows", 500)
    run = {"STORAGE_URI": f"file://{source}", "CACHE_ENDPOINT": client.endpoint}
    path = f"{Path(forked_python.executable()).parent}:{os.environ['PATH']}"
    # As a kubelet runs the pod, and ends it with the study.
    command = [*container["command"], *container["args"]]
    variables = {"PATH": path, "CACHE_DATASET": dataset_name, **run}
    with subprocess.Popen(command, env=variables) as pod:
        try:
            wait_until(lambda: dataset_name in pinned(client), 30.0, "the dataset of the study")
            assert client.describe(dataset_name).num_rows == 500
            pod.terminate()
            assert pod.wait(30) == 0
        finally:
            pod.kill()
    assert dataset_name not in [each.name for each in client.datasets()]


def pinned(client: CacheClient) -> list[str]:
    return [each.name for each in client.datasets() if each.pinned]


def test_a_study_without_a_shared_cache_is_refused_by_name(trainer: TrainerCluster) -> None:
    optimizer, name = study_of(trainer, FLAGSHIP, "s3://warehouse/lineitem/")
    from cache_runtimes.study import dataset_goes_with

    refused = f"study '{name}' has no dataset in a shared cache"
    with (
        closing(optimizer.backend.custom_api.api_client),
        pytest.raises(ConfigError, match=refused),
    ):
        dataset_goes_with(optimizer, name)


def test_trials_of_the_sdk_are_jobs_of_a_runtime_with_their_parameters(
    trainer: TrainerCluster, tmp_path: Path
) -> None:
    optimizer, name = study_of(trainer, SHARED, "s3://warehouse/lineitem/")
    optimizer.backend.custom_api.api_client.close()
    template = trainer.api.store.get("experiments", name, NAMESPACE)["spec"]["trialTemplate"]
    # As Katib makes a trial: it replaces the parameter in the text, and gives a name.
    text = json.dumps(template["trialSpec"]).replace("${trialParameters.learning_rate}", "0.004")
    trial = {**json.loads(text), "metadata": {"name": f"{name}-7xk2p"}}
    jobs = jobs_of(trial, tmp_path)
    node = container_of(jobs, "node")
    assert template["primaryContainerName"] == node["name"]
    assert jobs["node"]["template"]["spec"]["parallelism"] == 2
    assert "fit(**{'learning_rate': '0.004'})" in node["command"][-1]
    # Every trial makes sure that the same dataset is in the shared cache.
    loader = env_of(container_of(jobs, "dataset-initializer"))
    assert loader["STORAGE_URI"] == "s3://warehouse/lineitem/"
