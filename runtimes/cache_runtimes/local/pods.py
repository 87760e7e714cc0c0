"""A JobSet's pods -> what each of their containers runs on this around. Pure.

A container here is a process without an image and without namespaces. What would differ inside a
container is therefore written into its command, its arguments and its environment:

- the DNS name of a pod becomes a loopback address of its own, ``127.x.y.z``;
- a mount path becomes the directory that stands for the volume;
- the ports that a trainer's framework binds on every address become ports that are free, because
  all pods share one around.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from cache_protocol.errors import ConfigError
from cache_runtimes.local.render import COMPLETION_INDEX, JOBSET_LABEL, containers, pod_spec

Json = dict[str, Any]

_REFERENCE = re.compile(r"\$(\$|\(([^()]+)\))")
_KEYED_FIELD = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
_BEFORE_A_NAME = r"(?<![\w.-])"
_AFTER_A_NAME = r"(?![\w-]|\.\w)"


@dataclass(frozen=True)
class Pod:
    """One pod of a JobSet.

    Attributes:
        name: as its logs show it, without the random suffix of a cluster.
        host: its DNS name in the namespace.
        address: the loopback address that stands for it.
        job: the replicated job as the JobSet has it.
        replica: which of the replicated job's Jobs it is of.
        index: its completion index.
    """

    name: str
    host: str
    address: str
    job: Json
    replica: int
    index: int
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    namespace: str

    @property
    def spec(self) -> Json:
        """The pod spec."""
        return pod_spec(self.job)


@dataclass(frozen=True)
class Surroundings:
    """What a pod finds on this machine and in its namespace.

    Attributes:
        secrets, config_maps: the values of each, by name.
        environment: what stands for the environment of the images.
        extra_environment: set in every container, over what the manifests say.
        memory_bytes: of a container without a limit.
        cpu_count: of a container without a limit.
        ports: port numbers of frameworks -> the free ones that stand for them.
        hosts: names outside of the job, such as ``data-cache.data-cache-system:50051`` -> where
            that is here.
        find_program: the path of a program, None where there is none.
    """

    secrets: Mapping[str, Mapping[str, str]] = field(repr=False)
    config_maps: Mapping[str, Mapping[str, str]]
    environment: Mapping[str, str]
    extra_environment: Mapping[str, str]
    memory_bytes: int
    cpu_count: int
    ports: Mapping[int, int]
    hosts: Mapping[str, str]
    find_program: Callable[[str], str | None]


@dataclass(frozen=True)
class Process:
    """What a container runs.

    Attributes:
        container: its object in the pod spec; commands of probes and hooks as they run here.
        argv: the program and its arguments.
        environment: all of it.
        directory: where it starts.
    """

    container: Json
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    directory: PurePath


def pods(jobset: Json, address: Callable[[int], str]) -> list[Pod]:
    """Every pod of a JobSet, in the order of its jobs and indexes.

    Args:
        jobset: as `render` makes it.
        address: the number of a pod -> its loopback address.
    """
    metadata = jobset["metadata"]
    subdomain = (jobset["spec"].get("network") or {}).get("subdomain") or metadata["name"]
    found: list[Pod] = []
    for job in jobset["spec"]["replicatedJobs"]:
        template = job["template"]["spec"]["template"].get("metadata") or {}
        for replica in range(job.get("replicas", 1)):
            for index in range(job["template"]["spec"]["completions"]):
                name = f"{metadata['name']}-{job['name']}-{replica}-{index}"
                found.append(
                    Pod(
                        name=name,
                        host=f"{name}.{subdomain}",
                        address=address(len(found)),
                        job=job,
                        replica=replica,
                        index=index,
                        labels={
                            **(template.get("labels") or {}),
                            f"{JOBSET_LABEL}jobset-name": metadata["name"],
                            f"{JOBSET_LABEL}replicatedjob-name": job["name"],
                            f"{JOBSET_LABEL}job-index": str(replica),
                            COMPLETION_INDEX: str(index),
                        },
                        annotations={
                            **(template.get("annotations") or {}),
                            f"{JOBSET_LABEL}jobset-name": metadata["name"],
                            COMPLETION_INDEX: str(index),
                        },
                        namespace=metadata.get("namespace", "default"),
                    )
                )
    return found


def processes(
    pod: Pod,
    all_pods: Iterable[Pod],
    volumes: Mapping[str, PurePath],
    around: Surroundings,
    *,
    home: PurePath,
) -> dict[str, Process]:
    """What each container of a pod runs, by its name.

    Args:
        volumes: the directory of each volume of the pod.
        home: a directory of the pod's own, for what has no volume.

    Raises:
        ConfigError: naming the container and what of it cannot be run here.
    """
    all_pods = tuple(all_pods)
    names = _host_rule(all_pods)
    others = _substitution(around.hosts, _BEFORE_A_NAME, _AFTER_A_NAME)
    found: dict[str, Process] = {}
    for container in containers(pod.job):
        where = f"{pod.name}/{container['name']}"
        paths = _path_rule(container, volumes, where)
        rewrite = _Rewriting((names, others, paths, _port_rule(all_pods, around.ports)))
        env = _environment(pod, container, around)
        argv = [
            rewrite(_expanded(text, env))
            for text in (*(container.get("command") or ()), *(container.get("args") or ()))
        ]
        if not container.get("command"):
            raise ConfigError(
                f"{where} has no command: run-local has no images, so each container must say its "
                "program"
            )
        program = around.find_program(argv[0])
        if program is None:
            raise ConfigError(f"{where}: no program {argv[0]!r} on this machine's PATH")
        given = {name: _port(name, rewrite(value), around.ports) for name, value in env.items()}
        directory = container.get("workingDir")
        environment = {
            **around.environment,
            **{"HOME": str(home), "TMPDIR": str(home), "HOSTNAME": pod.name},
            **given,
            **around.extra_environment,
        }
        found[container["name"]] = Process(
            container=_with_commands(container, rewrite),
            argv=(program, *argv[1:]),
            environment=environment | _no_proxy(environment, all_pods, around.hosts),
            directory=PurePath(paths(directory)) if directory else home,
        )
    return found


def _with_commands(container: Json, rewrite: Callable[[str], str]) -> Json:
    """The container, with the commands of its probes and hooks rewritten.

    In a probe's, ``$(NAME)`` is what ``env`` says, and nothing where it says ``valueFrom``; a
    hook's stays as it is: pkg/kubelet/prober/prober.go and pkg/kubelet/lifecycle/handlers.go.
    """
    literal = {item["name"]: item.get("value") or "" for item in container.get("env") or ()}
    changed: Json = {}
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        if "exec" in (container.get(name) or {}):
            command = [_expanded(text, literal) for text in container[name]["exec"]["command"]]
            changed[name] = {**container[name], "exec": {"command": [*map(rewrite, command)]}}
    hook = (container.get("lifecycle") or {}).get("preStop") or {}
    if "exec" in hook:
        command = [*map(rewrite, hook["exec"]["command"])]
        changed["lifecycle"] = {**container["lifecycle"], "preStop": {"exec": {"command": command}}}
    return {**container, **changed}


def _no_proxy(
    environment: Mapping[str, str], all_pods: Iterable[Pod], hosts: Mapping[str, str]
) -> dict[str, str]:
    """The variables by which programs reach pods without a proxy, where there is a proxy.

    One by one: gRPC knows networks such as 127.1.2.0/24 too, but Python's urllib does not.
    """
    if not any(name.lower().endswith("_proxy") for name in environment):
        return {}
    here = [pod.address for pod in all_pods]
    here += dict.fromkeys(address.rpartition(":")[0] or address for address in hosts.values())
    names = ["no_proxy", "NO_PROXY", *({"no_grpc_proxy"} & environment.keys())]
    return {name: ",".join(filter(None, (environment.get(name), *here))) for name in names}


class _Rewriting:
    """Several rewritings of a text, one after the other."""

    def __init__(self, rules: tuple[Callable[[str], str], ...]) -> None:
        self._rules = rules

    def __call__(self, text: str) -> str:
        for rule in self._rules:
            text = rule(text)
        return text


def _host_rule(all_pods: Iterable[Pod]) -> Callable[[str], str]:
    addresses: dict[str, str] = {}
    for pod in all_pods:
        for suffix in (f".{pod.namespace}.svc.cluster.local", f".{pod.namespace}.svc", ""):
            addresses[pod.host + suffix] = pod.address
    return _substitution(addresses, _BEFORE_A_NAME, _AFTER_A_NAME)


def _path_rule(
    container: Json, volumes: Mapping[str, PurePath], where: str
) -> Callable[[str], str]:
    directories: dict[str, str] = {}
    for mount in container.get("volumeMounts") or ():
        if mount["name"] not in volumes:
            raise ConfigError(f"{where}: volumeMount {mount['name']!r} has no volume")
        if mount.get("subPathExpr"):
            raise ConfigError(f"{where}: subPathExpr of {mount['name']!r} is not run locally")
        directory = volumes[mount["name"]] / (mount.get("subPath") or "")
        directories[mount["mountPath"].rstrip("/")] = str(directory)
    return _substitution(directories, r"(?<![\w./-])", r"(?![\w.-])")


def _port_rule(all_pods: Iterable[Pod], ports: Mapping[int, int]) -> Callable[[str], str]:
    """ADDRESS:PORT of a framework, after the names have become addresses."""
    places = {
        f"{pod.address}:{port}": f"{pod.address}:{free}"
        for pod in all_pods
        for port, free in ports.items()
    }
    return _substitution(places, _BEFORE_A_NAME, r"(?!\d)")


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


def _environment(
    pod: Pod,
    container: Json,
    around: Surroundings,
) -> dict[str, str]:
    """As a kubelet makes it: envFrom, then env in order, each may refer to earlier ones."""
    where = f"{pod.name}/{container['name']}"
    env: dict[str, str] = {"JOB_COMPLETION_INDEX": str(pod.index)}
    for source in container.get("envFrom") or ():
        kind, known = "configMapRef", around.config_maps
        if "secretRef" in source:
            kind, known = "secretRef", around.secrets
        reference = source.get(kind) or {}
        values = known.get(reference.get("name", ""))
        if values is None and not reference.get("optional"):
            raise ConfigError(_missing(where, kind.removesuffix("Ref"), reference.get("name")))
        for name, value in (values or {}).items():
            env[source.get("prefix", "") + name] = value
    for item in container.get("env") or ():
        given: str | None = _expanded(item.get("value") or "", env)
        if item.get("valueFrom") is not None:
            given = _value_from(item["valueFrom"], pod, container, around)
        if given is not None:
            env[item["name"]] = given
    return env


def _value_from(
    source: Json,
    pod: Pod,
    container: Json,
    around: Surroundings,
) -> str | None:
    where = f"{pod.name}/{container['name']}"
    if "fieldRef" in source:
        return _field(source["fieldRef"]["fieldPath"], pod, where)
    if "resourceFieldRef" in source:
        return _resource(source["resourceFieldRef"], pod, container, around, where)
    for key, known in (
        ("secretKeyRef", around.secrets),
        ("configMapKeyRef", around.config_maps),
    ):
        if key in source:
            reference = source[key]
            value = known.get(reference["name"], {}).get(reference["key"])
            if value is None and not reference.get("optional"):
                name = f"{reference['name']}.{reference['key']}"
                raise ConfigError(_missing(where, key.removesuffix("KeyRef"), name))
            return value
    raise ConfigError(f"{where}: run-local does not know valueFrom {', '.join(source)}")


def _missing(where: str, kind: str, name: str | None) -> str:
    return (
        f"{where} needs the {kind} {name!r}: put it into the file of the TrainJob, as a document "
        "of its own"
    )


def _field(path: str, pod: Pod, where: str) -> str:
    keyed = _KEYED_FIELD.fullmatch(path)
    if keyed:
        return (pod.labels if keyed[1] == "labels" else pod.annotations).get(keyed[2], "")
    known: dict[str, str] = {
        "metadata.name": pod.name,
        "metadata.namespace": pod.namespace,
        "metadata.uid": pod.name,
        "spec.nodeName": "localhost",
        "spec.serviceAccountName": pod.spec.get("serviceAccountName", "default"),
        "status.hostIP": "127.0.0.1",
        "status.podIP": pod.address,
        "status.podIPs": pod.address,
    }
    if path not in known:
        raise ConfigError(f"{where}: run-local does not know the field {path!r}")
    return known[path]


def _resource(reference: Json, pod: Pod, container: Json, around: Surroundings, where: str) -> str:
    kind, _, name = reference["resource"].partition(".")
    of = reference.get("containerName", container["name"])
    resources = next(c for c in containers(pod.job) if c["name"] == of).get("resources") or {}
    given = (resources.get(kind) or {}).get(name)
    if given is None and name == "memory":
        given = around.memory_bytes
    elif given is None and name == "cpu":
        given = around.cpu_count
    if given is None or kind not in ("limits", "requests"):
        raise ConfigError(f"{where}: run-local does not know {reference['resource']!r}")
    divisor = parse_quantity(str(reference.get("divisor") or 1)) or 1
    return str(-(-int(parse_quantity(str(given)) * 1000) // int(divisor * 1000)))


def _expanded(text: str, env: Mapping[str, str]) -> str:
    """``$(NAME)`` of a known variable; ``$$`` is a dollar sign; others stay as they are."""

    def value(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return env.get(match[2], match[0])

    return _REFERENCE.sub(value, text)
