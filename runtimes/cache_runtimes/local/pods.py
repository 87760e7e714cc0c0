"""A JobSet's pods -> the process of each container. Pure.

A container here is a process without an image and without namespaces. Its command, arguments and
environment are therefore rewritten:

- the DNS name of a pod becomes a loopback address, ``127.x.y.z``;
- a mount path becomes the directory of the volume, and the home of MPI's image that of the pod;
- one token takes the place of the tokens of a cluster, if there is one (`Surroundings.token`);
- the port of a trainer's framework becomes a free one, because all pods share one machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, NamedTuple, TypeVar

from kubernetes.utils.quantity import parse_quantity

from cache_protocol.errors import ConfigError
from cache_runtimes.local.supported import UnsupportedFieldError
from cache_runtimes.local.trainer.info import COMPLETION_INDEX, containers, pod_spec
from cache_runtimes.local.trainer.jobset import JOBSET_LABEL

Json = dict[str, Any]
_T = TypeVar("_T")
Objects = Mapping[str, Mapping[str, str]]  # the values of Secrets or ConfigMaps, by their names

# In the environment of every process of a container, so that none is left behind.
MARK = "RUN_LOCAL_CONTAINER"
SSH_KEYS = "mpi-ssh-auth"  # the volume that makes a pod one of MPI
_MPI_HOME = "/home/mpiuser"  # in the image of MPI
_TOKEN = "CACHE_TOKEN"
_TOKEN_FILE = "CACHE_TOKEN_FILE"
_OF_CLUSTER = ("--auth-pods=", "--service-account-dir=")  # arguments of cache nodes
_OWNER_BITS = 0o700
_REFERENCE = re.compile(r"\$(\$|\(([^()]+)\))")


@dataclass(frozen=True)
class Pod:
    """One pod of a JobSet."""

    jobset: str
    namespace: str
    name: str  # without the random suffix that a cluster adds
    address: str  # of the loopback network
    job: Json  # its replicated job
    index: int  # its completion index

    @property
    def host(self) -> str:
        """Its DNS name in the namespace."""
        return f"{self.name}.{self.jobset}"

    @property
    def spec(self) -> Json:
        """Its pod spec."""
        return pod_spec(self.job)

    @property
    def annotations(self) -> dict[str, str]:
        """Those that its template gives it."""
        template = self.job["template"]["spec"]["template"]
        return (template.get("metadata") or {}).get("annotations") or {}


@dataclass(frozen=True)
class Surroundings:
    """What pods find on this machine."""

    secrets: Objects = field(repr=False)
    environment: Mapping[str, str]  # replaces that of the images
    extra_environment: Mapping[str, str]  # overrides the manifests in every container
    ports: Mapping[int, int]  # of frameworks -> the free ports that replace them
    hosts: Mapping[str, str]  # names outside the job -> addresses on this machine
    find_program: Callable[[str], str | None]  # the path of a program
    token: str | None = field(default=None, repr=False)  # shared by all nodes and trainers


@dataclass(frozen=True)
class Process:
    """The process of a container: program and arguments, whole environment, first directory."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    directory: PurePath


def pods(jobset: Json, address: Callable[[int], str]) -> list[Pod]:
    """Every pod of a rendered JobSet, in the order of its jobs and indexes.

    Args:
        address: the number of a pod -> its loopback address.
    """
    name, namespace = jobset["metadata"]["name"], jobset["metadata"]["namespace"]
    found: list[Pod] = []
    for job in jobset["spec"]["replicatedJobs"]:
        for index in range(job["template"]["spec"]["completions"]):
            pod_name = f"{name}-{job['name']}-0-{index}"
            found.append(Pod(name, namespace, pod_name, address(len(found)), job, index))
    return found


