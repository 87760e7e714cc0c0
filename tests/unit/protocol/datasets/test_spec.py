import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_protocol.datasets.dataset_spec import (
    DEFAULT_TARGET_SHARD_BYTES,
    FORMATS,
    DatasetSpec,
    parse_bytes,
)
from cache_protocol.errors import ConfigError
from cache_protocol.v1 import cache_pb2 as pb


def problem_of(**fields: Any) -> str:
    fields = {"name": "t", "source": "/data", **fields}
    with pytest.raises(ConfigError) as caught:
        DatasetSpec(fields.pop("name"), fields.pop("source"), **fields)
    return str(caught.value)


def yaml_problem(tmp_path: Path, text: str) -> str:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        DatasetSpec.from_yaml(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


# -- fields ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "bad", "quoted"),
    [
        ("name", "", "''"),
        ("name", "-x", "'-x'"),
        ("name", ".hidden", "'.hidden'"),
        ("name", "a//b", "'a//b'"),
        ("name", "a\n", r"'a\n'"),
        ("name", "x" * 129, "x" * 129),
        ("name", 7, "7"),
        ("source", "", "''"),
        ("source", [], "empty list"),
        ("source", ["/a", ""], "''"),
        ("source", [None], "None"),
        ("source", 7, "7"),
        ("source", b"/data", "b'/data'"),
        ("source", {"/a": 1}, "a dict"),
        ("source", {"/a"}, "{'/a'}"),
        ("format", "orc", "'orc'"),
        ("format", "Parquet", "'Parquet'"),
        ("sql", "", "''"),
        ("sql", " \n", r"' \n'"),
        ("sql", 3, "3"),
        ("filter", " ", "' '"),
        ("filter", 1, "1"),
        ("columns", "a", "'a'"),
        ("columns", [], "[]"),
        ("columns", ["a", ""], "['a', '']"),
        ("columns", ["a", 1], "['a', 1]"),
        ("columns", ["a", "a"], "['a', 'a']"),
        ("columns", {"a"}, "{'a'}"),
        ("replicas", 0, "0"),
        ("replicas", -1, "-1"),
        ("replicas", 1.5, "1.5"),
        ("replicas", True, "True"),
        ("replicas", "2", "'2'"),
        ("replicas", 2**32, "4294967296"),
        ("replicas", np.float64(2), repr(np.float64(2))),
        ("snapshot", -1, "-1"),
        ("snapshot", True, "True"),
        ("snapshot", 2**63, "9223372036854775808"),
        ("target_shard_bytes", 0, "0"),
        ("target_shard_bytes", -1, "-1"),
        ("target_shard_bytes", 1.5, "1.5"),
        ("target_shard_bytes", True, "True"),
        ("target_shard_bytes", "lots", "'lots'"),
        ("target_shard_bytes", 2**64, "18446744073709551616"),
    ],
)
def test_a_bad_field_is_named_and_quoted(field: str, bad: object, quoted: str) -> None:
    problem = problem_of(**{field: bad})

    assert field in problem
    assert quoted in problem


@pytest.mark.parametrize(
    "field",
    ["source", "sql", "columns", "filter", "ignore", "storage_options", "catalog"],
)
def test_a_text_that_no_message_can_carry_is_refused_by_the_name_of_its_field(field: str) -> None:
    """As of a file whose name is no UTF-8: half of a pair of surrogates."""
    text = "a\udc80"
    bad = {
        **{"columns": [text], "ignore": ["*.txt", text], "source": ["/data", text]},
        **{"storage_options": {"key": text}, "catalog": {"uri": text}},
    }
    problem = problem_of(**{field: bad.get(field, text)})
    assert f"{field} must be text in UTF-8" in problem
    assert ("a\\udc80'" in problem) == (field not in ("storage_options", "catalog"))


@pytest.mark.parametrize("nulls", ["keep", "refuse"])
def test_the_policy_for_nulls_crosses_the_wire(nulls: str) -> None:
    spec = DatasetSpec("t", "/data", nulls=nulls)
    assert DatasetSpec.from_proto(spec.to_proto()) == spec and spec.nulls == nulls


