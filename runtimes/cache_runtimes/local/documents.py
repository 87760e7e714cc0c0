"""YAML files -> the TrainJob, the runtime it names, and the Secrets and ConfigMaps beside them.

The models of `kubeflow-trainer-api` read both, as a cluster's API server does; a field that they do
not know, which a server would drop or refuse, is an error here.
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

_DEFAULT_RUNTIME_KIND = "ClusterTrainingRuntime"
_MODELS = {
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}
# What the models raise; of what is no list, no object or no quantity without a path.
_MISREAD = (TypeError, AttributeError, ValueError)
_API_VERSION = "trainer.kubeflow.org/v1alpha1"


@dataclass(frozen=True)
class Manifests:
    """What a TrainJob is made of.

    Attributes:
        train_job, runtime: the objects as their files say them.
        secrets, config_maps: the decoded values of each, by name.
    """

    train_job: Json
    runtime: Json
    secrets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    config_maps: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def read_manifests(train_job: Path, runtimes: Path) -> Manifests:
    """The TrainJob of a file and the runtime that it names.

    The file may hold other documents: Secrets, ConfigMaps, a runtime of the job's own.

    Args:
        train_job: a YAML file with one TrainJob.
        runtimes: a folder of manifests, or a file such as ``kubectl kustomize`` prints.

    Raises:
        ConfigError: a file that cannot be read, an unknown field or a wrong type, no TrainJob or
            several, no such runtime.
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
        config_maps={
            _name(d): _texts(d, "data") for d in documents if d.get("kind") == "ConfigMap"
        },
    )


def _runtime(job: Json, documents: list[Json], runtimes: Path) -> Json:
    reference = job["spec"]["runtimeRef"]
    kind = reference.get("kind", _DEFAULT_RUNTIME_KIND)
    found: dict[str, Json] = {}
    for document in documents:
        if document.get("kind") == kind:
            found.setdefault(_name(document), document)
    for path in _manifest_files(runtimes):
        for document in _documents(path):
            if document.get("kind") == kind:
                found.setdefault(_name(document), document)
    if reference["name"] not in found:
        raise ConfigError(
            f"no {kind} {reference['name']!r} in {runtimes}, which has "
            f"{', '.join(sorted(found)) or 'none'}; an overlay is built first: kubectl kustomize "
            "FOLDER > runtime.yaml, then --runtimes runtime.yaml"
        )
    return _checked(found[reference["name"]], runtimes)


def _manifest_files(runtimes: Path) -> Iterator[Path]:
    """The files of a folder that are whole objects: kustomize's patches are not."""
    if runtimes.is_file():
        yield runtimes
        return
    if not runtimes.is_dir():
        raise ConfigError(f"--runtimes must be a folder or a file, got {str(runtimes)!r}")
    for path in sorted(runtimes.rglob("*.yaml")):
        if path.name == "kustomization.yaml":
            continue
        kustomization = path.with_name("kustomization.yaml")
        if kustomization.exists():
            listed = next(_documents(kustomization), {}).get("resources") or ()
            if path.name not in listed:
                continue
        yield path


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
    values: dict[str, str] = {}
    for key, text in _texts(document, "data").items():
        try:
            values[key] = base64.b64decode(text, validate=True).decode()
        except (binascii.Error, UnicodeError):
            raise ConfigError(f"Secret {_name(document)}: {key} is no base64 text") from None
    return values | _texts(document, "stringData")


def _texts(document: Json, field: str) -> dict[str, str]:
    """The values of a Secret or a ConfigMap, which no message shows."""
    where = f"{document['kind']} {_name(document)}: {field}"
    values = document.get(field) or {}
    if not isinstance(values, dict):
        raise ConfigError(f"{where} must be names and their values")
    for key, value in values.items():
        if not isinstance(value, str):
            raise ConfigError(f"{where}.{key} must be a text: a number needs quotes")
    return values


def _checked(document: Json, path: Path) -> Json:
    """The document itself, after the models have read it and given all of it back."""
    kind = document["kind"]
    where = f"{path}: {kind} {_name(document)}"
    if document.get("apiVersion") != _API_VERSION:
        raise ConfigError(
            f"{where}: apiVersion must be {_API_VERSION}, got {document.get('apiVersion')!r}"
        )
    if not isinstance(document.get("spec"), dict):
        raise ConfigError(f"{where}: spec is missing, or no object")
    try:
        known = _MODELS[kind].from_dict(document)
    except ValidationError as error:
        problems = [
            f"{_place(problem['input'], problem['loc'], document)}: {problem['msg']}"
            for problem in error.errors()
        ]
        raise ConfigError(f"{where}: {'; '.join(problems)}") from None
    except _MISREAD as error:
        raise ConfigError(f"{where}: {_misread(document)}: {str(error).splitlines()[0]}") from None
    unknown = sorted(unknown_fields(document, known.to_dict() if known is not None else {}))
    if unknown:
        raise ConfigError(f"{where}: unknown field {', '.join(unknown)}")
    return document


def _misread(document: Json) -> str:
    """The path of what the model cannot read and does not name: the innermost it can do without."""
    for steps, _ in sorted(_parts(document), key=lambda part: len(part[0]), reverse=True):
        rest = copy.deepcopy(document)
        holder: Any = rest
        for step in steps[:-1]:
            holder = holder[step]
        del holder[steps[-1]]
        try:
            _MODELS[document["kind"]].from_dict(rest)
        except _MISREAD:  # of which ValidationError is one
            continue
        return _path(steps)
    return "fields of a wrong type"


def _place(value: Any, last: _Steps, document: Json) -> str:
    """Where ``value`` is, of which a model knows the last steps alone."""
    found = [
        steps
        for steps, part in _parts(document)
        if part is value and steps[len(steps) - len(last) :] == last
    ]
    return " or ".join(map(_path, found or [last]))


def _parts(part: Json | list[Any], before: _Steps = ()) -> Iterator[tuple[_Steps, Any]]:
    """All that a document is made of, and the steps to each."""
    for step, value in part.items() if isinstance(part, dict) else enumerate(part):
        yield (*before, step), value
        if isinstance(value, dict | list):
            yield from _parts(value, (*before, step))


def _path(steps: _Steps) -> str:
    """Such as ``spec.trainer.command[0]``."""
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return path.removeprefix(".")


def unknown_fields(given: Any, kept: Any, path: str = "") -> Iterator[str]:
    """The paths in ``given`` that are missing from ``kept``, what a model made of it."""
    if isinstance(given, dict):
        for key, value in given.items():
            step = f"{path}.{key}" if path else str(key)
            if not isinstance(kept, dict) or key not in kept:
                if value is not None:
                    yield step
            else:
                yield from unknown_fields(value, kept[key], step)
    elif isinstance(given, list):
        for index, value in enumerate(given):
            if not isinstance(kept, list) or index >= len(kept):
                yield f"{path}[{index}]"
            else:
                yield from unknown_fields(value, kept[index], f"{path}[{index}]")
