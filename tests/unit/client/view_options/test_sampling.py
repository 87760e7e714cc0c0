"""Options of weights, classes and epoch lengths: what is refused, and which view they make."""

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from cache_client.view_options import options as view_options
from cache_client.view_options import sampling as view_options_sampling
from cache_client.views import sampling as views_sampling
from cache_client.views import view as views_view
from cache_protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"weights": 3}, "weights must be the name of a column or SQL, got 3"),
        ({"per_class": ""}, "per_class must be the name of a column or SQL, got ''"),
        ({"weights": "a", "per_class": "b"}, "weights and per_class exclude each other"),
        ({"replacement": False}, "replacement needs weights, got False"),
        ({"weights": "a", "replacement": 1}, "replacement must be True or False, got 1"),
        ({"epoch_rows": 0}, "epoch_rows must be at least 1, got 0"),
        ({"epoch_rows": "x"}, "epoch_rows must be an integer, got 'x'"),
    ],
)
def test_bad_options_are_quoted(options, problem):
    with pytest.raises(ConfigError) as raised:
        view_options.View(**options)
    assert problem in str(raised.value)


SHUFFLE = views_view.Shuffle(True)


def made(options, values, shuffle=SHUFFLE, inner=None):
    asked = []

    def answer(sql):
        asked.append(sql)
        return pa.chunked_array([values])

    inner = inner or views_view.PlainView(len(values))
    return view_options_sampling.make_sampling(
        view_options.View(**options), inner, shuffle=shuffle, columns=[], values=answer
    ), asked


def test_each_option_makes_its_view():
    values = pa.array([1, 2, 3, 4])
    view, asked = made({"weights": "Price"}, values)
    assert isinstance(view, views_sampling.WeightedView)
    assert asked == ['"Price"']
    view, asked = made({"per_class": "a % 2"}, values)
    assert isinstance(view, views_sampling.BalancedView)
    assert asked == ["a % 2"]
    view, asked = made({"epoch_rows": 9}, values)
    assert isinstance(view, views_sampling.EpochRowsView)
    assert asked == []
    plain = views_view.PlainView(4)
    assert made({}, values, inner=plain) == (plain, [])


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (["a"], "weights='w' must give numbers, got string"),
        ([1.0, -2.0], "finite numbers of at least 0, got -2.0 in 1 of 2 rows"),
        ([1.0, None], "finite numbers of at least 0, got None in 1 of 2 rows"),
        ([1.0, float("inf")], "finite numbers of at least 0, got inf in 1 of 2 rows"),
        ([0, 0], "weights='w' gives 0 for each of 2 rows"),
    ],
)
def test_values_that_are_no_weights_are_quoted(values, problem):
    with pytest.raises(ConfigError) as raised:
        made({"weights": "w"}, pa.array(values))
    assert problem in str(raised.value)


def test_an_epoch_that_would_repeat_a_row_is_refused_by_its_limit():
    options = {"weights": "w", "replacement": False, "epoch_rows": 3}
    made(options, pa.array([1, 1, 2]))
    with pytest.raises(ConfigError, match=r"epoch_rows=3 .* there are 2: give at most 2"):
        made(options, pa.array([1, 0, 2]))


@pytest.mark.parametrize("values", [[1, 1, 2, 2], ["b", "b", "a", "a"], [0.5, 0.5, 1.5, 1.5]])
def test_classes_may_be_of_any_type(values):
    array = pa.array(values)
    for each in (array, array.dictionary_encode()):
        view, _ = made({"per_class": "label"}, each)
        assert view.num_classes == 2
        taken = view.samples(np.arange(4), 0).row_ids
        assert sorted(taken.tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "values",
    [
        pa.array([2**53 + 1, 2**63 - 1, 0]),
        pa.array([2**53 + 1, 2**64 - 1, 0], pa.uint64()),
        pa.array([1, 127, 0], pa.int8()),
        pa.array([1.5, -0.0, 2.5], pa.float32()),
        pa.array(np.array([0.5, 2.0, 0.0], np.float16)),
        pa.array([Decimal(1), Decimal(10) ** 30, Decimal(0)], pa.decimal128(38)),
    ],
    ids=lambda values: str(values.type),
)
@pytest.mark.parametrize("replacement", [True, False])
def test_weights_may_be_numbers_of_any_type(values, replacement):
    view, _ = made({"weights": "w", "replacement": replacement, "epoch_rows": 2}, values)
    taken = {*view.samples(np.arange(2), 0).row_ids.tolist()}
    allowed = {row for row, weight in enumerate(values.to_pylist()) if weight}
    assert taken <= allowed and (replacement or taken == allowed)


@pytest.mark.parametrize("kind", [pa.float64(), pa.float32()])
def test_floats_are_classes_as_sql_groups_them_and_what_is_missing_is_none(kind):
    values = pa.array([0.0, -0.0, 1.5, 0.0], pa.float64()).cast(kind)
    for each in (values, values.dictionary_encode()):
        view, _ = made({"per_class": "x"}, each)
        assert view.num_classes == 2
    for missing in (float("nan"), -float("nan"), None):
        with pytest.raises(ConfigError, match="is null or NaN in 2 of 3 rows"):
            made({"per_class": "x"}, pa.array([missing, 1.0, missing], pa.float64()).cast(kind))


def test_a_column_may_have_any_name():
    asked = []

    def answer(sql):
        asked.append(sql)
        return pa.chunked_array([[1.0, 2.0]])

    for name in ('my "col"', "a+b", "a + b"):
        view_options_sampling.make_sampling(
            view_options.View(weights=name), views_view.PlainView(2), shuffle=SHUFFLE,
            columns=['my "col"', "a+b"],
            values=answer,
        )  # fmt: skip
    assert asked == ['"my ""col"""', '"a+b"', "a + b"]


def test_what_is_no_class_is_refused():
    with pytest.raises(ConfigError, match="is null in 1 of 2 rows"):
        made({"per_class": "c"}, pa.array(["a", None]))
    with pytest.raises(ConfigError, match="must give single values, got list"):
        made({"per_class": "c"}, pa.array([[1], [2]]))
    with pytest.raises(ConfigError, match="epoch_rows=1 is less than the 2 classes"):
        made({"per_class": "c", "epoch_rows": 1}, pa.array(["a", "b"]))


def test_blocks_and_rows_from_everywhere_exclude_each_other():
    with pytest.raises(ConfigError, match="leave out shuffle_block_size, got 4"):
        made({"weights": "w"}, pa.array([1]), shuffle=views_view.Shuffle(True, 4))


def test_the_values_are_those_of_the_rows_of_the_view_below():
    inner = views_sampling.EpochRowsView(
        views_view.PlainView(4), 2, views_view.Shuffle(False)
    )  # rows 0 and 1
    view, _ = made({"weights": "w"}, pa.array([0, 1, 5, 5]), inner=inner)
    assert view.num_slots(0) == 2
    assert view.samples(np.arange(2), 0).row_ids.tolist() == [1, 1]
