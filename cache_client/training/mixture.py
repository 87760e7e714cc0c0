"""`CacheMixture`: several datasets read as one, in given proportions.

Checks the arguments, and joins the sources: their views to one, their readers to one.
`cache_client.views.mixing` decides which source and which row each slot has.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Any, cast

from cache_client.batches.batch_formats import with_column
from cache_client.job.arguments import BatchFormat, integer_or_problem
from cache_client.order.order import EpochOrder
from cache_client.order.permutation import checked_integer
from cache_client.order.states import read_state
from cache_client.order.view_text import view_options, view_text
from cache_client.reading.joined_reader import JoinedSource
from cache_client.reading.rows import Rows
from cache_client.reading.source import Source
from cache_client.training.base import RankBatches
from cache_client.training.dataset import CacheIterableDataset, dataset_of
from cache_client.training.job_config import JobConfig
from cache_client.training.left_out import LeftOut
from cache_client.training.opened import Opened, open_version
from cache_client.training.skipped_steps import slots_consumed
from cache_client.view_options.job_view import Assemble
from cache_client.view_options.options import View
from cache_client.views.mixing import (
    DRAWS,
    STOPS,
    Draw,
    Mixing,
    MixtureState,
    Stop,
    mixing,
)
from cache_client.views.mixture_view import MixedSource, MixtureView
from cache_client.views.patterns import whole_weights
from cache_client.views.view import Samples, Shuffle
from cache_protocol.datasets.dataset_names import joined
from cache_protocol.datasets.values import is_text
from cache_protocol.errors import ConfigError, checked, short, some_of
from cache_protocol.storage.flat_columns import nodes
from cache_protocol.storage.layout import Layout

_MAX_STEPS = 2**40
_MAX_NAME = 200  # of the report's name of what is read
_SHARED: Mapping[str, Callable[[JobConfig], object]] = {
    "batch_size": attrgetter("batch_size"),
    "rank": attrgetter("rank.rank"),
    "world_size": attrgetter("rank.world_size"),
    "drop_last": attrgetter("drop_last"),
    "pad_mask": attrgetter("pad_mask"),
    "stack": attrgetter("stack"),
    "stack_dtype": attrgetter("stack_dtype"),
    "batch_format": attrgetter("batch_format"),
    "decode": attrgetter("decode"),
    "nulls": attrgetter("nulls"),
    "transform": attrgetter("transform"),
    "device": attrgetter("device"),
    "copy": attrgetter("copy"),
    "deadline_s": attrgetter("access.deadline_s"),
    "audit": attrgetter("audit"),
    "job": attrgetter("job"),
}
"""Arguments that the mixture takes over from its sources; all must agree."""


class CacheMixture(RankBatches):
    """Ready batches of one rank, with rows of several datasets in given proportions.

    Which row a slot of an epoch has depends only on the versions, the seeds, the epoch and the
    slot. Any number of ranks, batch size and number of workers read the same slots, and a state of
    constant size resumes them. See "Mixtures" in the guide.

    Each source is read in passes, each with another shuffle if the source shuffles. A source that
    has given all its rows begins its next pass, also in the middle of an epoch of the mixture. The
    next epoch continues where the sources stand.

    Args:
        sources: name -> a dataset and its weight. The datasets say which columns and rows are read,
            and in which order (``shuffle``, ``seed``). They must have the same columns and types,
            and the same arguments for batches, ranks and jobs, which the mixture takes over:
            ``batch_size``, ``rank``, ``batch_format``, ``transform`` and others. Each source is
            shuffled by its seed, place and name. Weights are relative: 0.7 and 0.3 are 7 and 3.
            Shares are exact to one part in 10**9.
        stop: where an epoch ends. ``first_exhausted``: when a source is the first to have given all
            rows of a further pass. ``all_exhausted``: when the last one has. A number: after so
            many steps. A state keeps the rows of such an epoch, so with another batch size it has
            another number of steps.
        draw: ``stratified``: of any first n rows, each source has its share, to less than one row;
            of any n consecutive rows, such as a batch, to less than two. With weights that are no
            whole numbers with a sum of at most 65,536, these are two and four. ``random``: the
            sources of each 4,096 consecutive slots are shuffled by ``seed``; each keeps the order
            of its rows.
        seed: of the random draw; you must use the same on all ranks.
        weights_at: step -> name -> weight: other weights from that step on. Steps count from the
            begin of epoch 0 on, each ``world_size * batch_size`` rows.
        source_column: add a column of this name, with the name of each row's source.
        skip_steps: as in `CacheIterableDataset`.

    Raises:
        ConfigError: quotes every bad argument, and where sources differ both values.

    Thread-safety: iterate, and change epoch and state, from one thread at a time.
    """

    def __init__(
        self,
        sources: Mapping[str, tuple[CacheIterableDataset, float]],
        *,
        stop: Stop | int = "first_exhausted",
        draw: Draw = "stratified",
        seed: int = 0,
        weights_at: Mapping[int, Mapping[str, float]] | None = None,
        source_column: str | None = None,
        skip_steps: Mapping[int, Iterable[int]] | None = None,
    ) -> None:
        datasets, weights = _checked_sources(sources)
        problems = _differences(datasets)
        if isinstance(stop, str):
            if stop not in STOPS:
                problems.append(f"stop must be {', '.join(STOPS)} or steps, got {stop!r}")
        else:
            integer_or_problem(problems, "stop", stop, 1, _MAX_STEPS)
        if draw not in DRAWS:
            problems.append(f"draw must be one of {', '.join(DRAWS)}, got {draw!r}")
        checked(problems, lambda: EpochOrder(0, shuffle=False, seed=seed), ValueError)
        first = next(iter(datasets.values()))
        schedule = checked(problems, lambda: _schedule(weights, weights_at or {}), ValueError)
        if source_column is not None and not (is_text(source_column) and source_column):
            problems.append(f"source_column must be a name, got {source_column!r}")
        else:
            checked(
                problems,
                lambda: first.opened.job_view.column_names(
                    first.config.converter(_layout(datasets)).names,
                    pad_mask=first.config.pad_mask,
                    source_column=source_column,
                ),
            )
        if problems or schedule is None:
            raise ConfigError("; ".join(problems))
        config = replace(
            first.config,
            name=", ".join(datasets),
            view=View(),
            shuffle=Shuffle(
                any(dataset.config.shuffle.shuffle for dataset in datasets.values()), None, seed
            ),
            rank_is_given=all(dataset.config.rank_is_given for dataset in datasets.values()),
            skip_steps=skip_steps,
        )
        rows_per_step = config.rows_per_step
        self._names = tuple(datasets)
        self._schedule = schedule
        self._steps = None if isinstance(stop, str) else operator.index(stop)
        self._planned = mixing(
            [dataset.slots.num_slots(0) for dataset in datasets.values()],
            [(step * rows_per_step, each) for step, each in schedule],
            stop=stop if isinstance(stop, str) else operator.index(stop) * rows_per_step,
            draw=draw,
            seed=operator.index(seed),
        )
        self._told = {f"source {name}": _told(dataset) for name, dataset in datasets.items()}
        self._as_before: Callable[..., CacheMixture] | None = partial(
            _mixture_of,
            {name: dataset.config for name, dataset in datasets.items()},
            weights,
            {
                **{"stop": stop, "draw": draw, "seed": seed, "weights_at": weights_at},
                **{"source_column": source_column, "skip_steps": skip_steps},
            },
        )
        text = self._text(self._planned)
        super().__init__(config, _joined(datasets, config, self._planned, source_column, text))

    # -- properties ----------------------------------------------------------------------------

    @property
    def weights(self) -> dict[str, float]:
        """The share of each source in the rows of the next pass, at its begin."""
        epoch, offset = self._cursor.planned()
        of_slot = self._mixing.weights(self._mixing.epoch_start(epoch) + offset)
        return {
            name: weight / sum(of_slot) for name, weight in zip(self._names, of_slot, strict=True)
        }

    def rows_of_sources(self, epoch: int) -> dict[str, range]:
        """What an epoch reads of each source.

        Args:
            epoch: at least 0.

        Returns:
            For each source the rows of its part of the run, counted from 0. Row number p is sample
            ``p % n`` of pass ``p // n``, for a source of n samples.
        """
        mixing = self._mixing
        starts = mixing.counts(mixing.epoch_start(epoch))
        stops = mixing.counts(mixing.epoch_start(epoch + 1))
        return dict(zip(self._names, map(range, starts, stops), strict=True))

    @property
    def _title(self) -> list[str]:
        return list(self._names)

    def _facts(self) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint,
            "weights": self.weights,
            "stop": self._steps or self._mixing.stop,
            "draw": self._mixing.draw,
            "batch_size": self.batch_size,
            "rank": self.rank,
            "world_size": self.world_size,
            "seed": self.seed,
            "epoch": self.epoch,
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_as_before": None}  # workers load no older state

    # -- states --------------------------------------------------------------------------------

    def state_dict(self, *, steps: int | None = None) -> dict[str, Any]:
        """As `CacheIterableDataset.state_dict`, with a few numbers for each change of weights."""
        return {
            **super().state_dict(steps=steps),
            "mixture": self._mixture_state(self._mixing).to_dict(),
        }

    def _mixture_state(self, mixing: Mixing) -> MixtureState:
        slots = mixing.stop if isinstance(mixing.stop, int) else None
        return MixtureState(self._schedule, self._steps, slots, mixing.changes)

    def _text(self, mixing: Mixing) -> str:
        """What is read, for states and reports."""
        changes = self._mixture_state(mixing).to_dict()["changes"]
        how = {name: getattr(mixing, name) for name in ("draw", "seed", "stop")}
        return view_text({**self._told, **how, "changes": changes})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As `CacheIterableDataset.load_state_dict`; other weights count from the position on.

        If this mixture was made with the weights of the state, their changes stay where they were,
        also with another batch size. If it was made with others, these count from the position of
        the state on; with ``draw="random"`` from the next multiple of 4,096 rows on, or the next
        epoch. What was read before stays as it was.

        Raises:
            ConfigError, StaleVersionError: as there.
        """
        if not isinstance(state_dict, Mapping) or "mixture" not in state_dict:
            super().load_state_dict(state_dict)
            raise ConfigError("bad state: it is of a dataset, not of a mixture")
        rest = {key: value for key, value in state_dict.items() if key != "mixture"}
        self._read_sources_of(rest)
        before, mixing = self._opened, self._resumed(rest, state_dict["mixture"])
        if mixing != self._mixing and self._cursor.has_workers:
            raise ConfigError(
                "the state has weights that running DataLoader workers do not know: delete their "
                "iterator and loader before load_state_dict"
            )
        view = replace(self._mixture_view, mixing=mixing)
        self._opened = replace(
            before,
            job_view=replace(before.job_view, view=view),
            view_text=self._text(mixing),
        )
        try:
            super().load_state_dict(rest)
        except BaseException:
            self._opened = before
            raise

    def _read_sources_of(self, rest: Mapping[str, Any]) -> None:
        """Opens the sources as a state has them, if rows of them were erased since.

        Raises:
            ConfigError: a view needs values of these rows; or workers run.
        """
        try:
            state = read_state(rest)
            told = view_options(state.view)
        except ValueError:
            return  # is refused by name
        untils = {name: told.get(name, {}).get("erased", 0) for name in self._told}
        if (
            self._as_before is None
            or state.fingerprint == self.fingerprint
            or untils == {name: each.get("erased", 0) for name, each in self._told.items()}
        ):
            return
        if self._cursor.has_workers:
            raise ConfigError(
                "rows were erased since the state, which running DataLoader workers do not know: "
                "delete their iterator and loader before load_state_dict"
            )
        versions = {name: told.get(name, {}).get("fingerprint", "") for name in self._told}
        before = self._as_before(versions, untils)
        self._planned, self._told = before._planned, before._told
        self._opened = before._opened

    def _resumed(self, rest: Mapping[str, Any], written: Any) -> Mixing:
        """The mixing of a state, with the weights of this mixture from its position on."""
        try:
            state = read_state(rest)
            if state.fingerprint != self.fingerprint:
                return self._mixing  # such a state is refused
            saved = MixtureState.from_dict(written, len(self._names))
            if saved.steps != self._steps:
                raise ValueError(f"it has stop={saved.steps} steps, this mixture {self._steps}")
            stop = self._planned.stop if saved.epoch_slots is None else saved.epoch_slots
            mixing = replace(self._planned, stop=stop, changes=saved.changes)
            if saved.schedule == self._schedule:
                return mixing
            slot = mixing.epoch_start(state.epoch)
            slot += slots_consumed(state, mixing.num_slots(state.epoch))
            return mixing.resumed(mixing.change_slot(slot, state.epoch), self._planned)
        except ValueError as error:
            raise ConfigError(f"bad state: {error}") from None

    # -- reading -------------------------------------------------------------------------------

    @property
    def _mixture_view(self) -> MixtureView:
        view = self._slots
        assert isinstance(view, MixtureView)
        return view

    @property
    def _mixing(self) -> Mixing:
        return self._mixture_view.mixing


