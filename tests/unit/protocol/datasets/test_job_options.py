"""The annotations of a cache pod -> options of its job, and the refusal of bad ones by name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_protocol.datasets import job_options
from cache_protocol.datasets.job_options import (
    FILE_VARIABLE,
    PREFIX,
    JobOptions,
    parse_annotations,
    with_annotations,
)
from cache_protocol.datasets.job_settings import spec_from_env
from cache_protocol.errors import ConfigError, RequestError
from cache_protocol.storage.memory_budget import MIN_SHARD_BYTES, shard_bytes

SQL = "SELECT \"a b\", 'x=1' AS c FROM source\nWHERE a > 1 -- ü \\ 😀"
OPTIONS = {
    "sql": SQL,
    "columns": ["a b", "C"],
    "filter": "a > 1",
    "replicas": 2,
    "nodes": 4,
    "memory": "1.5Gi",
}
GOOD = [{name: value} for name, value in OPTIONS.items()] + [
    {"columns": ["a"], "filter": "b > 1", "replicas": 2, "nodes": 2},
    {"memory": "16Gi"},
    {"memory": "2000000000"},
]


def file_of(folder: Path, annotations: dict[str, str]) -> dict[str, str]:
    """The environment of a pod with annotations."""
    lines = [f"{key}={json.dumps(text, ensure_ascii=False)}\n" for key, text in annotations.items()]
    path = folder / "annotations"
    path.write_text("".join(lines), encoding="utf-8")
    return {FILE_VARIABLE: str(path), "STORAGE_URI": "/data/rows"}


@pytest.mark.parametrize("options", GOOD, ids=str)
def test_options_come_back_from_their_annotations_and_from_the_file_of_a_pod(
    options: dict[str, Any], tmp_path: Path
) -> None:
    wanted = JobOptions(**options)
    annotations = {**wanted.annotations(), "sidecar.istio.io/inject": "false"}
    assert JobOptions.from_annotations(annotations).annotations() == wanted.annotations()
    environ, found = with_annotations(file_of(tmp_path, annotations))
    assert found.annotations() == wanted.annotations()
    spec = spec_from_env(environ)
    for name in ("sql", "filter", "replicas"):
        if name in options:
            assert getattr(spec, name) == options[name]
    if "columns" in options:
        assert spec.columns == tuple(options["columns"])


def test_its_table_names_every_option_and_each_is_tested() -> None:
    rows = dict(re.findall(rf"^    {PREFIX}(\w+) +(\w+)", job_options.__doc__ or "", re.MULTILINE))
    options = JobOptions(**{**OPTIONS, "sql": None})
    assert rows.keys() == OPTIONS.keys() == {*options.given(), "sql"}
    named = {name: variable for name, variable in rows.items() if variable != "none"}
    assert named == job_options._VARIABLES


BAD = [
    ("sql", ""),
    ("sql", " "),
    ("columns", ""),
    ("columns", "a,,b"),
    ("columns", "a,a"),
    ("filter", ""),
    *(("replicas", text) for text in ("two", "0", "-1", "1.5", "", "2 ")),
    *(("nodes", text) for text in ("two", "0", "-1", "1.5", "")),
    *(("memory", text) for text in ("", "lots", "8GiB", "-8Gi", "8 Gi", "1Gi", "64Mi", "8")),
]


@pytest.mark.parametrize(("name", "text"), BAD)
def test_a_bad_value_is_refused_by_its_annotation(name: str, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        JobOptions.from_annotations({f"{PREFIX}{name}": text})
    assert f"{PREFIX}{name}=" in str(caught.value)
    assert len(str(caught.value)) <= 600


@given(st.text().filter(lambda name: name not in {*OPTIONS, "view"}))
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(RequestError, match="is unknown: it must be one of sql, columns"):
        JobOptions.from_annotations({f"{PREFIX}{name}": "1"})


def test_a_view_is_refused_with_the_place_where_it_works() -> None:
    with pytest.raises(RequestError, match=r"CACHE_VIEW in spec\.trainer\.env"):
        JobOptions.from_annotations({f"{PREFIX}view": "{}"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sql": "SELECT 1", "columns": ["a"]}, "cannot be combined"),
        ({"sql": "SELECT 1", "filter": "a"}, "cannot be combined"),
        ({"replicas": 3, "nodes": 2}, r"replicas=3 is more than .*nodes=2"),
        ({"columns": ["a,b"]}, "a comma separates columns"),
        ({"columns": "ab"}, "columns='ab'"),
        ({"nodes": True}, "nodes=True"),
        ({"memory": 8}, "memory=8"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        JobOptions(**options)


def test_the_least_memory_is_that_of_a_node() -> None:
    least = job_options._LEAST_MEMORY
    assert shard_bytes(least) == MIN_SHARD_BYTES
    assert JobOptions(memory=str(least)).memory_bytes == least
    with pytest.raises(RequestError, match="leaves no memory for rows"):
        JobOptions(memory=str(least - 1))


def test_an_option_and_its_variable_are_one_too_many(tmp_path: Path) -> None:
    environ = file_of(tmp_path, {f"{PREFIX}sql": "SELECT 1"})
    with pytest.raises(RequestError, match=rf"{PREFIX}sql and CACHE_SQL"):
        with_annotations({**environ, "CACHE_SQL": "SELECT 1"})
    with pytest.raises(ConfigError, match=r"CACHE_SQL=.* and CACHE_COLUMNS="):
        spec_from_env(with_annotations({**environ, "CACHE_COLUMNS": "a"})[0])


def test_a_file_that_is_not_there_or_not_a_kubelets_is_named(tmp_path: Path) -> None:
    path = tmp_path / "annotations"
    with pytest.raises(ConfigError, match=rf"{FILE_VARIABLE}='{path}' cannot be read"):
        with_annotations({FILE_VARIABLE: str(path)})
    path.write_text(f"{PREFIX}sql=SELECT 1\n")
    with pytest.raises(ConfigError, match="no annotation"):
        with_annotations({FILE_VARIABLE: str(path)})


def test_escapes_of_a_kubelet_are_read() -> None:
    # fmt.Sprintf("%v=%q\n"): printable runes stay, others are escaped.
    text = f'a/b="\\x00"\n{PREFIX}sql="\\a\\b\\f\\n\\r\\t\\v\\\\\\"\\x7f\\u2028\\U000e0001é😀$\'"\n'
    assert parse_annotations(text) == {
        f"{PREFIX}sql": "\a\b\f\n\r\t\v\\\"\x7f\u2028\U000e0001é😀$'"
    }


def test_the_size_of_a_cache_is_no_setting_of_its_job_unless_it_is_the_same() -> None:
    options = JobOptions(nodes=2, memory="4Gi")
    options.fits(nodes=2, memory_bytes=8 << 30)
    options.fits(nodes=2, memory_bytes=None)
    with pytest.raises(RequestError, match=r"nodes=2: the runtime has 3 cache pods"):
        options.fits(nodes=3, memory_bytes=8 << 30)
    with pytest.raises(
        RequestError, match=r"memory=4Gi: the cache pods of the runtime have 2048Mi"
    ):
        options.fits(nodes=2, memory_bytes=2 << 30)
    with pytest.raises(RequestError, match=r"nodes=2: .*; .*memory=4Gi: "):
        options.refuse_size()
    JobOptions(replicas=2).refuse_size()
