"""One version as a job reads it: opened, and swapped whole."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, Self

from cache_client.control.erasures import with_erased
from cache_client.epochs.observer import Observer
from cache_client.epochs.reports import ReaderIdentity, Reporter
from cache_client.epochs.training_run import TrainingRun
from cache_client.flight.routing import NodeRef, ShardMap
from cache_client.job.ranks import TrainingProcess, find_process, is_of_one_process
from cache_client.order.erased import Notes
from cache_client.order.permutation import Int64Array
from cache_client.order.states import SetUntil
from cache_client.order.view_text import erased_text, set_text, view_digest
from cache_client.reading.counts import ReadCounts, SharedCounts
from cache_client.reading.joined_reader import JoinedSource
from cache_client.reading.per_process import PerProcess
from cache_client.reading.rows import Rows
from cache_client.reading.shard_maps import wait_for_shard_map
from cache_client.reading.source import Source
from cache_client.reading.window_sizes import WindowSizes
from cache_client.training.first_epoch import LoadingSource
from cache_client.training.job_config import JobConfig
from cache_client.training.left_out import Known, LeftOut
from cache_client.view_options.columns import VersionNodes
from cache_client.view_options.job_view import JobView
from cache_client.view_options.open_view import make_view, read_shard_map
from cache_client.view_options.weight_log import log_name
from cache_client.views.amended import AmendedView
from cache_client.views.sampling import WeightedView
from cache_client.views.view import LoggedView, PlainView, SlotView, view_fingerprint
from cache_protocol.storage.layout import Layout
from cache_protocol.storage.pace import Pace
from cache_protocol.v1 import cache_pb2 as pb

_MOST_OF_TEXT: Final = 100  # of a setting, in reports
_said = False  # how to name a job

logger = logging.getLogger(__name__)


class RowReader(Protocol):
    """Fetches rows by the ids of a view. Thread-safe."""

    @property
    def num_nodes(self) -> int:
        """The most nodes that one window is requested from."""

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""

    def fetch(self, row_ids: Int64Array) -> list[Rows]:
        """The rows of these ids, in this order; see `cache_client.reading.reader`."""

    def request(self, row_ids: Int64Array) -> Callable[[], list[Rows]]:
        """Asks for rows; the result waits for them; see `cache_client.reading.reader`."""

    def keep_lease(self) -> None:
        """Renews leases in the background when they are due."""

    def close(self) -> None:
        """Closes every connection; running fetches fail."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class RowSource(Protocol):
    """Opens readers of what is read."""

    @property
    def shards(self) -> ShardMap:
        """The version, or several joined."""

    def open_reader(
        self, *, replica_offset: int, rows_per_message: int, counts: ReadCounts
    ) -> RowReader:
        """A reader for one pass; see `cache_client.reading.reader`."""