def _mixture_of(
    configs: Mapping[str, JobConfig],
    weights: Mapping[str, float],
    options: Mapping[str, Any],
    versions: Mapping[str, str],
    untils: Mapping[str, int],
) -> CacheMixture:
    """A mixture whose sources leave out the rows of the first acts of erasing.

    Args:
        weights, options: of the mixture.
        versions, untils: of each source, by its name after ``source``.
    """
    sources = {}
    for name, config in configs.items():
        key = f"source {name}"
        opened = open_version(config, fingerprint=versions[key], until=untils[key])
        sources[name] = (dataset_of(config, opened), weights[name])
    return CacheMixture(sources, **options)


def _joined(
    datasets: Mapping[str, CacheIterableDataset],
    config: JobConfig,
    planned: Mixing,
    source_column: str | None,
    text: str,
) -> Opened:
    """What the sources read, as one."""
    first = next(iter(datasets.values())).opened
    view = MixtureView(
        tuple(
            MixedSource(
                name, dataset.fingerprint, dataset.num_rows, dataset.slots, dataset.config.shuffle
            )
            for name, dataset in datasets.items()
        ),
        planned,
    )
    versions = [dataset.opened.name for dataset in datasets.values()]
    named = joined(versions)
    sources = [dataset.opened.source for dataset in datasets.values()]
    source = JoinedSource(cast("list[Source]", sources))
    assembler = _NamedSources(
        first.job_view.assembler, tuple(datasets), source_column, config.batch_format
    )
    added = (*first.job_view.added, *([(source_column, "source_column")] if source_column else []))
    return Opened(
        named if len(named) <= _MAX_NAME else joined((versions[0], str(len(versions) - 1))),
        view.fingerprint,
        source,
        replace(first.job_view, view=view, assembler=assembler, added=added),
        _layout(datasets),
        config.window_sizes(source.shards, view.rows_per_slot),
        tuple(dict.fromkeys(n for each in datasets.values() for n in each.opened.nodes)),
        text,
        LeftOut(
            config.access,
            [
                replace(known, first=start)
                for (known,), start in zip(
                    (dataset.opened.left_out.known for dataset in datasets.values()),
                    accumulate((dataset.num_rows for dataset in datasets.values()), initial=0),
                    strict=False,
                )
            ],
        ),
    )


