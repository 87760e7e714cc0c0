"""Events of OpenLineage, where its package is installed and configured; else nothing happens.

The package's own client sends them, as its variables and its file say. It is asked in a thread of
ours, with a bounded queue: a collector that is slow or away delays no load and no step. See
docs/traces.md.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Any, Literal

import pyarrow as pa

logger = logging.getLogger(__name__)

NAMESPACE = "trainer-data-cache"
"""Of the datasets of a cache."""

State = Literal["START", "RUNNING", "COMPLETE", "FAIL", "ABORT"]

_PRODUCER = "https://github.com/trainer-data-cache/trainer-data-cache"
_SETTINGS = ("OPENLINEAGE_URL", "OPENLINEAGE_CONFIG")
_TRANSPORT = "OPENLINEAGE__TRANSPORT"  # begins the names of further ones
_FILES = ("openlineage.yml", "~/.openlineage/openlineage.yml")
# A remote of git may have a token in its address. The user's settings come before this one.
_DEFAULTS = {"facets": {"source_code_location": {"disabled": True}}}
_MOST_WAITING = 1000
_MOST_FILES = 100  # of a table, in an event
_LAST_EVENTS_S = 2.0  # a collector that is away delays the end of a process no longer

_senders: dict[int, Sender | None] = {}  # by process id: a fork has no threads


@dataclass(frozen=True)
class Table:
    """A dataset of the cache, or a source, by the naming conventions of OpenLineage.

    Attributes:
        files: the first of those that are read, if there are several.
    """

    namespace: str
    name: str
    version: str = ""
    schema: pa.Schema | None = None
    files: tuple[str, ...] = ()
    num_rows: int | None = None
    num_bytes: int | None = None


@dataclass(frozen=True)
class Run:
    """A run of a job: what it is, reads and makes.

    Attributes:
        run_id: a UUID.
        job: name of the job.
        kind: of the job, such as ``LOAD``.
        facts: a facet of ours, ``trainerDataCache``.
    """

    run_id: str
    job: str
    kind: str
    inputs: tuple[Table, ...] = ()
    outputs: tuple[Table, ...] = ()
    sql: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)


class Sender:
    """Sends events in the background, in order. Thread-safe.

    Args:
        client: an `OpenLineageClient`.
        namespace: of jobs.
        parent: ``NAMESPACE/JOB/RUN`` of the run that this process is part of; empty: of none.
    """

    def __init__(self, client: Any, namespace: str = "default", parent: str = "") -> None:
        self._client = client
        self._namespace = namespace
        self._parent = parent
        self._waiting: queue.Queue[Callable[[], Any]] = queue.Queue(_MOST_WAITING)
        self._lock = threading.Lock()
        self._lost = 0
        threading.Thread(target=self._send_all, name="send-lineage", daemon=True).start()

    def send(self, state: State, run: Callable[[], Run], error: str = "") -> None:
        """Sends an event, or drops it where too many wait.

        Args:
            run: called in the thread that sends.
            error: why the run failed.
        """
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        try:
            self._waiting.put_nowait(lambda: self._event(state, now, run(), error))
        except queue.Full:
            self._note_lost(f"{_MOST_WAITING} events wait")

    def flush(self, timeout_s: float = _LAST_EVENTS_S) -> bool:
        """Waits until every event was sent or lost, before the process ends.

        Returns:
            whether that is so; else it says that the others are dropped.
        """
        with self._waiting.all_tasks_done:
            is_done = self._waiting.all_tasks_done.wait_for(
                lambda: not self._waiting.unfinished_tasks, timeout_s
            )
        if not is_done:
            self._note_lost(f"no answer in {timeout_s:g} s")
        return is_done

    def _send_all(self) -> None:
        while True:
            make = self._waiting.get()
            try:
                self._client.emit(make())
                self._note_sent()
            except Exception as error:  # of any transport, and of its server
                self._note_lost(type(error).__name__)
            finally:
                self._waiting.task_done()

    def _note_lost(self, reason: str) -> None:
        """Says once that events are lost; texts of errors may hold secrets of the transport."""
        with self._lock:
            self._lost += 1
            is_first = self._lost == 1
        if is_first:
            logger.warning(
                "lineage events are dropped reason=%s: see the settings of OpenLineage "
                "(OPENLINEAGE_URL) and its collector. Loads and training go on", reason,
            )  # fmt: skip

    def _note_sent(self) -> None:
        with self._lock:
            lost, self._lost = self._lost, 0
        if lost:
            logger.info("lineage events are sent again dropped=%d", lost)

    def _event(self, state: State, at: str, run: Run, error: str) -> Any:
        from openlineage.client import event_v2 as events
        from openlineage.client import facet_v2 as facets

        of_run: dict[str, Any] = {}
        if (parent := _parent_facet(self._parent)) is not None:
            of_run["parent"] = parent
        if error:
            of_run["errorMessage"] = facets.error_message_run.ErrorMessageRunFacet(error, "python")
        if run.facts:
            of_run["trainerDataCache"] = facets.RunFacet().with_additional_properties(**run.facts)
        of_job: dict[str, Any] = {
            "jobType": facets.job_type_job.JobTypeJobFacet("BATCH", "TRAINER_DATA_CACHE", run.kind)
        }
        if run.sql:
            of_job["sql"] = facets.sql_job.SQLJobFacet(run.sql)
        return events.RunEvent(
            eventTime=at,
            eventType=events.RunState[state],
            run=events.Run(run.run_id, of_run),
            job=events.Job(self._namespace, run.job, of_job),
            inputs=[_input(table) for table in run.inputs],
            outputs=[_output(table) for table in run.outputs],
            producer=_PRODUCER,
        )


def sender() -> Sender | None:
    """The sender of this process; None: OpenLineage is not set up."""
    process = os.getpid()
    if process not in _senders:
        _senders[process] = from_env()
    return _senders[process]


def flush() -> None:
    """Waits for the events of this process, before it ends."""
    if (made := _senders.get(os.getpid())) is not None:
        made.flush()


def from_env() -> Sender | None:
    """A sender as the environment and the file of OpenLineage say; None: it is not set up."""
    given = os.environ
    if given.get("OPENLINEAGE_DISABLED", "").strip().lower() == "true" or not (
        any(given.get(name) for name in _SETTINGS)
        or any(name.startswith(_TRANSPORT) for name in given)
        or any(os.path.isfile(os.path.expanduser(place)) for place in _FILES)
    ):
        return None
    if find_spec("openlineage") is None:
        logger.warning(
            "OpenLineage is configured, and its package is missing: no events are sent. "
            "pip install 'trainer-data-cache[lineage]'"
        )
        return None
    from openlineage.client import OpenLineageClient
    from openlineage.client.facet_v2 import set_producer

    try:
        client = OpenLineageClient(config=_DEFAULTS)
    except Exception as error:  # what the file says is wrong
        logger.warning("no lineage events are sent: bad settings reason=%s", type(error).__name__)
        return None
    set_producer(_PRODUCER)
    return Sender(
        client,
        given.get("OPENLINEAGE_NAMESPACE") or "default",
        given.get("OPENLINEAGE_PARENT_ID", ""),
    )


def _parent_facet(parent: str) -> Any:
    """The facet of a parent ``NAMESPACE/JOB/RUN``, as Airflow and dbt write it; None: bad."""
    from openlineage.client.facet_v2 import parent_run

    parts = parent.rsplit("/", 2)
    if len(parts) != 3:
        return None
    try:
        run = parent_run.Run(parts[2])
    except ValueError:  # no UUID
        return None
    return parent_run.ParentRunFacet(run, parent_run.Job(parts[0], parts[1]))


def _facets(table: Table) -> dict[str, Any]:
    from openlineage.client import facet_v2 as facets

    found: dict[str, Any] = {}
    if table.version:
        found["version"] = facets.dataset_version_dataset.DatasetVersionDatasetFacet(table.version)
    if table.schema is not None:
        found["schema"] = facets.schema_dataset.SchemaDatasetFacet(list(map(_field, table.schema)))
    return found


def _field(column: pa.Field) -> Any:
    from openlineage.client.facet_v2 import schema_dataset

    children = map(column.type.field, range(column.type.num_fields))
    return schema_dataset.SchemaDatasetFacetFields(
        column.name, str(column.type), fields=list(map(_field, children))
    )


def _input(table: Table) -> Any:
    from openlineage.client import event_v2 as events
    from openlineage.client import facet_v2 as facets

    of_input: dict[str, Any] = {}
    if table.files:
        subset = facets.base_subset_dataset
        locations = list(table.files[:_MOST_FILES])
        of_input["subset"] = subset.InputSubsetInputDatasetFacet(
            subset.LocationSubsetCondition(locations)
        )
    if table.num_rows is not None:
        of_input["inputStatistics"] = (
            facets.input_statistics_input_dataset.InputStatisticsInputDatasetFacet(
                rowCount=table.num_rows, size=table.num_bytes
            )
        )
    return events.InputDataset(table.namespace, table.name, of_input, facets=_facets(table))


def _output(table: Table) -> Any:
    from openlineage.client import event_v2 as events
    from openlineage.client import facet_v2 as facets

    of_output: dict[str, Any] = {}
    if table.num_rows is not None:
        of_output["outputStatistics"] = (
            facets.output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(
                rowCount=table.num_rows, size=table.num_bytes
            )
        )
    return events.OutputDataset(table.namespace, table.name, of_output, facets=_facets(table))
