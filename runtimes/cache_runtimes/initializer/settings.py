"""The settings of the initializer, from its environment. Pure.

    variable                          default       meaning
    TRAIN_JOB_NAME                    required      the job of the cache
    POD_NAMESPACE                     the pod's     the namespace of the job
    POD_NAME                          none          this pod: cache pods get its tolerations,
                                                    pull secrets and pod security context; shows
                                                    whether it is evicted
    CACHE_IMAGE                       required      of the cache pods
    CLUSTER_SIZE                      3             cache pods + 1: Trainer's own cache has a head
    WORKER_CPU, WORKER_MEM            2, 2Gi        of each cache pod, requests and limits
    HEAD_CPU, HEAD_MEM                none          ignored: there is no head
    IAM_ROLE                          none          of AWS, for the ServiceAccount of the pods only
    READINESS_INITIAL_DELAY_SECONDS   5             of the readiness probe of a cache pod
    READINESS_PERIOD_SECONDS          10
    READINESS_TIMEOUT_SECONDS         5
    READINESS_FAILURE_THRESHOLD       3
    CACHE_READY_DEADLINE_S            1800          for the whole cache, from the start
    CACHE_READY_FILE                  /tmp/ready    exists while the cache is ready
    CACHE_FAILURE_GRACE_S             30            see `Settings.failure_grace_s`
    CACHE_PROGRESS_S                  5             the longest silence of the log while it waits

`cache_protocol.datasets.job_settings` has the variables of the dataset, and `job_options` the
annotations of this pod: ``nodes`` stands for CLUSTER_SIZE less one, ``memory`` for WORKER_MEM. An
empty variable is absent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

from kubernetes.utils.quantity import parse_quantity

from cache_protocol.datasets.job_options import PREFIX, JobOptions, with_annotations
from cache_protocol.datasets.job_settings import (
    OF_ACCESS,
    VARIABLES,
    asks_for_dataset,
    spec_from_env,
)
from cache_protocol.errors import ConfigError, RequestError
from cache_protocol.storage.memory_budget import MIN_SHARD_BYTES, shard_bytes

DEFAULT_CLUSTER_SIZE = 3
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # RFC 1035, as for a TrainJob
_MAX_JOB_NAME = 46  # a StatefulSet's pods are labelled with its name and a hash of ten characters
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]*)?([numkMGTPE]|[KMGTPE]i)?")


@dataclass(frozen=True)
class ReadinessProbe:
    """When a cache pod counts as ready."""

    initial_delay_s: int
    period_s: int
    timeout_s: int
    failure_threshold: int


@dataclass(frozen=True)
class Settings:
    """Settings of one run.

    Attributes:
        num_nodes: cache pods.
        memory_bytes: ``memory``, a Kubernetes quantity, in bytes.
        failure_grace_s: how long a container may fail to start (its image cannot be pulled, its
            settings cannot be read) before the run fails.
        dataset: the variables of the dataset in this environment; not shown, some are secrets.
        head_variables: the ignored variables of a head.
        options: those of the annotations of this pod.
    """

    train_job: str
    namespace: str
    pod_name: str | None
    image: str
    num_nodes: int
    cpu: str
    memory: str
    memory_bytes: int
    iam_role: str | None
    readiness: ReadinessProbe
    ready_deadline_s: float
    ready_file: Path
    failure_grace_s: float
    progress_s: float
    head_variables: tuple[str, ...]
    dataset: Mapping[str, str] = field(repr=False)
    options: JobOptions = field(default_factory=JobOptions)

    @property
    def what_to_cache(self) -> frozenset[str]:
        """The variables of ``dataset`` for the table, without those for access to its store."""
        return frozenset(self.dataset) - frozenset(OF_ACCESS)

    @property
    def shard_bytes(self) -> int:
        """The part of a pod's memory for shards."""
        return shard_bytes(self.memory_bytes)


