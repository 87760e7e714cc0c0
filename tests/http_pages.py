"""The page and the metrics of a node, over HTTP."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families


def ask(page: str, path: str = "/", method: str = "GET") -> tuple[int, str, str]:
    """Status, content type and body."""
    connection = http.client.HTTPConnection(urlsplit(page).netloc, timeout=30)
    connection.request(method, path)
    answer = connection.getresponse()
    try:
        return answer.status, answer.headers["Content-Type"], answer.read().decode()
    finally:
        connection.close()


def metric(page: str, name: str, **labels: str) -> float:
    """The sum of the samples that have these labels."""
    _, _, body = ask(page, "/metrics")
    return sum(
        sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
