"""Amends an epoch in its midst: opens what a job reads from a position on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from cache_client.control.erasures import with_erased
from cache_client.flight.routing import ShardMap
from cache_client.job.ranks import is_of_one_process
from cache_client.order.erased import Notes, digest_of, noted
from cache_client.order.permutation import Int64Array
from cache_client.order.states import AmendedPart, amended_to_dict, parts_of
from cache_client.order.view_text import erased_text, view_options, view_text
from cache_client.reading.per_process import PerProcess
from cache_client.reading.shard_maps import wait_for_shard_map
from cache_client.training.job_config import JobConfig
from cache_client.training.opened import Opened, open_version
from cache_client.view_options.columns import VersionNodes
from cache_client.view_options.open_view import make_view
from cache_client.view_options.options import MAKE_COLUMNS, View
from cache_client.view_options.selection import condition_of
from cache_client.views.amended import AmendedView, Part, amended_view, chosen_rows
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


def agreed_version(
    config: JobConfig, epoch: int, at: int, amendment: int, before: Opened, *, same: bool = False
) -> Opened:
    """The newest version, and the last act of erasing: the same for all ranks at one position.

    Args:
        amendment: of those that the process made, from 1; 0: the ranks ask at each border.
        before: what the job reads now.
        same: only the act; the version stays.

    Raises:
        ConfigError: it does not begin with the rows of the version that is read now.
        CacheError: as `open_version`.
    """
    fingerprint = before.shards.fingerprint if same else ""
    if is_of_one_process(config.job):
        found = open_version(config, fingerprint=fingerprint)
    else:
        found = open_version(
            config, fingerprint=fingerprint, epoch=epoch, amended_at=at, amendment=amendment
        )
    shards = before.shards
    if shards.fingerprint == found.shards.fingerprint:
        return found
    if found.shards.erasures and not found.shards.begins_with(shards):
        shards = newest_map(config, shards)  # files that rows were erased in have other checksums
    erased = replace(found.shards.erased, until=shards.erased.until).first(shards.num_rows)
    if not found.shards.begins_with(shards) or not np.array_equal(
        erased.left_out, shards.erased.left_out
    ):
        raise OtherRowsError(
            f"the newest version of {config.name!r}, {found.shards.fingerprint}, does not begin "
            f"with the {shards.num_rows:,} rows of {shards.fingerprint}, so its row ids are "
            "others: an epoch takes rows that were appended, and leaves out rows that were "
            "forgotten. Write the other rows with append and cachectl forget the old ones, or take "
            "this version in the next epoch"
        )
    return found


class OtherRowsError(ConfigError):
    """A version does not begin with the rows that a job reads."""


def open_parts(
    config: JobConfig,
    epoch: int,
    history: Sequence[AmendedPart],
    latest: Opened,
    before: Opened | None = None,
    notes: Notes | None = None,
) -> Opened:
    """What a job reads in an epoch.

    Args:
        config: of the job; its view is that of the last part.
        history: of the job, up to this epoch.
        latest: the version of the last part, as epochs read it that are not amended.
        before: what the job read before the last part, if it is not opened anew.
        notes: what conditions said of rows that were erased since.

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
            own = _first_rows(shards, part.num_rows)
            own = replace(own, erased=replace(own.erased, until=part.erased, notes=notes or {}))
            views[key] = _slots(config, own, _view_of(part.view))
        told.append(Part(part.at, part.num_rows, views[key], part.erased, part.view))
    amended = amended_view(epoch, config.shuffle, told, slots)
    job_view = replace(latest.job_view, view=amended)
    return replace(
        latest,
        fingerprint=view_fingerprint(shards.fingerprint, job_view.identity),
        job_view=job_view,
        view_text=erased_text(amended_text(history, config.view), shards.erased.until),
    )


def with_notes(notes: Notes, opened: Opened, text: str, acts: Mapping[int, Int64Array]) -> Notes:
    """Notes, and what the views that a job reads say of the rows of more acts.

    Args:
        opened: what the job reads, made before these rows were erased.
        text: of its view, if its epoch was not amended.
        acts: all that are known.
    """
    slots, found = opened.slots, {condition: dict(each) for condition, each in notes.items()}
    parts = slots.parts if isinstance(slots, AmendedView) else (
        Part(0, opened.shards.num_rows, slots, opened.shards.erased.until, text),
    )  # fmt: skip
    for part in parts:
        condition = condition_of(_view_of(part.text))
        if not condition:
            continue
        own = found.setdefault(digest_of(condition, part.num_rows), {})
        rows = chosen_rows(part.view)
        for number, ids in acts.items():
            ids = ids[: np.searchsorted(ids, part.num_rows)]
            if number > part.erased and number not in own and len(ids):
                own[number] = noted(np.isin(ids, rows))
    return {condition: each for condition, each in found.items() if each}


def as_in_other_epochs(opened: Opened, view_text: str) -> Opened:
    """What a job reads in all epochs but the one that was amended."""
    if not isinstance(opened.slots, AmendedView):
        return opened
    job_view = replace(opened.job_view, view=opened.slots.latest)
    return replace(
        opened,
        fingerprint=view_fingerprint(opened.shards.fingerprint, job_view.identity),
        job_view=job_view,
        view_text=erased_text(view_text, opened.shards.erased.until),
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


def newest_map(config: JobConfig, shards: ShardMap) -> ShardMap:
    """The map of a version as it is now; its views leave out the rows that they left out.

    Raises:
        CacheError: as `wait_for_shard_map`.
    """
    access = config.access
    found = wait_for_shard_map(
        access.endpoint, config.name, shards.logical.names, access.ready_deadline_s,
        access.credentials, fingerprint=shards.fingerprint,
    )  # fmt: skip
    return with_erased(access, found, shards.erased.until, shards.erased.notes)


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
