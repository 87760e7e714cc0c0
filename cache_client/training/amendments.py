"""Amends an epoch in its midst: opens what a job reads from a position on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from cache_client.flight.routing import ShardMap
from cache_client.job.ranks import is_of_one_process
from cache_client.order.states import AmendedPart, amended_to_dict, parts_of
from cache_client.order.view_text import view_options, view_text
from cache_client.reading.per_process import PerProcess
from cache_client.training.job_config import JobConfig
from cache_client.training.opened import Opened, open_version
from cache_client.view_options.columns import VersionNodes
from cache_client.view_options.open_view import make_view
from cache_client.view_options.options import MAKE_COLUMNS, View
from cache_client.views.amended import AmendedView, Part, amended_view
from cache_client.views.view import SlotView, view_fingerprint
from cache_protocol.errors import ConfigError, StaleVersionError

MANY_ROWS: Final = ("pack", "group_by", "length_buckets")
"""Options of `View` whose samples are not single rows, or whose order is not one of rows."""


def check_amendable(view: View) -> str:
    """The text of a view, from which a state makes it again.

    Raises:
        ConfigError: an epoch cannot be amended with it; quotes the option.
    """
    given = view.given()
    many = [name for name in MANY_ROWS if name in given]
    if many:
        raise ConfigError(
            f"an epoch with {many[0]}={given[many[0]]!r} cannot be amended: amend counts single "
            "rows, and a sample of this view is several, or has its place by others"
        )
    try:
        _view_of(view.rows.text)
    except (ConfigError, TypeError, ValueError) as error:
        raise ConfigError(
            f"an epoch cannot be amended with {view}, because a state could not name it: {error}; "
            "write the rows as a column, and choose them by where"
        ) from None
    return view.rows.text


def newest_for(config: JobConfig, epoch: int, at: int, amendment: int, before: Opened) -> Opened:
    """The newest version, the same for all ranks that amend an epoch at one position.

    Args:
        amendment: of those that the process made; from 1.
        before: what the job reads now.

    Raises:
        ConfigError: it does not begin with the rows of the version that is read now.
        CacheError: as `open_version`.
    """
    if is_of_one_process(config.job):
        found = open_version(config)
    else:
        found = open_version(config, epoch=epoch, amended_at=at, amendment=amendment)
    if not found.shards.begins_with(before.shards):
        raise ConfigError(
            f"the newest version of {config.name!r}, {found.shards.fingerprint}, does not begin "
            f"with the {before.shards.num_rows:,} rows of {before.shards.fingerprint}, so its row "
            "ids are others: an epoch takes rows that were appended; take this version in the "
            "next epoch"
        )
    return found


def open_parts(
    config: JobConfig,
    epoch: int,
    history: Sequence[AmendedPart],
    latest: Opened,
    before: Opened | None = None,
) -> Opened:
    """What a job reads in an epoch.

    Args:
        config: of the job; its view is that of the last part.
        history: of the job, up to this epoch.
        latest: the version of the last part, as epochs read it that are not amended.
        before: what the job read before the last part, if it is not opened anew.

    Raises:
        StaleVersionError: the version does not have the rows of the history.
        CacheError: as `make_view`.
    """
    parts, shards = parts_of(history, epoch), latest.shards
    if len(parts) == 1:
        return latest
    slots = None if before is None else before.slots
    views = {parts[-1][2:]: latest.slots}
    if isinstance(slots, AmendedView) and slots.epoch == epoch:
        views |= {part[2:]: had.view for part, had in zip(parts[:-1], slots.parts, strict=False)}
    elif slots is not None and len(parts) == 2:
        views[parts[0][2:]] = slots
    told = []
    for part in parts:
        key = part[2:]
        if key not in views:
            views[key] = _slots(config, _first_rows(shards, part.num_rows), _view_of(part.view))
        told.append(Part(part.at, part.num_rows, views[key]))
    amended = amended_view(epoch, config.shuffle, told, slots)
    job_view = replace(latest.job_view, view=amended)
    return replace(
        latest,
        fingerprint=view_fingerprint(shards.fingerprint, job_view.identity),
        job_view=job_view,
        view_text=amended_text(history, config.view),
    )


def as_in_other_epochs(opened: Opened, view_text: str) -> Opened:
    """What a job reads in all epochs but the one that was amended."""
    if not isinstance(opened.slots, AmendedView):
        return opened
    job_view = replace(opened.job_view, view=opened.slots.latest)
    return replace(
        opened,
        fingerprint=view_fingerprint(opened.shards.fingerprint, job_view.identity),
        job_view=job_view,
        view_text=view_text,
        observer=PerProcess(),
    )


def amended_text(history: Sequence[AmendedPart], view: View) -> str:
    """The view of an amended epoch, for reports and records."""
    columns = {name: value for name, value in view.given().items() if name in MAKE_COLUMNS}
    return view_text({**columns, "amended": amended_to_dict(history)})


def view_of_state(parts: Sequence[AmendedPart]) -> View:
    """The view of the last part of a state.

    Raises:
        ConfigError: its text is not that of a view; quotes it.
    """
    try:
        return _view_of(parts[-1].view)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"bad state: the view {parts[-1].view!r}: {error}") from None


def _view_of(text: str) -> View:
    return View(**view_options(text))


def _first_rows(shards: ShardMap, num_rows: int) -> ShardMap:
    try:
        return shards.first_rows(num_rows)
    except ValueError as error:
        raise StaleVersionError(
            f"the state is of an epoch that was amended at {num_rows:,} rows, and {error}: the "
            "dataset was loaded again since"
        ) from None


def _slots(config: JobConfig, shards: ShardMap, view: View) -> SlotView:
    access = config.access
    version = VersionNodes(
        access.endpoint, shards, access.credentials, access.deadline_s, config.rank.rank
    )
    return make_view(
        view,
        version,
        config.shuffle,
        config.batch_format,
        ready_deadline_s=access.ready_deadline_s,
    ).view
