"""What a ServiceAccount token says, and where a pod finds its cluster. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

# What Kubernetes adds to the name of a pod of a Job; its alphabet has no vowels (apimachinery).
_GENERATED = re.compile(r"-[bcdfghjklmnpqrstvwxz2456789]{5}$")

SERVICE_ACCOUNT_DIR = PurePath("/var/run/secrets/kubernetes.io/serviceaccount")


class Cluster(NamedTuple):
    """Where a pod finds the API server of its cluster.

    Attributes:
        address: ``https://HOST:PORT``; None: this process is not in a pod.
        directory: of the files ``token`` and ``ca.crt``, for calls to that address.
        kubeconfig: of a process that is not in a pod; None: the one of the user.
    """

    address: str | None = None
    directory: PurePath = SERVICE_ACCOUNT_DIR
    kubeconfig: str | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str], directory: PurePath) -> Cluster:
        """By the variables that a kubelet sets in every container."""
        host, port = (environ.get(f"KUBERNETES_SERVICE_{name}") for name in ("HOST", "PORT"))
        if not host or not port:
            return cls(None, directory, environ.get("KUBECONFIG"))
        return cls(f"https://{f'[{host}]' if ':' in host else host}:{port}", directory)


class PodClaims(NamedTuple):
    """The private claims of a ServiceAccount token.

    Attributes:
        namespace: None: it is no ServiceAccount token.
        pod: the name of the pod that it was made for; empty: for none.
    """

    namespace: str | None
    pod: str

    @classmethod
    def of(cls, claims: Mapping[str, Any]) -> PodClaims:
        """Those of the claims of any token."""
        found = claims.get("kubernetes.io")
        found = found if isinstance(found, Mapping) else {}
        namespace, pod = found.get("namespace"), found.get("pod")
        return cls(
            namespace if isinstance(namespace, str) else None,
            str(pod.get("name", "")) if isinstance(pod, Mapping) else "",
        )

    @property
    def instance(self) -> str:
        """What a pod has in common with the one that it replaces in its Job or StatefulSet."""
        return _GENERATED.sub("", self.pod)
