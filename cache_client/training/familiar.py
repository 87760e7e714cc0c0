"""What people who come from other libraries look for in a dataset: its schema, a look, advice.

The names of other libraries that are not here raise an AttributeError with the way to do the same
here, so that `hasattr` stays right.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pyarrow as pa

from cache_client.order.permutation import checked_integer
from cache_protocol.cli.facts import facts_html, type_name
from cache_protocol.errors import ConfigError

_ONCE: Final = "sql= of its DatasetSpec, once, at the load"
_MAP: Final = f"a batch is changed by transform=, at each read, or by {_ONCE}"
_FILTER: Final = f"rows are left out by view=View(where='price > 100'), or by {_ONCE}"
_COLUMNS: Final = "columns are chosen by columns=['area', 'price']"
_RENAME: Final = f"columns are renamed by {_ONCE}, as in SELECT price AS label FROM source"
_SHUFFLE: Final = "each epoch is shuffled by shuffle=True and seed=, over all rows"
_BATCH: Final = "the batches are ready: batch_size= is their size"
_DIVIDE: Final = "ranks and workers divide the rows without a call: see rank= and world_size="
_SPLIT: Final = "rows are split by view=View(split={'train': 0.9, 'val': 0.1}, part='train')"
_FORMAT: Final = "batch_format= is torch, numpy, jax, arrow or polars"
_TABLE: Final = "the whole table is read by CacheClient().read(NAME), a pyarrow.RecordBatchReader"
_SKIP: Final = "a pass continues after a state: load_state_dict; skip_steps= leaves steps out"
_REPEAT: Final = "an epoch is chosen by set_epoch(epoch), and each `for` over the loader is a pass"
_KEPT: Final = "the nodes keep the rows in memory, and fetch ahead: nothing to call"
_LOADER: Final = "batches are read by dataset.loader(num_workers=n), or by iterating the dataset"
_ORDER: Final = f"rows are sorted by ORDER BY in {_ONCE}"
_STATS: Final = "the values of columns are summed up by `cachectl stats NAME`"
_MIX: Final = "datasets are joined by CacheMixture({'one': 0.5, 'two': 0.5}, ...)"
_JOIN: Final = "columns of another dataset are added by view=View(join=Join(...))"
_ROWS: Final = "rows by number are those of CacheDataset(NAME), such as dataset[3]"

HERE: Final = {
    name: advice
    for advice, names in {
        _MAP: "map map_batches map_dict flat_map add_column with_columns with_column decode apply",
        _FILTER: "filter where query drop_nulls dropna",
        _COLUMNS: "select select_columns remove_columns drop_columns drop to_tuple columns",
        _RENAME: "rename rename_column rename_columns cast cast_column",
        _SHUFFLE: "shuffle shuffled random_shuffle randomize_block_order",
        _BATCH: "batch batched unbatch padded_batch rebatch",
        _DIVIDE: "shard split_by_node split_by_worker repartition streaming_split num_shards",
        _SPLIT: "split train_test_split split_proportionately random_split",
        _FORMAT: "with_format set_format as_numpy_iterator as_numpy with_transform set_transform",
        _TABLE: "to_table to_arrow to_arrow_refs to_pandas to_polars to_dict to_list to_batches",
        _SKIP: "skip",
        _REPEAT: "repeat with_epoch with_length",
        _KEPT: "cache prefetch persist materialize",
        _LOADER: "iter iter_batches iter_rows iter_torch_batches to_torch to_iterable_dataset",
        _ORDER: "sort sort_values order_by",
        _STATS: "describe summary unique nunique value_counts min max mean std sum count",
        _MIX: "concatenate concatenate_datasets interleave interleave_datasets union zip",
        _JOIN: "join merge",
        _ROWS: "iloc loc row get",
        f"groups of rows are read by view=View(group_by=...); sums are made by {_ONCE}": (
            "groupby group_by group_by_window aggregate"
        ),
        f"a part of the rows is drawn by View(epoch_rows=..., weights=...), or {_ONCE}": (
            "sample random_sample random_sample_ limit"
        ),
        "the first batches are take(n), the first rows head(n)": "show take_batch peek first tail",
        "it is schema, an Arrow schema, or column_names": "features dtypes info element_spec",
        "rows are num_rows, columns len(column_names), steps len(dataset)": "shape num_columns",
    }.items()
    for name in names.split()
}
"""Names of other libraries -> how the same is done here."""


class Familiar:
    """Base of all datasets: looks at what they read. Has no state."""

    _more: ClassVar[str] = ""  # advice for every name

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """Arrow schema of the columns that are read, before they become batches."""

    @property
    @abstractmethod
    def column_names(self) -> list[str]:
        """The columns of a batch, before ``transform``."""

    @property
    @abstractmethod
    def _title(self) -> object: ...

    @abstractmethod
    def _first_rows(self, num_rows: int) -> pa.RecordBatch: ...

    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """What is read, for people; None: not shown."""

    def head(self, num_rows: int = 5) -> Any:
        """The first rows that are read, not shuffled, as a pandas frame of Arrow types.

        They are before ``transform``, ``stack`` and ``decode``. No pass notices it.
        `CacheClient.head` gives a RecordBatch, which needs no pandas.

        Raises:
            ConfigError: ``num_rows`` is no integer of at least 0; or there is no pandas.
            NodeUnavailableError, StaleVersionError: no node has them.
        """
        rows = self._first_rows(count_of("num_rows", num_rows))
        try:
            types_mapper = import_module("pandas").ArrowDtype
        except ImportError:
            raise ConfigError(
                "head makes a frame of pandas, which is not installed: pip install pandas, or "
                "take CacheClient().head(NAME), a pyarrow.RecordBatch"
            ) from None
        return rows.to_pandas(types_mapper=types_mapper)

    def _repr_html_(self) -> str:
        """What is read, for notebooks."""
        facts = [(name, _short(value)) for name, value in self._given() if name != "columns"]
        columns = [(field.name, type_name(field.type)) for field in self.schema]
        return facts_html(
            f"{type(self).__name__} {self._title}", facts, ("column", "type"), columns
        )

    def _given(self) -> Iterable[tuple[str, Any]]:
        return ((name, value) for name, value in self._facts().items() if value is not None)

    def __repr__(self) -> str:
        """The dataset and how it is read; the same in all processes and runs."""
        rest = ", ".join(f"{name}={value!r}" for name, value in self._given())
        return f"{type(self).__name__}({self._title!r}, {rest})"

    if not TYPE_CHECKING:  # a checker would take every name for one that is here

        def __getattr__(self, name: str) -> Any:
            if name not in HERE:
                return object.__getattribute__(self, name)  # the error of Python, or of a property
            raise AttributeError(
                f"{type(self).__name__} has no {name!r}: {HERE[name]}{self._more}",
                name=name,
                obj=self,
            )


def count_of(name: str, value: object) -> int:
    """A number of things. Raises ConfigError for anything but an integer of at least 0."""
    try:
        return checked_integer(name, value, 0)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _short(value: object) -> str:
    text = f"{value:,}" if type(value) is int else str(value)
    return text if len(text) <= 200 else f"{text[:199]}…"
