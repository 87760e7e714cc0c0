import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_protocol.datasets import job_settings
from cache_protocol.datasets.dataset_spec import DEFAULT_TARGET_SHARD_BYTES, DatasetSpec
from cache_protocol.datasets.job_settings import VARIABLES, asks_for_dataset, spec_from_env
from cache_protocol.errors import ConfigError
from cache_protocol.v1 import cache_pb2 as pb

S3 = {"STORAGE_URI": "s3://bucket/tpch/lineitem/"}
HF = {"STORAGE_URI": "hf://tatsu-lab/alpaca"}
FILES = {"STORAGE_URI": "/data/lineitem"}
CACHE = {
    "STORAGE_URI": "cache://tpch/lineitem",
    "METADATA_LOC": "s3a://bucket/wh/lineitem/metadata/v3.metadata.json",
}
KEYS = {"ACCESS_KEY_ID": "AKIA-key", "SECRET_ACCESS_KEY": "hush/secret+"}
ROLE = "arn:aws:iam::123456789012:role/trainer"
OTHER_ROLE = "arn:aws:iam::123456789012:role/other"


def problem_of(environ: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        spec_from_env(environ)
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    return str(caught.value)


def wire(spec: DatasetSpec) -> tuple[pb.DatasetSpec, pb.Secrets]:
    return spec.to_proto(), spec.secrets_to_proto()


# -- each variable ---------------------------------------------------------------------------------

# variable -> the environment, and what the table of the spec has of it
BECOMES: list[tuple[str, dict[str, str], str, Any]] = [
    ("STORAGE_URI", S3, "source", ("s3://bucket/tpch/lineitem/",)),
    ("METADATA_LOC", CACHE, "source", ("s3://bucket/wh/lineitem/metadata/v3.metadata.json",)),
    ("METADATA_LOC", CACHE, "format", "iceberg"),
    ("IAM_ROLE", {**CACHE, "IAM_ROLE": ROLE}, "options", {"role_arn": ROLE}),
    ("IAM_ROLE", {**S3, "IAM_ROLE": ROLE}, "options", {"role_arn": ROLE}),
    ("ROLE_ARN", {**S3, "ROLE_ARN": ROLE}, "options", {"role_arn": ROLE}),
    ("ROLE_ARN", {**S3, "ROLE_ARN": ROLE, "IAM_ROLE": ROLE}, "options", {"role_arn": ROLE}),
    *(
        ("ENDPOINT", {**place, "ENDPOINT": url}, "options", {"endpoint": url})
        for place in (S3, CACHE)
        for url in ("https://minio:9000", "http://127.0.0.1:5000/")
    ),
    ("REGION", {**S3, "REGION": "eu-west-1"}, "options", {"region": "eu-west-1"}),
    *(
        (
            variable,
            {**S3, **KEYS},
            "secrets",
            {"access_key_id": "AKIA-key", "secret_access_key": "hush/secret+"},
        )
        for variable in KEYS
    ),
    (
        "SESSION_TOKEN",
        {**CACHE, **KEYS, "SESSION_TOKEN": "hush-too"},
        "secrets",
        {
            "access_key_id": "AKIA-key",
            "secret_access_key": "hush/secret+",
            "session_token": "hush-too",
        },
    ),
    ("ACCESS_TOKEN", {**HF, "ACCESS_TOKEN": "hf_hush"}, "secrets", {"hf_token": "hf_hush"}),
    ("IGNORE_PATTERNS", {**S3, "IGNORE_PATTERNS": "*.json"}, "ignore", ("*.json",)),
    (
        "IGNORE_PATTERNS",
        {**HF, "IGNORE_PATTERNS": " *.md, data/test-* ,,raw/"},
        "ignore",
        ("*.md", "data/test-*", "raw/*"),
    ),
    ("CACHE_DATASET", {**S3, "CACHE_DATASET": "mine"}, "name", "mine"),
    ("CACHE_DATASET", {**CACHE, "CACHE_DATASET": "mine"}, "name", "mine"),
    ("CACHE_FORMAT", {**FILES, "CACHE_FORMAT": "csv"}, "format", "csv"),
    ("CACHE_FORMAT", {**CACHE, "CACHE_FORMAT": "iceberg"}, "format", "iceberg"),
    ("CACHE_SQL", {**S3, "CACHE_SQL": "SELECT a FROM source"}, "sql", "SELECT a FROM source"),
    ("CACHE_COLUMNS", {**S3, "CACHE_COLUMNS": "a"}, "columns", ("a",)),
    ("CACHE_COLUMNS", {**CACHE, "CACHE_COLUMNS": "b, a b ,C"}, "columns", ("b", "a b", "C")),
    ("CACHE_FILTER", {**S3, "CACHE_FILTER": "a > 1"}, "filter", "a > 1"),
    ("CACHE_REPLICAS", {**S3, "CACHE_REPLICAS": "2"}, "replicas", 2),
    (
        "CACHE_TARGET_SHARD_BYTES",
        {**S3, "CACHE_TARGET_SHARD_BYTES": "8MiB"},
        "target_shard_bytes",
        8 * 2**20,
    ),
    (
        "CACHE_TARGET_SHARD_BYTES",
        {**S3, "CACHE_TARGET_SHARD_BYTES": "4096"},
        "target_shard_bytes",
        4096,
    ),
]


@pytest.mark.parametrize(
    ("environ", "attribute", "value"),
    [row[1:] for row in BECOMES],
    ids=[f"{row[0]}-{row[2]}" for row in BECOMES],
)
def test_a_variable_becomes_what_the_table_says(
    environ: dict[str, str], attribute: str, value: object
) -> None:
    spec = spec_from_env(environ)

    (table,) = spec.tables
    found = getattr(table if hasattr(table, attribute) and attribute != "name" else spec, attribute)
    assert found == value
    again = DatasetSpec.from_proto(*wire(spec))
    assert (again, wire(again)) == (spec, wire(spec))


def test_the_table_of_the_module_has_each_variable_and_each_is_tested() -> None:
    text = job_settings.__doc__ or ""
    documented = re.findall(r"^    ([A-Z_]+)  ", text, re.MULTILINE)

    assert sorted(documented) == sorted(VARIABLES)
    assert {row[0] for row in BECOMES} == set(VARIABLES)
    assert {row[0] for row in BAD} | set(job_settings._SECRETS) == set(VARIABLES)


def test_what_is_not_said_is_the_default_of_the_spec() -> None:
    spec = spec_from_env(S3)

    assert spec == DatasetSpec("lineitem", "s3://bucket/tpch/lineitem/")
    assert (spec.replicas, spec.target_shard_bytes) == (1, DEFAULT_TARGET_SHARD_BYTES)


@pytest.mark.parametrize("empty", sorted(set(VARIABLES) - set(CACHE)))
def test_an_empty_variable_counts_as_absent(empty: str) -> None:
    assert spec_from_env({**CACHE, empty: ""}) == spec_from_env(CACHE)


def test_other_variables_are_not_looked_at() -> None:
    others = {
        "CACHE_SERVICE_HOST": "10.0.0.1",
        "CACHE_PORT": "tcp://10.0.0.1:50051",
        "CACHE_ENDPOINT": "grpc://cache:50051",
        "CACHE_WORLD_SIZE": "2",
        "TRAIN_JOB_NAME": "job",
        "CLUSTER_SIZE": "3",
        "AWS_REGION": "eu-west-1",
        "storage_uri": "x",
    }

    assert spec_from_env({**S3, **others}) == spec_from_env(S3)


# -- places ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "source", "name"),
    [
        ("s3://bucket/tbl/", "s3://bucket/tbl/", "tbl"),
        ("s3://bucket", "s3://bucket", "bucket"),
        ("s3://bucket/", "s3://bucket/", "bucket"),
        ("S3A://bucket/Tbl", "s3://bucket/Tbl", "Tbl"),
        ("s3n://bucket/tbl", "s3://bucket/tbl", "tbl"),
        ("s3://bucket/a/part-*.parquet", "s3://bucket/a/part-*.parquet", "a"),
        ("s3://bucket/a/part-?.parquet", "s3://bucket/a/part-?.parquet", "a"),
        ("s3://bucket/*/b/c.parquet", "s3://bucket/*/b/c.parquet", "bucket"),
        ("s3://bucket/a/lineitem.v2", "s3://bucket/a/lineitem.v2", "lineitem.v2"),
        ("gs://bucket/t.parquet", "gs://bucket/t.parquet", "t"),
        ("az://container/t.csv", "az://container/t.csv", "t"),
        ("abfss://c@acc.dfs.core.windows.net/t", "abfss://c@acc.dfs.core.windows.net/t", "t"),
        ("https://host:8080/a/t.JSONL?v=1", "https://host:8080/a/t.JSONL?v=1", "t"),
        ("http://host/t", "http://host/t", "t"),
        ("hf://tatsu-lab/alpaca", "hf://datasets/tatsu-lab/alpaca", "tatsu-lab.alpaca"),
        ("hf://datasets/tatsu-lab/alpaca", "hf://datasets/tatsu-lab/alpaca", "tatsu-lab.alpaca"),
        ("hf://org/name/data/*.parquet", "hf://datasets/org/name/data/*.parquet", "org.name"),
        ("hf://org/name@main/data/", "hf://datasets/org/name@main/data", "org.name"),
        ("postgresql://user@db:5432/shop", "postgresql://user@db:5432/shop", "shop"),
        ("postgres://db/shop?sslmode=require", "postgresql://db/shop?sslmode=require", "shop"),
        ("postgresql:///shop", "postgresql:///shop", "shop"),
        ("postgres:///shop", "postgresql:///shop", "shop"),
        ("file:///data/t.parquet", "file:///data/t.parquet", "t"),
        ("/data/lineitem.parquet", "/data/lineitem.parquet", "lineitem"),
        ("/data/*/part?.arrow", "/data/*/part?.arrow", "data"),
    ],
)
def test_a_place_gives_the_source_and_a_name(uri: str, source: str, name: str) -> None:
    spec = spec_from_env({"STORAGE_URI": uri})

    assert (spec.source, spec.name, spec.format) == ((source,), name, None)


