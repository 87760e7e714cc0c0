"""Rules for manifests, each with its source.

A rule takes one object and yields a line for each violation. `FIELD_RULES` apply to every object,
`POD_RULES` to every object with pods; `tests.runtime_rules` has the rules of training runtimes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from kubeflow_trainer_api import models as trainer_models

from cache_protocol.storage.memory_budget import shard_bytes
from cache_runtimes.local.trainer.quantities import value_of
from tests import admission

Json = dict[str, Any]
Rule = Callable[[Json], Iterator[str]]

ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
CACHE_COMMAND = ["cache-server"]
_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


def read(path: Path) -> Json:
    """The one object of a file, as the SDK's `TrainingRuntimeSource` reads it."""
    found = yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)
    assert isinstance(found, dict), path
    return found


def is_runtime(thing: Json) -> bool:
    return str(thing["kind"]).endswith("TrainingRuntime")


def job_set(runtime: Json) -> Json:
    found: Json = runtime["spec"]["template"]["spec"]
    return found


def jobs(runtime: Json) -> list[Json]:
    found: list[Json] = job_set(runtime)["replicatedJobs"]
    return found


def job_named(runtime: Json, name: str) -> Json:
    return next(job for job in jobs(runtime) if job["name"] == name)


def ancestor(job: Json) -> str | None:
    found: str | None = job["template"].get("metadata", {}).get("labels", {}).get(ANCESTOR)
    return found


def pod_of(job: Json) -> Json:
    found: Json = job["template"]["spec"]["template"]
    return found


def pods(thing: Json) -> Iterator[tuple[str, Json]]:
    """The pod templates of an object, with a name for each."""
    if is_runtime(thing):
        for job in jobs(thing):
            yield job["name"], pod_of(job)
    elif thing["kind"] in ("StatefulSet", "Job"):
        yield thing["metadata"]["name"], thing["spec"]["template"]


def containers(pod: Json) -> Iterator[Json]:
    """Init containers, sidecars among them, then containers."""
    yield from pod["spec"].get("initContainers", ())
    yield from pod["spec"]["containers"]


def container_named(pod: Json, name: str) -> Json:
    return next(container for container in containers(pod) if container["name"] == name)


def env_of(container: Json) -> dict[str, Any]:
    """Values and sources by name."""
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def memory_bytes(quantity: str) -> int:
    return int(quantity[:-2]) * _UNITS[quantity[-2:]]


# Every object.


def admission_lets_it_in(thing: Json) -> Iterator[str]:
    """The schema and the CEL rules of the API server; see `tests.admission`."""
    yield from admission.problems(thing)


def the_sdk_keeps_every_field(thing: Json) -> Iterator[str]:
    """The SDK reads runtimes by the models of kubeflow-trainer-api.

    One that does not parse fails `list_runtimes` altogether.
    """
    if is_runtime(thing):
        model = getattr(trainer_models, f"TrainerV1alpha1{thing['kind']}")
        yield from lost_fields(thing, model.from_dict(thing).to_dict(), "$")


