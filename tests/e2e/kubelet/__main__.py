"""Runs the pods of a real API server as processes of this machine; ends with its input."""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import random
import shutil
import socket
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client, config, watch

from cache_runtimes.local.pods import Objects, Surroundings
from tests.e2e.kubelet import names
from tests.e2e.kubelet.pod import ClusterPod, now
from tests.e2e.kubelet.volumes import Tokens, audiences

Json = dict[str, Any]

_NODE = "here"
_CAPACITY = {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": "8"}
_FRAMEWORK_PORTS = (29500, 6666)
_KEPT = ("PYTHONPATH", "LANG", "LD_LIBRARY_PATH")


class Kubelet:
    """Binds every pod to this machine and runs it. Its loop has a thread; the watch another.

    Args:
        root_ca: signs the certificate of the API server.
    """

    def __init__(self, api: client.ApiClient, logs: Path, root_ca: str) -> None:
        self._api = api
        # A controller of Kubernetes publishes it in every namespace; this cluster lacks that one.
        self._root_ca = {"kube-root-ca.crt": {"ca.crt": root_ca}}
        self._core = client.CoreV1Api(api)
        self._custom = client.CustomObjectsApi(api)
        self._apps = client.AppsV1Api(api)
        self._logs = logs
        self._addresses = names.Addresses(f"127.{random.randint(2, 250)}")
        self._ports: dict[tuple[str, str], dict[int, int]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by the uid of the pod
        self._loop = asyncio.get_running_loop()

    def add_node(self) -> None:
        """The node that this kubelet is; it is there and ready."""
        labels = {"kubernetes.io/hostname": _NODE}
        body = {"metadata": {"name": _NODE, "labels": labels}}
        with contextlib.suppress(client.ApiException):
            self._core.create_node(body)
        condition = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        times = {"lastHeartbeatTime": now(), "lastTransitionTime": now()}
        status = {
            "conditions": [condition | times],
            "allocatable": _CAPACITY,
            "capacity": _CAPACITY,
        }
        self._core.patch_node_status(_NODE, {"status": status})

    def watch(self) -> None:
        """Watches pods for ever. For a thread of its own."""
        while True:
            try:
                for event in watch.Watch().stream(self._core.list_pod_for_all_namespaces):
                    pod = self._api.sanitize_for_serialization(event["object"])
                    self._loop.call_soon_threadsafe(self._seen, event["type"], pod)
            except (client.ApiException, urllib3.exceptions.HTTPError) as error:
                print(f"watch: {error}", file=sys.stderr, flush=True)

    def _seen(self, change: str, pod: Json) -> None:
        uid, status = pod["metadata"]["uid"], pod.get("status") or {}
        task = self._tasks.get(uid)
        if change == "DELETED" or pod["metadata"].get("deletionTimestamp"):
            if task and not task.done():
                if not task.cancelling():  # a second cancellation would end its last steps
                    task.cancel()
            elif change == "DELETED":
                return
            elif task is None or status.get("phase") in ("Succeeded", "Failed"):
                self._do(self._remove, pod)
        elif pod["spec"].get("schedulingGates"):
            return
        elif not pod["spec"].get("nodeName"):
            self._do(self._bind, pod)
        elif task is None and status.get("phase") in (None, "Pending"):
            self._tasks[uid] = self._loop.create_task(self._run(pod))

    def _do(self, call: Any, pod: Json) -> None:
        self._loop.run_in_executor(None, call, pod)

    def _bind(self, pod: Json) -> None:
        meta = pod["metadata"]
        binding = client.V1Binding(
            metadata=client.V1ObjectMeta(name=meta["name"]),
            target=client.V1ObjectReference(kind="Node", name=_NODE, api_version="v1"),
        )
        with contextlib.suppress(client.ApiException):  # bound already, or gone
            self._core.create_namespaced_pod_binding(
                meta["name"], meta["namespace"], binding, _preload_content=False
            )

    def _remove(self, pod: Json) -> None:
        meta = pod["metadata"]
        uid = client.V1DeleteOptions(
            grace_period_seconds=0, preconditions=client.V1Preconditions(uid=meta["uid"])
        )
        with contextlib.suppress(client.ApiException):  # gone already
            self._core.delete_namespaced_pod(meta["name"], meta["namespace"], body=uid)

    async def _run(self, pod: Json) -> None:
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]

        async def report(status: Json) -> None:
            with contextlib.suppress(client.ApiException):  # the pod is gone
                await asyncio.to_thread(
                    self._core.patch_namespaced_pod_status,
                    *(name, namespace, status),
                )

        folder = self._logs / namespace
        folder.mkdir(exist_ok=True)
        try:
            surroundings = await asyncio.to_thread(self._surroundings, pod)
            with (folder / f"{name}.log").open("a") as log:
                await ClusterPod(pod, *surroundings, log, report).run()
        finally:
            found = await asyncio.to_thread(self._find, name, namespace)
            if found and found["metadata"].get("deletionTimestamp"):
                await asyncio.to_thread(self._remove, pod)

    async def stop(self) -> None:
        """Stops every pod; returns after their processes have ended."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _find(self, name: str, namespace: str) -> Json | None:
        try:
            found = self._core.read_namespaced_pod(name, namespace)
        except client.ApiException:
            return None
        return dict(self._api.sanitize_for_serialization(found))

    def _surroundings(self, pod: Json) -> tuple[str, Surroundings, Objects, Tokens]:
        """The address of a pod, what is around it, the ConfigMaps and the tokens."""
        namespace, spec = pod["metadata"]["namespace"], pod["spec"]
        jobsets = self._custom.list_cluster_custom_object("jobset.x-k8s.io", "v1alpha2", "jobsets")
        sets = self._items(self._apps.list_stateful_set_for_all_namespaces())
        mine = names.PodName(
            namespace, spec.get("subdomain") or "", spec.get("hostname") or pod["metadata"]["name"]
        )
        pods = list(names.pod_names(jobsets["items"], sets))
        services = self._items(self._core.list_service_for_all_namespaces())
        hosts = names.dns(namespace, pods, services, names.labels(sets), self._addresses)
        ports = self._ports.setdefault((namespace, mine.subdomain), _free_ports(_FRAMEWORK_PORTS))
        with_ports = {
            f"{host}:{port}": f"{address}:{free}"
            for host, address in hosts.items()
            for port, free in ports.items()
        }
        secrets = self._by_name(self._core.list_namespaced_secret(namespace))
        path = os.environ["PATH"]
        around = Surroundings(
            secrets=secrets_text(secrets),
            environment={"PATH": path, **{k: os.environ[k] for k in _KEPT if k in os.environ}},
            extra_environment=self._api_server() | self._credentials(pod),
            ports=ports,
            hosts={**hosts, **with_ports},
            find_program=lambda program: shutil.which(program, path=path),
        )
        listed = self._by_name(self._core.list_namespaced_config_map(namespace))
        config_maps = {name: one.get("data") or {} for name, one in listed.items()}
        tokens = {audience: self._token(pod, audience) for audience in audiences(spec)}
        return self._addresses.of(mine), around, self._root_ca | config_maps, tokens

    def _api_server(self) -> dict[str, str]:
        """The variables of the Service ``kubernetes``."""
        host, _, port = self._api.configuration.host.rpartition("/")[2].partition(":")
        return {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}

    def _token(self, pod: Json, audience: str = "") -> str:
        """A token that ends with the pod."""
        meta = pod["metadata"]
        account = pod["spec"].get("serviceAccountName") or "default"
        bound = {"kind": "Pod", "apiVersion": "v1", "name": meta["name"], "uid": meta["uid"]}
        request = {
            "spec": {
                "audiences": [audience] if audience else [],
                "expirationSeconds": 3600,
                "boundObjectRef": bound,
            }
        }
        made = self._core.create_namespaced_service_account_token(
            account, meta["namespace"], request
        )
        return str(made.status.token)

    def _credentials(self, pod: Json) -> dict[str, str]:
        """A kubeconfig in place of the token that a kubelet mounts; programs read either."""
        spec, namespace = pod["spec"], pod["metadata"]["namespace"]
        if not spec.get("automountServiceAccountToken"):
            return {}
        cluster = {
            "server": self._api.configuration.host,
            "insecure-skip-tls-verify": True,
        }
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "pod",
            "contexts": [
                {
                    "name": "pod",
                    "context": {"cluster": "here", "user": "pod", "namespace": namespace},
                }
            ],
            "clusters": [{"name": "here", "cluster": cluster}],
            "users": [{"name": "pod", "user": {"token": self._token(pod)}}],
        }
        path = self._logs / namespace / f"{pod['metadata']['name']}.kubeconfig"
        path.write_text(json.dumps(content))
        return {"KUBECONFIG": str(path), "PYTHONWARNINGS": "ignore:Unverified HTTPS"}

    def _items(self, listed: Any) -> list[Json]:
        return list(self._api.sanitize_for_serialization(listed)["items"])

    def _by_name(self, listed: Any) -> dict[str, Json]:
        return {item["metadata"]["name"]: item for item in self._items(listed)}


def secrets_text(secrets: dict[str, Json]) -> dict[str, dict[str, str]]:
    """The values of Secrets as variables of the environment take them."""
    return {
        name: {
            key: base64.b64decode(value).decode(errors="replace")
            for key, value in (secret.get("data") or {}).items()
        }
        for name, secret in secrets.items()
    }


def _free_ports(wanted: Iterable[int]) -> dict[int, int]:
    with contextlib.ExitStack() as stack:
        found = {}
        for port in wanted:
            held = stack.enter_context(socket.socket())
            held.bind(("", 0))
            found[port] = held.getsockname()[1]
        return found


async def main() -> None:
    """Runs until standard input ends; then stops every pod."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kubeconfig")
    parser.add_argument("logs", type=Path, help="DIR/NAMESPACE/POD.log")
    parser.add_argument("root_ca", type=Path, help="certificates of the API server")
    args = parser.parse_args()
    urllib3.disable_warnings()
    config.load_kube_config(args.kubeconfig)
    kubelet = Kubelet(client.ApiClient(), args.logs, args.root_ca.read_text())
    args.logs.mkdir(parents=True, exist_ok=True)
    kubelet.add_node()
    threading.Thread(target=kubelet.watch, daemon=True).start()
    print("kubelet: ready", flush=True)
    await asyncio.to_thread(sys.stdin.buffer.read)
    await kubelet.stop()


if __name__ == "__main__":
    asyncio.run(main())
