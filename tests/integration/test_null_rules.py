"""Nulls and structs from a file to a batch, by every way to read them in torch and numpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from cache_client import (
    CacheClient,
    CacheDataset,
    CacheIterableDataset,
    CacheMixture,
    DatasetSpec,
    Reading,
    View,
)
from cache_protocol.errors import ConfigError
from cache_server import LocalCluster

ROWS = 60
ADDRESS = pa.struct([("zip", pa.int32()), ("street", pa.string())])


def table(first_rating: int | None) -> pa.Table:
    numbers = range(ROWS)
    ratings = [None if n % 4 == 1 else n % 7 for n in numbers] if first_rating is None else numbers
    addresses = [
        None if n % 5 == 0 else {"zip": None if n % 3 == 0 else n, "street": f"{n}"}
        for n in numbers
    ]
    return pa.table(
        {
            "row": pa.array(numbers, pa.int64()),
            "rating": pa.array(list(ratings), pa.int8()),
            "weight": pa.array([None if n % 2 else n / 2 for n in numbers], pa.float32()),
            "address": pa.array(addresses, ADDRESS),
            "city": pa.array([n % 3 for n in numbers], pa.int16()),
        }
    )


CITIES = pa.table(
    {"city": pa.array([0, 1, 2], pa.int16()), "size": pa.array([5, None, 7], pa.int64())}
)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("tables")
    tables = {"some": table(None), "known": table(0), "cities": CITIES}
    with LocalCluster(nodes=1) as cluster:
        for name, each in tables.items():
            pq.write_table(each, directory / f"{name}.parquet", row_group_size=20)
            CacheClient(cluster.endpoint).load(DatasetSpec(name, directory / f"{name}.parquet"))
        yield cluster.endpoint


def batches(endpoint: str, name: str = "some", **options: Any) -> list[Any]:
    options = {"batch_size": 16, "cache": endpoint, **options}
    return list(CacheIterableDataset(name, **options))


def joined(parts: list[dict[str, Any]], column: str) -> list[Any]:
    return [value for part in parts for value in part[column].tolist()]


def test_a_pass_refuses_nulls_of_integers_by_name(endpoint: str) -> None:
    dataset = CacheIterableDataset("some", cache=endpoint, batch_size=8)
    with pytest.raises(ConfigError, match=r"'rating' \(int8\), 'address\.zip' \(int32\)"):
        next(iter(dataset))
    assert len(batches(endpoint, columns=["row", "weight", "address.street"])) == 4


def test_a_value_or_a_mask_stands_for_nulls(endpoint: str) -> None:
    wanted = table(None)["rating"].to_pylist()
    filled = batches(endpoint, nulls={"rating": -1, "address.zip": -2}, shuffle=True)
    by_row = dict(zip(joined(filled, "row"), joined(filled, "rating"), strict=True))
    assert by_row == {row: -1 if n is None else n for row, n in enumerate(wanted)}
    masked = batches(endpoint, nulls="mask")
    assert joined(masked, "rating.valid") == [n is not None for n in wanted]
    zips = [None if a is None else a["zip"] for a in table(None)["address"].to_pylist()]
    assert joined(masked, "address.zip.valid") == [n is not None for n in zips]
    streets = [text for batch in masked for text in batch["address"]["street"]]
    assert streets == [None if n % 5 == 0 else f"{n}" for n in range(ROWS)]


def test_masks_travel_from_workers_and_to_devices(endpoint: str) -> None:
    dataset = CacheIterableDataset("some", cache=endpoint, batch_size=16, nulls="mask")
    (first, *_) = dataset.loader(num_workers=1)
    (on_device, *_) = batches(endpoint, nulls="mask", device="cpu")
    assert first["address"]["zip"].tolist() == on_device["address"]["zip"].tolist()
    assert first["rating.valid"].dtype == on_device["rating.valid"].dtype == torch.bool


def test_rows_by_number_have_structs_and_masks(endpoint: str) -> None:
    dataset = CacheDataset("some", cache=endpoint, nulls="mask")
    row = dataset[7]
    assert row["address"] == {"zip": torch.tensor(7), "street": "7"}
    assert row["rating.valid"].item() is True and dataset[5]["rating.valid"].item() is False
    with pytest.raises(ConfigError, match="nulls must be 'mask' or a dict"):
        CacheDataset("some", cache=endpoint, nulls="none")  # type: ignore[arg-type]


def test_record_batches_have_the_nulls_of_the_table(endpoint: str) -> None:
    parts = batches(endpoint, batch_format="arrow")
    assert pa.Table.from_batches(parts).equals(table(None))
    field = pa.Table.from_batches(batches(endpoint, batch_format="arrow", columns=["address.zip"]))
    assert field.schema.field("address").type == pa.struct([ADDRESS.field("zip")])


def test_a_mixture_has_the_masks_of_all_its_sources(endpoint: str) -> None:
    sources = {
        name: CacheIterableDataset(
            name, cache=endpoint, batch_size=16, nulls="mask", columns=["row", "rating"]
        )
        for name in ("known", "some")
    }
    mixture = CacheMixture(
        {name: (source, 1) for name, source in sources.items()}, source_column="from"
    )
    for batch in mixture:
        assert list(batch) == ["row", "rating", "rating.valid", "from"]
        for row, valid, name in zip(
            batch["row"].tolist(), batch["rating.valid"].tolist(), batch["from"], strict=True
        ):
            assert valid == (name == "known" or row % 4 != 1)


def test_joined_columns_and_groups_have_masks(endpoint: str) -> None:
    columns = ["row", "city", "rating"]
    view = View(join={"city": "cities"})
    for batch in batches(endpoint, view=view, columns=columns, nulls="mask"):
        assert batch["size.valid"].tolist() == (batch["city"] != 1).tolist()
        assert batch["rating.valid"].tolist() == (batch["row"] % 4 != 1).tolist()
    grouped = View(group_by="city", order_by="row", window=(2, 2))
    (first, *_) = batches(endpoint, view=grouped, nulls="mask")
    assert first["address"]["zip"].shape == first["address.zip.valid"].shape == (16, 2)


def test_fields_are_stacked(endpoint: str) -> None:
    stack = {"x": ["rating", "address.zip", "weight"]}
    reading = Reading(stack_dtype="float64")
    (first, *_) = batches(endpoint, stack=stack, reading=reading, nulls="mask")
    assert first["x"].shape == (16, 3) and first["x"].dtype == torch.float64
    assert list(first["address"]) == ["street"]
