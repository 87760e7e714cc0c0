"""Announces the orders of a job to nodes that prepare them: see `cache_client.reading`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager

from cache_client.epochs.passes import Pass
from cache_client.order.order import EpochOrder
from cache_client.reading.announcements import Announcements
from cache_client.reading.source import Source
from cache_client.training.job_config import JobConfig
from cache_client.training.opened import Opened, RowSource
from cache_client.views.amended import AmendedView
from cache_client.views.buckets import EpochBuckets

Skipped = Mapping[int, tuple[tuple[int, int], ...]]


@contextmanager
def in_announced_order(
    config: JobConfig, opened: Opened, pass_: Pass, skipped: Skipped
) -> Iterator[tuple[RowSource, Callable[[], None]]]:
    """Waits until the order of a pass is prepared, where nodes do so.

    Args:
        skipped: by epoch, see `EpochOrder`.

    Yields:
        Where the rows come from, and what to call from time to time: it announces the next epoch.
    """
    source, view = opened.source, opened.slots
    nodes = [node for node in opened.nodes if node.id in opened.shards.preparing]
    is_shuffled = config.shuffle.shuffle or view.orders_rows
    is_one = isinstance(source, Source) and opened.loading is None
    if not (nodes and is_shuffled and is_one) or isinstance(view, AmendedView):
        yield source, lambda: None
        return
    assert isinstance(source, Source)
    # The seed of a view that orders its rows is not in its order.
    of = f"{opened.fingerprint} {opened.view_text} {config.shuffle!r}"
    num_rows = opened.shards.num_rows

    def buckets(order: EpochOrder, start: int) -> EpochBuckets:
        return EpochBuckets(view, order, num_rows, start, of)

    now, epoch = buckets(pass_.order, pass_.plan.rows_consumed), pass_.epoch + 1
    following = buckets(config.shuffle.order(view, epoch, skipped.get(epoch, ())), 0)
    sends = config.rank.rank == 0 and pass_.worker == 0
    with closing(
        Announcements(nodes, opened.shards, config.access.credentials, now, following, sends=sends)
    ) as told:
        is_prepared = told.wait()

        def go_on() -> None:
            told.go_on(pass_.handed_out / max(1, len(pass_.steps)))

        go_on()
        yield (source.in_order(now.name) if is_prepared else source), go_on
