"""What holds for a table of every lake format; what one alone has is in the file of its name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import unquote

import pyarrow as pa
import pytest

from cache_protocol.datasets.dataset_spec import DatasetSpec, TableSpec
from cache_protocol.errors import LoadError, RequestError
from cache_protocol.storage.layout import Layout
from tests.checked_network import checked_network
from tests.lake_formats import LAKES, Lake
from tests.lake_tables import (
    BUCKET,
    SECRET,
    assert_same_rows,
    lake_bucket,
    pinned_table,
    read_table,
    s3_options,
)

IDS, NO_COLUMNS = pa.schema([("id", pa.int64())]), pa.schema([])
NOWHERE = s3_options("http://127.0.0.1:1")


@pytest.fixture(params=LAKES, ids=[lake.name for lake in LAKES])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def lake(kind: Any, tmp_path: Path) -> Iterator[Lake]:
    """A table that a test may change."""
    with kind.at(tmp_path) as made:
        yield made


@pytest.fixture(scope="module", params=LAKES, ids=[lake.name for lake in LAKES])
def kept(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lake]:
    with request.param.at(tmp_path_factory.mktemp("kept")) as made:
        yield made


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with lake_bucket() as endpoint:
        yield endpoint


@pytest.fixture(scope="module", params=LAKES, ids=[lake.name for lake in LAKES])
def in_s3(
    request: pytest.FixtureRequest, s3: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lake]:
    with request.param.in_s3(s3, tmp_path_factory.mktemp("in-s3")) as made:
        yield made


def spec_of(kind: Any, source: str, **arguments: Any) -> TableSpec:
    return DatasetSpec("d", source, format=kind.format, **arguments).tables[0]


def test_each_version_is_what_the_library_of_the_format_reads(kept: Lake) -> None:
    versions = kept.versions()
    assert len(versions) >= 4
    for version, rows in versions.items():
        spec = spec_of(kept, kept.source, snapshot=version)
        pin = kept.module.pin(spec)
        found = read_table(spec, pin)
        assert_same_rows(found, rows)
        assert found.equals(read_table(spec, kept.module.pin(spec)))  # in the same order
        assert pin.exact_rows and pin.comparable and json.dumps(pin.content)
        assert sum(split.num_rows or 0 for split in pin.cut(NO_COLUMNS, 1)) == found.num_rows


def test_a_pinned_table_stays_as_it_was(lake: Lake) -> None:
    expected, spec = lake.rows(), spec_of(lake, lake.source)
    pin = lake.module.pin(spec)
    lake.append()
    assert_same_rows(read_table(spec, pin), expected)
    assert lake.module.pin(spec_of(lake, lake.source)).content != pin.content


def test_splits_are_the_files_in_the_order_of_their_writes(kept: Lake) -> None:
    splits, files = kept.module.pin(spec_of(kept, kept.source)).cut(kept.stored, 1), kept.files()
    fixed = Layout(kept.stored).fixed_row_bytes
    assert [(split.file.path, split.file.size, split.num_rows) for split in splits] == [
        (file.path, file.size, file.num_rows) for file in files
    ]
    for split, file in zip(splits, files, strict=True):
        assert (split.part, split.parts) == (0, 1)
        row_bytes = fixed + 4 + len(file.part.encode())
        assert split.estimated_bytes == file.num_rows * row_bytes


@pytest.mark.parametrize("columns", [("part", "extra"), ("part",), ("id",)])
def test_only_the_columns_of_the_query_are_read(kept: Lake, columns: tuple[str, ...]) -> None:
    spec = spec_of(kept, kept.source)
    assert_same_rows(read_table(spec, kept.module.pin(spec), columns), kept.rows(columns))


def test_rows_are_counted_without_a_column(kept: Lake) -> None:
    spec = spec_of(kept, kept.source)
    pin = kept.module.pin(spec)
    pinned, splits = pinned_table(spec, pin, ()), pin.cut(NO_COLUMNS, 1)
    counted = sum(b.num_rows for split in splits for b in kept.module.read(pinned, split, {}))
    assert counted == kept.rows().num_rows


def test_splits_are_read_at_once_and_the_table_is_opened_once(lake: Lake) -> None:
    spec, module = spec_of(lake, lake.source), lake.module
    pin = module.pin(spec)
    pinned, splits = pinned_table(spec, pin), pin.cut(IDS, 1)
    with (
        patch.object(module, lake.opens, wraps=getattr(module, lake.opens)) as opened,
        ThreadPoolExecutor(4) as pool,
    ):
        parts = list(pool.map(lambda split: list(module.read(pinned, split, {})), splits * 2))
    assert opened.call_count == 1
    once = pa.Table.from_batches([batch for part in parts[: len(splits)] for batch in part])
    assert_same_rows(once, lake.rows())


def test_a_missing_file_is_named_in_one_line(lake: Lake) -> None:
    spec = spec_of(lake, lake.source)
    pin = lake.module.pin(spec)
    split = pin.cut(IDS, 1)[0]
    Path(unquote(split.file.path.removeprefix("file://"))).unlink()
    with pytest.raises(LoadError) as caught:
        list(lake.module.read(pinned_table(spec, pin), split, {}))
    assert split.file.path in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_version_is_refused_with_the_known_ones(kept: Lake) -> None:
    version, reason = kept.unknown
    with pytest.raises(RequestError, match=reason):
        kept.module.pin(spec_of(kept, kept.source, snapshot=version))


def test_a_table_that_is_not_there_is_named_and_not_made(kind: Any, tmp_path: Path) -> None:
    absent = tmp_path / kind.absent[0]
    with pytest.raises(LoadError, match=f"cannot read {kind.name} table .*{absent.name}"):
        kind.module.pin(spec_of(kind, str(absent)))
    assert not absent.exists()


def test_two_sources_are_refused(kind: Any) -> None:
    places = [f"/a/{kind.absent[0]}", f"/b/{kind.absent[0]}"]
    several = DatasetSpec("d", places, format=kind.format).tables[0]
    with pytest.raises(RequestError, match="one source"):
        kind.module.pin(several)


@pytest.mark.parametrize(("scheme", "is_checked"), [("s3", False), ("s3a", False), ("s3", True)])
def test_a_table_in_s3_is_read_and_its_pin_has_no_key(
    in_s3: Lake, s3: str, scheme: str, is_checked: bool
) -> None:
    source = in_s3.source.replace("s3://", f"{scheme}://")
    # A snapshot that is kept open keeps its connection: other options open it again.
    options = s3_options(s3) | ({"max_retries": "9"} if is_checked else {})
    spec = spec_of(in_s3, source, storage_options=options)
    expected = in_s3.rows()
    with checked_network(f"{s3}/") if is_checked else nullcontext():
        pin = in_s3.module.pin(spec)
        assert_same_rows(read_table(spec, pin), expected)
        splits = pin.cut(pa.schema([("part", pa.string())]), 1)
    parts = expected.column("part").to_pylist()
    assert sum(split.estimated_bytes for split in splits) == sum(
        4 + len((part or "").encode()) for part in parts
    )
    assert SECRET not in pin.snapshot + json.dumps(pin.content) + repr(spec)


def test_the_place_of_the_store_may_come_from_the_environment(
    in_s3: Lake, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_options(s3).items():
        monkeypatch.setenv(name, value)
    spec = spec_of(in_s3, in_s3.source)
    assert_same_rows(read_table(spec, in_s3.module.pin(spec)), in_s3.rows())


def test_a_line_break_in_a_variable_of_s3_is_named_without_its_value(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{SECRET}\n")
    with pytest.raises(RequestError, match="AWS_SECRET_ACCESS_KEY must have no") as caught:
        kind.module.pin(spec_of(kind, f"s3a://{BUCKET}/{kind.absent[1]}"))
    assert SECRET not in str(caught.value)


def test_a_missing_object_names_itself_and_no_key(kind: Any, s3: str) -> None:
    for place in (f"s3://{BUCKET}/{kind.absent[0]}", f"s3://absent/{kind.absent[1]}"):
        with pytest.raises(LoadError) as caught:
            kind.module.pin(spec_of(kind, place, storage_options=s3_options(s3)))
        message = str(caught.value)
        assert place in message and s3 in message and SECRET not in message


def test_a_secret_in_a_message_of_the_library_is_hidden(kind: Any) -> None:
    spec = spec_of(kind, f"s3://{BUCKET}/{kind.absent[1]}", storage_options=NOWHERE)
    failure = ValueError(f"denied\n  \x1b[31m↳ for {SECRET}")
    with (
        patch.object(kind.module, kind.finds, side_effect=failure),
        pytest.raises(LoadError, match=r": denied for \*\*\*$"),
    ):
        kind.module.pin(spec)


def test_an_unknown_option_is_refused_by_its_name_before_anything_is_asked(kept: Lake) -> None:
    for source, options in (
        (f"s3://{BUCKET}/{kept.absent[1]}", {**NOWHERE, "nope": SECRET}),
        (kept.source, {"nope": SECRET}),
    ):
        with pytest.raises(RequestError, match=r"store has (an|no) option 'nope'") as caught:
            kept.module.pin(spec_of(kept, source, storage_options=options))
        assert SECRET not in str(caught.value)
