"""YAML files -> the TrainJob, the runtime that it names, their Secrets and ConfigMaps.

The models of `kubeflow-trainer-api` check them, as the API server of a cluster does. A server may
drop an unknown field; here it is an error.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from kubeflow_trainer_api import models
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from cache_protocol.errors import ConfigError
from cache_runtimes.local.supported import CONFIG_MAP, SECRET, check_supported

Json = dict[str, Any]

_API_VERSION = "trainer.kubeflow.org/v1alpha1"
_DEFAULT_RUNTIME_KIND = "ClusterTrainingRuntime"
# Fields of Trainer before 2.2; an API server drops them and says nothing.
_SUCCESSORS = {"spec.podTemplateOverrides": ": Trainer 2.2 and newer read spec.runtimePatches"}
_MODELS = {
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}


@dataclass(frozen=True)
class Manifests:
    """A TrainJob and its runtime as their files say them; the values of Secrets and ConfigMaps."""

    train_job: Json
    runtime: Json
    secrets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    config_maps: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def read_manifests(train_job: Path, runtimes: Path) -> Manifests:
    """Reads a TrainJob and the runtime that it names.

    Args:
        train_job: a YAML file with one TrainJob; it may also hold Secrets, ConfigMaps and runtimes.
        runtimes: a folder of manifests, or a file such as ``kubectl kustomize`` prints.

    Raises:
        ConfigError: an unreadable file, an unknown field, a wrong type, no TrainJob or several, or
            no such runtime.
    """
    documents = list(_documents(train_job))
    jobs = [document for document in documents if document.get("kind") == "TrainJob"]
    if len(jobs) != 1:
        raise ConfigError(f"{train_job} must hold one TrainJob, it holds {len(jobs)}")
    job = _checked(jobs[0], train_job)
    return Manifests(
        train_job=job,
        runtime=_runtime(job, documents, runtimes),
        secrets={_name(d): _values(d) for d in documents if d.get("kind") == "Secret"},
        config_maps={_name(d): _values(d) for d in documents if d.get("kind") == "ConfigMap"},
    )


def _runtime(job: Json, documents: list[Json], runtimes: Path) -> Json:
    reference = job["spec"]["runtimeRef"]
    kind = reference.get("kind", _DEFAULT_RUNTIME_KIND)
    found: dict[str, Json] = {}
    for document in (*documents, *_shipped(runtimes)):
        if document.get("kind") == kind:
            found.setdefault(_name(document), document)
    if reference["name"] not in found:
        raise ConfigError(
            f"no {kind} {reference['name']!r} in {runtimes}, which has "
            f"{', '.join(sorted(found)) or 'none'}; build an overlay first: kubectl kustomize "
            "FOLDER > runtime.yaml, then --runtimes runtime.yaml"
        )
    return _checked(found[reference["name"]], runtimes)


def _shipped(runtimes: Path) -> Iterator[Json]:
    """The objects of a file, or of the files of a folder."""
    if not runtimes.exists():
        raise ConfigError(f"--runtimes must be a folder or a file, got {str(runtimes)!r}")
    for path in sorted(runtimes.rglob("*.yaml")) if runtimes.is_dir() else [runtimes]:
        yield from _documents(path)


def _documents(path: Path) -> Iterator[Json]:
    try:
        documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    for document in documents:
        if document is None:
            continue
        if not isinstance(document, dict):
            raise ConfigError(f"{path} must hold objects, got {type(document).__name__}")
        yield document


def _name(document: Json) -> str:
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str):
        raise ConfigError(f"a {document.get('kind')} has no metadata.name")
    return name


def _values(document: Json) -> dict[str, str]:
    """The values of a Secret or a ConfigMap.

    Raises:
        ConfigError: naming a field that run-local does not support, or a value that is no string.
            No message shows a value of ``data`` or of a Secret.
    """
    where, values = f"{document['kind']} {_name(document)}", {}
    if document["kind"] == "Secret":
        check_supported(dict.fromkeys(document, "<not shown>"), SECRET, where)
    else:
        check_supported(document, CONFIG_MAP, where)
    is_plain = {"stringData": True, "data": document["kind"] == "ConfigMap"}
    for name in ("data", "stringData"):
        given = document.get(name) or {}
        if not isinstance(given, dict):
            raise ConfigError(f"{where}: {name} must be names and their values")
        for key, value in given.items():
            if not isinstance(value, str):
                raise ConfigError(f"{where}: {name}.{key} must be a string: quote a number")
            try:
                values[key] = value if is_plain[name] else b64decode(value, validate=True).decode()
            except ValueError:
                raise ConfigError(f"{where}: data.{key} must be base64") from None
    return values


def _checked(document: Json, path: Path) -> Json:
    """The document, after the models have read it.

    Raises:
        ConfigError: naming every unknown field and every wrong type.
    """
    kind = document["kind"]
    where = f"{path}: {kind} {_name(document)}"
    if document.get("apiVersion") != _API_VERSION:
        raise ConfigError(
            f"{where}: apiVersion must be {_API_VERSION}, got {document.get('apiVersion')!r}"
        )
    if not isinstance(document.get("spec"), dict):
        raise ConfigError(f"{where}: spec must be an object, got {document.get('spec')!r}")
    try:
        _MODELS[kind].model_validate(document, extra="forbid", by_alias=True, by_name=False)
    except ValidationError as error:
        problems = [_told(problem) for problem in error.errors() if not _is_scalar(problem)]
        if problems:
            raise ConfigError(f"{where}: {'; '.join(problems)}") from None
    return document


def _is_scalar(problem: ErrorDetails) -> bool:
    """Whether the input is a quantity or a port, which the models read as an object only."""
    model = str((problem.get("ctx") or {}).get("class_name"))
    is_scalar = type(problem["input"]) in (str, int, float)  # not bool
    return is_scalar and model.endswith(("Quantity", "IntOrString"))


def _told(problem: ErrorDetails) -> str:
    """Such as ``spec.trainer.command[0]: Input should be a valid string``; never the input."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in problem["loc"])
    path = "".join(steps).removeprefix(".")
    if problem["type"] != "extra_forbidden":
        return f"{path}: {problem['msg']}"
    return f"unknown field {path}" + _SUCCESSORS.get(path, "")