@pytest.mark.parametrize(
    ("location", "source"),
    [
        ("s3a://b/t/metadata/v3.metadata.json", "s3://b/t/metadata/v3.metadata.json"),
        ("s3://b/t/metadata.json", "s3://b/t/metadata.json"),
        ("gs://b/t/v3.gz.metadata.json", "gs://b/t/v3.gz.metadata.json"),
        ("file:///wh/t/v3.metadata.json", "file:///wh/t/v3.metadata.json"),
        ("/wh/t/v3.metadata.json", "/wh/t/v3.metadata.json"),
    ],
)
def test_the_ancestors_table_is_read_from_its_metadata(location: str, source: str) -> None:
    spec = spec_from_env({"STORAGE_URI": "cache://tpch/lineitem", "METADATA_LOC": location})

    assert spec == DatasetSpec("tpch.lineitem", source, format="iceberg")


def test_the_sdks_s3_initializer_makes_a_whole_spec() -> None:
    environ = {
        "STORAGE_URI": "s3://bucket/tpch/orders",
        "IGNORE_PATTERNS": "*.json,*.md",
        "ENDPOINT": "https://minio:9000",
        **KEYS,
        "REGION": "us-east-1",
        "ROLE_ARN": ROLE,
        "CACHE_REPLICAS": "2",
        "CACHE_COLUMNS": "a,b",
        "CACHE_FILTER": "a > 1",
    }
    expected = DatasetSpec(
        "orders",
        "s3://bucket/tpch/orders",
        columns=["a", "b"],
        filter="a > 1",
        replicas=2,
        ignore=["*.json", "*.md"],
        storage_options={
            "endpoint": "https://minio:9000",
            "access_key_id": "AKIA-key",
            "secret_access_key": "hush/secret+",
            "region": "us-east-1",
            "role_arn": ROLE,
        },
    )

    spec = spec_from_env(environ)

    assert (spec, wire(spec)) == (expected, wire(expected))
    assert "hush" not in repr(spec) + str(spec.to_proto())


