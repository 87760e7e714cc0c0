"""The windows of a pass: runs of steps that are requested at once, and their batches."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from cache_client.batches.batch_formats import with_column
from cache_client.batches.sending import changeable, sent
from cache_client.epochs.observer import Observer, SharedDigests
from cache_client.epochs.passes import Pass
from cache_client.flight.call_threads import CallThreads
from cache_client.order.digests import Words, step_digests
from cache_client.order.erased import NO_ROWS
from cache_client.order.order import StepPlan, step_windows
from cache_client.order.permutation import Int64Array
from cache_client.reading.counts import ReadCounts, SharedCounts
from cache_client.reading.fetch_ahead import FETCH_THREADS, LATE_S, ask_ahead, fetch_ahead
from cache_client.reading.rows import Rows, cut, join
from cache_client.reading.window_sizes import WindowSizes
from cache_client.training.job_config import JobConfig
from cache_client.training.opened import Opened, RowReader
from cache_client.view_options.job_view import Assemble
from cache_client.views.due import samples_of
from cache_client.views.view import NO_SHUFFLE, Samples
from cache_protocol.errors import ErasedRowsError, NodeUnavailableError
from cache_protocol.storage.disk_reads import ADVICE
from cache_protocol.storage.row_sets import among
from cache_protocol.wire import tracing

logger = logging.getLogger(__name__)


class Window(NamedTuple):
    """The rows of a run of steps.

    Attributes:
        pieces: the rows, in order.
        samples: of all steps.
        sizes: slots of each step.
        repeated: whether each slot has another row in place of one that was erased; None: no slot.
        digests: of each step, if wanted.
        later: steps of the run whose rows were not sealed.
        ended: there are no more steps.
    """

    pieces: list[Rows]
    samples: Samples
    sizes: list[int]
    digests: tuple[Words, Words] | None
    later: range = range(0)
    ended: bool = False
    repeated: npt.NDArray[np.bool_] | None = None

    def batches(self, assemble: Assemble, at_once: int) -> Iterator[Any]:
        """The batches; steps of about so many slots are made at once."""
        steps = max(1, at_once // max(1, *self.sizes))
        runs = [self.sizes[at : at + steps] for at in range(0, len(self.sizes), steps)]
        slots_of_runs = [sum(run) for run in runs]
        stop = 0
        for rows, run in zip(
            cut(self.pieces, self.samples.rows_of_steps(slots_of_runs)), runs, strict=True
        ):
            start, stop = stop, stop + sum(run)
            yield from assemble(rows, self.samples.slots(start, stop), run)


def all_windows(results: Iterable[Window], fetch: Callable[[range], Window]) -> Iterator[Window]:
    """The windows, with the rest of those whose rows were not all sealed when they were asked."""
    for window in results:
        while window.sizes:
            yield window
            if not window.later:
                break
            window = fetch(window.later)
        if window.ended:
            return


def ask_for_window(
    pass_: Pass,
    opened: Opened,
    rank: int,
    request: Callable[[Int64Array], Callable[[], list[Rows]]],
    window: range,
    *,
    fetch: Callable[[Int64Array], list[Rows]],
    audits: bool,
    pads: bool = False,
    given_up: Callable[[], bool],
    note: Callable[[int, float], None] = lambda steps, seconds: None,
) -> Callable[[], Window]:
    """Asks for the rows of a run of steps; the result waits for them.

    While the version loads, it waits for the first of these steps, and asks for those of them that
    can be read. Rows that were erased are left out.

    Args:
        request, fetch: of a reader, see `Reader`.
        pads: every batch has as many rows, so another row takes the place of an erased one.
        given_up: whether nothing waits for the rows any more.
        note: called with the steps and how long their rows took.

    Raises:
        NodeUnavailableError: naming the first step. Others as `Reader.fetch`.
    """
    job_view, loading = opened.job_view, opened.loading
    step, view, later, ended = window.start, job_view.view, range(0), False
    with _named(step):
        if loading is not None:
            view, window, later, ended = loading.wait_for(pass_, window, given_up)
            if not window:
                none = Window([], Samples(np.empty(0, np.int64)), [], None, ended=ended)
                return lambda: none

        def planned(left_out: Int64Array) -> Window:
            slots, sizes, samples, left = samples_of(
                view, pass_.plan, pass_.order, window, rank, NO_ROWS if pads else left_out
            )
            digests, repeated = step_digests(slots, sizes) if audits else None, None
            if pads and samples.lengths is None and opened.left_out.any:
                repeated = among(samples.row_ids, opened.left_out.every)
                if repeated.any():
                    other = opened.left_out.another(samples.row_ids)
                    row_ids = np.where(repeated, other, samples.row_ids)
                    samples = replace(samples, row_ids=row_ids)
            return Window([], samples, left, digests, later, ended, repeated)

        known = opened.left_out.rows
        plan = planned(known)
        span = tracing.begin_below(
            pass_.traceparent, "cache.window", step=step, rows=len(plan.samples.row_ids)
        )
        begun = time.monotonic()
        with tracing.current(span):
            try:
                wait = request(plan.samples.row_ids)
            except ErasedRowsError:  # learns of them where it waits
                wait = partial(fetch, plan.samples.row_ids)
        asking_s = time.monotonic() - begun

    def receive() -> Window:
        with _named(step), tracing.spanning(span):
            made, answer, since, begun = plan, wait, known, time.monotonic()
            while True:
                try:
                    pieces = answer()
                    break
                except ErasedRowsError:
                    if not opened.left_out.learn(since):
                        raise
                since = opened.left_out.rows
                made = planned(since)
                answer = partial(fetch, made.samples.row_ids)
            note(len(made.sizes), time.monotonic() - begun + asking_s)
            if job_view.lookups is not None:
                pieces = job_view.lookups.extend(pieces, made.samples.row_ids)
            return made._replace(pieces=pieces)

    return receive


@contextmanager
def _named(step: int) -> Iterator[None]:
    """Names the step of a failure."""
    try:
        yield
    except NodeUnavailableError as error:
        raise NodeUnavailableError(f"step {step}: {error}") from None


def pass_batches(
    pass_: Pass,
    reader: RowReader,
    config: JobConfig,
    opened: Opened,
    sizes: WindowSizes,
    observer: Observer,
    counts: SharedCounts,
) -> Generator[Any, None, None]:
    """The batches of a pass. Changes nothing of its dataset, and may run in any thread."""
    job_view, rank = opened.job_view, config.rank.rank
    assemble = _assembler(config, opened)
    # A worker sends the whole storage of a batch.
    at_once = 1 if pass_.in_worker else job_view.slots_at_once
    if job_view.assembler is None and not pass_.in_worker:
        at_once = sizes.rows_per_message()  # of one message, so that none are joined
    transform = config.transform and observer.timed(config.transform)
    audits, loading = config.audit != "off", opened.loading
    shared = SharedDigests(counts, pass_) if audits and pass_.in_worker else None
    steps = pass_.steps
    per_window = sizes.steps_per_window(reader.num_nodes)
    pace = opened.pace.get(sizes.pace)
    ask = partial(
        ask_for_window, pass_, opened, rank, fetch=reader.fetch, audits=audits,
        pads=config.pad_mask is not None, given_up=lambda: reader.is_closed, note=pace.note,
    )  # fmt: skip

    def fetch(window: range) -> Window:
        return ask(lambda ids: partial(reader.fetch, ids), window)()

    windows = step_windows(steps, lambda: pace.size(per_window))
    depth, on_wait = sizes.windows_ahead(per_window), observer.note_wait

    said = loading is not None  # where waiting is what it does

    def on_late() -> None:
        nonlocal said
        if not said:
            said = True
            logger.warning(
                "no batch of %r for %g s: %s. From a disk, random rows come slowly. %s",
                opened.name,
                LATE_S,
                "its nodes bring rows slowly, or not at all"
                if reader.num_nodes
                else "its files on this machine are read slowly",
                ADVICE,
            )

    if reader.num_nodes and not sizes.in_streams and loading is None:
        results = ask_ahead(
            partial(ask, reader.request), windows, depth=depth, on_wait=on_wait, on_late=on_late
        )
    else:  # two threads share the work of files, and wait for rows that are not loaded
        results = fetch_ahead(
            fetch,
            windows,
            depth=depth,
            threads=1 if sizes.in_streams else FETCH_THREADS,
            on_wait=on_wait,
            on_late=on_late,
        )
    # Closed also where an error of the transform is kept, and this with it.
    with closing(results), _BatchSpans(pass_, rank) as spans:
        step, given = iter(steps), 0
        for window in all_windows(results, fetch):
            if window.digests is not None:
                if shared is None:
                    pass_.digests.put(*window.digests)
                else:
                    shared.begin(*window.digests)
            batches, stop = changeable(window.batches(assemble, at_once)), 0
            for batch, size in zip(batches, window.sizes, strict=True):
                at, stop = stop, stop + size
                if shared is not None:
                    shared.put_next()
                if config.pad_mask is not None:
                    padded = pass_.plan.num_padded(next(step), rank)
                    mask = np.arange(size) < size - padded
                    if window.repeated is not None:
                        mask &= ~window.repeated[at:stop]
                    with torch.inference_mode(False):
                        batch = with_column(batch, config.pad_mask, mask, config.batch_format)
                if config.reading.row_ids is not None:
                    numbers = window.samples.row_ids[at:stop].copy()
                    with torch.inference_mode(False):
                        batch = with_column(
                            batch, config.reading.row_ids, numbers, config.batch_format
                        )
                made = batch if transform is None else transform(batch)
                spans.end()
                yield sent(made) if pass_.in_worker else made
            given += len(window.sizes)
            spans.begin(given)


class _BatchSpans:
    """A span for each batch that begins a window, from when it is asked for until it is there.

    The other batches wait for nothing. The windows that are asked for meanwhile are below it.
    """

    def __init__(self, pass_: Pass, rank: int) -> None:
        self._pass, self._rank = pass_, rank
        self._span: Any = None
        self._is_on = tracing.is_on()

    def begin(self, number: int) -> None:
        """The training loop asks for a batch."""
        if self._is_on:
            epoch, rank = self._pass.epoch, self._rank
            self._span = tracing.begin("cache.batch", epoch=epoch, number=number, rank=rank)
            self._pass.traceparent = tracing.traceparent(self._span)

    def end(self) -> None:
        """It has it."""
        if self._span is not None:
            tracing.end(self._span)
            self._span = None

    def __enter__(self) -> _BatchSpans:
        self.begin(0)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            tracing.end(self._span, error)


def first_batches(
    pass_: Pass, config: JobConfig, opened: Opened, counts: SharedCounts
) -> list[Any]:
    """The first batches of a pass, `Pass.most_steps`; nothing is counted or reported."""
    unseen = replace(config, audit="off")
    observer = opened.make_observer(config, opened.nodes, counts, skipped="", in_worker=False)
    sizes = opened.sizes_of(config, 1)
    with (
        _reader_of(config, opened) as reader,
        closing(pass_batches(pass_, reader, unseen, opened, sizes, observer, counts)) as batches,
    ):
        return list(batches)


def first_rows(epoch: int, num_rows: int, config: JobConfig, opened: Opened) -> pa.RecordBatch:
    """The rows of the first samples of an epoch, at most ``num_rows``; not shuffled.

    While the version loads, they are in the order in which they were loaded.
    """
    pass_ = Pass()
    pass_.epoch, pass_.order = epoch, NO_SHUFFLE.order(opened.slots, epoch)
    pass_.plan = StepPlan(opened.slots.num_slots(epoch), 1, max(1, num_rows))
    with _reader_of(config, opened) as reader, CallThreads() as threads:
        ask = partial(
            ask_for_window, fetch=reader.fetch, audits=False, given_up=lambda: reader.is_closed
        )
        steps = range(min(1, pass_.plan.num_steps))
        wait = threads.call(ask, pass_, opened, 0, lambda ids: partial(reader.fetch, ids), steps)
        pieces = threads.call(wait).pieces
    if not pieces:
        return pa.RecordBatch.from_pylist([], opened.layout.logical)
    rows = join(pieces)
    return rows.slice(0, min(num_rows, rows.num_rows)).to_batch()


def _reader_of(config: JobConfig, opened: Opened) -> RowReader:
    return opened.source.open_reader(
        replica_offset=config.rank.rank,
        rows_per_message=opened.sizes_of(config, 1).rows_per_message(),
        counts=ReadCounts([node.id for node in opened.nodes]),
    )


def _assembler(config: JobConfig, opened: Opened) -> Assemble:
    convert, assembler = config.converter(opened.layout), opened.job_view.assembler
    if assembler is not None:
        return assembler(convert)
    return lambda rows, _, sizes: convert.batches(rows, sizes)
