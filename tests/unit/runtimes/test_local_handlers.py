"""Which probes and hooks run-local can run, and how it names the others."""

from __future__ import annotations

from typing import Any

import pytest

from cache_protocol.errors import ConfigError
from cache_runtimes.local.handlers import check_handlers
from tests.train_jobs import container

Json = dict[str, Any]

PORTS = [{"name": "web", "containerPort": 80}]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"startupProbe": {"grpc": {"port": 1, "service": "ready"}, "periodSeconds": 2}},
        {"livenessProbe": {"tcpSocket": {"port": "web"}, "failureThreshold": 9}},
        {"readinessProbe": {"httpGet": {"port": "web", "path": "/x", "scheme": "HTTP"}}},
        {"readinessProbe": {"exec": {"command": ["true"]}}},
        {"lifecycle": {"preStop": {"sleep": {"seconds": 1}}}},
        {"lifecycle": {"preStop": {"exec": {"command": ["true"]}}}},
    ],
)
def test_what_can_be_run_passes(fields: Json) -> None:
    check_handlers(container("c", "x", ports=PORTS, **fields), "pod/c")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"startupProbe": {}}, "startupProbe must have one action of grpc, tcpSocket"),
        ({"livenessProbe": {"tcpSocket": {"port": "no"}}}, "livenessProbe: container c has no"),
        ({"livenessProbe": {"tcpSocket": {}}}, "has no port None"),
        ({"livenessProbe": {"tcpSocket": {"port": 70_000}}}, "has no port 70000"),
        ({"livenessProbe": {"tcpSocket": {"port": 1, "host": "h"}}}, "tcpSocket.host"),
        ({"readinessProbe": {"grpc": {"port": "web"}}}, "grpc.port must be a number, got 'web'"),
        ({"readinessProbe": {"httpGet": {"port": 1, "host": "h"}}}, "httpGet.host"),
        ({"readinessProbe": {"httpGet": {"port": 1, "httpHeaders": []}}}, "httpGet.httpHeaders"),
        ({"readinessProbe": {"httpGet": {"port": 1, "scheme": "HTTPS"}}}, "httpGet by 'HTTPS'"),
        (
            {"readinessProbe": {"exec": {"command": ["true"]}, "successThreshold": 2}},
            "does not do successThreshold",
        ),
        ({"lifecycle": {"postStart": {}}}, "does not do lifecycle.postStart"),
        ({"lifecycle": {"preStop": {"httpGet": {"port": 1}}}}, "preStop: run-local does not do"),
    ],
)
def test_what_cannot_be_run_is_named(fields: Json, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_handlers(container("c", "x", ports=PORTS, **fields), "pod/c")
    assert str(caught.value).startswith("pod/c: ")
    assert words in str(caught.value)