@pytest.mark.parametrize("place", [HF, FILES, {"STORAGE_URI": "gs://bucket/t"}])
def test_a_secret_for_another_store_is_left_alone(place: dict[str, str]) -> None:
    assert wire(spec_from_env({**place, **KEYS})) == wire(spec_from_env(place))
    assert wire(spec_from_env({**S3, "ACCESS_TOKEN": "hf_hush"})) == wire(spec_from_env(S3))


@pytest.mark.parametrize(
    "uri",
    [
        "postgresql://?host=/var/run",
        "postgresql://?dbname=x&table=public.t",
        "postgresql://me@?table=public.t",
        "postgresql://",
        "s3://bucket/t/v3.metadata.json",
    ],
)
def test_a_place_that_makes_no_name_is_read_where_one_is_given(uri: str) -> None:
    spec = spec_from_env({"STORAGE_URI": uri, "CACHE_DATASET": "mine"})

    assert (spec.name, spec.source) == ("mine", (uri,))


def test_the_password_of_a_database_is_a_secret() -> None:
    spec = spec_from_env({"STORAGE_URI": "postgresql://me:hush@db/shop"})

    assert spec.source == ("postgresql://me@db/shop",)
    assert spec.tables[0].secrets == {"password": "hush"}


# -- what is refused -------------------------------------------------------------------------------