@dataclass(frozen=True)
class Opened:
    """What a job reads: one version, or those of a mixture. Immutable.

    Attributes:
        name: of the version; of a mixture, those of its sources.
        fingerprint: of the version and the view.
        source: opens readers.
        job_view: slots -> rows -> batches.
        layout: of the rows.
        sizes: of windows and messages.
        nodes: every node that holds rows.
        view_text: what is read other than each row once, see `cache_client.order.view_text`.
        left_out: rows that were erased since.
        weight_log: the dataset with what training reports of weights; empty: the view has none.
        set_until: the weights that training set; None: none.
        observer: watches the passes of a process; reports are of one version.
        pace: how many steps a window has, by the time that windows took.
    """

    name: str
    fingerprint: str
    source: RowSource
    job_view: JobView
    layout: Layout
    sizes: WindowSizes
    nodes: tuple[NodeRef, ...]
    view_text: str
    left_out: LeftOut
    weight_log: str = ""
    set_until: SetUntil | None = None
    observer: PerProcess[Observer] = field(default_factory=PerProcess, compare=False)
    pace: PerProcess[Pace] = field(default_factory=PerProcess, compare=False)

    @property
    def shards(self) -> ShardMap:
        """The version, or several joined."""
        return self.source.shards

    @property
    def versions(self) -> tuple[ShardMap, ...]:
        """Each version that is read."""
        source = self.source
        return source.versions if isinstance(source, JoinedSource) else (source.shards,)

    @property
    def loading(self) -> LoadingSource | None:
        """Where the rows come from in the first epoch of a version that may load."""
        return self.source if isinstance(self.source, LoadingSource) else None

    @property
    def slots(self) -> SlotView:
        """Which rows each slot has."""
        return self.job_view.view if self.loading is None else self.loading.view

    def sizes_of(self, config: JobConfig, num_workers: int) -> WindowSizes:
        """The sizes of the windows of a pass.

        Each window follows the one before where one node has all of its rows: where there is one
        node, or each window begins where the one before ends.
        """
        one_reader = config.rank.world_size * num_workers == 1
        in_order = not config.shuffle.shuffle and isinstance(self.slots, PlainView)
        in_streams = in_order and (one_reader or len(self.nodes) == 1)
        return replace(self.sizes, in_streams=in_streams)

    def make_observer(
        self,
        config: JobConfig,
        nodes: Sequence[NodeRef],
        counts: SharedCounts,
        *,
        skipped: str,
        in_worker: bool,
        run: TrainingRun | None = None,
    ) -> Observer:
        """What watches the passes of a process.

        Args:
            nodes: that are counted.
            counts: of this process and its workers.
            skipped: the steps that the job leaves out, as text.
            in_worker: the process is a DataLoader worker.
            run: see `Observer`.
        """
        rank = config.rank.rank
        is_shared = not is_of_one_process(config.job)
        if not is_shared:
            _say_how_to_name_a_job(config.rank.world_size)
        identity = ReaderIdentity(
            run=secrets.token_hex(8),
            job=config.job,
            dataset=self.name,
            fingerprint=self.fingerprint,
            rank=rank,
            world_size=config.rank.world_size,
            view=self.view_text,
            shuffle=(config.shuffle.shuffle, config.shuffle.shuffle_block_size),
            amended=self.slots.amended_at if isinstance(self.slots, AmendedView) else (0, ()),
        )
        places = [node.location for node in nodes]
        first = rank % len(places) if places else 0
        locations = dict.fromkeys((*places[first:], *places[:first], config.access.endpoint))
        reporter = Reporter(
            identity,
            tuple(locations),
            config.access.credentials,
            standing=_standing(
                config,
                self.view_text,
                _short(skipped),
                find_process(config.job, in_worker=in_worker),
            ),
            is_shared=is_shared,
        )
        told = None if run is None else (run, self.versions)
        return Observer(identity, tuple(node.id for node in nodes), counts, reporter, told)


def _say_how_to_name_a_job(world_size: int) -> None:
    """Says once in a process that disagreements of its ranks are not seen."""
    global _said
    if not _said:
        _said = True
        logger.log(
            logging.WARNING if world_size > 1 else logging.INFO,
            "the cache cannot see which processes are ranks of one job, so it cannot tell whether "
            "they agree: pass the same job= in each, or set CACHE_JOB",
        )


def _standing(
    config: JobConfig, view: str, skipped: str, process: TrainingProcess
) -> pb.ReaderReport:
    """What each report says: who reads, and by which terms, on which all ranks must agree."""
    shuffle = config.shuffle
    order = {
        "shuffle": shuffle.shuffle,
        "shuffle_block_size": shuffle.shuffle_block_size,
        "drop_last": config.drop_last,
        "pad_mask": config.pad_mask is not None,
        "skip_steps": skipped,
    }
    return pb.ReaderReport(
        view=_printable(view),
        view_digest=view_digest(view),
        seed=_short(str(shuffle.seed)),
        batch_size=config.batch_size,
        order=", ".join(f"{name}={value}" for name, value in order.items()),
        follows=config.version in ("each-epoch", "now"),
        host=_printable(process.host),
        pid=process.pid,
        process=process.name,
        process_rank=process.rank,
        num_processes=process.num_processes,
        attempt=_printable(process.attempt),
    )


