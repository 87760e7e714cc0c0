"""The rows of a training step, without training: ``cachectl rows``.

Which rows a step has follows from what the job reads, which its audit record or its reports tell.
The same functions compute it as in training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from cache_client.control.erasures import with_erased
from cache_client.control.infos import JobInfo
from cache_client.control.row_reads import fetch_rows, open_version
from cache_client.flight.routing import ShardMap
from cache_client.job.connection import Access
from cache_client.order.audit_record import AuditRecord
from cache_client.order.due import Due
from cache_client.order.erased import Notes, joined_rows
from cache_client.order.order import EpochOrder, StepPlan, runs_of_steps
from cache_client.order.permutation import Int64Array
from cache_client.order.states import (
    AmendedPart,
    SetUntil,
    amended_from_dict,
    parts_of,
    set_until,
)
from cache_client.order.view_text import view_options
from cache_client.views.amended import Part, amended_view
from cache_client.views.due import samples_of
from cache_client.views.mixing import Mixing, MixtureState
from cache_client.views.mixture_view import MixedSource, MixtureView
from cache_client.views.view import (
    LoggedView,
    PlainView,
    Shuffle,
    SlotView,
    epoch_order,
    view_fingerprint,
)
from cache_protocol.errors import (
    CacheError,
    ConfigError,
    StaleVersionError,
    missing_package,
    some_of,
)
from cache_protocol.storage.row_sets import among


class NotShownError(CacheError):
    """What was asked cannot be shown; says why."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Which step.

    Attributes:
        dataset: its name; of a mixture, those of its sources.
        fingerprint: of the version and the view; empty: of the newest version.
        view: what is read, see `cache_client.order.view_text`.
        shuffle: of the job.
        skip_steps: of the epoch, that are left out.
        skipped: the same, as runs of positions.
        of_groups: the epoch was read while the version loaded.
        notes: what conditions said of rows that were erased since.
    """

    dataset: str
    fingerprint: str
    view: str
    shuffle: Shuffle
    epoch: int
    step: int
    ranks: Sequence[int]
    world_size: int
    batch_size: int
    drop_last: bool
    pad: bool
    rows_consumed: int
    skip_steps: Sequence[int] = ()
    skipped: tuple[tuple[int, int], ...] = ()
    of_groups: bool = False
    notes: Notes = field(default_factory=dict)


class StepRow(NamedTuple):
    """A row that a rank is given; ``source`` is empty unless it is of a mixture."""

    rank: int
    source: str
    row_id: int
    values: Mapping[str, Any]


def question_of(record: AuditRecord, *, step: int, rank: int | None) -> Question:
    """The question of a step of the pass that a record is of."""
    shuffle, block_size = record.job_shuffle
    return Question(
        dataset=record.dataset,
        fingerprint=record.fingerprint,
        view=record.view,
        shuffle=Shuffle(shuffle, block_size, record.seed),
        epoch=record.epoch,
        step=step,
        ranks=range(record.world_size) if rank is None else (rank,),
        world_size=record.world_size,
        batch_size=record.batch_size,
        drop_last=record.drop_last,
        pad=record.pad,
        rows_consumed=record.rows_consumed,
        skipped=record.skipped,
        of_groups=bool(record.groups),
    )


def record_of(job: JobInfo, epoch: int, rows_consumed: int | None) -> AuditRecord | None:
    """The audit record of a pass of a job over an epoch; None: there is none.

    Raises:
        ConfigError: the job read the epoch in several parts; names them.
    """
    records = [AuditRecord.from_dict(json.loads(entry.record)) for entry in job.audits]
    of_epoch = [each for each in records if each.epoch == epoch]
    found = [each for each in of_epoch if rows_consumed in (None, each.rows_consumed)]
    begins = sorted({each.rows_consumed for each in found})
    if len(begins) > 1:
        raise ConfigError(
            f"the job read epoch {epoch} in parts: give --rows-consumed as one of {some_of(begins)}"
        )
    kinds = {replace(each, **_OF_RANK, **_of_load(each)) for each in found}
    if len(kinds) > 1:
        raise NotShownError(
            f"the ranks of the job read epoch {epoch} in {len(kinds)} ways: cachectl audit names "
            "the differences"
        )
    return found[-1] if found else None


def _of_load(record: AuditRecord) -> dict[str, Any]:
    """What differs between the records of a version that loads."""
    return {"groups": (), "num_rows": 0} if record.groups else {}


# What differs between the records of a pass of several ranks, or while they read.
_OF_RANK: Mapping[str, Any] = {
    **dict(run="", number=0, rank=0, steps=0, rows=0, set_digest=0, order_digest=0),
    **dict(checkpoints=(), begun_s=0.0, made_s=0.0, due=Due()),
}


def view_of_argument(given: str) -> str:
    """The text of a view that is given as JSON, or as a file of JSON or YAML.

    Raises:
        ConfigError: it is neither, or no view; quotes it.
    """
    import yaml

    try:
        text = given if given.lstrip().startswith("{") else Path(given).read_text("utf-8")
        options = yaml.safe_load(text)  # JSON, too
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the view {given!r}: {error}") from None
    if not isinstance(options, dict):
        raise ConfigError(f"a view is a dict of options, got {options!r}")
    _view(options)
    return json.dumps(options)


def step_rows(access: Access, question: Question) -> tuple[pa.Schema, list[StepRow]]:
    """The columns of the dataset, and the rows of the step, by rank.

    Raises:
        ConfigError: there is no such step or rank; quotes it.
        NotShownError: the view, or the version, is not known any more; says why.
        CacheError: as `open_version`.
    """
    versions, view, order_of = read_view(access, question)
    num_slots = view.num_slots(question.epoch)
    try:
        whole = StepPlan(
            num_slots,
            question.world_size,
            question.batch_size,
            drop_last=question.drop_last,
            pad=question.pad,
        )
        skipped = question.skipped or runs_of_steps(question.skip_steps, whole)
        order = order_of(skipped)
        plan = replace(whole, num_rows=order.num_left, rows_consumed=question.rows_consumed)
        steps = range(question.step, question.step + 1)
        samples = [samples_of(view, plan, order, steps, rank)[2] for rank in question.ranks]
    except ValueError as error:
        raise ConfigError(str(error)) from None
    lists = [each.row_ids for each in samples]
    ranks = np.repeat(np.array(question.ranks), [len(each) for each in lists])
    row_ids = np.concatenate([np.empty(0, np.int64), *lists])
    firsts = np.cumsum([0, *(each.shards.num_rows for each in versions)])
    places = np.searchsorted(firsts, row_ids, side="right") - 1
    found: list[StepRow | None] = [None] * len(row_ids)
    for number, version in enumerate(versions):
        own = np.flatnonzero(places == number)
        ids = row_ids[own] - firsts[number]
        if not len(ids):
            continue
        values = _values(access, version.shards, ids)
        for at, row_id, row in zip(own.tolist(), ids.tolist(), values, strict=True):
            found[at] = StepRow(int(ranks[at]), version.source, row_id, row)
    return versions[0].shards.logical, [each for each in found if each is not None]


def _values(access: Access, shards: ShardMap, ids: Int64Array) -> list[dict[str, Any]]:
    """The values of rows; nulls for those that were erased."""
    erased = shards.erased
    gone = among(ids, joined_rows([erased.left_out, erased.gone]))
    there = iter(fetch_rows(access, shards, ids[~gone]).to_pylist() if not gone.all() else ())
    none = dict.fromkeys(shards.logical.names)
    return [none if is_gone else next(there) for is_gone in gone.tolist()]


class ReadVersion(NamedTuple):
    """A version that is read, and its name in a mixture."""

    source: str
    shards: ShardMap


OrderOf = Callable[[tuple[tuple[int, int], ...]], EpochOrder]
"""Skipped runs -> the order of an epoch."""


def read_view(access: Access, question: Question) -> tuple[list[ReadVersion], SlotView, OrderOf]:
    """What is read, its view, and skipped runs -> the order of its slots.

    Raises:
        NotShownError: the view, or the version, is not known any more; says why.
        CacheError: as `open_version`.
    """
    try:
        options = view_options(question.view)
        erased = int(options.pop("erased", 0))
        history = amended_from_dict(options["amended"]) if "amended" in options else ()
        told = set_until(options.pop("set_weights")) if "set_weights" in options else None
    except ValueError as error:
        raise NotShownError(
            f"the view of the job is not known in full, {error}: give it by --view"
        ) from None
    fingerprint, shuffle = question.fingerprint.partition("-")[0], question.shuffle
    if "changes" in options:
        return _read_mixture(access, question, options)
    if question.of_groups:
        return _read_log(access, question, fingerprint)
    until = erased if question.fingerprint else None
    shards = _open(access, question.dataset, fingerprint, until, question.notes)
    if history:
        parts = parts_of(history, question.epoch)
        view: SlotView = amended_rows(access, shards, parts, shuffle, question.notes)
        has_all = not {"codes", "join"} & options.keys()
    else:
        view, has_all = _make_view(access, shards, options, shuffle)
        if told is not None:
            view = _by_weights(access, shards, options, view, told, question.epoch)
    expected = view_fingerprint(shards.fingerprint, view.identity)
    _compare(question, expected if has_all else question.fingerprint)
    return [ReadVersion("", shards)], view, lambda runs: shuffle.order(view, question.epoch, runs)


def amended_rows(
    access: Access,
    shards: ShardMap,
    parts: Sequence[AmendedPart],
    shuffle: Shuffle,
    notes: Notes,
) -> SlotView:
    """The view of an epoch that has these segments.

    Args:
        shards: of a version that has the rows of all segments.
        parts: of one epoch.
        notes: what conditions said of rows that were erased since.

    Raises:
        NotShownError: the version has other rows. CacheError: as `_make_view`.
    """
    try:
        told = []
        for part in parts:
            own = shards.first_rows(part.num_rows)
            own = replace(own, erased=replace(own.erased, until=part.erased, notes=notes))
            view, _ = _make_view(access, own, view_options(part.view), shuffle)
            told.append(Part(part.at, part.num_rows, view))
    except ValueError as error:
        raise NotShownError(f"the job was amended, and {error}") from None
    return told[0].view if len(told) == 1 else amended_view(parts[0].epoch, shuffle, told)


def _read_log(
    access: Access, question: Question, fingerprint: str
) -> tuple[list[ReadVersion], SlotView, OrderOf]:
    """An epoch that was read while the version loaded."""
    shards = _open(access, question.dataset, fingerprint)
    log = _open(access, question.dataset, fingerprint, with_log=True).log
    view = None if log is None else LoggedView(log, has_row_ids=True)
    known = None if view is None else view_fingerprint(fingerprint, view.identity)
    if log is None or view is None or known != question.fingerprint or not log.closed:
        raise NotShownError(
            "the cache does not have the log of the load any more, which is the order of this epoch"
        )
    shuffle, epoch, groups = question.shuffle, question.epoch, log.rows_of_groups
    return (
        [ReadVersion("", shards)],
        view,
        lambda _: epoch_order(shuffle, log.num_rows, epoch, groups=groups),
    )


def _read_mixture(
    access: Access, question: Question, options: Mapping[str, Any]
) -> tuple[list[ReadVersion], SlotView, OrderOf]:
    """The sources of a mixture, and their slots as one view."""
    told = {name.removeprefix("source "): each for name, each in options.items()
            if name.startswith("source ")}  # fmt: skip
    versions, sources = [], []
    for name, each in told.items():
        until = int(each.get("erased", 0))
        shards = _open(access, each["dataset"], each["fingerprint"], until)
        shuffle = Shuffle(each["shuffle"], each["shuffle_block_size"], each["seed"])
        view, _ = _make_view(access, shards, each["view"], shuffle)
        versions.append(ReadVersion(name, shards))
        fingerprint = view_fingerprint(shards.fingerprint, view.identity)
        sources.append(MixedSource(name, fingerprint, shards.num_rows, view, shuffle))
    state = {"plan": (), "steps": None, "epoch_slots": None, "changes": options["changes"]}
    mixing = Mixing(
        tuple(each.view.num_slots(0) for each in sources),
        options["stop"],
        options["draw"],
        options["seed"],
        MixtureState.from_dict(state, len(sources)).changes,
    )
    mixed = MixtureView(tuple(sources), mixing)
    _compare(question, mixed.fingerprint)
    order = question.shuffle.order
    return versions, mixed, lambda runs: order(mixed, question.epoch, runs)


def _compare(question: Question, fingerprint: str) -> None:
    """Raises NotShownError where a job reads by another view than this one."""
    if question.fingerprint not in ("", fingerprint):
        raise NotShownError(
            f"the job reads fingerprint {question.fingerprint}, and this view is {fingerprint}: "
            "give the view of the job by --view"
        )


def _open(
    access: Access,
    name: str,
    fingerprint: str,
    until: int | None = None,
    notes: Notes | None = None,
    *,
    with_log: bool = False,
) -> ShardMap:
    try:
        shards = open_version(access, name, fingerprint, with_log=with_log)
        return shards if with_log else with_erased(access, shards, until, notes)
    except StaleVersionError as error:
        raise NotShownError(f"the cache does not have the version any more: {error}") from None


def _view(options: Mapping[str, Any]) -> Any:
    """The `View` of options, as far as they choose rows."""
    try:
        from cache_client.view_options.options import MAKE_COLUMNS, View
    except ImportError as error:
        raise ConfigError(missing_package(error, "rows of a view", "client")) from None
    return View(**{name: each for name, each in options.items() if name not in MAKE_COLUMNS})


def _by_weights(
    access: Access,
    shards: ShardMap,
    options: Mapping[str, Any],
    view: SlotView,
    told: SetUntil,
    epoch: int,
) -> SlotView:
    """The view of an epoch by weights that training set."""
    from cache_client.view_options.columns import VersionNodes
    from cache_client.view_options.weight_log import view_of_told

    nodes = VersionNodes(access.endpoint, shards, access.credentials, access.deadline_s)
    return view_of_told(access, view, _view(options), nodes, told, range(epoch, epoch + 1))


def _make_view(
    access: Access, shards: ShardMap, options: Mapping[str, Any], shuffle: Shuffle
) -> tuple[SlotView, bool]:
    """The view of options, and whether none of them was left out."""
    if not options and not len(shards.erased.left_out):
        return PlainView(shards.num_rows), True
    asked = _view(options)
    from cache_client.view_options.columns import VersionNodes
    from cache_client.view_options.open_view import make_view

    nodes = VersionNodes(access.endpoint, shards, access.credentials, access.deadline_s)
    has_all = not {"codes", "join"} & options.keys()
    return make_view(asked, nodes, shuffle).view, has_all