@pytest.mark.parametrize("field", ["format", "missing_columns", "columns"])
def test_an_array_of_numpy_in_place_of_a_text_is_quoted(field: str) -> None:
    assert "got array(" in problem_of(**{field: np.array(["null", "csv"]).reshape(1, 2)})
    assert "got array(" in problem_of(**{field: np.array("a")})


def test_integers_of_numpy_are_integers() -> None:
    given = {"replicas": 2, "snapshot": 7, "target_shard_bytes": 10**6}
    of_numpy = {name: np.int64(value) for name, value in given.items()}
    spec = DatasetSpec("t", "/data", **of_numpy)  # type: ignore[arg-type]
    assert spec == DatasetSpec("t", "/data", **given)  # type: ignore[arg-type]
    assert {type(n) for n in (spec.replicas, spec.target_shard_bytes)} == {int}
    assert spec.to_proto().tables[0].snapshot == 7


def test_a_snapshot_is_a_number_or_a_name() -> None:
    for snapshot in (0, 7, "v1", "7", None):
        spec = DatasetSpec("t", "/data", snapshot=snapshot)
        assert DatasetSpec.from_proto(spec.to_proto()).tables[0].snapshot == snapshot
    assert "got ''" in problem_of(snapshot="")
    assert "text in UTF-8" in problem_of(snapshot="a\udc80")


def test_every_bad_field_is_quoted_at_once() -> None:
    problem = problem_of(
        name="a b",
        source="",
        format="orc",
        sql=" ",
        columns="x",
        filter="",
        replicas=0,
        target_shard_bytes="much",
    )

    fields = ("name", "source", "format", "sql", "columns", "filter", "replicas", "target_shard")
    for field, value in zip(
        fields, ("'a b'", "''", "'orc'", "' '", "'x'", "''", "0", "'much'"), strict=True
    ):
        assert field in problem
        assert f"got {value}" in problem


@pytest.mark.parametrize("shortcut", [{"columns": ["a"]}, {"filter": "a > 1"}])
def test_sql_and_its_shortcuts_exclude_each_other(shortcut: dict[str, Any]) -> None:
    assert "cannot be combined" in problem_of(sql="SELECT a FROM source", **shortcut)


@pytest.mark.parametrize("name", ["a", "0", "A-b_c.d", "x" * 128])
def test_a_good_name_is_kept(name: str) -> None:
    assert DatasetSpec(name, "/data").name == name


def test_relative_paths_become_absolute_where_the_spec_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    spec = DatasetSpec("t", ["data/a.parquet", Path("b") / "*.parquet", "../c", "/d//e"])

    assert spec.source == (
        f"{tmp_path}/data/a.parquet",
        f"{tmp_path}/b/*.parquet",
        f"{tmp_path.parent}/c",
        "/d/e",
    )


def test_the_home_directory_is_that_of_the_process_that_makes_the_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "spec.yaml"
    given = ["~/a.parquet", Path("~"), "./~/b", "c~", "/d/~/e"]
    expected = (
        *("/home/me/a.parquet", "/home/me"),
        *(f"{tmp_path}/~/b", f"{tmp_path}/c~", "/d/~/e"),
    )

    assert DatasetSpec("t", given).source == expected
    several = DatasetSpec("t", sources={"a": {"source": given}}, sql="SELECT * FROM a")
    assert several.tables[0].source == expected
    path.write_text('name: t\nsource: ["~/a.parquet", "~", "./~/b", "c~", "/d/~/e"]\n')
    spec = DatasetSpec.from_yaml(path)
    assert spec.source == expected
    monkeypatch.setenv("HOME", "/home/of-a-node")
    assert DatasetSpec.from_proto(spec.to_proto()).source == expected


@pytest.mark.parametrize("uri", ["file:///a/b%20c.parquet", "s3://bucket/key", "hf+x://a//b/.."])
def test_a_uri_is_kept_as_it_is(uri: str) -> None:
    assert DatasetSpec("t", uri).source == (uri,)


def test_one_source_and_a_list_of_one_are_the_same_spec() -> None:
    assert DatasetSpec("t", "/data") == DatasetSpec("t", ["/data"])
    assert DatasetSpec("t", Path("/data")) == DatasetSpec("t", iter(["/data"]))


