"""`report_progress` against Trainer's own status server, whose feature gate is off by default."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.e2e.clusters import Cluster, control_plane, unpack
from tests.free_ports import free_port
from tests.train_jobs import container, replicated_job, runtime, train_job

_CERTIFICATES = Path("/tmp/k8s-webhook-server")  # where the status server looks for them
# The issuer of tokens must be an address of this machine: the status server fetches its keys.
_API_SERVER = """#!{python}
import os, sys
port = next(a for a in sys.argv if a.startswith("--secure-port=")).partition("=")[2]
url = f"https://127.0.0.1:{{port}}"
args = [a for a in sys.argv if not a.startswith("--service-account-issuer=")]
args += [f"--service-account-issuer={{url}}", f"--service-account-jwks-uri={{url}}/openid/v1/jwks"]
os.execv("{program}", args)
"""
# Trainer reads a certificate and its own token at fixed paths: a mount namespace has them.
_TRAINER = """#!{python}
import json, os, pathlib, sys
from kubernetes import client, config
file = pathlib.Path(sys.argv[sys.argv.index("--config") + 1])
known = json.loads(file.read_text())
known |= {{"featureGates": {{"TrainJobStatus": True}}, "statusServer": {{"port": {port}}}}}
file.write_text(json.dumps(known))
config.load_kube_config(os.environ["KUBECONFIG"])
core = client.CoreV1Api()
core.create_namespaced_service_account("default", {{"metadata": {{"name": "trainer"}}}})
made = core.create_namespaced_service_account_token("trainer", "default", {{"spec": {{}}}})
own = file.parent / "sa/kubernetes.io/serviceaccount"
own.mkdir(parents=True)
(own / "token").write_text(made.status.token)
(own / "ca.crt").write_text((file.parent / "pki/apiserver.crt").read_text())
(own / "namespace").write_text("default")
steps = [
    f"mount --bind {{file.parent}}/certs/k8s-webhook-server {certificates}",
    "mount -t tmpfs none /run && mkdir -p /run/secrets",
    f"mount --bind {{file.parent}}/sa /run/secrets",
    'exec "{program}" ' + " ".join(sys.argv[1:]),
]
os.execvp("unshare", ["unshare", "-rm", "sh", "-c", " && ".join(steps)])
"""


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[tuple[Cluster, int]]:
    """A control plane with the gate on, and the port of its status server."""
    plane = os.environ.get("E2E_CONTROL_PLANE")
    if not plane:
        pytest.skip("needs E2E_CONTROL_PLANE (tests/e2e/clusters.py)")
    if not shutil.which("unshare") or subprocess.run(["unshare", "-rm", "true"]).returncode:
        pytest.skip("needs mount namespaces of users")
    unpacked, port = unpack(Path(plane)), free_port()
    programs = tmp_path / "bin"
    programs.mkdir()
    for program in unpacked.iterdir():
        (programs / program.name).symlink_to(program)
    _CERTIFICATES.mkdir(exist_ok=True)
    for name, text in (
        ("kube-apiserver", _API_SERVER),
        ("trainer-controller-manager", _TRAINER),
    ):
        (programs / name).unlink()
        values = {"python": sys.executable, "certificates": _CERTIFICATES, "port": port}
        (programs / name).write_text(text.format(program=unpacked / name, **values))
        (programs / name).chmod(0o755)
    with control_plane(Path(plane), tmp_path, "", programs) as cluster:
        yield cluster, port


def test_the_status_of_a_train_job_shows_percent_time_left_and_metrics(
    gated: tuple[Cluster, int], tmp_path: Path
) -> None:
    cluster, port = gated
    certificate = tmp_path / "plane/certs/k8s-webhook-server/serving-certs/tls.crt"
    secret = {"ca.crt": certificate.read_text()}
    name = {"name": "kubeflow-trainer-webhook-cert"}
    cluster.core.create_namespaced_secret("default", {"metadata": name, "stringData": secret})
    trainer = container("node", "sleep 60")
    job = replicated_job("node", trainer, ancestor="trainer", serviceAccountName="default")
    cluster.apply(runtime(job))
    cluster.apply(train_job(trainer={"numNodes": 1}), namespace="default")
    (pod,) = cluster.wait("default", lambda: cluster.pods("default", "job-node"), "a trainer")
    given = {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}
    url = urlsplit(given["KUBEFLOW_TRAINER_SERVER_URL"])
    metadata = {each: pod["metadata"][each] for each in ("name", "uid")}
    request = {
        "audiences": [url.path.removeprefix("/apis/")],
        "boundObjectRef": {"kind": "Pod", "apiVersion": "v1", **metadata},
    }
    made = cluster.core.create_namespaced_service_account_token(
        "default", "default", {"spec": request}
    )
    (tmp_path / "token").write_text(made.status.token)
    environ = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "KUBEFLOW_TRAINER_SERVER_URL": f"https://127.0.0.1:{port}{url.path}",
        "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(certificate),
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token"),
    }
    lines = "from cache_client import report_progress as r; r(1, 4); r(2, 4, {'loss': 0.25})"
    subprocess.run([sys.executable, "-c", lines], env={**os.environ, **environ}, check=True)
    status = (cluster.get("TrainJob", "job", "default") or {})["status"]["trainerStatus"]
    assert status["progressPercentage"] == 50
    assert status["estimatedRemainingSeconds"] >= 0
    assert status["metrics"] == [{"name": "loss", "value": "0.25"}]
