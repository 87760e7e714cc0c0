"""The loopback address of each pod, and of each DNS name of a cluster. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

Json = dict[str, Any]


class PodName(NamedTuple):
    """What a cluster's DNS calls a pod; it stays when another pod takes its place."""

    namespace: str
    subdomain: str
    hostname: str


class Addresses:
    """An address of ``127.x.0.0/16`` for each name, given at the first question."""

    def __init__(self, network: str) -> None:
        self._network = network  # such as 127.77
        self._known: dict[PodName, str] = {}

    def of(self, name: PodName) -> str:
        number = len(self._known) + 2
        return self._known.setdefault(name, f"{self._network}.{number >> 8}.{number & 255}")


def pod_names(jobsets: Iterable[Json], stateful_sets: Iterable[Json]) -> Iterator[PodName]:
    """Every pod that these objects make, whether it runs already or not."""
    for jobset in jobsets:
        name, namespace = jobset["metadata"]["name"], jobset["metadata"]["namespace"]
        network = jobset["spec"].get("network") or {}
        for job in jobset["spec"]["replicatedJobs"]:
            spec = job["template"]["spec"]
            for replica in range(job.get("replicas", 1)):
                for index in range(spec.get("completions") or spec.get("parallelism") or 1):
                    host = f"{name}-{job['name']}-{replica}-{index}"
                    yield PodName(namespace, network.get("subdomain") or name, host)
    for stateful_set in stateful_sets:
        meta, spec = stateful_set["metadata"], stateful_set["spec"]
        for index in range(spec.get("replicas", 1)):
            host = f"{meta['name']}-{index}"
            yield PodName(meta["namespace"], spec.get("serviceName") or "", host)


def labels(stateful_sets: Iterable[Json]) -> dict[PodName, dict[str, str]]:
    """The labels of the pods of StatefulSets, which Services select."""
    return {
        name: {
            **stateful_set["spec"]["template"]["metadata"]["labels"],
            "statefulset.kubernetes.io/pod-name": name.hostname,
        }
        for stateful_set in stateful_sets
        for name in pod_names((), [stateful_set])
    }


def dns(
    namespace: str,
    pods: Iterable[PodName],
    services: Iterable[Json],
    labels: Mapping[PodName, Mapping[str, str]],
    addresses: Addresses,
) -> dict[str, str]:
    """What a pod of ``namespace`` finds under each name.

    A Service means the first pod that its selector selects. Its ports are those of the pods.

    Args:
        labels: of each pod that a selector may select.
    """
    found: dict[str, str] = {}

    def add(name: str, of: str, address: str) -> None:
        found.update((f"{name}{end}", address) for end in _suffixes(of))
        if of == namespace:
            found[name] = address

    for pod in pods:
        if pod.subdomain:
            add(f"{pod.hostname}.{pod.subdomain}", pod.namespace, addresses.of(pod))
    for service in services:
        selector = (service["spec"].get("selector") or {}).items()
        for pod in sorted(labels):
            of = service["metadata"]["namespace"]
            if selector and pod.namespace == of and selector <= labels[pod].items():
                add(service["metadata"]["name"], of, addresses.of(pod))
                break
    return found


def _suffixes(namespace: str) -> Iterator[str]:
    for end in ("", ".svc", ".svc.cluster.local"):
        yield f".{namespace}{end}"