# the variable that is wrong -> the environment, and parts of the message
BAD: list[tuple[str, dict[str, str], list[str]]] = [
    ("STORAGE_URI", {}, ["STORAGE_URI is missing"]),
    ("STORAGE_URI", {"STORAGE_URI": ""}, ["STORAGE_URI is missing"]),
    *(
        ("STORAGE_URI", {"STORAGE_URI": uri}, [f"STORAGE_URI={uri!r}", why])
        for uri, why in [
            ("pvc://claim/path", "must be a path or one of s3://"),
            ("ftp://host/t", "hf://"),
            ("s3:/bucket/t", "must be a path or one of"),
            ("s3:bucket", "must be a path or one of"),
            ("s3://", "must name a bucket or a host"),
            ("s3:///t", "must name a bucket or a host"),
            (" s3://bucket/t", "white space"),
            ("s3://bucket/t\n", "white space"),
            ("http://host:99999999/t", "not a valid URI"),
            ("http://[::1/t", "not a valid URI"),
            ("hf://alpaca", "hf://ORG/NAME"),
            ("hf://datasets/alpaca", "hf://ORG/NAME"),
            ("hf://org//name", "hf://ORG/NAME"),
            ("file://", "must name a file or a folder"),
            ("file://?", "must name a file or a folder"),
        ]
    ),
    *(
        ("STORAGE_URI", {**CACHE, "STORAGE_URI": uri}, [f"{uri!r}: must be cache://SCHEMA/TABLE"])
        for uri in ("cache://lineitem", "cache://a/b/c", "cache://a//b")
    ),
    ("STORAGE_URI", {**CACHE, "STORAGE_URI": "cache://"}, ["'cache://'", "bucket or a host"]),
    (
        "METADATA_LOC",
        {"STORAGE_URI": "cache://a/b"},
        ["METADATA_LOC is missing", "STORAGE_URI='cache://a/b'"],
    ),
    (
        "METADATA_LOC",
        {**CACHE, **S3},
        [f"METADATA_LOC={CACHE['METADATA_LOC']!r}", "'s3://bucket/tpch/lineitem/'"],
    ),
    *(
        ("METADATA_LOC", {**CACHE, "METADATA_LOC": location}, [f"METADATA_LOC={location!r}", why])
        for location, why in [
            ("s3a://bucket/wh/lineitem", "metadata.json"),
            ("hf://org/t/v3.metadata.json", "must be a path or one of"),
            ("cache://a/v3.metadata.json", "must be a path or one of"),
            ("s3a:///v3.metadata.json", "bucket"),
        ]
    ),
    *(
        ("ENDPOINT", {**S3, "ENDPOINT": url}, [f"ENDPOINT={url!r}", "http"])
        for url in ("minio:9000", "minio", "s3://minio", "http://", "http://minio ")
    ),
    ("REGION", {**S3, "REGION": "eu west"}, ["REGION='eu west'"]),
    ("ROLE_ARN", {**S3, "ROLE_ARN": "trainer"}, ["ROLE_ARN='trainer'", "arn:aws:iam::"]),
    ("IAM_ROLE", {**CACHE, "IAM_ROLE": "trainer"}, ["IAM_ROLE='trainer'", "arn:aws:iam::"]),
    (
        "IAM_ROLE",
        {**S3, "ROLE_ARN": ROLE, "IAM_ROLE": OTHER_ROLE},
        [f"ROLE_ARN={ROLE!r} and IAM_ROLE={OTHER_ROLE!r}", "two roles"],
    ),
    *(
        (name, {**place, name: value}, [f"{name}={value!r}", "only for s3"])
        for name, value in [
            ("ENDPOINT", "http://minio:9000"),
            ("REGION", "eu-west-1"),
            ("ROLE_ARN", ROLE),
            ("IAM_ROLE", ROLE),
        ]
        for place in (HF, FILES, {**CACHE, "METADATA_LOC": "gs://b/v3.metadata.json"})
    ),
    (
        "IGNORE_PATTERNS",
        {**S3, "IGNORE_PATTERNS": "['*.md', '*.json']"},
        ["""IGNORE_PATTERNS="['*.md', '*.json']\"""", "commas"],
    ),
    (
        "IGNORE_PATTERNS",
        {**CACHE, "IGNORE_PATTERNS": "*.md"},
        ["IGNORE_PATTERNS='*.md'", "iceberg"],
    ),
    (
        "IGNORE_PATTERNS",
        {**S3, "IGNORE_PATTERNS": "*.md", "CACHE_FORMAT": "delta"},
        ["IGNORE_PATTERNS='*.md'", "delta"],
    ),
    ("CACHE_DATASET", {**S3, "CACHE_DATASET": "a//b"}, ["CACHE_DATASET='a//b'", "letters"]),
    *(
        ("CACHE_DATASET", {"STORAGE_URI": uri}, ["CACHE_DATASET is missing", repr(uri)])
        for uri in ("/data/my table.csv", "s3://b/t/v3.metadata.json", "/", "/*.csv", "/data/_t")
    ),
    *(
        ("CACHE_DATASET", {"STORAGE_URI": uri}, ["CACHE_DATASET is missing", shown])
        for uri, shown in [
            ("postgresql://", "'postgresql://'"),
            ("postgres://", "'postgres://'"),
            ("postgresql://?host=/var/run", "'postgresql://?...'"),
            ("postgresql://?dbname=x&table=public.t", "'postgresql://?...'"),
            ("postgresql://me@?table=public.t", "'postgresql://me@?...'"),
        ]
    ),
    (
        "CACHE_DATASET",
        {**CACHE, "STORAGE_URI": "cache://my db/t"},
        ["CACHE_DATASET is missing", "'cache://my db/t'"],
    ),
    ("CACHE_FORMAT", {**S3, "CACHE_FORMAT": "orc"}, ["CACHE_FORMAT='orc'", "parquet, arrow"]),
    ("CACHE_FORMAT", {**CACHE, "CACHE_FORMAT": "parquet"}, ["CACHE_FORMAT='parquet'", "iceberg"]),
    ("CACHE_FORMAT", {**S3, "CACHE_FORMAT": "postgres"}, ["CACHE_FORMAT='postgres'", "s3://"]),
    (
        "CACHE_FORMAT",
        {"STORAGE_URI": "postgresql://db/shop", "CACHE_FORMAT": "csv"},
        ["CACHE_FORMAT='csv'", "postgresql://db/shop"],
    ),
    ("CACHE_SQL", {**S3, "CACHE_SQL": "  "}, ["CACHE_SQL='  '", "query"]),
    *(
        (
            "CACHE_SQL",
            {**S3, "CACHE_SQL": "SELECT 1", shortcut: "a"},
            ["CACHE_SQL='SELECT 1'", f"{shortcut}='a'", "cannot be combined"],
        )
        for shortcut in ("CACHE_COLUMNS", "CACHE_FILTER")
    ),
    *(
        ("CACHE_SQL", {**S3, misspelt: "SELECT 1"}, [misspelt, f"did you mean {meant}?"])
        for misspelt, meant in [
            *(("CACHE_SQ", "CACHE_SQL"), ("CACHE_COLUMN", "CACHE_COLUMNS")),
            *(("CACHE_FILTRE", "CACHE_FILTER"), ("CACHE_REPLICA", "CACHE_REPLICAS")),
        ]
    ),
    ("CACHE_COLUMNS", {**S3, "CACHE_COLUMNS": "a,,b"}, ["CACHE_COLUMNS='a,,b'"]),
    ("CACHE_COLUMNS", {**S3, "CACHE_COLUMNS": "a,b,"}, ["CACHE_COLUMNS='a,b,'"]),
    ("CACHE_COLUMNS", {**S3, "CACHE_COLUMNS": "a, a"}, ["CACHE_COLUMNS='a, a'", "repeat"]),
    ("CACHE_FILTER", {**S3, "CACHE_FILTER": " "}, ["CACHE_FILTER=' '"]),
    *(
        ("CACHE_REPLICAS", {**S3, "CACHE_REPLICAS": text}, [f"CACHE_REPLICAS='{text[:99]}", why])
        for text, why in [
            *(("0", "at least 1"), ("-1", "at least 1"), ("two", "at least 1")),
            *((" 2", "at least 1"), ("1_0", "at least 1"), ("70000", "at most")),
            *(("2.0", "at least 1"), ("1" * 5000, "at least 1"), ("\u0663", "at least 1")),
        ]
    ),
    *(
        (
            "CACHE_TARGET_SHARD_BYTES",
            {**S3, "CACHE_TARGET_SHARD_BYTES": text},
            [f"CACHE_TARGET_SHARD_BYTES={text!r}"],
        )
        for text in ("much", "0", "-1", "2 parsecs", "1e99")
    ),
]