def test_sources_and_columns_keep_the_given_order() -> None:
    spec = DatasetSpec("t", ["/b", "/a", "/b"], columns=["z", "a"])

    assert spec.source == ("/b", "/a", "/b")
    assert spec.columns == ("z", "a")


def test_a_spec_is_frozen_hashable_and_pickles() -> None:
    spec = DatasetSpec("t", "/data", columns=["a"], filter="a > 1", replicas=2)

    with pytest.raises(AttributeError):
        spec.name = "other"  # type: ignore[misc]
    assert len({spec, pickle.loads(pickle.dumps(spec))}) == 1


# -- sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1),
        (123, 123),
        ("123", 123),
        ("1KiB", 1024),
        ("64MiB", 64 * 1024**2),
        ("8 GiB", 8 * 1024**3),
        ("512 MB", 512_000_000),
        ("1.5KiB", 1536),
    ],
)
def test_a_size_is_a_number_or_a_text_with_a_unit(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size
    assert DatasetSpec("t", "/data", target_shard_bytes=text).target_shard_bytes == size


@pytest.mark.parametrize("bad", [None, True, 1.5, float("inf"), "", "-3", "8 gigs", b"3", [1]])
def test_what_is_no_size_is_quoted(bad: object) -> None:
    with pytest.raises(ValueError, match="size in bytes") as caught:
        parse_bytes(bad)
    assert repr(bad) in str(caught.value)


# -- types of columns --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        *(("string", "string"), ("float64", "double"), ("date32", "date32[day]"), ("i4", "int32")),
        *(("decimal128(10,2)", "decimal128(10, 2)"), ("decimal64(9)", "decimal64(9, 0)")),
        *(("timestamp[us]", "timestamp[us]"), ("time32[ms]", "time32[ms]")),
        ("timestamp[ns,tz=Europe/Berlin]", "timestamp[ns, tz=Europe/Berlin]"),
        ("timestamp[s, tz=+02:00]", "timestamp[s, tz=+02:00]"),
        ("list<list<float32>>", "list<item: list<item: float>>"),
        (pa.timestamp("us", "UTC"), "timestamp[us, tz=UTC]"),
    ],
)
def test_a_type_is_kept_by_the_name_that_arrow_has_for_it(given: object, kept: str) -> None:
    spec = DatasetSpec("t", "/a.csv", types={"a": given})

    assert spec.tables[0].types == {"a": kept}
    assert DatasetSpec("t", "/a.csv", types={"a": kept}) == spec


@pytest.mark.parametrize(
    "bad",
    [
        *("strin", "STRING(3)", "binary", "duration[s]", "float16", "struct<a: int8>", "null", ""),
        *("decimal128", "decimal128(39, 2)", "timestamp", "timestamp[us, tz=Mars/Sea]", "list<x>"),
        *(None, 3, ["string"]),
    ],
)
def test_a_type_that_no_text_can_be_read_as_is_quoted_with_those_there_are(bad: object) -> None:
    problem = problem_of(types={"zip": bad, "ok": "int8"})

    assert f"got {bad!r} for 'zip'; in YAML, quote a type" in problem
    assert "types must be among bool, int8 to int64" in problem and "'ok'" not in problem


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"types": ["zip"]}, "types must be a mapping of columns to types, got ['zip']"),
        ({"types": {3: "int8"}}, "types must name columns, got 3"),
        ({"types": {"a": "int8"}, "format": "parquet"}, "got {'a': 'int8'}, is for csv and json"),
        ({"types": {"a": "int8"}, "catalog": {"type": "rest"}}, "is for csv and json"),
        (
            {"source": None, "types": {"a": "int8"}, "sources": {"x": "/x.csv"}, "sql": "SELECT 1"},
            "types cannot be combined with sources",
        ),
    ],
)
def test_types_that_cannot_be_of_a_table_are_refused(arguments: dict[str, Any], words: str) -> None:
    assert words in problem_of(**arguments)


