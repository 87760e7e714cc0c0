"""Reads the objects of a TrainJob with the rights of the caller's kubeconfig."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kubernetes.client import ApiClient, ApiException, Configuration
from kubernetes.config import ConfigException, list_kube_config_contexts, load_kube_config
from urllib3.exceptions import HTTPError

from cache_protocol.errors import ConfigError, NodeUnavailableError
from cache_runtimes.diagnosis.causes import silent
from cache_runtimes.diagnosis.owned import Objects, groups_of, name_of, own, uid_of
from cache_runtimes.initializer.plan import JOB_LABEL
from cache_runtimes.local.trainer.info import NODE
from cache_runtimes.local.trainer.jobset import JOBSET_LABEL

Json = dict[str, Any]

_NOT_FOUND = 404
_TRAINER = "apis/trainer.kubeflow.org/v1alpha1"
_MOST_LOGS = 4
_LOG_LINES = 200
_JOBSET = "apis/jobset.x-k8s.io/v1alpha2"


def read_objects(
    name: str, namespace: str | None, *, kubeconfig: str | None = None, timeout_s: float = 20.0
) -> tuple[str, Objects]:
    """Reads a TrainJob and what its controllers made of it.

    Args:
        namespace: None for that of the kubeconfig's context.
        kubeconfig: None for ``KUBECONFIG`` or ``~/.kube/config``.
        timeout_s: of each call.

    Returns:
        The namespace, and the objects. A kind that may not be read is in `Objects.refused`.

    Raises:
        ConfigError: there is no kubeconfig, or it is bad.
        NodeUnavailableError: the API server does not answer.
    """
    configuration = Configuration()
    try:
        load_kube_config(kubeconfig, client_configuration=configuration)
        context = _context(kubeconfig)
    except (ConfigException, OSError) as error:
        raise ConfigError(f"no cluster to ask: {error}") from None
    configuration.retries = False
    namespace = namespace or context
    with ApiClient(configuration) as api:
        reading = _Reading(api, namespace, timeout_s)
        jobs = reading.list(_TRAINER, "trainjobs")
        by_name = {job["metadata"]["name"]: job for job in jobs}
        if name not in by_name:
            return namespace, Objects(None, sorted(by_name), refused=reading.refused)
        of_jobset, of_cache = f"{JOBSET_LABEL}jobset-name={name}", f"{JOB_LABEL}={name}"
        pods = [*reading.list("api/v1", "pods", of_jobset)]
        cache_pods = reading.list("api/v1", "pods", of_cache)
        sets = reading.list("apis/apps/v1", "statefulsets", of_cache) if cache_pods else ()
        objects = Objects(
            train_job=by_name[name],
            train_jobs=sorted(by_name),
            jobsets=reading.list(_JOBSET, "jobsets"),
            stateful_sets=sets,
            jobs=reading.list("apis/batch/v1", "jobs", of_jobset),
            pods=[*pods, *cache_pods],
            events=reading.list("api/v1", "events"),
            refused=reading.refused,
        )
        objects = replace(objects, pod_groups=reading.pod_groups(own(objects).pods))
        asked = silent(own(objects).pods)[:_MOST_LOGS]
        return namespace, replace(objects, logs={uid_of(pod): reading.log(pod) for pod in asked})


def _context(kubeconfig: str | None) -> str:
    _, active = list_kube_config_contexts(kubeconfig)
    return str(active["context"].get("namespace") or "default")


class _Reading:
    """Lists kinds of one namespace, and remembers what was refused."""

    def __init__(self, api: ApiClient, namespace: str, timeout_s: float) -> None:
        self._api = api
        self._namespace = namespace
        self._timeout_s = timeout_s
        self.refused: dict[str, str] = {}

    def list(self, group: str, plural: str, selector: str = "") -> Sequence[Json]:
        query = [("labelSelector", selector)] if selector else []
        try:
            answer = self._get(f"/{group}/namespaces/{self._namespace}/{plural}", query)
        except ApiException as error:
            if error.status == _NOT_FOUND:
                self.refused[plural] = f"this cluster has no {plural}: Trainer is not installed"
            else:
                self.refused[plural] = f"{error.status} {error.reason}"
            return []
        found: list[Json] = json.loads(answer).get("items") or []
        return found

    def pod_groups(self, pods: Sequence[Json]) -> Sequence[Json]:
        """The PodGroups that waiting pods name."""
        named = groups_of(pods)
        return [
            group
            for api in sorted({api for api, _ in named})
            for group in self.list(api, "podgroups")
            if (api, name_of(group)) in named
        ]

    def log(self, pod: Json) -> str:
        """The end of the log of a trainer; empty where the caller or the kubelet has none."""
        path = f"/api/v1/namespaces/{self._namespace}/pods/{pod['metadata']['name']}/log"
        try:
            query = [("container", NODE), ("tailLines", str(_LOG_LINES))]
            return self._get(path, query).decode(errors="replace")
        except ApiException:
            return ""

    def _get(self, path: str, query: Sequence[tuple[str, str]]) -> bytes:
        try:
            answer = self._api.call_api(
                path,
                "GET",
                query_params=query,
                header_params={"Accept": "*/*"},
                auth_settings=["BearerToken"],
                _preload_content=False,
                _return_http_data_only=True,
                _request_timeout=self._timeout_s,
            )
        except HTTPError as error:
            raise NodeUnavailableError(
                f"the API server at {self._api.configuration.host} does not answer: {error}"
            ) from None
        return bytes(answer.data)