def _printable(text: str) -> str:
    """A text with other characters escaped: nodes refuse them."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _short(text: str) -> str:
    """A text, or its digest if it is long."""
    if len(text) <= _MOST_OF_TEXT:
        return text
    return f"sha256-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def open_version(
    config: JobConfig,
    before: Opened | None = None,
    *,
    epoch: int | None = None,
    fingerprint: str = "",
    amended_at: int = 0,
    amendment: int = 0,
    until: int | None = None,
    notes: Notes | None = None,
    num_rows: int | None = None,
) -> Opened:
    """Opens a version: of this fingerprint or epoch, else the newest.

    Args:
        config: of the job.
        before: what the job reads now; returned if the version stays.
        amended_at, amendment: the version from this position of the epoch on, and the how many-th
            amendment of the process it is.
        until: the last act of erasing that a view leaves out; None: the last one.
        notes: see `Erased`.
        num_rows: only its first rows; None: all.

    Raises:
        ConfigError: the version does not fit the arguments.
        CacheError: as `wait_for_shard_map`.
    """
    access, log_groups, follow = config.access, None, None
    loads = config.version == "first-rows"
    if loads:
        log_groups = 0 if epoch == 0 else None
        if before is not None:  # all epochs are of one version
            fingerprint = before.shards.fingerprint
            if (log_groups is None) == (before.shards.log is None):
                return before
    elif epoch is not None:
        follow = pb.EpochOfJob(
            job=config.job, epoch=epoch, amended_at=amended_at, amendment=amendment
        )
    shards, columns, hidden = read_shard_map(
        config.view,
        config.columns,
        lambda names: wait_for_shard_map(
            access.endpoint, config.name, names, access.ready_deadline_s, access.credentials,
            fingerprint=fingerprint, follow=follow, known_groups=log_groups,
            others=() if before is None else before.shards.locations(access.endpoint),
        ),
    )  # fmt: skip
    if not loads:
        shards = with_erased(access, shards, until, notes)
    if num_rows is not None:
        shards = shards.first_rows(num_rows)
    stays = before is not None and (before.shards.fingerprint, before.shards.erased.until) == (
        shards.fingerprint,
        shards.erased.until,
    )
    if (
        not loads
        and before is not None
        and stays
        and before.view_text == erased_text(config.view.text, shards.erased.until)
    ):
        return before
    if shards.log is not None:
        return _opened(config, LoadingSource(
            access.endpoint, shards, columns, access.credentials,
            deadline_s=access.deadline_s, local=access.local,
            shuffle=config.shuffle, ready_deadline_s=access.ready_deadline_s,
        ), JobView(LoggedView(shards.log)))  # fmt: skip
    job_view = make_view(
        config.view,
        _nodes(config, shards),
        config.shuffle,
        config.batch_format,
        hidden=hidden,
        ready_deadline_s=access.ready_deadline_s,
    )
    source = Source(
        access.endpoint, shards, columns, access.credentials,
        deadline_s=access.deadline_s, local=access.local,
    )  # fmt: skip
    return _opened(config, source, job_view)


def _nodes(config: JobConfig, shards: ShardMap) -> VersionNodes:
    access = config.access
    return VersionNodes(
        access.endpoint, shards, access.credentials, access.deadline_s, config.rank.rank
    )


def nodes_of(opened: Opened, config: JobConfig) -> VersionNodes:
    """The nodes of the version that a job reads."""
    return _nodes(config, opened.shards)


def _opened(config: JobConfig, source: Source, job_view: JobView) -> Opened:
    shards, identity = source.shards, job_view.identity
    layout = shards.layout if job_view.lookups is None else job_view.lookups.layout
    job_view.column_names(config.converter(layout).names, **config.added)
    return Opened(
        shards.dataset,
        view_fingerprint(shards.fingerprint, identity),
        source,
        job_view,
        layout,
        config.window_sizes(shards, job_view.view.rows_per_slot),
        shards.nodes,
        erased_text(config.view.text, shards.erased.until),
        LeftOut(config.access, [Known(shards, shards.erased)]),
        _weight_log(config, shards),
    )


def _weight_log(config: JobConfig, shards: ShardMap) -> str:
    if config.view.weights is None:
        return ""
    read = view_fingerprint(shards.fingerprint, config.view.rows.text)
    return log_name(shards.dataset, config.job, read)


def with_view(opened: Opened, config: JobConfig, view: WeightedView, told: SetUntil) -> Opened:
    """What a job reads, by weights that training set."""
    job_view, shards = replace(opened.job_view, view=view), opened.shards
    return replace(
        opened,
        fingerprint=view_fingerprint(shards.fingerprint, job_view.identity),
        job_view=job_view,
        view_text=erased_text(set_text(config.view.text, told), shards.erased.until),
        set_until=told,
        observer=PerProcess(),
    )
