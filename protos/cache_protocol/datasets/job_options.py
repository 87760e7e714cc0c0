"""The settings of a cache that a TrainJob gives as annotations of its cache pods.

Kubeflow Trainer lets a job change neither the environment nor the resources of an initializer, but
the annotations of its pods. A runtime shows them to its cache pods as a file (a ``downwardAPI``
volume), which CACHE_ANNOTATIONS_FILE names:

    annotation                     variable         who takes it
    trainer-data-cache/sql         CACHE_SQL        every cache
    trainer-data-cache/columns     CACHE_COLUMNS    every cache; separated by commas
    trainer-data-cache/filter      CACHE_FILTER     every cache
    trainer-data-cache/replicas    CACHE_REPLICAS   every cache
    trainer-data-cache/nodes       none             an initializer that makes the cache pods;
                                                    another cache must have that size already
    trainer-data-cache/memory      none             a cache of one job: of each pod

An annotation with this prefix that is not in the table, or has a bad value, is refused by name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from cache_protocol.datasets.job_settings import parsed, refusal
from cache_protocol.errors import ConfigError, RequestError, short, some_of

PREFIX = "trainer-data-cache/"
FILE_VARIABLE = "CACHE_ANNOTATIONS_FILE"
VIEW = "view"  # of trainers, not of a cache
_VARIABLES = {
    "sql": "CACHE_SQL",
    "columns": "CACHE_COLUMNS",
    "filter": "CACHE_FILTER",
    "replicas": "CACHE_REPLICAS",
}
_LEAST_MEMORY = 1088 << 20  # as `storage.memory_budget` divides it
_LINE = re.compile(r'([^=\s]+)=(".*")')  # as a kubelet writes it: Go's %v=%q
_QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)(|[kMGT]|[KMGT]i)")
_UNITS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True)
class JobOptions:
    """What a job sets of its cache. Each option is declared here.

    Args:
        sql: a query over the table ``source``.
        columns: instead of ``sql``: the columns to keep, in this order.
        filter: instead of ``sql``: an SQL condition over the columns of ``source``.
        replicas: the number of cache nodes that hold each shard.
        nodes: the number of cache pods.
        memory: of each cache pod, a Kubernetes quantity such as ``16Gi``.

    Raises:
        RequestError: quotes every bad option, as its annotation.
    """

    sql: str | None = None
    columns: Sequence[str] | None = None
    filter: str | None = None
    replicas: int | None = None
    nodes: int | None = None
    memory: str | None = None

    def __post_init__(self) -> None:
        problems = [
            f"{PREFIX}{name}={short(repr(value), 80)}: {wrong}"
            for name, value in self.given().items()
            if (wrong := _wrong(name, value)) is not None
        ]
        if self.sql is not None and (self.columns, self.filter) != (None, None):
            problems.append(
                f"{PREFIX}sql cannot be combined with {PREFIX}columns or {PREFIX}filter: write "
                "them in the sql"
            )
        if not problems and self.replicas and self.nodes and self.replicas > self.nodes:
            problems.append(
                f"{PREFIX}replicas={self.replicas} is more than {PREFIX}nodes={self.nodes}"
            )
        _refuse(problems)

    @classmethod
    def from_annotations(cls, annotations: Mapping[str, str]) -> JobOptions:
        """The options among the annotations of a pod; those without the prefix are not ours.

        Raises:
            RequestError: quotes every unknown annotation, or every bad value.
        """
        texts = {
            key.removeprefix(PREFIX): text
            for key, text in annotations.items()
            if key.startswith(PREFIX)
        }
        known = [each.name for each in fields(cls)]
        problems = [
            f"{PREFIX}{VIEW}: trainers read a view, a cache holds every row: set CACHE_VIEW in "
            "spec.trainer.env, or pass view= in the training code"
            for name in texts
            if name == VIEW
        ]
        problems += [
            f"the annotation {PREFIX}{name} is unknown: it must be one of {', '.join(known)}"
            for name in sorted(texts.keys() - {*known, VIEW})
        ]
        _refuse(problems)
        return cls(**{name: _value(name, text) for name, text in texts.items()})

    def given(self) -> dict[str, Any]:
        """The options that are set."""
        every = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in every.items() if value is not None}

    def annotations(self) -> dict[str, str]:
        """The annotations that say this to the pods of a cache."""
        return {f"{PREFIX}{name}": text for name, text in self._texts().items()}

    def variables(self) -> dict[str, str]:
        """The variables of `cache_protocol.datasets.job_settings` that say the same."""
        texts = self._texts()
        return {variable: texts[name] for name, variable in _VARIABLES.items() if name in texts}

    @property
    def memory_bytes(self) -> int | None:
        """``memory`` in bytes."""
        return None if self.memory is None else _quantity_bytes(self.memory)

    def fits(self, *, nodes: int, memory_bytes: int | None) -> None:
        """Checks the options that a TrainJob cannot change against the pods of its runtime.

        Args:
            nodes: the number of cache pods.
            memory_bytes: the limit of each; None: none.

        Raises:
            RequestError: another number of nodes, or more memory; says which runtime to use.
        """
        problems = []
        if self.nodes is not None and self.nodes != nodes:
            problems.append(
                f"{PREFIX}nodes={self.nodes}: the runtime has {nodes} cache pods, which a TrainJob "
                "cannot change: use a runtime of that size, or torch-distributed-with-cache"
            )
        asked = self.memory_bytes
        if asked is not None and memory_bytes is not None and asked > memory_bytes:
            problems.append(
                f"{PREFIX}memory={self.memory}: the cache pods of the runtime have "
                f"{memory_bytes >> 20}Mi, more of which a TrainJob cannot give: use a runtime of "
                "that size, or torch-distributed-with-cache"
            )
        _refuse(problems)

    def refuse_size(self) -> None:
        """Refuses a size, for a cache of many jobs.

        Raises:
            RequestError: ``nodes`` or ``memory`` is set.
        """
        sizes = {name: text for name, text in self._texts().items() if name in ("nodes", "memory")}
        _refuse(
            f"{PREFIX}{name}={text}: the shared cache has the size that its administrator gave it"
            for name, text in sizes.items()
        )

    def _texts(self) -> dict[str, str]:
        return {
            name: ",".join(value) if name == "columns" else str(value)
            for name, value in self.given().items()
        }


def with_annotations(environ: Mapping[str, str]) -> tuple[Mapping[str, str], JobOptions]:
    """The environment of a cache pod with the options of its annotations, and those options.

    Raises:
        RequestError: an annotation is unknown or bad, or its variable is set too.
        ConfigError: CACHE_ANNOTATIONS_FILE cannot be read.
    """
    path = environ.get(FILE_VARIABLE)
    if not path:
        return environ, JobOptions()
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{FILE_VARIABLE}={path!r} cannot be read: {error.strerror}") from None
    options = JobOptions.from_annotations(parse_annotations(text))
    _refuse(
        f"the annotation {PREFIX}{name} and {variable} of the environment: give one of them"
        for name, variable in _VARIABLES.items()
        if variable in options.variables() and environ.get(variable)
    )
    return {**environ, **options.variables()}, options


def parse_annotations(text: str) -> dict[str, str]:
    """The annotations with our prefix in a file that a kubelet wrote.

    Raises:
        ConfigError: a line is none of a kubelet.
    """
    found = {}
    for line in text.split("\n"):
        if not line.startswith(PREFIX):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ConfigError(f"{FILE_VARIABLE} has a line that is no annotation: {short(line)}")
        found[match[1]] = str(ast.literal_eval(match[2]))  # Python has all escapes of Go's %q
    return found


def _value(name: str, text: str) -> Any:
    return parsed("CACHE_REPLICAS" if name == "nodes" else _VARIABLES.get(name, ""), text)


def _wrong(name: str, value: Any) -> str | None:
    if name == "nodes":
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        return None if is_count else "must be a whole number of at least 1"
    if name == "memory":
        num_bytes = _quantity_bytes(value) if isinstance(value, str) else None
        if num_bytes is None:
            return "must be a Kubernetes quantity such as 16Gi"
        if num_bytes < _LEAST_MEMORY:
            return "leaves no memory for rows: the process may take 1Gi, so give at least 1088Mi"
        return None
    wrong = refusal(**{name: value})
    if wrong is None and name == "columns" and any("," in column for column in value):
        wrong = "a comma separates columns: use sql for a column with a comma in its name"
    return wrong


def _quantity_bytes(text: str) -> int | None:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    base = 1024 if match[2].endswith("i") else 1000
    return int(float(match[1]) * base ** _UNITS[match[2][:1]])


def _refuse(problems: Any) -> None:
    found = list(problems)
    if found:
        raise RequestError(f"bad annotations of the pod: {some_of(found, '; ')}")