def test_types_are_those_of_python_in_yaml_and_on_the_wire(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(
        "name: t\nsource: /a.csv\ntypes:\n  zip: string\n  price: decimal128(10, 2)\n"
        "  at: timestamp[us]\n"
    )
    types = {"zip": "string", "price": "decimal128(10, 2)", "at": "timestamp[us]"}

    spec = DatasetSpec.from_yaml(path)

    assert spec == DatasetSpec("t", "/a.csv", types=types)
    assert DatasetSpec.from_proto(spec.to_proto()) == spec
    assert spec != DatasetSpec("t", "/a.csv")


def test_each_table_has_its_types() -> None:
    spec = DatasetSpec(
        "t",
        sources={"a": {"source": "/a.csv", "types": {"zip": "string"}}, "b": "/b.csv"},
        sql="SELECT * FROM a JOIN b USING (zip)",
        allow_unordered=True,
    )

    assert [dict(table.types) for table in spec.tables] == [{"zip": "string"}, {}]
    assert DatasetSpec.from_proto(spec.to_proto()) == spec


# -- YAML and mappings -------------------------------------------------------------------------


def test_a_yaml_file_gives_the_same_spec_as_the_arguments(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(
        "name: taxi\n"
        "source: [/data/a.parquet, file:///data/b.parquet]\n"
        "format: parquet\n"
        "columns: [fare, tip]\n"
        "filter: fare > 0\n"
        "replicas: 2\n"
        "target_shard_bytes: 64MiB\n"
    )

    assert DatasetSpec.from_yaml(path) == DatasetSpec(
        "taxi",
        ["/data/a.parquet", "file:///data/b.parquet"],
        format="parquet",
        columns=["fare", "tip"],
        filter="fare > 0",
        replicas=2,
        target_shard_bytes=64 * 1024**2,
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("name: [", "not YAML"),
        ("name: 2024-99-99\nsource: /data", "not YAML"),
        ("", "must be a mapping, got None"),
        ("- name", "must be a mapping, got ['name']"),
        ("name: t", "lacks source"),
        ("{}", "lacks name, source"),
        ("name: t\nsource: /data\nreplica: 2", "unknown key 'replica'"),
        ("name: t\nsource: /data\nx: 1\n3: y", "unknown key 'x', 3"),
        ("name: 12\nsource: /data", "got 12"),
        ("name: t\nsource: {path: /data}", "got a dict"),
        ("name: t\nsource: /data\ntarget_shard_bytes: .inf", "got inf"),
    ],
)
def test_a_bad_yaml_file_is_named_with_the_reason(tmp_path: Path, text: str, reason: str) -> None:
    assert reason in yaml_problem(tmp_path, text)


def test_unknown_keys_come_with_the_known_ones(tmp_path: Path) -> None:
    problem = yaml_problem(tmp_path, "name: t\nsource: /data\ncolumn: [a]")

    assert "known keys: name, source, format, types, escape, sql, columns, filter, " in problem


def test_unknown_keys_missing_ones_and_bad_fields_are_named_at_once(tmp_path: Path) -> None:
    problem = yaml_problem(
        tmp_path, "name: a b\nreplica: 2\nreplicas: 0\ncolumns: x\nsnapshot: [new]"
    )

    for words in (
        *("unknown key 'replica'", "lacks source", "letter or digit, got 'a b'"),
        *("at least 1, got 0", "column names, got 'x'", "tag or branch, got ['new']"),
    ):
        assert words in problem
    assert "'missing'" not in problem and "source must be" not in problem


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("name: t\nsource: /a\nfilter: x\nfilter: y", "'filter' is repeated in line 4"),
        (
            "name: t\nsources:\n  a: {source: /a, source: /b}",
            "'source' is repeated in line 3",
        ),
        ("name: t\nsource: &all [*all]", "a value of the dataset spec holds itself"),
        ("name: t\nsource: " + "[" * 1000, "it is nested too deeply"),
    ],
)
def test_a_yaml_file_that_says_a_thing_twice_or_without_end_is_refused(
    tmp_path: Path, text: str, reason: str
) -> None:
    assert reason in yaml_problem(tmp_path, text)