def lost_fields(given: Any, kept: Any, path: str) -> Iterator[str]:
    """The fields of an object that its model does not keep."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            if key in kept:
                yield from lost_fields(value, kept[key], f"{path}.{key}")
            else:
                yield f"{path}.{key} is no field"
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for index, value in enumerate(given):
            yield from lost_fields(value, kept[index], f"{path}[{index}]")
    elif given != kept:
        yield f"{path} is {kept!r}, not {given!r}"


FIELD_RULES: tuple[Rule, ...] = (admission_lets_it_in, the_sdk_keeps_every_field)


# Every pod.

_ALLOWED_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"),
    *("persistentVolumeClaim", "projected", "secret"),
}


def pods_are_restricted(thing: Json) -> Iterator[str]:
    """Pod Security Standards, profile "restricted" (kubernetes.io)."""
    for name, pod in pods(thing):
        spec, of_pod = pod["spec"], pod["spec"].get("securityContext", {})
        for host in ("hostNetwork", "hostPID", "hostIPC"):
            if spec.get(host):
                yield f"{name}: {host}"
        for volume in spec.get("volumes", ()):
            if not volume.keys() - {"name"} <= _ALLOWED_VOLUMES:
                yield f"{name}: volume {volume['name']} of a kind that is not allowed"
        for container in containers(pod):
            own = container.get("securityContext", {})
            both = {**of_pod, **own}
            where = f"{name}/{container['name']}"
            if both.get("runAsNonRoot") is not True or both.get("runAsUser") == 0:
                yield f"{where}: may run as root"
            if both.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
                yield f"{where}: no seccompProfile"
            if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
                yield f"{where}: allowPrivilegeEscalation must be false"
            capabilities = own.get("capabilities", {})
            if capabilities.get("drop") != ["ALL"] or capabilities.get("add"):
                yield f"{where}: capabilities must drop ALL and add none"
            if any("hostPort" in port for port in container.get("ports", ())):
                yield f"{where}: hostPort"


def mounts_have_volumes(thing: Json) -> Iterator[str]:
    """Kubernetes' validation of pods; volumeClaimPolicies add volumes by their templates' names.

    ``pkg/controllers/volume_claim_policy.go`` of JobSet appends the volume without a look at those
    that are there, so a template's name must be no pod's own volume.
    """
    policies = job_set(thing).get("volumeClaimPolicies", ()) if is_runtime(thing) else ()
    claims = [claim["metadata"]["name"] for each in policies for claim in each["templates"]]
    if thing["kind"] == "StatefulSet":  # its controller adds the volumes
        claims += [c["metadata"]["name"] for c in thing["spec"].get("volumeClaimTemplates", ())]
    mounted = set()
    for name, pod in pods(thing):
        volumes = [volume["name"] for volume in pod["spec"].get("volumes", ())]
        yield from (
            f"{name}: volume {claim} is a claim too" for claim in claims if claim in volumes
        )
        for container in containers(pod):
            for mount in container.get("volumeMounts", ()):
                mounted.add(mount["name"])
                if mount["name"] not in (*volumes, *claims):
                    yield f"{name}/{container['name']}: no volume {mount['name']}"
        used = {m["name"] for each in containers(pod) for m in each.get("volumeMounts", ())}
        yield from (f"{name}: volume {volume} is not used" for volume in set(volumes) - used)
    yield from (f"claim {claim} is not used" for claim in set(claims) - mounted)


def variables_are_defined(thing: Json) -> Iterator[str]:
    """The kubelet leaves ``$(NAME)`` as it stands where NAME is not defined, or later in `env`."""
    for name, pod in pods(thing):
        for container in containers(pod):
            where = f"{name}/{container['name']}"
            known: set[str] = set()
            for variable in container.get("env", ()):
                for used in re.findall(r"\$\((\w+)\)", variable.get("value", "")):
                    if used not in known:
                        yield f"{where}: {variable['name']} uses {used} before it is defined"
                known.add(variable["name"])
            for text in (*container.get("command", ()), *container.get("args", ())):
                for used in re.findall(r"\$\((\w+)\)", text):
                    if used not in known:
                        yield f"{where}: {used} in {text!r} is not defined"


def probes_find_their_port(thing: Json) -> Iterator[str]:
    """A gRPC probe has a number, not a name, for its port (Kubernetes API)."""
    for name, pod in pods(thing):
        for container in containers(pod):
            ports = {port["containerPort"] for port in container.get("ports", ())}
            for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
                grpc = container.get(kind, {}).get("grpc")
                if grpc and grpc["port"] not in ports:
                    yield f"{name}/{container['name']}: {kind} asks port {grpc['port']!r}"


def restarts_are_possible(thing: Json) -> Iterator[str]:
    """Kubernetes' validation: ``restartPolicyRules`` come with a ``restartPolicy`` of their own.

    A sidecar is always restarted, so rules for it would mean nothing.
    """
    for name, pod in pods(thing):
        for container in containers(pod):
            policy = container.get("restartPolicy")
            if container.get("restartPolicyRules") and policy in (None, "Always"):
                yield f"{name}/{container['name']}: restartPolicyRules with {policy}"


def requests_fit_limits(thing: Json) -> Iterator[str]:
    """Kubernetes' validation: a request is not above its limit; a device needs the same limit."""
    for name, pod in pods(thing):
        for container in containers(pod):
            resources = container.get("resources", {})
            limits = resources.get("limits", {})
            for what, request in resources.get("requests", {}).items():
                limit, is_device = limits.get(what), "/" in what
                above = limit and value_of(request) > value_of(limit)
                if above or (is_device and request != limit):
                    yield f"{name}/{container['name']}: {what} {request} of {limit}"


