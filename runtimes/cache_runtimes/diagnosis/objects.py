"""Reads the objects of a TrainJob with the rights of the caller's kubeconfig."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kubernetes.client import ApiClient, ApiException, Configuration
from kubernetes.config import ConfigException, list_kube_config_contexts, load_kube_config
from urllib3.exceptions import HTTPError

from cache_protocol.errors import ConfigError, NodeUnavailableError
from cache_runtimes.diagnosis.findings import Objects
from cache_runtimes.initializer.plan import JOB_LABEL
from cache_runtimes.local.trainer.jobset import JOBSET_LABEL

Json = dict[str, Any]

_NOT_FOUND = 404
_TRAINER = "apis/trainer.kubeflow.org/v1alpha1"
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
        jobsets = {each["metadata"]["name"]: each for each in reading.list(_JOBSET, "jobsets")}
        of_jobset, of_cache = f"{JOBSET_LABEL}jobset-name={name}", f"{JOB_LABEL}={name}"
        pods = [*reading.list("api/v1", "pods", of_jobset)]
        pods += reading.list("api/v1", "pods", of_cache)
        return namespace, Objects(
            train_job=by_name[name],
            train_jobs=sorted(by_name),
            jobset=jobsets.get(name),
            jobs=reading.list("apis/batch/v1", "jobs", of_jobset),
            pods=pods,
            events=reading.list("api/v1", "events"),
            refused=reading.refused,
        )


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
        path = f"/{group}/namespaces/{self._namespace}/{plural}"
        query = [("labelSelector", selector)] if selector else []
        try:
            answer = self._api.call_api(
                path,
                "GET",
                query_params=query,
                header_params={"Accept": "application/json"},
                auth_settings=["BearerToken"],
                _preload_content=False,
                _return_http_data_only=True,
                _request_timeout=self._timeout_s,
            )
        except ApiException as error:
            if error.status == _NOT_FOUND:
                self.refused[plural] = f"this cluster has no {plural}: Trainer is not installed"
            else:
                self.refused[plural] = f"{error.status} {error.reason}"
            return []
        except HTTPError as error:
            raise NodeUnavailableError(
                f"the API server at {self._api.configuration.host} does not answer: {error}"
            ) from None
        found: list[Json] = json.loads(answer.data).get("items") or []
        return found
