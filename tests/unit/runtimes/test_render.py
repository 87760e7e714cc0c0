"""What Trainer makes of a TrainJob and its runtime, restated."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from cache_protocol.errors import ConfigError
from cache_runtimes.local.render import render, render_objects
from cache_runtimes.local.supported import UnsupportedFieldError
from cache_runtimes.local.trainer.info import pod_spec
from cache_runtimes.local.trainer.quantities import canonical
from tests.train_jobs import container, env, replicated_job, runtime, train_job

Json = dict[str, Any]

INITIALIZER_MOUNT = [{"name": "initializer", "mountPath": "/workspace"}]


def two_jobs(**node: Any) -> Json:
    return runtime(
        replicated_job(
            "dataset-initializer",
            container(
                "dataset-initializer",
                "serve",
                env=env(STORAGE_URI="none", KEPT="1"),
                volumeMounts=INITIALIZER_MOUNT,
            ),
            ancestor="dataset-initializer",
            parallelism=3,
            volumes=[{"name": "initializer", "emptyDir": {}}],
        ),
        replicated_job(
            "node",
            container("node", "train", env=env(MODE="slow"), **node),
            ancestor="trainer",
            depends_on="dataset-initializer:Ready",
        ),
    )


def job_of(jobset: Json, name: str) -> Json:
    return next(job for job in jobset["spec"]["replicatedJobs"] if job["name"] == name)


def environment(jobset: Json, job: str, name: str) -> dict[str, Any]:
    spec = pod_spec(job_of(jobset, job))
    found = next(
        c for c in [*spec["containers"], *spec.get("initContainers", ())] if c["name"] == name
    )
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in found["env"]}


def test_the_jobset_has_the_name_and_the_namespace_of_the_job() -> None:
    job = train_job("mine")
    job["metadata"]["namespace"] = "team"
    jobset = render(job, two_jobs())
    assert jobset["metadata"] == {"name": "mine", "namespace": "team"}
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")


def test_the_initializer_gets_its_uri_its_variables_and_its_secret() -> None:
    dataset = {
        "storageUri": "s3://bucket/table",
        "env": env(REGION="eu", KEPT="2"),
        "secretRef": {"name": "keys"},
    }
    jobset = render(train_job(initializer={"dataset": dataset}), two_jobs())
    found = environment(jobset, "dataset-initializer", "dataset-initializer")
    assert found == {"STORAGE_URI": "s3://bucket/table", "KEPT": "2", "REGION": "eu"}
    cache = pod_spec(job_of(jobset, "dataset-initializer"))["containers"][0]
    assert cache["envFrom"] == [{"secretRef": {"name": "keys"}}]


def test_every_cache_pod_counts_as_the_runtime_says_and_trainers_as_the_job_says() -> None:
    jobset = render(train_job(trainer={"numNodes": 4}), two_jobs())
    counts = {
        job["name"]: (
            job["template"]["spec"]["parallelism"],
            job["template"]["spec"]["completions"],
        )
        for job in jobset["spec"]["replicatedJobs"]
    }
    assert counts == {"dataset-initializer": (3, 3), "node": (4, 4)}


def test_the_trainer_of_the_job_replaces_that_of_the_runtime() -> None:
    trainer = {
        "image": "mine",
        "command": ["python"],
        "args": ["train.py"],
        "env": env(MODE="fast", MORE="1"),
        "resourcesPerNode": {"limits": {"cpu": "3"}},
    }
    jobset = render(train_job(trainer=trainer), two_jobs())
    node = pod_spec(job_of(jobset, "node"))["containers"][0]
    assert (node["image"], node["command"], node["args"]) == ("mine", ["python"], ["train.py"])
    found = environment(jobset, "node", "node")
    assert (found["MODE"], found["MORE"]) == ("fast", "1")


def test_the_resources_of_the_job_are_merged_into_those_of_the_runtime() -> None:
    trainer = {"resourcesPerNode": {"limits": {"cpu": "0.5", "nvidia.com/gpu": 1}}}
    shipped = {"requests": {"memory": "1024Mi"}, "limits": {"cpu": "2", "memory": "2Gi"}}
    jobset = render(train_job(trainer=trainer), two_jobs(resources=shipped))
    assert pod_spec(job_of(jobset, "node"))["containers"][0]["resources"] == {
        "requests": {"memory": "1Gi"},
        "limits": {"cpu": "500m", "memory": "2Gi", "nvidia.com/gpu": "1"},
    }


def test_torchrun_finds_its_variables() -> None:
    jobset = render(train_job("mine", trainer={"numNodes": 2, "numProcPerNode": 3}), two_jobs())
    found = environment(jobset, "node", "node")
    index = {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    assert found["PET_NNODES"] == "2"
    assert found["PET_NPROC_PER_NODE"] == "3"
    assert found["PET_NODE_RANK"] == {"fieldRef": index}
    assert found["PET_MASTER_ADDR"] == "mine-node-0-0.mine"
    assert found["PET_MASTER_PORT"] == "29500"


def test_a_job_without_a_trainer_gets_no_variables_of_torchrun() -> None:
    assert environment(render(train_job(), two_jobs()), "node", "node") == {"MODE": "slow"}


@pytest.mark.parametrize(
    ("resources", "processes"),
    [
        ({}, "1"),
        ({"limits": {"cpu": "4"}}, "4"),
        ({"limits": {"cpu": "4"}, "requests": {"cpu": "2500m"}}, "3"),
        ({"limits": {"cpu": "4", "nvidia.com/gpu": 2}}, "auto"),
        ({"requests": {"memory": "1Gi"}}, "1"),
    ],
)
def test_processes_a_node_come_from_the_resources(resources: Json, processes: str) -> None:
    jobset = render(train_job(trainer={}), two_jobs(resources=resources))
    assert environment(jobset, "node", "node")["PET_NPROC_PER_NODE"] == processes


def test_a_sidecar_gets_the_variables_of_torchrun_where_the_policy_says_so() -> None:
    policy = {
        "numNodes": 2,
        "torch": {"envInjection": {"targets": [{"jobName": "node", "containerNames": ["cache"]}]}},
    }
    sidecar = container("cache", "serve", env=env(OWN="1"), restartPolicy="Always")
    made = runtime(
        replicated_job(
            "node", container("node", "train"), ancestor="trainer", initContainers=[sidecar]
        ),
        ml_policy=policy,
    )
    found = environment(render(train_job(trainer={}), made), "node", "cache")
    assert found["PET_NNODES"] == "2"
    assert found["OWN"] == "1"


def test_a_sidecar_gets_the_variables_without_a_trainer_too() -> None:
    targets = [{"jobName": "node", "containerNames": ["cache"]}]
    made = runtime(
        replicated_job(
            "node",
            container("node", "train"),
            ancestor="trainer",
            initContainers=[container("cache", "serve", restartPolicy="Always")],
        ),
        ml_policy={"numNodes": 2, "torch": {"envInjection": {"targets": targets}}},
    )
    jobset = render(train_job("mine"), made)
    assert environment(jobset, "node", "cache")["PET_MASTER_ADDR"] == "mine-node-0-0.mine"
    assert "env" not in pod_spec(job_of(jobset, "node"))["containers"][0]


def test_jax_finds_its_variables() -> None:
    made = runtime(
        replicated_job("node", container("node", "train"), ancestor="trainer"),
        ml_policy={"numNodes": 2, "jax": {}},
    )
    jobset = render(train_job("mine", trainer={"numNodes": 3}), made)
    index = {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    assert environment(jobset, "node", "node") == {
        "JAX_NUM_PROCESSES": "3",
        "JAX_PROCESS_ID": {"fieldRef": index},
        "JAX_COORDINATOR_ADDRESS": "mine-node-0-0.mine:29500",
    }
    node = pod_spec(job_of(jobset, "node"))["containers"][0]
    assert node["ports"] == [{"containerPort": 29500}]


def test_a_job_without_a_trainer_gets_no_variables_of_jax() -> None:
    made = runtime(
        replicated_job("node", container("node", "train"), ancestor="trainer"),
        ml_policy={"jax": {}},
    )
    assert "env" not in pod_spec(job_of(render(train_job(), made), "node"))["containers"][0]


def test_mpi_gets_its_hostfile_and_its_key() -> None:
    made = runtime(
        replicated_job("launcher", container("node", "mpirun"), ancestor="trainer"),
        replicated_job("node", container("node", "sshd")),
        ml_policy={"numNodes": 1, "mpi": {"runLauncherAsNode": True, "numProcPerNode": 2}},
    )
    objects = {
        made["kind"]: made for made in render_objects(train_job("a", trainer={"numNodes": 3}), made)
    }
    assert list(objects) == ["ConfigMap", "JobSet", "Secret"]
    hosts = ["a-launcher-0-0.a", "a-node-0-0.a", "a-node-0-1.a"]
    hostfile = "".join(f"{host} slots=2\n" for host in hosts)
    assert objects["ConfigMap"]["data"] == {"hostfile": hostfile}
    assert objects["Secret"]["type"] == "kubernetes.io/ssh-auth"


@pytest.mark.parametrize(
    ("quantity", "written"),
    [
        *(("0.5", "500m"), ("1024Mi", "1Gi"), ("1.5Gi", "1536Mi"), ("1000", "1k"), (2, "2")),
        *(("2000M", "2G"), ("100n", "100n"), ("1e3", "1e3"), ("512Ki", "512Ki"), ("0", "0")),
        ("0.5Ki", "512"),
    ],
)
def test_quantities_are_written_as_go_writes_them(quantity: str | int, written: str) -> None:
    assert canonical(quantity) == written


def test_runtime_patches_reach_the_template_and_the_labels() -> None:
    sidecar = container("cache", "serve", env=env(CACHE_SQL="old"), restartPolicy="Always")
    made = runtime(
        replicated_job(
            "node", container("node", "train"), ancestor="trainer", initContainers=[sidecar]
        )
    )
    patch_of_pod = {
        "nodeSelector": {"zone": "a"},
        "initContainers": [{"name": "cache", "env": env(CACHE_SQL="new")}],
    }
    patch = {
        "manager": "example.com/me",
        "trainingRuntimeSpec": {
            "template": {
                "metadata": {"labels": {"queue": "q"}},
                "spec": {
                    "replicatedJobs": [
                        {"name": "node", "template": {"spec": {"template": {"spec": patch_of_pod}}}}
                    ]
                },
            }
        },
    }
    jobset = render(train_job(runtimePatches=[patch]), made)
    assert jobset["metadata"]["labels"] == {"queue": "q"}
    assert environment(jobset, "node", "cache") == {"CACHE_SQL": "new"}
    assert pod_spec(job_of(jobset, "node"))["nodeSelector"] == {"zone": "a"}


def test_a_runtime_patch_merges_maps_and_lists_that_have_a_merge_key() -> None:
    made = runtime(
        replicated_job(
            "node",
            container("node", "x", volumeMounts=[{"mountPath": "/a", "name": "x"}]),
            ancestor="trainer",
            nodeSelector={"zone": "a", "disk": "ssd"},
            tolerations=[{"key": "cpu"}],
            volumes=[{"name": "x", "emptyDir": {}}],
        )
    )
    mounts = [{"mountPath": "/b", "name": "y"}, {"mountPath": "/a", "name": "z"}]
    pod = {
        "containers": [{"name": "node", "volumeMounts": mounts}],
        "nodeSelector": {"zone": "b"},
        "tolerations": [{"key": "gpu"}],
        "volumes": [{"name": "y", "emptyDir": {}}],
    }
    patch = patched("node", "node")
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    job["template"]["spec"]["template"]["spec"] = pod
    found = pod_spec(job_of(render(train_job(runtimePatches=[patch]), made), "node"))
    # The patch's own items come first.
    assert found["containers"][0]["volumeMounts"] == mounts
    assert found["nodeSelector"] == {"zone": "b", "disk": "ssd"}
    assert found["tolerations"] == [{"key": "gpu"}]
    assert [volume["name"] for volume in found["volumes"]] == ["y", "x"]


def test_rendering_changes_neither_the_job_nor_the_runtime() -> None:
    job = train_job(initializer={"dataset": {"storageUri": "s3://a/b"}}, trainer={"numNodes": 2})
    made = two_jobs()
    before = copy.deepcopy((job, made))
    render(job, made)
    assert (job, made) == before


def without_mount() -> Json:
    made = two_jobs()
    del pod_spec(made["spec"]["template"]["spec"]["replicatedJobs"][0])["containers"][0][
        "volumeMounts"
    ]
    return made


def only_node() -> Json:
    return runtime(replicated_job("node", container("node", "train"), ancestor="trainer"))


def patched(job: str, *container_names: str, **fields: Any) -> Json:
    pod = {"containers": [{"name": name, **fields} for name in container_names]}
    template = {"spec": {"template": {"spec": pod}}}
    return {
        "manager": "example.com/me",
        "trainingRuntimeSpec": {
            "template": {"spec": {"replicatedJobs": [{"name": job, "template": template}]}}
        },
    }


DATASET = {"dataset": {"storageUri": "s3://a/b"}}


@pytest.mark.parametrize(
    ("job", "made", "words"),
    [
        (train_job(initializer=DATASET), only_node(), ["spec.initializer.dataset", "no job"]),
        (train_job(initializer=DATASET), without_mount(), ["no volumeMount 'initializer'"]),
        (
            train_job(trainer={"env": env(PET_NNODES="2")}),
            two_jobs(),
            ["spec.trainer.env must not have PET_NNODES"],
        ),
        (
            train_job(trainer={"numNodes": -1}),
            two_jobs(),
            ["spec.trainer.numNodes must be at least 0, got -1", "schema of the TrainJob"],
        ),
        (
            train_job(trainer={"resourcesPerNode": {"limits": {"cpu": "four"}}}),
            two_jobs(),
            ["spec.trainer.resourcesPerNode.limits[cpu] must be a quantity, got 'four'"],
        ),
        (
            train_job(trainer={"env": [*env(A="1"), *env(A="2")]}),
            two_jobs(),
            ["spec.trainer.env[1] must be the only item with the name 'A'"],
        ),
        (
            train_job(trainer={"env": [{"value": "1"}]}),
            two_jobs(),
            ["spec.trainer.env[0].name must be set", "schema of the TrainJob"],
        ),
        (train_job(runtimePatches=[{}]), two_jobs(), ["runtimePatches[0].manager must be set"]),
        (
            train_job(runtimePatches=[{"manager": "me"}]),
            two_jobs(),
            ["spec.runtimePatches.manager 'me' is no path with a domain"],
        ),
        (
            train_job(trainer={}),
            two_jobs(ports=[{"containerPort": 80}, {"containerPort": 90}]),
            ["[1].template.spec.template.spec.containers[0].ports has a port twice"],
        ),
        (train_job("a" * 34), two_jobs(), ["too long", "63"]),
        (
            train_job(runtimePatches=[patched("other")]),
            two_jobs(),
            ["containers must be set", "schema of the JobSet"],
        ),
        (
            train_job(runtimePatches=[patched("node", "node", env=env(A="1"))]),
            two_jobs(),
            ["spec.runtimePatches env", "webhook of the TrainJob"],
        ),
    ],
)
def test_what_a_cluster_would_refuse_is_refused(job: Json, made: Json, words: list[str]) -> None:
    with pytest.raises(ConfigError, match="a cluster would refuse it") as caught:
        render(job, made)
    for word in words:
        assert word in str(caught.value)


def test_every_problem_is_named_at_once() -> None:
    job = train_job(initializer=DATASET, trainer={"env": env(PET_NODE_RANK="0", PET_NNODES="1")})
    with pytest.raises(ConfigError) as caught:
        render(job, without_mount())
    assert "volumeMount" in str(caught.value)
    assert "PET_NODE_RANK" in str(caught.value)
    assert "PET_NNODES" in str(caught.value)


def test_a_policy_that_is_not_rendered_here_is_named() -> None:
    made = runtime(
        replicated_job("node", container("node", "train"), ancestor="trainer"),
        ml_policy={"numNodes": 2, "flux": {}},
    )
    with pytest.raises(UnsupportedFieldError, match=r"runtime scripts: spec\.mlPolicy\.flux=\{\}"):
        render(train_job(), made)