def keys_are_matched_once(thing: Json) -> Iterator[str]:
    """Kubernetes' validation: a key of ``matchLabelKeys`` is not in the label selector too."""
    for name, pod in pods(thing):
        affinity = pod["spec"].get("affinity", {}).get("podAffinity", {})
        terms = [
            *pod["spec"].get("topologySpreadConstraints", ()),
            *affinity.get("requiredDuringSchedulingIgnoredDuringExecution", ()),
            *(
                each["podAffinityTerm"]
                for each in affinity.get("preferredDuringSchedulingIgnoredDuringExecution", ())
            ),
        ]
        for term in terms:
            labels = term["labelSelector"].get("matchLabels", {})
            for key in term.get("matchLabelKeys", ()):
                if key in labels:
                    yield f"{name}: {key} is in matchLabelKeys and in labelSelector"


def shards_fit_their_volume(thing: Json) -> Iterator[str]:
    """A cache node fills as much memory as its volume has, no more and no less."""
    for name, pod in pods(thing):
        sizes = {
            volume["name"]: volume["emptyDir"]["sizeLimit"]
            for volume in pod["spec"].get("volumes", ())
            if volume.get("emptyDir", {}).get("sizeLimit")
        }
        for container in containers(pod):
            if container.get("command") != CACHE_COMMAND:
                continue
            mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
            limit = memory_bytes(container["resources"]["limits"]["memory"])
            size = sizes.get(mounts.get("/cache", ""), "0Gi")
            if memory_bytes(size) != shard_bytes(limit):
                yield f"{name}: sizeLimit {size}, but {shard_bytes(limit)} bytes for shards"


def no_mesh_joins_pods(thing: Json) -> Iterator[str]:
    """Istio's injection webhook: a label, and for old versions an annotation (istio.io).

    Its proxy neither ends with a Job's container nor passes pod addresses on.
    """
    for name, pod in pods(thing):
        for key in ("labels", "annotations"):
            value = pod.get("metadata", {}).get(key, {}).get("sidecar.istio.io/inject")
            if value != "false":
                yield f"{name}: {key} must have sidecar.istio.io/inject 'false', got {value!r}"


def callers_are_known(thing: Json) -> Iterator[str]:
    """A cache node accepts ServiceAccount tokens only, and all who talk to it have one.

    The kubelet writes and renews tokens of projected volumes (kubernetes.io). Only nodes have one
    for the API server, for the keys of the others.
    """
    for name, pod in pods(thing):
        projected = {
            volume["name"]: volume["projected"]["sources"]
            for volume in pod["spec"].get("volumes", ())
            if "projected" in volume
        }
        for container in containers(pod):
            where = f"{name}/{container['name']}"
            is_node = container.get("command") == CACHE_COMMAND
            variables = env_of(container) if "env" in container else {}
            calls = "CACHE_ENDPOINT" in variables or container.get("command") == ["cachectl"]
            if not (is_node or calls):
                continue
            found = {
                f"{mount['mountPath']}/{source['serviceAccountToken']['path']}": (
                    source["serviceAccountToken"].get("audience")
                )
                for mount in container["volumeMounts"]
                for source in projected.get(mount["name"], ())
                if "serviceAccountToken" in source and mount.get("readOnly")
            }
            token = variables.get("CACHE_TOKEN_FILE")
            if found.pop(token, None) != "data-cache":
                yield f"{where}: CACHE_TOKEN_FILE is no token for data-cache, got {token!r}"
            if is_node:
                arguments = [text.partition("=") for text in container["args"]]
                options = {option: value for option, _, value in arguments}
                if "--insecure" in options or not options.keys() & {"--auth-pods", "--auth-jwt"}:
                    yield f"{where}: every caller may do everything"
                found.pop(f"{options.get('--service-account-dir')}/token", None)
            if found:
                yield f"{where}: has other tokens, {sorted(found)}"


POD_RULES: tuple[Rule, ...] = (
    callers_are_known,
    no_mesh_joins_pods,
    pods_are_restricted,
    mounts_have_volumes,
    variables_are_defined,
    probes_find_their_port,
    restarts_are_possible,
    requests_fit_limits,
    keys_are_matched_once,
    shards_fit_their_volume,
)
