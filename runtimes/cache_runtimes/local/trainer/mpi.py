"""The plugin of MPI: hostfile, SSH key, and the variables of Open MPI. Pure.

``pkg/runtime/framework/plugins/mpi/mpi.go`` of kubeflow/trainer.
"""

from __future__ import annotations

from collections.abc import Iterator

from cache_runtimes.local.trainer.info import (
    LAUNCHER,
    NODE,
    Info,
    Json,
    gpus,
    main_container,
    set_env,
    set_mounts,
    set_volumes,
    variable,
)
from cache_runtimes.local.trainer.refusals import Refusal, by_trainer

_HOSTFILE = "hostfile"
_HOSTFILE_DIR = "/etc/mpi"
_VARIABLES = (
    *("OMPI_MCA_orte_default_hostfile", "OMPI_MCA_orte_keep_fqdn_hostnames"),
    *("OMPI_MCA_orte_set_default_slots", "OMPI_MCA_plm_rsh_args"),
)
_DEFAULTS = {  # of the CRD, whose one implementation is OpenMPI
    "numProcPerNode": 1,
    "sshAuthMountPath": "/root/.ssh",
    "runLauncherAsNode": False,
}


def problems(info: Info) -> Iterator[Refusal]:
    """``MPI.Validate``."""
    if info.trainer is None:
        return
    both = info.job_index(LAUNCHER) is not None and info.job_index(NODE) is not None
    several = (info.trainer.get("numNodes") or 1) > 1
    if _policy(info)["runLauncherAsNode"] and several and not both:
        yield by_trainer(
            "spec.trainer.numNodes", "must be 1 without the replicated jobs launcher and node"
        )
    reserved = {item["name"] for item in info.trainer.get("env") or ()} & {*_VARIABLES}
    if reserved:
        yield by_trainer("spec.trainer.env", f"must not have {', '.join(sorted(reserved))}")


def enforce(info: Info) -> None:
    """``MPI.EnforceMLPolicy``."""
    policy, wanted = _policy(info), (info.trainer or {}).get("numNodes")
    index = info.job_index(NODE)
    if wanted is not None and index is not None:
        info.counts[index] = max(wanted - 1, 1) if policy["runLauncherAsNode"] else wanted
    for job in info.jobs:
        if job["name"] not in (NODE, LAUNCHER):
            continue
        set_volumes(job, [_key_volume(info)])
        node = main_container(job, NODE)
        if job["name"] == LAUNCHER:
            set_volumes(job, [_hostfile_volume(info)])
        if node is None:
            continue
        set_mounts(node, [{"name": "mpi-ssh-auth", "mountPath": policy["sshAuthMountPath"]}])
        if job["name"] == LAUNCHER:
            set_mounts(node, [{"name": "mpi-hostfile", "mountPath": _HOSTFILE_DIR}])
            slots = str(_slots(info))
            values = (f"{_HOSTFILE_DIR}/{_HOSTFILE}", "true", slots, "-o ConnectionAttempts=10")
            set_env(node, map(variable, _VARIABLES, values))


def build(info: Info) -> Iterator[Json]:
    """``MPI.Build``: the ConfigMap of the hostfile and the Secret of the key.

    A cluster makes the key of each TrainJob; here the Secret has no data.
    """
    nodes = (LAUNCHER, NODE) if _policy(info)["runLauncherAsNode"] else (NODE,)
    subdomain = (info.jobset.get("network") or {}).get("subdomain") or info.name
    hosts = "".join(
        f"{info.name}-{job['name']}-{replica}-{number}.{subdomain} slots={_slots(info)}\n"
        for job, count in zip(info.jobs, info.counts, strict=True)
        if job["name"] in nodes
        for replica in range(job.get("replicas") or 1)
        for number in range(count)
    )
    yield {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{info.name}-mpi-hostfile", "namespace": info.namespace},
        "data": {_HOSTFILE: hosts},
    }
    yield {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{info.name}-mpi-ssh-auth", "namespace": info.namespace},
        "type": "kubernetes.io/ssh-auth",
        "immutable": True,
    }


def runs_launcher_as_node(info: Info) -> bool:
    """``Builder.isRunLauncherAsNode``."""
    mpi = (info.policy or {}).get("mpi")
    return mpi is not None and bool(mpi.get("runLauncherAsNode"))


def _policy(info: Info) -> Json:
    return {**_DEFAULTS, **((info.policy or {}).get("mpi") or {})}


def _slots(info: Info) -> int:
    """Processes a node: of the TrainJob, of the runtime, or one for each GPU."""
    given, shipped = (info.trainer or {}).get("numProcPerNode"), _policy(info)["numProcPerNode"]
    if given is not None:
        return int(given)
    return max(1, gpus(info.counted_resources())) if shipped == 1 else int(shipped)


def _key_volume(info: Info) -> Json:
    files = (
        ("ssh-privatekey", "id_rsa", 0o640),
        ("ssh-publickey", "id_rsa.pub", 0o644),
        ("ssh-publickey", "authorized_keys", 0o644),
    )
    return {
        "name": "mpi-ssh-auth",
        "secret": {
            "secretName": f"{info.name}-mpi-ssh-auth",
            "defaultMode": 0o400,
            "items": [{"key": key, "path": path, "mode": mode} for key, path, mode in files],
        },
    }


def _hostfile_volume(info: Info) -> Json:
    item = {"key": _HOSTFILE, "path": _HOSTFILE, "mode": 0o444}
    config_map = {"name": f"{info.name}-mpi-hostfile", "items": [item]}
    return {"name": "mpi-hostfile", "configMap": config_map}