@pytest.mark.parametrize(
    ("environ", "parts"), [row[1:] for row in BAD], ids=[row[0] for row in BAD]
)
def test_a_bad_setting_is_refused_and_quoted(environ: dict[str, str], parts: list[str]) -> None:
    problem = problem_of(environ)

    assert [part for part in parts if part not in problem] == [], problem
    assert problem.startswith("bad settings: ")


def test_all_bad_settings_are_reported_at_once() -> None:
    environ = {
        "STORAGE_URI": "pvc://claim",
        "ENDPOINT": "minio",
        "REGION": "?",
        "ROLE_ARN": "one",
        "IAM_ROLE": "two",
        "ACCESS_KEY_ID": "AKIA-hush",
        "CACHE_DATASET": "?",
        "CACHE_FORMAT": "orc",
        "CACHE_SQL": " ",
        "CACHE_COLUMNS": ",",
        "CACHE_FILTER": " ",
        "CACHE_REPLICAS": "0",
        "CACHE_TARGET_SHARD_BYTES": "much",
        "IGNORE_PATTERNS": "['a']",
    }

    problem = problem_of(environ)

    quoted = [f"{name}={value!r}" for name, value in environ.items() if name != "ACCESS_KEY_ID"]
    assert [part for part in quoted if part not in problem] == []
    assert "SECRET_ACCESS_KEY is missing" in problem
    assert "hush" not in problem


