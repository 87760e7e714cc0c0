"""What cachectl makes of values, types and forecasts."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest
from rich.console import Console

from cache_client.cli import display, jobs_display
from cache_client.control import forecast as control_forecast
from cache_client.control import infos
from cache_protocol.cli import facts
from cache_protocol.v1 import cache_pb2 as pb


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (157.07252502441406, pa.float32(), "157.07253"),
        (0.10000000149011612, pa.float32(), "0.1"),
        (0.0999755859375, pa.float16(), "0.1"),
        (157.07252502441406, pa.float64(), "157.07252502441406"),
        (math.nan, pa.float32(), "nan"),
        (-math.inf, pa.float32(), "-inf"),
        (None, pa.float32(), "None"),
        (16777216, pa.int32(), "16777216"),
        ([0.10000000149011612, None], pa.list_(pa.float32()), "[0.1, None]"),
        ([[0.20000000298023224]], pa.list_(pa.list_(pa.float32(), 1), 1), "[[0.2]]"),
        ("x" * 41, pa.string(), "x" * 39 + "…"),
        ("Straße 日本 🙂", pa.string(), "Straße 日本 🙂"),
    ],
)
def test_a_value_is_shown_in_the_digits_that_its_type_has(
    value: object, dtype: pa.DataType, text: str
) -> None:
    assert display.cell(value, dtype) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("two\nlines\r\n", "two\\nlines\\r\\n"),
        ("a\tb", "a\\tb"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("\u202etxt.exe", "\\u202etxt.exe"),
    ],
)
def test_a_value_that_would_steer_the_terminal_is_shown_escaped_on_one_line(
    value: str, text: str
) -> None:
    assert display.cell(value, pa.string()) == text


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (pa.float16(), "float16"),
        (pa.float32(), "float32"),
        (pa.float64(), "float64"),
        (pa.list_(pa.float32(), 3), "fixed_size_list<item: float32>[3]"),
        (pa.list_(pa.float64()), "list<item: float64>"),
        (pa.int32(), "int32"),
        (pa.large_string(), "large_string"),
        ("decimal128(12, 2)", "decimal128(12, 2)"),
    ],
)
def test_floats_have_the_names_that_torch_has_for_them(dtype: pa.DataType | str, name: str) -> None:
    assert facts.type_name(dtype) == name


def nodes_needed(largest: int, limit: int, needed: int, on_node: int) -> str:
    forecast = pb.LoadForecast(
        rows_exact=True,
        schema=pa.schema([("x", pa.int64())]).serialize().to_pybytes(),
        num_shards=3,
        largest_shard_bytes=largest,
        node_bytes=[on_node],
        memory_limit_bytes=limit,
        nodes_needed=needed,
    )
    return dict(control_forecast.forecast_facts(control_forecast.from_proto(forecast, 1, 1)))[
        "nodes needed"
    ]


def test_a_plan_shows_how_many_nodes_it_takes_or_why_no_number_is_enough() -> None:
    mib = 2**20
    assert nodes_needed(mib, 4 * mib, 1, mib) == "1, of 4.0 MiB each"
    assert nodes_needed(mib, 4 * mib, 2, 5 * mib) == "2, of 4.0 MiB each; it does not fit"
    assert nodes_needed(15 * mib, 4 * mib, 0, 45 * mib) == (
        "no number is enough: one shard (15.0 MiB) exceeds the limit of 4.0 MiB; lower "
        "target_shard_bytes, or write smaller row groups"
    )


def test_facts_that_go_to_a_file_are_as_wide_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display.show_facts("houses", [("rows", "9,000"), ("decoded", "202.1 KiB")])

    assert capsys.readouterr().out == "houses\n  rows     9,000      \n  decoded  202.1 KiB  \n"


def test_a_table_shows_names_that_would_steer_the_terminal_escaped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display.show_rows(["node", "cache\ndir"], [["a1", "/x\x1b[2J\n"]])

    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["node", "cache\\ndir"],
        ["a1", "/x\\x1b[2J\\n"],
    ]


def test_the_types_of_a_table_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    schema = pa.schema([("price", pa.decimal128(9, 2)), ("weight", pa.float32())])

    display.show_dataset(
        infos.DatasetInfo("houses", "f00", 9, 72, 1, schema, "ready", {0: ("a1",)}), False
    )

    header, *rows = capsys.readouterr().out.splitlines()[-3:]
    assert header.split() == ["column", "type"]
    assert [row.split(maxsplit=1) for row in map(str.strip, rows)] == [
        ["price", "decimal128(9, 2)"],
        ["weight", "float32"],
    ]


@pytest.mark.parametrize(
    ("placement", "shown"),
    [
        ({0: ("a1", "b2"), 1: ("b2", "a1")}, "replicas     2"),
        ({0: ("a1", "b2"), 1: ("b2",)}, "replicas     2; 1 shard of 2 with fewer"),
        ({0: (), 1: ("b2",)}, "replicas     2; 2 shards of 2 with fewer"),
    ],
)
def test_a_dataset_with_fewer_replicas_than_requested_shows_it(
    capsys: pytest.CaptureFixture[str], placement: dict[int, tuple[str, ...]], shown: str
) -> None:
    schema = pa.schema([("price", pa.float64())])
    info = infos.DatasetInfo(
        "houses", "f00", 9, 72, 2, schema, "ready", placement=placement, replicas=2
    )
    assert len(repr(info).splitlines()) == 3 and "9 rows, 72 bytes, 2 shards" in repr(info)

    display.show_dataset(info, False)

    lines = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in lines if "replicas" in line] == [shown]


def test_top_says_that_it_waits_for_a_job_and_shows_bad_ends_in_red() -> None:
    def shown(*jobs: pb.JobInfo, waits_for: str = "") -> str:
        view = jobs_display.top_view([infos.job_info(job) for job in jobs], [], waits_for)
        console = Console(force_terminal=True, color_system="standard", width=200)
        with console.capture() as capture:
            console.print(view)
        return capture.get()

    assert "waiting for the first report of job train" in shown(waits_for="train")
    assert "no reader has reported lately" in shown()
    for end in pb.PassEnd.values():
        text = shown(pb.JobInfo(name="train", verdict="over", end=end))
        is_bad = end in (pb.PASS_END_UNSPECIFIED, pb.PASS_END_FAILED)
        assert ("\x1b[31mover" in text) is is_bad


def test_a_job_is_a_few_lines_and_a_table_for_notebooks() -> None:
    ranks = [pb.RankInfo(rank=rank, step=7, wait_share=0.5) for rank in range(12)]
    job = infos.job_info(
        pb.JobInfo(name="a<b", dataset="houses", verdict="compute bound", step=7, ranks=ranks)
    )
    assert repr(job).startswith("JobInfo('a<b', compute bound)\n")
    assert len(repr(job).splitlines()) == 5
    html = job._repr_html_()
    assert "job a&lt;b" in html and html.count("<td>50%</td>") == 12