def processes(
    pod: Pod,
    all_pods: Sequence[Pod],
    volumes: Mapping[str, PurePath],
    around: Surroundings,
    *,
    home: PurePath,
) -> dict[str, Process]:
    """The process of each container of a pod, by the container's name.

    Args:
        volumes: the directory of each volume of the pod.
        home: a directory of the pod, for files outside its volumes.

    Raises:
        ConfigError: naming the container, and what of it cannot be run here.
    """
    with_names = _names_replaced(_addresses(all_pods, around))
    is_mpi = SSH_KEYS in volumes
    found: dict[str, Process] = {}
    for container in containers(pod.job):
        where = f"{pod.name}/{container['name']}"
        directories = _directories(container, volumes, where)
        if is_mpi:
            directories[_MPI_HOME] = str(home)
        with_paths = _substitution(directories, r"(?<![\w./-])", r"(?![\w.-])")
        env = _environment(pod, container, around.secrets, where)
        if around.token is not None and _TOKEN_FILE not in env:
            env.setdefault(_TOKEN, around.token)
        if not container.get("command"):
            raise ConfigError(
                f"{where} has no command: run-local has no images, so each container must name "
                "its program"
            )
        program, *arguments = (
            with_paths(with_names(_expanded(text, env)))
            for text in (*container["command"], *(container.get("args") or ()))
            if around.token is None or not text.startswith(_OF_CLUSTER)
        )
        path = around.find_program(program)
        if path is None:
            raise ConfigError(f"{where}: no program {program!r} on this machine's PATH")
        environment = {
            **around.environment,
            **{"HOME": str(home), "TMPDIR": str(home), "HOSTNAME": pod.name},
            **({"PATH": f"{home}/bin:{around.environment['PATH']}"} if is_mpi else {}),
            **{
                name: _port(name, with_paths(with_names(value)), around.ports)
                for name, value in env.items()
            },
            **around.extra_environment,
            MARK: f"{home}/{container['name']}",
        }
        directory = container.get("workingDir")
        found[container["name"]] = Process(
            argv=(path, *arguments),
            environment=environment | _no_proxy(environment, all_pods, around.hosts),
            directory=PurePath(with_paths(directory)) if directory else home,
        )
    return found


def with_addresses(
    data: Mapping[str, str], pod: Pod, all_pods: Sequence[Pod], around: Surroundings
) -> dict[str, str]:
    """The values of MPI's ConfigMap, with the addresses of this machine for names of pods.

    The pod's own name becomes ``localhost``: mpirun starts processes there without ssh.
    """
    replaced = _names_replaced({**_addresses(all_pods, around), pod.host: "localhost"})
    return {name: replaced(text) for name, text in data.items()}


class VolumeFile(NamedTuple):
    """A file of a volume.

    Attributes:
        mode: the bits of the owner; ssh refuses a key that others may read.
    """

    text: str
    mode: int

    @classmethod
    def of(cls, text: str, item: Json, source: Json) -> VolumeFile:
        """With the mode of its item, of its volume, or of Kubernetes."""
        modes = (item.get("mode"), source.get("defaultMode"), 0o644)
        return cls(text, next(mode for mode in modes if mode is not None) & _OWNER_BITS)


def volume_files(
    volume: Json, pod: Pod, secrets: Objects, config_maps: Objects
) -> dict[str, VolumeFile]:
    """Each file of a volume of a Secret, a ConfigMap or annotations, by its path; else nothing.

    Raises:
        ConfigError: naming the object or the key that is absent, or the path that is not below the
            volume.
    """
    if source := volume.get("secret"):
        kind, name, known = "Secret", source["secretName"], secrets
    elif source := volume.get("configMap"):
        kind, name, known = "ConfigMap", source["name"], config_maps
    elif source := volume.get("downwardAPI"):
        # As a kubelet writes them, which escapes as Go does.
        lines = [
            f"{name}={json.dumps(text, ensure_ascii=False)}\n"
            for name, text in sorted(pod.annotations.items())
        ]
        return {
            each["path"]: VolumeFile.of("".join(lines), each, source) for each in source["items"]
        }
    else:
        return {}
    values = _known(known, name, f"{pod.name} needs the {kind}")
    items = source.get("items") or [{"key": key, "path": key} for key in values]
    needs = f"{pod.name} needs, in the {kind} {name!r}, the key"
    for item in source.get("items") or ():
        path = PurePath(item["path"])
        if path.is_absolute() or ".." in path.parts:
            raise ConfigError(
                f"{pod.name}: a path of volume {volume['name']!r} must be below it, "
                f"got {item['path']!r}"
            )
    return {
        item["path"]: VolumeFile.of(_known(values, item["key"], needs), item, source)
        for item in items
    }


def token_files(volume: Json, token: str) -> dict[str, VolumeFile]:
    """Each file of a volume that holds a token of the cluster, here ``token``."""
    projected = volume.get("projected") or {}
    tokens = (source.get("serviceAccountToken") for source in projected.get("sources") or ())
    return {
        each["path"]: VolumeFile.of(token, {}, projected) for each in tokens if each is not None
    }


def _addresses(all_pods: Iterable[Pod], around: Surroundings) -> dict[str, str]:
    """DNS names, with and without the port of a framework -> addresses."""
    found = dict(around.hosts)
    for each in all_pods:
        found[each.host] = each.address
        for port, free in around.ports.items():
            found[f"{each.host}:{port}"] = f"{each.address}:{free}"
    return found


