"""YAML files -> the TrainJob, the runtime that it names, and their Secrets.

The models of `kubeflow-trainer-api` read them, as the API server of a cluster does. A server drops
or refuses unknown fields; here they are an error.
"""

from __future__ import annotations

import base64
import binascii
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from kubeflow_trainer_api import models
from pydantic import ValidationError

from cache_protocol.errors import ConfigError

Json = dict[str, Any]
_Steps = tuple[str | int, ...]

_API_VERSION = "trainer.kubeflow.org/v1alpha1"
_DEFAULT_RUNTIME_KIND = "ClusterTrainingRuntime"
_MODELS = {
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}
# What the models raise for a wrong type; ValidationError is a ValueError.
_WRONG_TYPE = (TypeError, AttributeError, ValueError)


@dataclass(frozen=True)
class Manifests:
    """A TrainJob and its runtime as their files say them, and the values of each Secret."""

    train_job: Json
    runtime: Json
    secrets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def read_manifests(train_job: Path, runtimes: Path) -> Manifests:
    """Reads the TrainJob of a file and the runtime that it names.

    The file may also hold Secrets and a runtime.

    Args:
        train_job: a YAML file with one TrainJob.
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
        secrets={_name(d): _secret(d) for d in documents if d.get("kind") == "Secret"},
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
    """The objects of a file or a folder, without the patches of kustomize."""
    if runtimes.is_file():
        yield from _documents(runtimes)
        return
    if not runtimes.is_dir():
        raise ConfigError(f"--runtimes must be a folder or a file, got {str(runtimes)!r}")
    for path in sorted(runtimes.rglob("*.yaml")):
        kustomization = path.with_name("kustomization.yaml")
        if path == kustomization:
            continue
        if kustomization.exists():
            listed = next(_documents(kustomization), {}).get("resources") or ()
            if path.name not in listed:
                continue
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


def _secret(document: Json) -> dict[str, str]:
    """The values of a Secret; no message shows them."""
    where, values = f"Secret {_name(document)}", {}
    for name in ("data", "stringData"):
        given = document.get(name) or {}
        if not isinstance(given, dict):
            raise ConfigError(f"{where}: {name} must be names and their values")
        for key, value in given.items():
            if not isinstance(value, str):
                raise ConfigError(f"{where}: {name}.{key} must be a string: quote a number")
            try:
                values[key] = value
                if name == "data":
                    values[key] = base64.b64decode(value, validate=True).decode()
            except (binascii.Error, UnicodeError):
                raise ConfigError(f"{where}: data.{key} must be base64") from None
    return values


def _checked(document: Json, path: Path) -> Json:
    """The document, after the models have read it and given all of it back."""
    kind = document["kind"]
    where = f"{path}: {kind} {_name(document)}"
    if document.get("apiVersion") != _API_VERSION:
        raise ConfigError(
            f"{where}: apiVersion must be {_API_VERSION}, got {document.get('apiVersion')!r}"
        )
    if not isinstance(document.get("spec"), dict):
        raise ConfigError(f"{where}: spec must be an object, got {document.get('spec')!r}")
    try:
        kept = _MODELS[kind].from_dict(document)
    except _WRONG_TYPE as error:
        raise ConfigError(f"{where}: {_wrong_part(document)}: {_reason(error)}") from None
    unknown = sorted(_unknown_fields(document, kept.to_dict() if kept is not None else {}))
    if unknown:
        raise ConfigError(f"{where}: unknown field {', '.join(unknown)}")
    return document


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(problem["msg"] for problem in error.errors())
    return str(error).splitlines()[0]


def _wrong_part(document: Json) -> str:
    """The path of the innermost part without which the model reads the document."""
    for steps, _ in sorted(_parts(document), key=lambda part: len(part[0]), reverse=True):
        rest = copy.deepcopy(document)
        holder: Any = rest
        for step in steps[:-1]:
            holder = holder[step]
        del holder[steps[-1]]
        try:
            _MODELS[document["kind"]].from_dict(rest)
        except _WRONG_TYPE:
            continue
        return _path(steps)
    return "several fields have a wrong type"


def _parts(part: Json | list[Any], before: _Steps = ()) -> Iterator[tuple[_Steps, Any]]:
    """All parts of a document, and the steps to each."""
    for step, value in part.items() if isinstance(part, dict) else enumerate(part):
        yield (*before, step), value
        if isinstance(value, dict | list):
            yield from _parts(value, (*before, step))


def _path(steps: _Steps) -> str:
    """Such as ``spec.trainer.command[0]``."""
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return path.removeprefix(".")


def _unknown_fields(given: Json, kept: Json) -> Iterator[str]:
    """The innermost paths in ``given`` that are missing from ``kept``, what a model made of it."""
    known = {steps for steps, _ in _parts(kept)}
    for steps, value in _parts(given):
        if steps not in known and value is not None and (steps[:-1] in known or not steps[:-1]):
            yield _path(steps)