def _layout(datasets: Mapping[str, CacheIterableDataset]) -> Layout:
    """That of the rows, with the nulls of all sources; their columns must be the same."""
    first, *others = [dataset.opened.layout for dataset in datasets.values()]
    names = {name for each in (first, *others) for name in each.nulls.units}
    return first.with_nulls(names & {n for node in nodes(first.tree) for n in node.null_units})


def _told(dataset: CacheIterableDataset) -> dict[str, Any]:
    """What is read of a source, and in which order."""
    how, version = dataset.config.shuffle, dataset.opened.shards
    until = version.erased.until
    return {
        "dataset": version.dataset,
        "fingerprint": version.fingerprint,
        **({"erased": until} if until else {}),
        "shuffle": how.shuffle,
        "shuffle_block_size": how.shuffle_block_size,
        "seed": how.seed,
        "view": dataset.view.given(),
    }


@dataclass(frozen=True)
class _NamedSources:
    """Adds the column with the sources to the batches of an assembler.

    Attributes:
        assembler: of the sources; None: their converter.
        names: of the sources.
        column: the name of the new column; None: none is added.
    """

    assembler: Callable[[Callable[[Rows], Any]], Assemble] | None
    names: tuple[str, ...]
    column: str | None
    batch_format: BatchFormat

    def __call__(self, convert: Callable[[Rows], Any]) -> Assemble:
        make = None if self.assembler is None else self.assembler(convert)

        def assemble(rows: Rows, samples: Samples, slots: Sequence[int]) -> Iterator[Any]:
            batches = [convert(rows)] if make is None else make(rows, samples, slots)
            if self.column is None:
                yield from batches
                return
            assert samples.sources is not None
            names = [self.names[source] for source in samples.sources.tolist()]
            stop = 0
            for batch, size in zip(batches, slots, strict=True):
                start, stop = stop, stop + size
                yield with_column(batch, self.column, names[start:stop], self.batch_format)

        return assemble


