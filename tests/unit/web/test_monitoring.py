"""The dashboard and the alert rules name metrics and labels that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.verbs import ROLES, is_open
from cache_server.node.status import CacheStatus, NodeStatus, VersionStatus
from cache_server.node.traffic import Counts, Read, Served
from cache_server.shards.version_key import VersionKey
from cache_server.web.metrics import exposition
from cache_server.web.service import PATHS

MONITORING = Path(__file__).resolve().parents[3] / "docs" / "monitoring"
# A node and a job with everything that has a metric.
STATUS = NodeStatus(
    node=pb.Node(id="a", stored_bytes=1, memory_limit_bytes=2),
    ready=True,
    coordinator="c",
    coordinator_page="http://c:3/",
    versions=(VersionStatus(VersionKey("t", "f"), 1, 1, 0, 0, 1),),
    huge_page_bytes=0,
    counts=Counts({Read("t", "exchange"): Served(1, 1)}, {"LoadError": 1}),
    cache=CacheStatus(
        (pb.Node(id="a", alive=True),),
        (
            pb.DatasetInfo(
                spec=pb.DatasetSpec(name="t"),
                state=pb.DATASET_STATE_LOADING,
                progress=pb.LoadProgress(shards_done=1, shards_total=4),
            ),
        ),
        (
            pb.JobInfo(
                name="train", dataset="t", live=True, world_size=4, rows_per_s=100.0,
                wait_share=0.5, local_share=0.25, step=3, num_steps=4,
            ),
            pb.JobInfo(name="over", dataset="t"),
        ),
    ),
    loads_running=1,
)  # fmt: skip


# What that node shows a caller who sees no dataset (tests/contract/test_access.py).
WITHOUT_DATASETS = replace(
    STATUS,
    versions=(),
    counts=Counts({}, STATUS.counts.errors),
    cache=CacheStatus((pb.Node(id="a", alive=True),), (), ()),
)
SHOWN = {"/metrics/node": WITHOUT_DATASETS, "/metrics": STATUS}
MONITORS = ("pod-monitor.yaml", "datasets/pod-monitor.yaml")


def metrics(status: NodeStatus = STATUS) -> dict[str, list[Any]]:
    """Samples by name."""
    body, _ = exposition(status, "")
    samples: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)
    return samples


OF_TARGETS = {"instance", "namespace"}  # that a PodMonitor adds
LABELS = {label for samples in metrics().values() for s in samples for label in s.labels}


def endpoint(name: str) -> Any:
    """The only endpoint of a PodMonitor."""
    (found,) = yaml.safe_load((MONITORING / name).read_text())["spec"]["podMetricsEndpoints"]
    return found


def scraped(name: str) -> dict[tuple[str, ...], float]:
    """The series of this project that a PodMonitor keeps: values by name and labels."""
    given = endpoint(name)
    found = [s for samples in metrics(SHOWN[given["path"]]).values() for s in samples]
    for rule in given.get("metricRelabelings", ()):
        assert rule.pop("action") == "keep"
        (label,), pattern = rule["sourceLabels"], rule["regex"]
        found = [s for s in found if re.fullmatch(pattern, s.labels.get(label, ""))]
    return values(found)


def values(samples: Iterable[Any]) -> dict[tuple[str, ...], float]:
    """Values by name and labels, without those of the process."""
    return {
        (s.name, *s.labels.items()): s.value for s in samples if s.name.startswith("data_cache_")
    }


def has_series(kept: Iterable[tuple[Any, ...]], name: str, label: str, value: str) -> bool:
    """Whether one has this name and, unless it is empty, this label."""
    return any(each == name and (not label or (label, value) in labels) for each, *labels in kept)


def expressions() -> list[str]:
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    return [
        *(rule["expr"] for group in rules["spec"]["groups"] for rule in group["rules"]),
        *(target["expr"] for panel in dashboard["panels"] for target in panel["targets"]),
    ]


def test_every_expression_has_series_of_one_pod_monitor() -> None:
    monitors = [scraped(monitor) for monitor in MONITORS]

    for expression in expressions():
        needed = re.findall(r'(data_cache_\w+)(?:\{(\w+)="(\w+)"\})?', expression)
        assert needed
        assert any(
            all(has_series(kept, name, label, value) for name, label, value in needed)
            for kept in monitors
        ), expression
        grouped = re.findall(r"\b(?:by|on) \(([\w, ]+)\)", expression)
        assert {*", ".join(grouped).split(", ")} - {""} <= LABELS | OF_TARGETS
    assert len(expressions()) >= 16


def test_every_series_comes_from_one_pod_monitor() -> None:
    of_nodes, of_datasets = map(scraped, MONITORS)

    assert of_nodes.keys() & of_datasets.keys() == set()
    assert of_nodes | of_datasets == values(chain.from_iterable(metrics().values()))


def test_a_pod_monitor_sends_a_token_where_the_path_needs_one() -> None:
    for monitor in MONITORS:
        given = endpoint(monitor)
        assert given["path"] in PATHS
        assert f"http {given['path']}" in ROLES
        assert ("authorization" in given) == (not is_open(f"http {given['path']}"))


def test_every_label_of_a_text_exists() -> None:
    texts = "".join((MONITORING / name).read_text() for name in ("alerts.yaml", "dashboard.json"))
    labels = set(re.findall(r"\{\{ ?(?:\$labels\.)?(\w+) ?\}\}", texts))

    assert labels <= LABELS | OF_TARGETS


def test_a_running_job_has_metrics_and_one_that_is_over_has_none() -> None:
    found = {
        name.removeprefix("data_cache_job_"): sample.value
        for name, samples in metrics().items()
        if name.startswith("data_cache_job_")
        for sample in samples
        if sample.labels == {"training_job": "train", "dataset": "t"}
    }

    assert found == {
        "ranks": 4,
        "rows_per_second": 100,
        "wait_ratio": 0.5,
        "local_ratio": 0.25,
        "epoch_ratio": 0.75,
        "ranks_disagree": 0,
    }
    assert all(len(metrics()[f"data_cache_job_{name}"]) == 1 for name in found)
    (loaded,) = metrics()["data_cache_dataset_loaded_ratio"]
    assert loaded.value == 0.25
