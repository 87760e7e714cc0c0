"""How the initializer finds the API server of the cluster that it runs in."""

from __future__ import annotations

from pathlib import Path

import pytest
import urllib3
from kubernetes.config import incluster_config

from cache_protocol.errors import ConfigError
from cache_runtimes.initializer.cluster import connect


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The files and variables of a pod."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    files = {"token": "SERVICE_TOKEN_FILENAME", "ca.crt": "SERVICE_CERT_FILENAME"}
    for name, constant in files.items():
        (tmp_path / name).write_text("there")
        monkeypatch.setattr(incluster_config, constant, str(tmp_path / name))
    return tmp_path


def test_the_api_server_is_reached_past_the_proxy_of_the_source(
    pod: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", ".svc,10.0.0.0/8")
    api = connect(None)
    assert api.configuration.host == "https://10.96.0.1:443"
    assert not isinstance(api.rest_client.pool_manager, urllib3.ProxyManager)


def test_without_a_token_the_error_names_the_reason(pod: Path) -> None:
    (pod / "token").unlink()
    with pytest.raises(
        ConfigError, match="this is not a pod of a cluster: Service token file does"
    ):
        connect(None)