def _checked_sources(
    sources: object,
) -> tuple[dict[str, CacheIterableDataset], dict[str, float]]:
    """The datasets and their weights, by name."""
    good = isinstance(sources, Mapping) and all(
        is_text(name) and name and isinstance(source, tuple) and len(source) == 2
        and isinstance(source[0], CacheIterableDataset)
        for name, source in sources.items()
    )  # fmt: skip
    if not good or not sources:
        raise ConfigError(
            "a mixture takes a dict from name to a CacheIterableDataset and its weight, such as "
            f'{{"web": (web, 0.7), "code": (code, 0.3)}}, got {sources!r}'
        )
    assert isinstance(sources, Mapping)
    return (
        {name: dataset for name, (dataset, _) in sources.items()},
        {name: weight for name, (_, weight) in sources.items()},
    )


def _schedule(
    weights: Mapping[str, float], weights_at: Mapping[int, Mapping[str, float]]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Pairs of steps and whole weights, ascending, the first at step 0.

    Raises:
        ValueError: quotes a bad step or bad weights.
    """
    schedule = {0: whole_weights(list(weights.values()))}
    if not isinstance(weights_at, Mapping):
        raise ValueError(f"weights_at must map steps to weights, got {weights_at!r}")
    for step, given in weights_at.items():
        number = checked_integer("a step of weights_at", step, 1, _MAX_STEPS)
        if not isinstance(given, Mapping) or set(given) != set(weights):
            raise ValueError(
                f"weights_at[{step}] must have a weight for each of {some_of(map(repr, weights))}"
                f", got {short(repr(given))}"
            )
        schedule[number] = whole_weights([given[name] for name in weights])
    return tuple(sorted(schedule.items()))


def _differences(datasets: Mapping[str, CacheIterableDataset]) -> list[str]:
    """Why the datasets cannot be mixed; empty if they can."""
    problems = []
    (name, first), *others = datasets.items()
    for other_name, other in others:
        for argument, asked in _SHARED.items():
            ours, theirs = asked(first.config), asked(other.config)
            if ours != theirs:
                problems.append(
                    f"the sources must agree on {argument}: {name!r} has {ours!r}, "
                    f"{other_name!r} has {theirs!r}"
                )
        ours, theirs = _columns(first), _columns(other)
        if ours != theirs:
            problems.append(
                "the sources must have the same columns in the same order: "
                f"{name!r} has {_only(ours, theirs)}, {other_name!r} has {_only(theirs, ours)}: "
                "give both datasets the same columns=, or cast and rename them in the sql"
            )
        if not _same(first.opened.job_view.assembler, other.opened.job_view.assembler):
            problems.append(f"the sources {name!r} and {other_name!r} make different batches")
    for name, dataset in datasets.items():
        if dataset.slots.epochs == "any size":
            problems.append(
                f"source {name!r} may have another number of samples in each epoch: pack documents "
                "with cut_documents=True, or without shuffle, and not with weights, per_class or "
                "epoch_rows"
            )
        elif not dataset.slots.num_slots(0):
            problems.append(f"source {name!r} has no rows")
        if dataset.opened.job_view.lookups is not None:
            problems.append(f"source {name!r} has codes or join, which a mixture does not read")
        if dataset.config.version != "ready":
            problems.append(
                f"source {name!r} has version={dataset.config.version!r}: a mixture keeps its "
                "versions"
            )
        if dataset.config.reading.row_ids:
            problems.append(f"source {name!r} has row_ids, which a mixture does not give")
        if dataset.config.skip_steps:
            problems.append(f"source {name!r} has skip_steps: give it to the mixture")
    return problems


def _same(one: Any, other: Any) -> bool:
    """Whether two functions do the same, as far as one can see."""
    if isinstance(one, partial) and isinstance(other, partial):
        same = (one.func, one.args, one.keywords) == (other.func, other.args, other.keywords)
        return bool(same)
    return bool(one == other)


def _columns(dataset: CacheIterableDataset) -> list[str]:
    """Names and types of what is read."""
    return [f"{field.name!r} {field.type}" for field in dataset.opened.layout.logical]


def _only(columns: list[str], others: list[str]) -> str:
    """Some of the columns that the others lack, or that have another place there."""
    lacked = [each for each in columns if each not in others]
    if not lacked and len(columns) < len(others):
        return "no others"
    moved = (ours for ours, theirs in zip(columns, others, strict=False) if ours != theirs)
    return some_of(lacked or moved)