@pytest.mark.parametrize("place", [S3, CACHE, {}])
@pytest.mark.parametrize(
    ("keys", "missing"),
    [
        (["ACCESS_KEY_ID"], "SECRET_ACCESS_KEY is missing"),
        (["SECRET_ACCESS_KEY"], "ACCESS_KEY_ID is missing"),
        (["SESSION_TOKEN"], "ACCESS_KEY_ID and SECRET_ACCESS_KEY are missing"),
        (["SESSION_TOKEN", "ACCESS_KEY_ID"], "SECRET_ACCESS_KEY is missing"),
    ],
)
def test_half_a_key_is_refused(place: dict[str, str], keys: list[str], missing: str) -> None:
    problem = problem_of({**place, **dict.fromkeys(keys, "hush")})

    assert missing in problem
    assert "hush" not in problem


SECRETS = ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "ACCESS_TOKEN")


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_with_white_space_around_it_is_refused_and_not_shown(secret: str) -> None:
    environ = {**S3, **dict.fromkeys(SECRETS, "hush"), secret: "hush\n"}

    problem = problem_of(environ)

    assert problem == f"bad settings: {secret} has white space around it (its value is not shown)"


@pytest.mark.parametrize(
    "environ",
    [
        {"STORAGE_URI": "https://me:hush@host/t?X-Amz-Signature=hush"},
        {"STORAGE_URI": "https://host/t?X-Amz-Signature=hush", "REGION": "eu-west-1"},
        {"STORAGE_URI": "ftp://me:hush@host/t"},
        {"STORAGE_URI": "ftp://me:hu/hush@sh@host/t?token=hush"},
        {"STORAGE_URI": "postgresql://me:hush@db:x/shop"},
        {"STORAGE_URI": " postgresql://me:hush@db/shop"},
        {"STORAGE_URI": "postgresql://me:hush@db/my shop"},
        {"STORAGE_URI": "postgresql://me:hush@db/shop", "CACHE_FORMAT": "csv"},
        {"STORAGE_URI": "postgresql://me:hush@[/shop"},
        {"STORAGE_URI": "cache://a/b", "METADATA_LOC": "https://me:hush@h/t?token=hush"},
        {**FILES, "METADATA_LOC": "https://me:hush@h/v3.metadata.json"},
        {**S3, "ENDPOINT": "https://me:hush@minio"},
        {**S3, "ENDPOINT": "https://minio?password=hush"},
    ],
)
def test_a_secret_in_a_uri_is_not_shown(environ: dict[str, str]) -> None:
    problem = problem_of(environ)

    assert "hush" not in problem
    assert "STORAGE_URI" in problem or "METADATA_LOC" in problem or "ENDPOINT" in problem


