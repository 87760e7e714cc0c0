"""What a job reads, as a dataset of MLflow; the only importer of mlflow."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa
from mlflow.data.dataset import Dataset
from mlflow.data.dataset_source import DatasetSource
from mlflow.types.schema import (
    AnyType,
    Array,
    ColSpec,
    DataType,
    Object,
    Property,
    Schema,
)

from cache_client.job.connection import access_to
from cache_client.reading.table_reads import read_table

_MOST_OF_DIGEST: Final = 36  # that MLflow takes
_MOST_OF_VIEW: Final = 10_000
_TYPES: Final = (
    (pa.types.is_boolean, DataType.boolean),
    (pa.types.is_int64, DataType.long),
    (pa.types.is_uint64, DataType.long),
    (pa.types.is_uint32, DataType.long),
    (pa.types.is_integer, DataType.integer),
    (pa.types.is_float64, DataType.double),
    (pa.types.is_floating, DataType.float),
    (pa.types.is_decimal, DataType.double),
    (pa.types.is_string, DataType.string),
    (pa.types.is_large_string, DataType.string),
    (pa.types.is_string_view, DataType.string),
    (pa.types.is_binary, DataType.binary),
    (pa.types.is_large_binary, DataType.binary),
    (pa.types.is_fixed_size_binary, DataType.binary),
    (pa.types.is_date, DataType.datetime),
    (pa.types.is_timestamp, DataType.datetime),
)


class CacheDatasetSource(DatasetSource):
    """Where a job read: the cache, the versions, and what the order of the rows follows from."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._facts = dict(facts)

    @staticmethod
    def _get_source_type() -> str:
        return "trainer_data_cache"

    def load(self, **_: Any) -> pa.RecordBatchReader:
        """All rows of the first version, in source order.

        Raises:
            StaleVersionError: the cache does not have it any more.
        """
        first, access = self._facts["versions"][0], access_to(self._facts["cache"])
        return read_table(
            access.endpoint,
            first["dataset"],
            columns=(),
            rows=None,
            fingerprint=first["fingerprint"],
            deadline_s=access.deadline_s,
            local=access.local,
            credentials=access.credentials,
        )

    @staticmethod
    def _can_resolve(raw_source: Any) -> bool:
        return False

    @classmethod
    def _resolve(cls, raw_source: Any) -> CacheDatasetSource:
        raise NotImplementedError("a dataset object makes its source: dataset.mlflow_dataset()")

    def to_dict(self) -> dict[str, Any]:
        """The facts."""
        return self._facts

    @classmethod
    def from_dict(cls, source_dict: dict[Any, Any]) -> CacheDatasetSource:
        """The source of a logged run."""
        return cls(source_dict)


class MlflowDataset(Dataset):
    """One version and view, for `mlflow.log_input`.

    Args:
        name: of the dataset.
        fingerprint: of the version and the view.
        facts: see `CacheDatasetSource`.
        logical: the columns that are read.
        profile: sums, such as rows and bytes.
    """

    def __init__(
        self,
        name: str,
        fingerprint: str,
        facts: Mapping[str, Any],
        logical: pa.Schema,
        profile: Mapping[str, int],
    ) -> None:
        self._logical = logical
        self._sums = dict(profile)
        view = str(facts.get("view", ""))[:_MOST_OF_VIEW]
        source = CacheDatasetSource({**facts, "view": view, "fingerprint": fingerprint})
        is_short = len(fingerprint) <= _MOST_OF_DIGEST
        digest = fingerprint if is_short else hashlib.sha256(fingerprint.encode()).hexdigest()
        super().__init__(source, name, digest[:_MOST_OF_DIGEST])

    def _compute_digest(self) -> str:
        raise NotImplementedError("a digest is given")

    @property
    def profile(self) -> dict[str, int]:
        """Rows and bytes."""
        return self._sums

    @property
    def schema(self) -> Schema:
        """The columns that are read."""
        columns: list[Any] = [
            ColSpec(_type(each.type), each.name, required=not each.nullable)
            for each in self._logical
        ]
        return Schema(columns)

    def to_dict(self) -> dict[str, str]:
        """What a tracking store keeps."""
        schema = json.dumps({"mlflow_colspec": self.schema.to_dict()})
        return {**super().to_dict(), "schema": schema, "profile": json.dumps(self.profile)}


def _type(dtype: pa.DataType) -> Any:
    """The type of MLflow with the values of an Arrow type; any type where there is none."""
    if pa.types.is_struct(dtype):
        fields = [dtype.field(i) for i in range(dtype.num_fields)]
        return Object([Property(f.name, _type(f.type), required=not f.nullable) for f in fields])
    if hasattr(dtype, "value_type") and not pa.types.is_dictionary(dtype):
        return Array(_type(dtype.value_type))
    return next((found for fits, found in _TYPES if fits(dtype)), AnyType())