def from_env(environ: Mapping[str, str], *, own_namespace: str | None = None) -> Settings:
    """Reads the settings from ``environ``.

    Args:
        own_namespace: of this pod, from its service account; POD_NAMESPACE overrides it.

    Raises:
        ConfigError: quoting every bad setting and every bad variable of the dataset.
        RequestError: quoting every bad annotation.
    """
    environ, options = with_annotations(environ)
    given = _Given({**environ, **_size_of(options, environ)})
    readiness = ReadinessProbe(
        given.whole("READINESS_INITIAL_DELAY_SECONDS", 5, least=0),
        given.whole("READINESS_PERIOD_SECONDS", 10),
        given.whole("READINESS_TIMEOUT_SECONDS", 5),
        given.whole("READINESS_FAILURE_THRESHOLD", 3),
    )
    memory = given.text("WORKER_MEM", "2Gi")
    settings = Settings(
        train_job=given.job_name("TRAIN_JOB_NAME"),
        namespace=given.text("POD_NAMESPACE", own_namespace),
        pod_name=environ.get("POD_NAME") or None,
        image=given.text("CACHE_IMAGE"),
        # A cache has at least one node, so 1 and 2 mean the same.
        num_nodes=max(1, given.whole("CLUSTER_SIZE", DEFAULT_CLUSTER_SIZE) - 1),
        cpu=given.cpu("WORKER_CPU", "2"),
        memory=memory,
        memory_bytes=given.memory_bytes("WORKER_MEM", memory),
        iam_role=environ.get("IAM_ROLE") or None,
        readiness=readiness,
        ready_deadline_s=given.seconds("CACHE_READY_DEADLINE_S", 1800.0),
        ready_file=given.path("CACHE_READY_FILE", "/tmp/ready"),
        failure_grace_s=given.seconds("CACHE_FAILURE_GRACE_S", 30.0, zero=True),
        progress_s=given.seconds("CACHE_PROGRESS_S", 5.0),
        head_variables=tuple(name for name in ("HEAD_CPU", "HEAD_MEM") if environ.get(name)),
        dataset={name: environ[name] for name in VARIABLES if environ.get(name)},
        options=options,
    )
    if asks_for_dataset(environ):
        try:
            spec_from_env(environ)
        except ConfigError as error:
            given.problems.append(str(error).removeprefix("bad settings: "))
    if given.problems:
        raise ConfigError("bad settings: " + "; ".join(given.problems))
    return settings


def _size_of(options: JobOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the size that annotations ask for."""
    nodes = "" if options.nodes is None else str(options.nodes + 1)
    asked = {"nodes": ("CLUSTER_SIZE", nodes), "memory": ("WORKER_MEM", options.memory or "")}
    for name, (variable, value) in asked.items():
        if value and environ.get(variable) not in (None, "", value):
            raise RequestError(
                f"bad annotations of the pod: {PREFIX}{name}={getattr(options, name)} and "
                f"{variable}={environ[variable]!r} are two sizes: give one of them"
            )
    return {variable: value for variable, value in asked.values() if value}


class _Given:
    """Reads variables and collects their problems; a bad one reads as its default."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.problems: list[str] = []
        self._environ = environ

    def text(self, name: str, default: str | None = None) -> str:
        value = self._environ.get(name) or default
        if not value:
            self.problems.append(f"{name} is missing")
        return value or ""

    def job_name(self, name: str) -> str:
        value = self.text(name)
        if value and (not _NAME.fullmatch(value) or len(value) > _MAX_JOB_NAME):
            self._refuse(
                name,
                value,
                f"a name of at most {_MAX_JOB_NAME} lower case letters, digits and hyphens",
            )
        return value

    def path(self, name: str, default: str) -> Path:
        path = Path(self.text(name, default))
        if not path.is_absolute():
            self._refuse(name, str(path), "an absolute path")
        return path

    def whole(self, name: str, default: int, least: int = 1) -> int:
        value = self.text(name, str(default))
        if re.fullmatch("[0-9]{1,9}", value) and int(value) >= least:
            return int(value)
        self._refuse(name, value, f"a whole number of at least {least}")
        return default

    def seconds(self, name: str, default: float, *, zero: bool = False) -> float:
        value = self.text(name, str(default))
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if math.isfinite(seconds) and (seconds > 0 or (zero and seconds == 0)):
            return seconds
        least = "of at least 0" if zero else "above 0"
        self._refuse(name, value, f"a number of seconds {least}")
        return default

    def cpu(self, name: str, default: str) -> str:
        value = self.text(name, default)
        if not _quantity(value):
            self._refuse(name, value, "a Kubernetes quantity above 0, such as 2 or 500m")
        return value

    def memory_bytes(self, name: str, value: str) -> int:
        memory_bytes = int(_quantity(value) or 0)
        if not memory_bytes:
            self._refuse(name, value, "a Kubernetes quantity above 0, such as 8Gi")
        elif shard_bytes(memory_bytes) < MIN_SHARD_BYTES:
            self.problems.append(
                f"{name}={value!r} leaves no memory for rows: the process may take 1Gi or a "
                "quarter, so set at least 1088Mi"
            )
        return memory_bytes

    def _refuse(self, name: str, value: str, wanted: str) -> None:
        self.problems.append(f"{name} must be {wanted}, got {value!r}")


def _quantity(text: str) -> Decimal | None:
    return parse_quantity(text) if _QUANTITY.fullmatch(text) else None