ODD = st.sampled_from(
    [
        *("", "x", "0", "2", "s3://b/t", "hf://a/b", "cache://a/b", "a,b", " ", "csv", "iceberg"),
        *(
            "http://h:1",
            "/a/v1.metadata.json",
            "postgresql://h/d",
            "//",
            "s3://[",
            "\0",
            "://",
            "*",
        ),
        ROLE,
    ]
)


@given(st.dictionaries(st.sampled_from(VARIABLES), ODD | st.text(max_size=8)))
def test_any_environment_is_a_spec_or_a_config_error_without_secrets(
    environ: dict[str, str],
) -> None:
    secrets = {name: f"hush-{name}-hush" for name in SECRETS if name in environ}
    try:
        spec = spec_from_env({**environ, **secrets})
    except ConfigError as error:
        assert "hush" not in str(error)
    else:
        assert "hush" not in repr(spec) + str(spec.to_proto())
        assert DatasetSpec.from_proto(*wire(spec)) == spec


def test_any_two_bad_settings_are_both_reported() -> None:
    bad = {
        "ENDPOINT": "minio",
        "REGION": "?",
        "ROLE_ARN": "one",
        "CACHE_DATASET": "?",
        "CACHE_FORMAT": "orc",
        "CACHE_REPLICAS": "0",
        "CACHE_COLUMNS": ",",
    }
    for first, second in itertools.combinations(bad, 2):
        problem = problem_of({**S3, first: bad[first], second: bad[second]})
        assert f"{first}={bad[first]!r}" in problem
        assert f"{second}={bad[second]!r}" in problem


# -- files to leave out ----------------------------------------------------------------------------


def test_ignored_files_travel_with_their_table() -> None:
    spec = DatasetSpec(
        "t",
        sources={
            "a": {"source": "/a", "ignore": ["*.md", "raw/*"]},
            "b": {"source": "/b", "ignore": None},
        },
        sql="SELECT * FROM a JOIN b USING (id)",
    )

    again = DatasetSpec.from_proto(*wire(spec))

    assert [table.ignore for table in spec.tables] == [("*.md", "raw/*"), ()]
    assert again == spec
    assert spec != DatasetSpec("t", sources={"a": "/a", "b": "/b"}, sql=spec.sql)


@pytest.mark.parametrize("bad", ["*.md", b"*.md", [""], [1], 7, {"*.md": 1}, {"*.md"}])
def test_ignore_must_be_a_list_of_patterns(bad: Any) -> None:
    with pytest.raises(ConfigError, match="ignore must be a list of patterns") as caught:
        DatasetSpec("t", "/data", ignore=bad)
    shown = "got a dict" if isinstance(bad, dict) else repr(bad)  # whose values may be secrets
    assert shown in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        *({"format": name} for name in ("iceberg", "delta", "postgres")),
        {"format": "iceberg", "catalog": {"type": "sql"}},
    ],
)
def test_no_file_of_a_table_format_can_be_left_out(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"ignore, got \['a'\]") as caught:
        DatasetSpec("t", "/data", ignore=["a"], **options)
    assert "says itself what is in it" in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "asks"),
    [
        ({}, False),
        ({"STORAGE_URI": ""}, False),
        ({"PATH": "/bin", "CACHE_SERVICE_HOST": "10.0.0.1"}, False),
        (KEYS, False),
        (S3, True),
        ({"STORAGE_URI": "ftp://bad"}, True),
        ({"METADATA_LOC": "s3://x"}, True),
        ({"CACHE_REPLICAS": "2"}, True),
    ],
)
def test_an_environment_asks_for_a_dataset_by_anything_but_a_secret(
    environ: dict[str, str], asks: bool
) -> None:
    assert asks_for_dataset(environ) is asks


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("STORAGE_URI", "postgresql:/user:hush@host/db"),
        ("STORAGE_URI", "postgres:user:hush@host/db"),
        ("ENDPOINT", "user:hush@host:9000"),
    ],
)
def test_the_password_of_an_address_without_its_slashes_is_not_quoted(
    name: str, value: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name}='{value.partition(':')[0]}:") as caught:
        spec_from_env({"STORAGE_URI": "s3://bucket/t", name: value})
    assert "hush" not in str(caught.value) and "@host" in str(caught.value)
