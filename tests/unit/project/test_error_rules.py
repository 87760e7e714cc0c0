"""The rules that the suite checks each error by find what they are for, and nothing else."""

from __future__ import annotations

import pytest

from cache_protocol.errors import CacheError, ConfigError, LoadError
from tests.error_rules import LONGEST, note_output, problems, watched

_COMMAND = ["cache_client/cli/app.py", "cache_client/control/client.py"]
_CALL = ["cache_client/training/dataset.py"]
_WRITE = ["cache_client/control/commits.py"]


@pytest.mark.parametrize(
    ("error", "places", "expected"),
    [
        (LoadError("x" * (LONGEST + 1)), _CALL, "is longer"),
        (LoadError("cannot read a, b, c, d and 3 more: no footer"), _CALL, "lists places"),
        (LoadError("failed: no footer"), _CALL, "begins with a word"),
        (ConfigError("no dataset: give --refresh"), _CALL, "names --refresh"),
        (ConfigError("no column 'a': give view=View(where='b')"), _COMMAND, "names View("),
        (ConfigError("it may have changed: give refresh=True"), _COMMAND, "names refresh=True"),
        (ConfigError("timeout_s must be more than 0, got -1"), _COMMAND, "names timeout_s"),
        (LoadError("column 'a' holds 1 null: use COALESCE"), _WRITE, "advises 'COALESCE'"),
        (LoadError("column 'a' is a map: cast it in the sql"), _WRITE, "advises 'in the sql'"),
    ],
)
def test_a_bad_error_is_found_and_its_fault_is_named(
    error: CacheError, places: list[str], expected: str
) -> None:
    (problem,) = problems(error, places)
    assert problem.startswith(expected)


@pytest.mark.parametrize(
    ("error", "places"),
    [
        (ConfigError("; ".join(["x" * 400] * 3)), _CALL),
        (ConfigError("no dataset: give --refresh"), _COMMAND),
        (ConfigError("it may have changed: run cachectl load --refresh"), _CALL),
        (LoadError("no column 'a', 'b', 'c', 'd' and 3 more: it has 'e'"), _CALL),
        (LoadError("column 'a' holds 1 null: use COALESCE in the sql"), _CALL),
        (LoadError("it has replicas=3 and seed=1"), _COMMAND),
        (ConfigError("CACHE_FORMAT must be parquet or arrow, got '--work'"), _CALL),
    ],
)
def test_a_good_error_is_let_through(error: CacheError, places: list[str]) -> None:
    assert problems(error, places) == []


@pytest.mark.parametrize(
    ("message", "is_bad"),
    [
        ("cannot read 'a', 'b': no footer", False),
        (f"cannot read '{'a' * 300}' of /a/{'b' * 300}: no footer", False),
        (f"cannot read {'a very ' * 30} long story: no footer", True),
    ],
)
def test_the_text_of_a_library_is_near_the_begin_of_what_is_made_of_it(
    message: str, is_bad: bool
) -> None:
    with watched() as bad:
        try:
            raise ValueError("no footer")
        except ValueError:
            LoadError(message)

    assert bool([text for text in bad if "behind 120 other characters" in text]) == is_bad


def test_each_bad_error_of_this_process_is_noted_while_it_is_watched() -> None:
    with watched() as bad:
        LoadError("no footer")
        LoadError("failed: no footer")

    assert bad == ["LoadError begins with a word that is no cause: failed: no footer"]


def test_a_bad_error_that_a_program_prints_is_noted() -> None:
    with watched() as bad:
        note_output("loading\ncachectl: LoadError: failed: no footer\n")
        note_output("cachectl: ConfigError: no dataset: give --refresh\n")

    assert bad == ["cachectl: LoadError begins with a word that is no cause: failed: no footer"]
