"""Values of CSV: what is let through is exactly what stands there, as Python reads it."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_protocol.errors import LoadError
from cache_server.source.pinned import PinnedTable
from cache_server.sql.loader import read_split
from tests.query_source import local, whole

EPOCH = datetime(1970, 1, 1)
UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
TIME = re.compile(
    r"(\d{4})-?(\d\d?)-?(\d\d?)"
    r"(?:[Tt ](\d\d):?(\d\d):?(\d\d)(\.\d*)?\s?(?:([+-])(\d\d):?(\d\d)?|Z|z|UTC)?)?"
)

NOTHING = st.just("")
DIGITS = st.text("0123456789", min_size=1, max_size=21)
NUMBERS = st.builds(
    "".join,
    st.tuples(
        st.sampled_from(["", "-", "+"]),
        DIGITS | st.sampled_from([str(2**63 - 1), str(2**63), "0x1f", "inf", "NaN", "1_0"]),
        NOTHING | st.just(".") | DIGITS.map(".{}".format),
        NOTHING | st.sampled_from(["e0", "E5", "e-30", "e+308", "e400"]),
    ),
)
CLOCKS = st.builds(
    "".join,
    st.tuples(
        st.sampled_from(["T", " ", "t"]),
        st.sampled_from(["00:00:00", "23:59:59", "23:59:59", "235959", "23:59:60", "24:00:00"]),
        NOTHING
        | st.sampled_from([".", ".0", ".5", ".123", ".123456", ".123456789", ".9999999999"]),
        NOTHING | st.sampled_from(["Z", "z", "+02:00", "-0530", "+14", " UTC"]),
    ),
)
TIMES = st.builds(
    "".join,
    st.tuples(
        st.sampled_from(["2024", "1972", "1968", "1677", "2262", "0004", "9996"]),
        st.sampled_from(["-02-29", "-12-31", "-02-29", "-12-31", "-1-1", "0630", "-06-31"]),
        NOTHING | CLOCKS | CLOCKS | st.sampled_from(["x", ".", "Z", " ", "T", "+02:00"]),
    ),
)


def value_of(path: Path, text: str, dtype: pa.DataType) -> pa.Scalar | None:
    """The only value of a column; None where it is refused."""
    path.write_text(f"a,b\n{text},1\n")
    table = PinnedTable("source", "csv", pa.schema([("a", dtype), ("b", pa.int64())]))
    try:
        (batch,) = read_split(local(whole(path), "csv"), "SELECT a FROM source", table)
    except LoadError as error:
        assert str(path) in str(error)
        return None
    return batch.column(0)[0]


def seconds(text: str) -> Decimal:
    """Since 1970, exactly; those without an offset are of UTC."""
    found = TIME.fullmatch(text)
    assert found, text
    numbers = [int(number or 0) for number in found.groups()[:6]]
    whole = Decimal((datetime(*numbers) - EPOCH) // timedelta(seconds=1))  # type: ignore[arg-type]
    fraction = found[7] or ""
    offset = int(found[9] or 0) * 3600 + int(found[10] or 0) * 60
    exact = whole + (Decimal(f"0{fraction}") if len(fraction) > 1 else 0)
    return exact + offset if found[8] == "-" else exact - offset


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("values") / "a.csv"


@settings(max_examples=150)
@given(text=NUMBERS)
def test_a_number_is_the_one_that_python_reads(path: Path, text: str) -> None:
    integer, number = value_of(path, text, pa.int64()), value_of(path, text, pa.float64())

    assert integer is None or integer.as_py() == Decimal(text)
    assert number is None or repr(number.as_py()) == repr(float(text)).replace("-nan", "nan")


@given(text=TIMES, unit=st.sampled_from([*UNITS, "day"]))
def test_a_time_is_exactly_the_one_that_stands_there(path: Path, text: str, unit: str) -> None:
    dtype = pa.date32() if unit == "day" else pa.timestamp(unit)

    found = value_of(path, text, dtype)

    if found is not None and unit == "day":
        assert Decimal(found.value) == seconds(text) / 86_400
    elif found is not None:
        assert Decimal(found.value) == seconds(text) * UNITS[unit]


@pytest.mark.parametrize("text", ["true", "TRUE", "tRuE", "false", "fAlSe", "1", "0", "t", "NA"])
def test_truth_values_are_written_in_any_case_and_no_other_way(path: Path, text: str) -> None:
    found = value_of(path, text, pa.bool_())

    wanted = {"true": True, "false": False}.get(text.lower())
    assert (None if found is None else found.as_py()) == wanted


@pytest.mark.parametrize("text", ["NA", "null", "NULL", " ", "0x10", "nan", "#N/A"])
def test_no_spelling_of_null_but_the_empty_value_is_one(path: Path, text: str) -> None:
    string = value_of(path, text, pa.string())

    assert string is not None and string.as_py() == text
    assert value_of(path, text, pa.int64()) is None
