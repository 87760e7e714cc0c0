"""The functions that a machine has: shipped ones, and those of packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_protocol.errors import ConfigError
from cache_server.functions.installed import SHIPPED, function_named, installed
from tests import function_packages


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    function_named.cache_clear()


def test_the_default_is_what_this_package_ships() -> None:
    assert list(installed()) == list(SHIPPED)
    assert all(name == function.name for name, function in installed().items())


def test_functions_of_other_packages_are_named_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(function_packages.install(tmp_path))
    assert list(installed(["good", "json_field"])) == ["good", "json_field"]
    with pytest.raises(ConfigError, match=r"no function 'goood' is installed; .*good"):
        installed(["goood"])


def test_an_entry_point_that_is_no_function_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = function_packages.install(tmp_path)
    points = folder / "misbehaving-1.0.dist-info" / "entry_points.txt"
    points.write_text(f"[{function_packages.GROUP}]\nodd = misbehaving:hog\nlost = nowhere:f\n")
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(ConfigError, match=r"must be a cache_server\.functions\.Function of this"):
        installed(["odd"])
    with pytest.raises(ConfigError, match="cannot import function 'lost' from nowhere:f"):
        installed(["lost"])


def test_without_the_libraries_of_tokens_other_functions_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert list(installed()) == ["normalize_text", "json_field", "hash_bucket"]
    with pytest.raises(ConfigError, match=r"needs tokenizers: install trainer-data-cache\[llm\]"):
        installed(["tokenize"])
