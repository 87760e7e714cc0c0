"""The Lease and the ConfigMaps of one cache in Kubernetes; the only importer of its client here."""

from __future__ import annotations

import base64
import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from cache_protocol.errors import ConfigError, missing_package
from cache_server.auth.kubernetes import Cluster
from cache_server.election.lease import Lease
from cache_server.election.objects import (
    LEASE_TIMEOUT_S,
    TIMEOUT_S,
    ConflictError,
    RefusedError,
    StoredMap,
)

_NOT_FOUND, _CONFLICT = 404, 409
_MAY_PASS = (408, 429)  # of the answers below 500
_PAGE = 50  # ConfigMaps in one answer
_CATALOGUE = "trainer-data-cache/catalogue"
_CONTENT = "content"


class ClusterObjects:
    """An `ElectionStore` of Kubernetes.

    Args:
        cluster: of this pod. Outside of a pod, the current context of its kubeconfig counts.
        namespace, name: of the Lease; its ConfigMaps have a label with the name.

    Raises:
        ConfigError: neither is there, or the package is missing.
    """

    kind = "configmap"

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        try:
            from kubernetes import client
        except ModuleNotFoundError as error:
            raise ConfigError(missing_package(error, "--leader-election", "election")) from None
        self.name = name
        self._namespace = namespace
        configuration = client.Configuration()
        configuration.retries = False
        _set_up(cluster, configuration)
        api = client.ApiClient(configuration)
        self._core, self._leases = client.CoreV1Api(api), client.CoordinationV1Api(api)

    def read_lease(self) -> Lease | None:
        """See `LeaseStore`."""
        found = self._get(self._leases.read_namespaced_lease, self.name, LEASE_TIMEOUT_S)
        if found is None:
            return None
        spec = found.spec
        return Lease(
            spec.holder_identity or "",
            float(spec.lease_duration_seconds or 0),
            found.metadata.resource_version,
            spec.lease_transitions or 0,
        )

    def write_lease(self, before: Lease | None, holder: str, duration_s: float) -> Lease:
        """See `LeaseStore`."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        is_new = before is None or before.holder != holder
        transitions = 0 if before is None else before.transitions + is_new
        spec: dict[str, Any] = {
            "holderIdentity": holder,
            "leaseDurationSeconds": round(duration_s),
            "leaseTransitions": transitions,
            "renewTime": now,
        }
        if is_new:
            spec["acquireTime"] = now
        body = {
            "metadata": self._metadata(self.name, before.version if before else ""),
            "spec": spec,
        }
        with _errors():
            if before is None:
                call = self._leases.create_namespaced_lease
                made = call(self._namespace, body, _request_timeout=LEASE_TIMEOUT_S)
            else:
                call = self._leases.replace_namespaced_lease
                made = call(self.name, self._namespace, body, _request_timeout=LEASE_TIMEOUT_S)
        version = made.metadata.resource_version
        return Lease(holder, float(round(duration_s)), version, transitions)

    def read_map(self, name: str) -> StoredMap | None:
        """See `ElectionStore`."""
        found = self._get(self._core.read_namespaced_config_map, name)
        return None if found is None else _stored(found)

    def maps(self) -> Iterator[StoredMap]:
        """See `ElectionStore`."""
        more = ""
        while True:
            with _errors():
                page = self._core.list_namespaced_config_map(
                    self._namespace,
                    label_selector=f"{_CATALOGUE}={self.name}",
                    limit=_PAGE,
                    **({"_continue": more} if more else {}),
                    _request_timeout=TIMEOUT_S,
                )
            yield from map(_stored, page.items)
            more = page.metadata._continue
            if not more:
                return

    def write_map(self, wanted: StoredMap) -> StoredMap:
        """See `ElectionStore`."""
        body = {
            "metadata": {
                **self._metadata(wanted.name, wanted.version),
                "annotations": dict(wanted.notes),
            },
            "binaryData": {_CONTENT: base64.b64encode(wanted.content).decode()},
        }
        with _errors():
            if not wanted.version:
                made = self._core.create_namespaced_config_map(
                    self._namespace, body, _request_timeout=TIMEOUT_S
                )
            else:
                made = self._core.replace_namespaced_config_map(
                    wanted.name, self._namespace, body, _request_timeout=TIMEOUT_S
                )
        return _stored(made)

    def remove_map(self, name: str) -> None:
        """See `ElectionStore`."""
        delete = self._core.delete_namespaced_config_map
        self._get(delete, name)

    def _get(
        self, call: Callable[..., Any], name: str, timeout_s: tuple[float, float] = TIMEOUT_S
    ) -> Any:
        """The answer of a call about an object; None: there is none."""
        from kubernetes.client.exceptions import ApiException

        with _errors():
            try:
                return call(name, self._namespace, _request_timeout=timeout_s)
            except ApiException as error:
                if error.status != _NOT_FOUND:
                    raise
                return None

    def _metadata(self, name: str, version: str) -> dict[str, Any]:
        return {
            "name": name,
            "labels": {_CATALOGUE: self.name, "app.kubernetes.io/part-of": "trainer-data-cache"},
            **({"resourceVersion": version} if version else {}),
        }


def _stored(found: Any) -> StoredMap:
    metadata = found.metadata
    return StoredMap(
        metadata.name,
        base64.b64decode((found.binary_data or {}).get(_CONTENT, "")),
        metadata.annotations or {},
        metadata.resource_version,
        metadata.creation_timestamp.timestamp() if metadata.creation_timestamp else 0.0,
    )


def _set_up(cluster: Cluster, configuration: Any) -> None:
    """Where the API server is, and what this process shows to it."""
    from kubernetes import config
    from kubernetes.config.config_exception import ConfigException
    from kubernetes.config.incluster_config import InClusterConfigLoader

    try:
        if cluster.address is None:
            config.load_kube_config(cluster.kubeconfig, client_configuration=configuration)
        else:
            InClusterConfigLoader(
                str(cluster.directory / "token"), str(cluster.directory / "ca.crt")
            ).load_and_set(configuration)
    except ConfigException as error:
        raise ConfigError(
            f"--leader-election kubernetes needs the API of a cluster: {error}. Run the node in a "
            "pod with a token of its ServiceAccount, or set KUBECONFIG"
        ) from None


@contextmanager
def _errors() -> Iterator[None]:
    """Turns the errors of the client into an `OSError` with a reason."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        kind: type[OSError] = OSError
        if error.status == _CONFLICT:
            kind = ConflictError
        elif error.status is not None and 400 <= error.status < 500:
            kind = OSError if error.status in _MAY_PASS else RefusedError
        raise kind(errno.EIO, f"the API server answers {error.status} {error.reason}") from None
    except HTTPError as error:
        raise OSError(errno.EIO, f"the API server does not answer: {error}") from None