def test_a_yaml_file_may_merge_mappings_and_set_keys_of_theirs_anew(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(
        "name: t\nsql: SELECT * FROM a\nsources:\n"
        "  a: &a {source: /a, format: csv}\n  b: {<<: *a, source: /b}\n"
    )
    spec = DatasetSpec.from_yaml(path)
    assert [(t.name, t.source, t.format) for t in spec.tables] == [
        ("a", ("/a",), "csv"),
        ("b", ("/b",), "csv"),
    ]


def test_a_yaml_file_of_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_bytes("name: ü".encode("utf-16"))

    with pytest.raises(ConfigError, match="is not YAML") as caught:
        DatasetSpec.from_yaml(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("missing", ["nowhere.yaml", "."])
def test_an_unreadable_yaml_file_is_named(tmp_path: Path, missing: str) -> None:
    with pytest.raises(ConfigError, match="cannot read the dataset spec") as caught:
        DatasetSpec.from_yaml(tmp_path / missing)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"source": {"path": "/a", "secret_access_key": "hush"}}, "URI, got a dict"),
        ({"source": [["/a", {"key": "hush"}]]}, "URI, got a list"),
        ({"sources": [{"name": "a", "storage_options": {"key": "hush"}}]}, "sources, got a list"),
        ({"sources": "postgresql://me:hush@db/x"}, "sources, got a str"),
        ({"sources": {"a": {"source": {"key": "hush"}}}}, "sources.a: source must be a path"),
        ({"sources": {"a": {"source": "/a", "ignore": {"key": "hush"}}}}, "names, got a dict"),
        ({"source": "/a", "format": {"key": "hush"}}, "postgres, got a dict"),
        ({"source": "/a", "snapshot": {"key": "hush"}}, "branch, got a dict"),
        ({"source": "/a", "missing_columns": {"key": "hush"}}, "null, got a dict"),
        ({"source": "/a", "nulls": {"key": "hush"}}, "nulls must be keep or refuse, got a dict"),
        ({"source": "/a", "nulls": "nan"}, "nulls must be keep or refuse, got 'nan'"),
        ({"source": "/a", "columns": [{"key": "hush"}]}, "names, got a list"),
        ({"source": "/a", "target_shard_bytes": {"key": "hush"}}, "64MiB, got a dict"),
        ({"source": b"postgresql://me:hush@db/x"}, "URI, got a bytes"),
        ({"source": "postgresql://me:hush@[db/x"}, "of the scheme postgresql"),
        ({"source": "/a", "storage_options": {"endpoint": "http://me:hush@[h"}, "replicas": 0}, ""),
    ],
)
def test_a_bad_value_that_may_hold_a_secret_is_not_quoted(
    fields: dict[str, Any], found: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        DatasetSpec.from_mapping({"name": "t", **fields})

    assert found in str(caught.value)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "query", ["user=u&password=hush", "PGPASSWORD=x&pwd=hush", "access_token=hush", "apiKey=hush"]
)
def test_a_secret_in_the_query_of_an_option_is_kept_as_one(query: str) -> None:
    spec = DatasetSpec(
        "t", "a.b", format="iceberg", catalog={"type": "sql", "uri": f"sqlite:///x?{query}"}
    )

    assert "hush" not in str(spec.to_proto())
    assert "hush" in str(spec.secrets_to_proto())


@pytest.mark.parametrize("key", ["access_token", "api_key", "X-Amz-Signature", "sig"])
def test_a_source_with_a_secret_in_its_query_is_refused_and_another_query_is_not(key: str) -> None:
    with pytest.raises(ConfigError, match=f"is signed by {key}") as caught:
        DatasetSpec("t", f"https://host/t.parquet?{key}=hush")
    assert "hush" not in str(caught.value)

    DatasetSpec("t", "https://host/t.parquet?version=3&sort_key=a&design=new")


def test_a_source_without_a_host_that_has_a_secret_in_its_query_is_named_by_its_scheme() -> None:
    with pytest.raises(ConfigError, match="a source of postgresql:// is signed by password"):
        DatasetSpec("t", "postgresql:///db?host=/run&table=t&password=hush")