def _names_replaced(addresses: Mapping[str, str]) -> Callable[[str], str]:
    # After a single slash stands a part of a path.
    return _substitution(addresses, r"(?<![\w.-])(?<![^/]/)(?<!^/)", r"(?![\w-]|\.\w)")


def _no_proxy(
    environment: Mapping[str, str], all_pods: Iterable[Pod], hosts: Mapping[str, str]
) -> dict[str, str]:
    """The variables by which programs reach pods past a proxy.

    They list addresses, not networks such as 127.1.2.0/24: Python's urllib does not know those.
    """
    if not any(name.lower().endswith("_proxy") for name in environment):
        return {}
    here = [pod.address for pod in all_pods]
    here += dict.fromkeys(address.rpartition(":")[0] or address for address in hosts.values())
    names = ["no_proxy", "NO_PROXY", *({"no_grpc_proxy"} & environment.keys())]
    return {name: ",".join(filter(None, (environment.get(name), *here))) for name in names}


def _directories(container: Json, volumes: Mapping[str, PurePath], where: str) -> dict[str, str]:
    """Mount paths -> directories."""
    found: dict[str, str] = {}
    for mount in container.get("volumeMounts") or ():
        if mount["name"] not in volumes:
            raise ConfigError(f"{where}: volumeMount {mount['name']!r} has no volume")
        found[mount["mountPath"].rstrip("/")] = str(volumes[mount["name"]])
    return found


def _port(name: str, value: str, ports: Mapping[int, int]) -> str:
    """The value of a variable such as PET_MASTER_PORT."""
    is_port = name.endswith("_PORT") and value.isdecimal()
    return str(ports.get(int(value), int(value))) if is_port else value


def _substitution(values: Mapping[str, str], before: str, after: str) -> Callable[[str], str]:
    if not values:
        return lambda text: text
    longest_first = sorted(values, key=len, reverse=True)
    pattern = re.compile(f"{before}({'|'.join(map(re.escape, longest_first))}){after}")
    return lambda text: pattern.sub(lambda match: values[match[1]], text)


def _environment(pod: Pod, container: Json, secrets: Objects, where: str) -> dict[str, str]:
    """As a kubelet makes it: envFrom, then env in order; each may refer to earlier ones."""
    env: dict[str, str] = {"JOB_COMPLETION_INDEX": str(pod.index)}
    for item in container.get("envFrom") or ():
        env |= _known(secrets, item["secretRef"]["name"], f"{where} needs the Secret")
    for item in container.get("env") or ():
        source = item.get("valueFrom") or {}
        if "fieldRef" in source:
            value = _field(source["fieldRef"]["fieldPath"], pod, where)
        elif "resourceFieldRef" in source:
            value = _memory_limit(container, where)
        elif "secretKeyRef" in source:
            name, key = source["secretKeyRef"]["name"], source["secretKeyRef"]["key"]
            values = _known(secrets, name, f"{where} needs the Secret")
            value = _known(values, key, f"{where} needs, in the Secret {name!r}, the key")
        else:
            value = _expanded(item.get("value") or "", env)
        env[item["name"]] = value
    return env


def _known(values: Mapping[str, _T], name: str, needs: str) -> _T:
    if name not in values:
        raise ConfigError(
            f"{needs} {name!r}: add it to the file of the TrainJob, as another document"
        )
    return values[name]


def _field(path: str, pod: Pod, where: str) -> str:
    known = {
        "metadata.name": pod.name,
        "metadata.namespace": pod.namespace,
        f"metadata.labels['{JOBSET_LABEL}jobset-name']": pod.jobset,
        f"metadata.annotations['{COMPLETION_INDEX}']": str(pod.index),
        "status.podIP": pod.address,
        "metadata.labels['topology.kubernetes.io/zone']": "",  # as of a machine without a zone
    }
    if path not in known:
        raise UnsupportedFieldError(f"run-local does not support {where}: fieldPath={path!r}")
    return known[path]


def _memory_limit(container: Json, where: str) -> str:
    limit = ((container.get("resources") or {}).get("limits") or {}).get("memory")
    if limit is None:
        raise UnsupportedFieldError(f"run-local does not support {where}: limits.memory=None")
    return str(bytes_of(limit))


def bytes_of(quantity: object) -> int:
    """A quantity of memory in bytes."""
    return int(parse_quantity(str(quantity)))


def _expanded(text: str, env: Mapping[str, str]) -> str:
    """Replaces ``$(NAME)`` of a known variable; ``$$`` is a dollar sign."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[1] == "$" else env.get(match[2], match[0])

    return _REFERENCE.sub(value, text)
