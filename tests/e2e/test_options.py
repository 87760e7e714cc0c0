"""What the SDK's `cache_options` set reaches the cache; what cannot be is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cache_client import View
from cache_protocol.datasets.job_options import FILE_VARIABLE, PREFIX, JobOptions
from cache_protocol.errors import ConfigError, RequestError
from tests.e2e import rows
from tests.e2e.clusters import Cluster, manifests
from tests.e2e.conftest import FLAGSHIP, MakeJob
from tests.e2e.jobs import WITH_CACHE, diagnosis_of, grant, wait_for_end, without_gang
from tests.kubeflow_backend import import_sdk
from tests.manifests import is_runtime, job_named, pod_of
from tests.object_store import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server
from tests.train_jobs import env, train_job

Json = dict[str, Any]

SHARED = "torch-distributed-shared-data-cache"
KEYS = {"ACCESS_KEY_ID": ACCESS_KEY_ID, "SECRET_ACCESS_KEY": SECRET_ACCESS_KEY}
# Prints what the cache of this job holds, and the ids that rank 0 reads of it.
SHOW = """
import json
from cache_client import CacheClient, CacheIterableDataset, Connection
from cache_client.job.ranks import find_rank

rows = CacheIterableDataset("rows", cache=Connection(local=False), batch_size=10)
ids = [number for batch in rows for number in batch["id"].tolist()]
if find_rank().rank == 0:
    client = CacheClient()
    made = client.describe("rows")
    print(json.dumps({
        "ids": ids, "num_rows": made.num_rows, "columns": sorted(made.schema.names),
        "replicas": made.replicas, "limits": [node.memory_limit_bytes for node in client.nodes()],
    }), flush=True)
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    folder = tmp_path_factory.mktemp("rows")
    rows.write(folder)
    with S3Server() as running:
        for file in folder.iterdir():
            running.put("warehouse", f"rows/{file.name}", file.read_bytes())
        yield running


class Sdk:
    """The Kubeflow SDK as a user of a namespace."""

    def __init__(self, cluster: Cluster, namespace: str, store: S3Server) -> None:
        if not cluster.storage_uri.startswith("file://"):
            pytest.skip("pods of this cluster do not reach the store of the test")
        self.kubeflow = import_sdk()
        config = self.kubeflow.KubernetesBackendConfig(
            config_file=str(cluster.kubeconfig), namespace=namespace
        )
        self.client = self.kubeflow.TrainerClient(config)
        self.store = store

    def train(self, name: str, runtime: str, *options: Any) -> None:
        kubeflow = self.kubeflow
        from kubeflow.trainer.options import Name, TrainerArgs, TrainerCommand

        self.client.train(
            runtime=runtime,
            initializer=kubeflow.Initializer(
                dataset=kubeflow.S3DatasetInitializer(
                    storage_uri="s3://warehouse/rows/",
                    endpoint=self.store.endpoint,
                    region=REGION,
                    access_key_id=ACCESS_KEY_ID,
                    secret_access_key=SECRET_ACCESS_KEY,
                )
            ),
            trainer=kubeflow.CustomTrainerContainer(image="trainer", num_nodes=1),
            options=[
                *(Name(name), TrainerCommand(["python", "-c"]), TrainerArgs([SHOW])),
                *options,
            ],
        )


@pytest.fixture
def sdk(cluster: Cluster, namespace: str, store: S3Server) -> Sdk:
    return Sdk(cluster, namespace, store)


def shown(cluster: Cluster, namespace: str, name: str) -> Json:
    """What the trainer of a complete job printed."""
    assert wait_for_end(cluster, namespace, name) == "Complete", cluster.report(namespace)
    (line,) = [line for line in cluster.lines(namespace, name) if '"num_rows"' in line]
    found: Json = json.loads(line)
    return found


def test_options_of_the_sdk_choose_rows_replicas_memory_and_view(
    cluster: Cluster, namespace: str, sdk: Sdk
) -> None:
    from cache_runtimes.sdk import cache_options

    sql = 'SELECT id, id * 2 AS "twice\'s" FROM source WHERE id < 100 -- $(HOME) \\ é\n'
    view = View(where="id >= 90")
    every = cache_options(sql=sql, replicas=2, nodes=2, memory="3Gi", view=view)
    sdk.train("every", FLAGSHIP, every)
    sdk.train("narrow", FLAGSHIP, cache_options(columns=["id"], filter="id >= 1990"))
    assert shown(cluster, namespace, "every") == {
        "ids": list(range(90, 100)),
        "num_rows": 100,
        "columns": ["id", "twice's"],
        "replicas": 2,
        "limits": [2 << 30] * 2,
    }
    narrow = shown(cluster, namespace, "narrow")
    assert (narrow["num_rows"], narrow["columns"], narrow["replicas"]) == (10, ["id"], 1)
    assert narrow["limits"] == [6 << 30] * 2


def test_the_runtime_that_makes_its_cache_makes_it_of_the_size_of_the_options(
    cluster: Cluster, namespace: str, sdk: Sdk
) -> None:
    from cache_runtimes.sdk import cache_options

    grant(cluster, namespace, "ServiceAccount", "RoleBinding")
    (runtime,) = (each for each in manifests(WITH_CACHE) if is_runtime(each))
    runtime["kind"] = "TrainingRuntime"  # it comes before that of the cluster
    initializer = pod_of(job_named(runtime, "dataset-initializer"))["spec"]["containers"][0]
    # The ready file is the default; a process without a mount finds it by the variable.
    initializer["env"] += env(CACHE_READY_FILE="/tmp/ready")
    cluster.apply(runtime, namespace=namespace)
    options = cache_options(
        runtime=WITH_CACHE,
        nodes=3,
        memory="1536Mi",
        filter="id < 7 AND '$(HOME)' < '%'",  # false once a variable is filled in
        replicas=3,
    )
    sdk.train("sized", WITH_CACHE, options)
    made = shown(cluster, namespace, "sized")
    assert (made["num_rows"], made["replicas"], made["limits"]) == (7, 3, [512 << 20] * 3)


