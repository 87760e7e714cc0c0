"""The settings of a cache for `TrainerClient.train` of the Kubeflow SDK.

    client.train(
        runtime="torch-distributed-data-cache",
        initializer=Initializer(dataset=S3DatasetInitializer(storage_uri="s3://...")),
        trainer=CustomTrainer(func=train, num_nodes=2),
        options=[cache_options(sql="SELECT a, b FROM source WHERE a > 0", replicas=2)],
    )

It needs the SDK: ``pip install 'kubeflow>=0.5,<0.6'``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kubeflow.trainer import CustomTrainer, CustomTrainerContainer
from kubeflow.trainer.options.kubernetes import (
    JobSetSpecPatch,
    JobSetTemplatePatch,
    JobSpecPatch,
    JobTemplatePatch,
    PodTemplatePatch,
    ReplicatedJobPatch,
    RuntimePatch,
    TrainingRuntimeSpecPatch,
)

from cache_protocol.datasets.job_options import FILE_VARIABLE, JobOptions
from cache_protocol.errors import ConfigError
from cache_runtimes.local.pods import bytes_of
from cache_runtimes.local.trainer.info import containers

Json = dict[str, Any]


class ViewOptions(Protocol):
    """A `cache_client.View`, which has checked its options."""

    def given(self) -> dict[str, Any]:
        """The options that are set."""


FLAGSHIP = "torch-distributed-data-cache"
_MANAGER = "trainer-data-cache.github.io/cache-options"
_API = ("trainer.kubeflow.org", "v1alpha1")


def cache_options(
    *,
    runtime: str = FLAGSHIP,
    sql: str | None = None,
    columns: Sequence[str] | None = None,
    filter: str | None = None,
    replicas: int | None = None,
    nodes: int | None = None,
    memory: str | None = None,
    view: ViewOptions | None = None,
) -> RuntimePatch:
    """An option of `TrainerClient.train`: what the cache of the job holds, and its size.

    Args:
        runtime: the same name as in `train`. The option reads it in the cluster, to find the pods
            of its cache and their limits.
        sql: a query over the table ``source``.
        columns: instead of ``sql``: the columns to keep, in this order.
        filter: instead of ``sql``: an SQL condition over the columns of ``source``.
        replicas: the number of cache nodes that hold each shard.
        nodes: the number of cache pods. Only ``torch-distributed-with-cache`` makes as many;
            another runtime must have that number.
        memory: of each cache pod, a Kubernetes quantity such as ``16Gi``; at most the limit of the
            runtime, except with ``torch-distributed-with-cache``.
        view: a `cache_client.View`: what trainers read other than each row once, where the training
            code names no view.

    Raises:
        RequestError: quotes every bad option.
        ConfigError: the view has an option that JSON cannot hold.
    """
    options = JobOptions(sql, columns, filter, replicas, nodes, memory)
    return _CacheOptions(runtime, options, _view_text({} if view is None else view.given()))


class _CacheOptions(RuntimePatch):  # type: ignore[misc]
    """Annotates the pods of the cache, once the runtime is known."""

    def __init__(self, runtime: str, options: JobOptions, view: str) -> None:
        super().__init__()
        self.manager = _MANAGER  # beside a RuntimePatch of the caller, which has the SDK's
        self._runtime, self._options, self._view = runtime, options, view

    def __call__(self, job_spec: Json, trainer: Any, backend: Any) -> None:
        """Adds the patch to a TrainJob that is being made.

        Raises:
            RequestError: the runtime cannot do this; says which can.
            ConfigError: there is no such runtime, or none that takes options.
            ValueError: the backend is not that of Kubernetes.
        """
        if self._view:
            _give_view(trainer, self._view)
        if self._options.given():
            super().__call__({}, trainer, backend)  # checks the backend
            job = checked_job(runtime_of(backend, self._runtime), self._options)
            self.training_runtime_spec = _annotated(job, self._options.annotations())
            super().__call__(job_spec, trainer, backend)


def checked_job(runtime: Json, options: JobOptions) -> str:
    """The replicated job of a runtime whose pods take options. Pure.

    Raises:
        RequestError: the size of the runtime's cache cannot be what the options say.
        ConfigError: no pod of the runtime takes options.
    """
    for job in runtime["spec"]["template"]["spec"]["replicatedJobs"]:
        for container in containers(job):
            variables = {each["name"]: each for each in container.get("env") or ()}
            if FILE_VARIABLE in variables:
                _check_size(container, variables, options)
                return str(job["name"])
    raise ConfigError(
        f"runtime {runtime['metadata']['name']!r} takes no cache_options: install one of this "
        "version of trainer-data-cache (kubectl apply -k runtimes/)"
    )


def _check_size(container: Json, variables: Mapping[str, Json], options: JobOptions) -> None:
    if container["command"] == ["cachectl"]:  # it loads into a cache of many jobs
        options.refuse_size()
    elif "CACHE_WORLD_SIZE" in variables:
        limit = container["resources"]["limits"]["memory"]
        nodes = int(variables["CACHE_WORLD_SIZE"]["value"])
        options.fits(nodes=nodes, memory_bytes=bytes_of(limit))


def _give_view(trainer: Any, view: str) -> None:
    if not isinstance(trainer, CustomTrainer | CustomTrainerContainer):
        raise ConfigError(f"view needs a CustomTrainer, got {type(trainer).__name__}")
    trainer.env = {**(trainer.env or {}), "CACHE_VIEW": view}


def _view_text(options: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(options)) if options else ""
    except TypeError:
        raise ConfigError(
            f"view must have options that JSON can hold, got {dict(options)!r}: pass such a view "
            "in the training code"
        ) from None


def runtime_of(backend: Any, name: str) -> Json:
    """The runtime as the cluster has it; one of the namespace comes first, as in the SDK."""
    api = backend.custom_api
    reads = (
        lambda: api.get_namespaced_custom_object(
            *_API, backend.namespace, "trainingruntimes", name
        ),
        lambda: api.get_cluster_custom_object(*_API, "clustertrainingruntimes", name),
    )
    for read in reads:
        try:
            found: Json = read()  # type: ignore[no-untyped-call]
        except Exception as error:
            if getattr(error, "status", None) != 404:  # an ApiException of the SDK's client
                raise
        else:
            return found
    raise ConfigError(f"there is no runtime {name!r}: give the runtime of train() here, too")


def _annotated(job: str, annotations: dict[str, str]) -> TrainingRuntimeSpecPatch:
    pods = PodTemplatePatch(metadata={"annotations": annotations})
    patched = ReplicatedJobPatch(job, JobTemplatePatch(spec=JobSpecPatch(template=pods)))
    jobs = JobSetSpecPatch(replicated_jobs=[patched])
    return TrainingRuntimeSpecPatch(template=JobSetTemplatePatch(spec=jobs))