@pytest.mark.parametrize("source", ["hu/sh", "hu#sh", "hu?sh", "5432x/hush", "a:hu/sh", "hu/s@h"])
def test_a_source_whose_password_ends_its_host_too_early_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match="write them as %2F, %3F and %23") as caught:
        DatasetSpec("t", f"postgresql://user:{source}@host/db?table=t")
    assert "hu" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "postgresql://one:5432,two:5433/db?table=t&application_name=me@here",
        "https://host:8080/t@v1.parquet",
        "https://[::1]:8080/t@v1.parquet",
        "s3://bucket/a:b/t@v1.parquet",
    ],
)
def test_an_at_sign_after_the_host_ends_no_password(source: str) -> None:
    assert DatasetSpec("t", source).source == (source,)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("proxy_uri", "user:hush@proxy:3128"),
        ("endpoint", "http://user:hu/sh@host:9000"),
        ("catalog.uri", "postgresql+psycopg2://user:hu#sh@host/db"),
        ("catalog.uri", "postgresql+psycopg2://user@host/db?sslpassword=hush"),
        ("google_application_credentials", '{"private_key": "hush"}'),
    ],
)
def test_an_option_that_holds_a_secret_where_none_belongs_is_kept_as_one(
    name: str, value: str
) -> None:
    spec = DatasetSpec("t", "/t.json", format="iceberg", storage_options={name: value})

    assert dict(spec.tables[0].secrets) == {name: value}
    assert not spec.tables[0].options


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("endpoint", "http://host:9000/a@b"),
        ("role_arn", "arn:aws:iam::123456789012:role/me@here"),
        ("role_session_name", "me@here"),
        ("query", "SELECT a FROM t WHERE b = 'c:d@e'"),
        ("catalog.warehouse", "s3://bucket/w@v1"),
        ("catalog.glue.region", "eu-west-1"),
    ],
)
def test_an_option_that_holds_no_secret_is_shown(name: str, value: str) -> None:
    spec = DatasetSpec("t", "/t.json", format="iceberg", storage_options={name: value})

    assert dict(spec.tables[0].options) == {name: value}


@pytest.mark.parametrize(
    "text", ["- storage_options: {key: hush}", 'name: t\nstorage_options: {key: "hush}', "a: [hush"]
)
def test_a_bad_yaml_file_shows_no_secret(tmp_path: Path, text: str) -> None:
    assert "hush" not in yaml_problem(tmp_path, text)


def test_an_unknown_key_of_one_table_comes_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"sources\.a: unknown key 'colums'; known keys: source, "
    ):
        DatasetSpec("t", sources={"a": {"source": "/a", "colums": []}}, sql="SELECT * FROM a")


# -- the wire ----------------------------------------------------------------------------------

texts = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=20)
queries = st.one_of(
    st.fixed_dictionaries({}),
    st.fixed_dictionaries({"sql": texts.filter(str.strip)}),
    st.fixed_dictionaries(
        {},
        optional={
            "columns": st.lists(texts, min_size=1, max_size=4, unique=True),
            "filter": texts.filter(str.strip),
        },
    ),
)


@settings(max_examples=60)
@given(
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    source=st.lists(texts.map(lambda text: f"/data/{text}"), min_size=1, max_size=3),
    format=st.sampled_from([None, *FORMATS]),
    query=queries,
    replicas=st.integers(1, 65_535),
    shard_bytes=st.integers(1, 1024**5),
)
def test_the_wire_form_gives_the_same_spec_back(
    name: str,
    source: list[str],
    format: str | None,
    query: dict[str, Any],
    replicas: int,
    shard_bytes: int,
) -> None:
    spec = DatasetSpec(
        name,
        source,
        format=format,
        replicas=replicas,
        target_shard_bytes=shard_bytes,
        **query,
    )

    message = pb.DatasetSpec.FromString(spec.to_proto().SerializeToString())

    assert DatasetSpec.from_proto(message) == spec


def test_a_message_with_only_name_and_source_has_the_defaults() -> None:
    spec = DatasetSpec.from_proto(
        pb.DatasetSpec(name="t", tables=[pb.TableSpec(name="source", source=["/data"])])
    )

    assert spec == DatasetSpec("t", "/data")
    assert (spec.replicas, spec.target_shard_bytes) == (1, DEFAULT_TARGET_SHARD_BYTES)


def test_a_bad_message_is_refused_like_a_bad_argument() -> None:
    with pytest.raises(ConfigError, match=r"got '\.\./x'"):
        DatasetSpec.from_proto(
            pb.DatasetSpec(name="../x", tables=[pb.TableSpec(name="source", source=[os.sep])])
        )
