"""Amends an epoch in its midst: opens what a job reads from a position on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from cache_client.flight.routing import ShardMap
from cache_client.job.ranks import is_of_one_process
from cache_client.order.states import AmendedPart
from cache_client.order.view_text import view_options, view_text
from cache_client.training.job_config import JobConfig
from cache_client.training.opened import Opened, open_version
from cache_client.view_options.columns import VersionNodes
from cache_client.view_options.open_view import make_view
from cache_client.view_options.options import View
from cache_client.views.amended import AmendedView, Part
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


def newest_for(config: JobConfig, epoch: int, at: int, before: Opened) -> Opened:
    """The newest version, the same for all ranks that amend an epoch at one position.

    Raises:
        ConfigError: it does not begin with the rows of the version that is read now.
        CacheError: as `open_version`.
    """
    if is_of_one_process(config.job):
        found = open_version(config)
    else:
        found = open_version(config, epoch=epoch, amended_at=at)
    if not found.shards.begins_with(before.shards):
        raise ConfigError(
            f"the newest version of {config.name!r}, {found.shards.fingerprint}, does not begin "
            f"with the {before.shards.num_rows:,} rows of {before.shards.fingerprint}, so its row "
            "ids are others: an epoch takes rows that were appended; take this version in the "
            "next epoch"
        )
    return found


def open_parts(
    config: JobConfig, epoch: int, parts: Sequence[AmendedPart], latest: Opened | None = None
) -> Opened:
    """What a job reads in an amended epoch.

    Args:
        config: of the job; its view is that of the last part.
        epoch: of the job.
        parts: of the epoch; the last one has all rows of the version.
        latest: the version of the last part, as all other epochs read it.

    Raises:
        ConfigError: the parts are not of this version.
        CacheError: as `open_version`.
    """
    latest = open_version(config) if latest is None else latest
    if len(parts) == 1:
        return latest
    shards = latest.shards
    views = [
        latest.slots
        if (part.num_rows, part.view) == parts[-1][1:]
        else _slots(config, _first_rows(shards, part.num_rows), _view_of(part.view))
        for part in parts
    ]
    amended = AmendedView(
        epoch,
        config.shuffle,
        tuple(Part(part.at, part.num_rows, view) for part, view in zip(parts, views, strict=True)),
    )
    job_view = replace(latest.job_view, view=amended)
    return replace(
        latest,
        fingerprint=view_fingerprint(shards.fingerprint, job_view.identity),
        job_view=job_view,
        view_text=amended_text(epoch, parts),
    )


def amended_text(epoch: int, parts: Sequence[AmendedPart]) -> str:
    """The view of an amended epoch, for reports and records; `parts_of_text` reads it."""
    views = list(dict.fromkeys(part.view for part in parts))
    numbers = [n for at, num_rows, view in parts for n in (at, num_rows, views.index(view))]
    return view_text({"amended": {"epoch": epoch, "views": views, "parts": numbers}})


def parts_of_text(options: Mapping[str, object]) -> tuple[int, tuple[AmendedPart, ...]]:
    """The epoch and the parts of `amended_text`, of its option ``amended``."""
    numbers, views = options["parts"], options["views"]
    assert isinstance(numbers, list) and isinstance(views, list)
    triples = zip(*[iter(numbers)] * 3, strict=True)
    parts = tuple(AmendedPart(at, num_rows, views[view]) for at, num_rows, view in triples)
    return int(str(options["epoch"])), parts


def view_of_state(parts: Sequence[AmendedPart]) -> View:
    """The view of the last part of a state.

    Raises:
        ConfigError: it is none; quotes it.
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
