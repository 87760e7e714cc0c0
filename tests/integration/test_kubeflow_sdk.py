"""TrainJobs of the real Kubeflow SDK: made on an API server, run on this machine, trained."""

from __future__ import annotations

import ast
import importlib
import io
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pyiceberg.catalog.sql import SqlCatalog

from cache_client import CacheClient, DatasetSpec
from tests import forked_python
from tests.conftest import write_numbered
from tests.kubeflow_backend import (
    EXAMPLES,
    NAMESPACE,
    Finished,
    TrainerCluster,
    assert_every_row_once,
    import_sdk,
    lineitem,
    trainer_cluster,
)
from tests.lake_tables import ACCESS_KEY_ID, BUCKET, SECRET, lake_bucket
from tests.object_store import S3Server
from tests.store_stubs import HubStub, Served

Json = dict[str, Any]


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[TrainerCluster]:
    with trainer_cluster(tmp_path) as running:
        yield running


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lineitem(tmp_path_factory.mktemp("tpch"))


def run_example(
    trainer: TrainerCluster,
    *arguments: str,
    script: str = "kubeflow_sdk.py",
    credentials: dict[str, str] | None = None,
    **environment: str,
) -> tuple[Json, Finished, str]:
    """The TrainJob that a script of examples/ made, its run, and what the script printed.

    Args:
        credentials: in the environment of the example.
        environment: of the pods.
    """
    prefixes = ("AWS_", "HF_", "KUBE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    with forked_python.Popen(
        [sys.executable, str(EXAMPLES / script), *arguments],
        env={**kept, "KUBECONFIG": str(trainer.kubeconfig), **(credentials or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as example:
        try:
            name = trainer.wait_for_job(timeout_s=60)
            if not name:
                example.kill()
            assert name, example.communicate()[1]
            job = trainer.job(name)
            done = trainer.run(name, **environment)
            output, errors = example.communicate(timeout=60)
        finally:
            example.kill()
    assert example.returncode == 0, f"{done}\n{output}{errors}"
    assert output.splitlines()[0] == f"TrainJob {name} is created"
    assert output.splitlines()[-1] == f"TrainJob {name} is complete"
    return job, done, output


def variables(job: Json) -> dict[str, str]:
    """The variables of a TrainJob's initializer."""
    return {item["name"]: item["value"] for item in job["spec"]["initializer"]["dataset"]["env"]}


@pytest.mark.timeout(240)
def test_an_s3_dataset_of_the_sdk_is_cached_and_trained_on(
    trainer: TrainerCluster, table: Path
) -> None:
    with S3Server() as s3:
        for file in table.iterdir():
            s3.put("warehouse", f"tpch/lineitem/{file.name}", file.read_bytes())
        s3.require(s3.secrets["access_key_id"])
        keys = {f"AWS_{name.upper()}": value for name, value in s3.secrets.items()}
        job, done, printed = run_example(
            trainer,
            "s3://warehouse/tpch/lineitem/",
            *("--endpoint", s3.endpoint, "--region", "us-east-1", "--epochs", "1"),
            credentials=keys,
        )
    assert job["spec"]["initializer"]["dataset"]["storageUri"] == "s3://warehouse/tpch/lineitem/"
    assert variables(job)["ENDPOINT"] == s3.endpoint
    ((patched,),) = (
        patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        for patch in job["spec"]["runtimePatches"]
    )
    assert patched["template"]["spec"]["template"]["metadata"]["annotations"] == {
        "trainer-data-cache/columns": "l_orderkey,l_linenumber,l_quantity,l_discount,l_tax,"
        "l_extendedprice"
    }
    assert_every_row_once(printed.splitlines(), table, epochs=1, ranks=2)
    assert s3.secrets["secret_access_key"] not in str(done)


@pytest.mark.timeout(240)
def test_a_hugging_face_dataset_of_the_sdk_is_cached_and_trained_on(
    trainer: TrainerCluster, table: Path
) -> None:
    files = {f"data/{file.name}": file.read_bytes() for file in sorted(table.iterdir())}
    hub = type("Hub", (HubStub,), {"files": files, "seen": []})
    with Served(hub) as endpoint:
        job, done, printed = run_example(
            trainer,
            *("hf://tatsu-lab/alpaca", "--num-nodes", "1"),
            credentials={"HF_TOKEN": "hush-hush"},
            HF_ENDPOINT=endpoint,
        )
    assert variables(job) == {"ACCESS_TOKEN": "hush-hush"}
    assert_every_row_once(printed.splitlines(), table, epochs=2, ranks=1)
    assert "hush-hush" not in str(done)


@pytest.mark.timeout(240)
def test_an_iceberg_table_of_the_sdks_cache_initializer_is_cached_and_trained_on(
    trainer: TrainerCluster, table: Path
) -> None:
    rows = pq.read_table(table)
    with lake_bucket() as endpoint:
        catalog = SqlCatalog(
            "default",
            **{
                "uri": f"sqlite:///{trainer.folder / 'catalogue.db'}",
                "warehouse": f"s3://{BUCKET}/warehouse",
                "s3.endpoint": endpoint,
                "s3.access-key-id": ACCESS_KEY_ID,
                "s3.secret-access-key": SECRET,
                "s3.region": "us-east-1",
            },
        )
        catalog.create_namespace("tpch")
        iceberg = catalog.create_table("tpch.lineitem", rows.schema)
        iceberg.append(rows.slice(0, 4000))
        iceberg.append(rows.slice(4000))
        catalog.close()
        location = iceberg.metadata_location.replace("s3://", "s3a://")
        job, _, printed = run_example(
            trainer,
            *("cache://tpch/lineitem", "--metadata-loc", location, "--num-nodes", "1"),
            # The SDK's class has no place for these: on a cluster, the pods have an identity.
            AWS_ENDPOINT_URL=endpoint,
            AWS_ACCESS_KEY_ID=ACCESS_KEY_ID,
            AWS_SECRET_ACCESS_KEY=SECRET,
            AWS_REGION="us-east-1",
        )
    assert variables(job) == {"CLUSTER_SIZE": "3", "METADATA_LOC": location}
    assert_every_row_once(printed.splitlines(), table, epochs=2, ranks=1)


def fashion(num_images: int) -> tuple[bytes, list[int]]:
    """A Parquet file as FashionMNIST has them, and its labels: noise, and a bar for each class."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 100, (num_images, 28, 28), np.uint8)
    labels = [number % 10 for number in range(num_images)]
    images = []
    for picture, label in zip(pixels, labels, strict=True):
        picture[2 * label + 4 : 2 * label + 6] += 150
        png = io.BytesIO()
        Image.fromarray(picture).save(png, "PNG")
        images.append({"bytes": png.getvalue(), "path": None})
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    file = io.BytesIO()
    pq.write_table(pa.table({"image": pa.array(images, kind), "label": labels}), file)
    return file.getvalue(), labels


@pytest.mark.timeout(240)
def test_the_quick_start_of_trainer_learns_fashion_mnist_from_the_cache(
    trainer: TrainerCluster,
) -> None:
    file, labels = fashion(600)
    files = {
        "fashion_mnist/train-00000-of-00001.parquet": file,
        "fashion_mnist/test-00000-of-00001.parquet": fashion(10)[0],
    }
    of_hub = {"dataset": "zalando-datasets/fashion_mnist", "files": files, "seen": []}
    with Served(type("Hub", (HubStub,), of_hub)) as endpoint:
        job, _, printed = run_example(
            trainer,
            # What `pip` would fetch, the environment of this test has.
            *("--epochs", "2", "--batch-size", "20", "--packages", ""),
            script="fashion_mnist.py",
            credentials={"HF_TOKEN": "hush-hush"},
            HF_ENDPOINT=endpoint,
        )
    assert job["spec"]["trainer"]["numNodes"] == 2
    reports = re.findall(
        r"epoch (\d): loss \S+, accuracy (\S+)%, (\d+) of (\d+) images by (\d) ranks, (\d+) diff",
        printed,
    )
    assert [int(epoch) for epoch, *_ in reports] == [0, 1]
    for _, _, *counts in reports:
        # No two of its images are equal: each came exactly once.
        assert [int(count) for count in counts] == [len(labels), len(labels), 2, len(labels)]
    assert float(reports[-1][1]) > 90, printed


@pytest.fixture
def sdk_client(trainer: TrainerCluster) -> Iterator[Any]:
    """The SDK's client of the cluster, in this process."""
    sdk = import_sdk()
    config = sdk.KubernetesBackendConfig(config_file=str(trainer.kubeconfig), namespace=NAMESPACE)
    made = sdk.TrainerClient(config)
    yield made
    made.backend.custom_api.api_client.close()


def test_the_sdk_reads_every_runtime(sdk_client: Any) -> None:
    found = {runtime.name: runtime for runtime in sdk_client.list_runtimes()}
    assert {name: runtime.trainer.framework for name, runtime in found.items()} == {
        "deepspeed-data-cache": "deepspeed",
        "jax-distributed-data-cache": "jax",
        "mlx-data-cache": "mlx",
        "torch-distributed-data-cache": "torch",
        "torch-distributed-data-cache-colocated": "torch",
        "torch-distributed-shared-data-cache": "torch",
        "torch-distributed-with-cache": "torch",
        "torchtune-qwen2.5-1.5b": "torchtune",
        "xgboost-data-cache": "xgboost",
    }
    for name, runtime in found.items():
        assert sdk_client.get_runtime(name) == runtime
        assert runtime.trainer.device == "Unknown", name  # a job says what its trainers get


def print_hello() -> None:
    """A function that the SDK can ship."""
    print("hello")


def test_the_cache_is_a_step_of_the_job_whose_logs_can_be_read(
    trainer: TrainerCluster, sdk_client: Any
) -> None:
    sdk = import_sdk()
    name = sdk_client.train(
        runtime="torch-distributed-data-cache",
        initializer=sdk.Initializer(
            dataset=sdk.S3DatasetInitializer(storage_uri="s3://warehouse/lineitem/")
        ),
        trainer=sdk.CustomTrainer(func=print_hello, num_nodes=2),
    )
    assert sdk_client.get_job(name).status == "Created"
    pods = trainer.create_pods(name, {"dataset-initializer": "Running"})
    for pod in pods:
        trainer.api.logs[pod] = "load dataset=lineitem 40%\n"
    job = sdk_client.get_job(name)
    # It shows one of the pods.
    (step,) = job.steps
    assert (step.name, step.status, step.device) == ("dataset-initializer", "Running", "cpu")
    assert step.pod_name in pods
    assert [*sdk_client.get_job_logs(name, step="dataset-initializer")] == [
        "load dataset=lineitem 40%"
    ]
    trainer.create_pods(name, {"node": "Running"})
    job = sdk_client.get_job(name)
    assert {step.name for step in job.steps} == {"dataset-initializer", "node-0", "node-1"}
    assert (job.status, job.num_nodes) == ("Running", 2)
    assert [listed.name for listed in sdk_client.list_jobs()] == [name]
    sdk_client.delete_job(name)
    assert trainer.api.store.find("trainjobs") == []


def test_the_job_has_the_trainers_of_the_sdk_call(trainer: TrainerCluster, sdk_client: Any) -> None:
    sdk = import_sdk()
    name = sdk_client.train(
        runtime="torch-distributed-data-cache",
        trainer=sdk.CustomTrainer(
            func=print_hello,
            num_nodes=3,
            resources_per_node={"cpu": 4, "memory": "16Gi", "gpu": 1},
            env={"NCCL_DEBUG": "INFO"},
        ),
    )
    spec = trainer.job(name)["spec"]
    assert spec["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "ClusterTrainingRuntime",
        "name": "torch-distributed-data-cache",
    }
    assert "initializer" not in spec
    assert spec["trainer"]["numNodes"] == 3
    assert spec["trainer"]["resourcesPerNode"]["limits"] == {
        "cpu": 4,
        "memory": "16Gi",
        "nvidia.com/gpu": 1,
    }
    assert spec["trainer"]["env"] == [{"name": "NCCL_DEBUG", "value": "INFO"}]


@pytest.mark.parametrize(
    ("script", "function"),
    [("kubeflow_sdk.py", "train"), ("fashion_mnist.py", "train_fashion_mnist")],
)
def test_what_the_sdk_ships_survives_a_shell(script: str, function: str) -> None:
    source = (EXAMPLES / script).read_text()
    (train,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    text = ast.get_source_segment(source, train)
    assert text is not None
    assert [character for character in "$`\\" if character in text] == []


LOCAL_JOB = """
import os
import sys

from kubeflow.trainer import CustomTrainer, LocalProcessBackendConfig, TrainerClient


def train(parameters):
    import json
    import os

    from cache_client import CacheIterableDataset

    rows = CacheIterableDataset(parameters["dataset"], batch_size=64, shuffle=True)
    seen = [int(row) for batch in rows for row in batch["row"]]
    print(json.dumps({"world": rows.world_size, "rows": seen, "environment": [*os.environ]}))


endpoint, dataset, wheel, path = sys.argv[1:]
client = TrainerClient(backend_config=LocalProcessBackendConfig())
name = client.train(
    runtime="torch-distributed",
    trainer=CustomTrainer(
        func=train,
        func_args={"dataset": dataset},
        packages_to_install=[f"torch @ {wheel}"],
        pip_index_urls=["file:///nowhere"],
        env={"CACHE_ENDPOINT": endpoint, "PYTHONPATH": path, "TMPDIR": os.environ["TMPDIR"]},
    ),
)
job = client.wait_for_job_status(name, {"Complete", "Failed"}, timeout=150, polling_interval=1)
print(job.status)
print(*client.get_job_logs(name), sep=chr(10))
"""


def borrowed_torch(folder: Path) -> Path:
    """A wheel ``torch`` that is the torch of this environment, for a venv without a network."""
    path = folder / "torch-0-py3-none-any.whl"
    files = {
        "borrowed.pth": sysconfig.get_path("purelib"),
        "torch-0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 0\n",
        "torch-0.dist-info/WHEEL": (
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
        "torch-0.dist-info/entry_points.txt": (
            "[console_scripts]\ntorchrun = torch.distributed.run:main\n"
        ),
    }
    names = [*files, "torch-0.dist-info/RECORD"]
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
        wheel.writestr(names[-1], "".join(f"{name},,\n" for name in names))
    return path


def run_local_job(folder: Path, *arguments: str) -> list[str]:
    """The lines that `LOCAL_JOB` prints."""
    program = folder / "local_job.py"
    program.write_text(textwrap.dedent(LOCAL_JOB), encoding="utf-8")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    sources = os.pathsep.join((str(EXAMPLES.parent), str(EXAMPLES.parent / "protos")))
    done = forked_python.run(
        [sys.executable, str(program), *arguments, sources],
        # It looks for a python on the path, and leaves folders behind.
        env={**os.environ, "PATH": path, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.timeout(240)
def test_the_local_backend_of_the_sdk_reads_a_cache_that_its_environment_names(
    client: CacheClient, dataset_name: str, tmp_path: Path
) -> None:
    client.load(DatasetSpec(dataset_name, write_numbered(tmp_path / "rows", 500)))
    wheel = borrowed_torch(tmp_path).as_uri()
    status, *lines = run_local_job(tmp_path, client.endpoint, dataset_name, wheel)
    assert status == "Complete", "\n".join(lines)
    (told,) = (json.loads(line) for line in lines if line.startswith("{"))
    assert told["world"] == 1
    assert sorted(told["rows"]) == [*range(500)]
    # Nothing of ours but what was passed on, and what bash and torchrun add.
    assert {"CACHE_ENDPOINT", "PYTHONPATH", "RANK", "WORLD_SIZE"} <= {*told["environment"]}
    assert not {"PYTEST_CURRENT_TEST", "HOME"} & {*told["environment"]}


def test_the_local_backend_of_the_sdk_has_no_torchrun_unless_torch_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script of the job, which the test before runs: its environment begins with pip only."""
    scripts: list[str] = []
    sdk = import_sdk()
    backend = importlib.import_module("kubeflow.trainer.backends.localprocess.backend")
    monkeypatch.setattr(backend.LocalJob, "start", lambda job: scripts.append(job.command[-1]))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # of environments that it leaves behind
    client = sdk.TrainerClient(sdk.LocalProcessBackendConfig())
    for packages in (None, ["torch"]):
        trainer = sdk.CustomTrainer(func=print_hello, packages_to_install=packages)
        client.train(runtime="torch-distributed", trainer=trainer)
    for script in scripts:
        (environment,) = re.findall(r"-m venv --without-pip (\S+)", script)
        assert f"\n{environment}/bin/torchrun " in script
    without, installed = (re.findall(r"pip install .*", script) for script in scripts)
    assert without == [] and len(installed) == 1 and installed[0].endswith('"torch"')