def test_a_sidecar_takes_the_options_of_its_job(
    cluster: Cluster, namespace: str, store: S3Server
) -> None:
    from cache_runtimes.sdk import checked_job

    runtime = without_gang(manifests(f"{FLAGSHIP}-colocated")[0])
    sidecar = pod_of(job_named(runtime, "node"))["spec"]["initContainers"][0]
    sidecar["env"] += env(
        STORAGE_URI="s3://warehouse/rows/", ENDPOINT=store.endpoint, REGION=REGION, **KEYS
    )
    cluster.apply(runtime, namespace=namespace)
    options = JobOptions(filter="id < 9", nodes=1)
    trainer = {"command": ["python", "-c"], "args": [SHOW]}
    patches = annotated(checked_job(runtime, options), options.annotations())
    made = train_job(
        "beside",
        runtimeRef={"name": runtime["metadata"]["name"]},
        trainer=trainer,
        runtimePatches=patches,
    )
    cluster.apply(made, namespace=namespace)
    assert shown(cluster, namespace, "beside")["num_rows"] == 9


@pytest.mark.usefixtures("shared_cache")
def test_the_shared_cache_takes_options_of_a_dataset_but_no_size(
    cluster: Cluster, namespace: str, sdk: Sdk
) -> None:
    from cache_runtimes.sdk import cache_options

    sdk.train("shared", SHARED, cache_options(runtime=SHARED, filter="id < 5", replicas=2))
    made = shown(cluster, namespace, "shared")
    assert (made["num_rows"], made["replicas"]) == (5, 2)
    with pytest.raises(RequestError, match="the shared cache has the size that"):
        sdk.train("no", SHARED, cache_options(runtime=SHARED, nodes=2))


def annotated(job: str, annotations: dict[str, str]) -> list[Json]:
    """``spec.runtimePatches`` that annotates the pods of a replicated job."""
    template = {"spec": {"template": {"metadata": {"annotations": annotations}}}}
    jobs = [{"name": job, "template": template}]
    return [
        {
            "manager": "example.com/test",
            "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}},
        }
    ]


# The annotation of a job -> what the reason says besides its name.
WRONG = {
    "sqll": ("SELECT 1", "is unknown: it must be one of sql, columns"),
    "replicas": ("two", "replicas must be"),
    "memory": ("64Gi", "the cache pods of the runtime have 8192Mi"),
    "nodes": ("4", "the runtime has 2 cache pods, which a TrainJob cannot change"),
    "view": ("{}", "set CACHE_VIEW in spec.trainer.env"),
}


def test_a_wrong_annotation_fails_the_job_at_once_and_by_its_name(
    cluster: Cluster, namespace: str, make_job: MakeJob
) -> None:
    for name, (value, _) in WRONG.items():
        annotations = {f"{PREFIX}{name}": value}
        patches = annotated("dataset-initializer", annotations)
        cluster.apply(make_job(name, runtimePatches=patches), namespace=namespace)
    for name, (_, words) in WRONG.items():
        assert wait_for_end(cluster, namespace, name) == "Failed", cluster.report(namespace)
        ends = [
            pod["status"]["containerStatuses"][0]["state"]["terminated"]
            for pod in cluster.pods(namespace, f"{name}-dataset-initializer")
        ]
        assert ends and {end["exitCode"] for end in ends} <= {65, 143}
        (reason, *_) = (end["message"] for end in ends if end["exitCode"] == 65)
        assert f"{PREFIX}{name}" in reason and words in reason
        assert any(
            f"{PREFIX}{name}" in finding.what
            for finding in diagnosis_of(cluster, namespace, name).findings
        )
    assert not cluster.pods(namespace, "-node-")


def test_what_cannot_be_is_refused_before_the_job_is_sent(
    cluster: Cluster, namespace: str, sdk: Sdk
) -> None:
    from cache_runtimes.sdk import cache_options

    old = manifests("torch-distributed-data-cache")[0]
    old["kind"], old["metadata"]["name"] = "TrainingRuntime", "old"
    cache = pod_of(job_named(old, "dataset-initializer"))["spec"]["containers"][0]
    cache["env"] = [each for each in cache["env"] if each["name"] != FILE_VARIABLE]
    cluster.apply(old, namespace=namespace)
    for options, error, words in (
        ({"nodes": 4}, RequestError, "nodes=4: the runtime has 2 cache pods"),
        (
            {"memory": "64Gi"},
            RequestError,
            "memory=64Gi: the cache pods of the runtime have 8192Mi",
        ),
        ({"runtime": "none", "replicas": 2}, ConfigError, "there is no runtime 'none'"),
        ({"runtime": "old", "replicas": 2}, ConfigError, "runtime 'old' takes no cache_options"),
    ):
        with pytest.raises(error, match=words):
            sdk.train("no", FLAGSHIP, cache_options(**options))
    assert cluster.list_of("TrainJob", namespace) == []
