"""How programs end: exit codes, the last line, and what Kubernetes keeps of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache_protocol.cli.exits import tell
from cache_protocol.errors import (
    CacheError,
    ConfigError,
    LoadError,
    NodeUnavailableError,
    RequestError,
    TransientLoadError,
    exit_code,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 78),
        (LoadError("x"), 65),
        (RequestError("x"), 65),
        (TransientLoadError("x"), 75),
        (NodeUnavailableError("x"), 1),
        (CacheError("x"), 1),
    ],
)
def test_the_class_of_an_error_decides_the_exit_code(error: CacheError, code: int) -> None:
    assert exit_code(error) == code


def test_the_last_line_is_the_termination_message_in_at_most_500_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "log").touch()
    environ = {"CACHE_TERMINATION_LOG": str(path)}
    tell("cache-server", LoadError("no\nfile"), environ)
    assert path.read_text() == "LoadError: no file"
    assert capsys.readouterr().err == "cache-server: LoadError: no file\n"
    tell("cache-server", LoadError(f"begin {'x' * 560} end"), environ)
    assert len(path.read_text()) <= 500
    assert path.read_text().startswith("LoadError: begin") and path.read_text().endswith(" end")


def test_a_process_outside_kubernetes_leaves_no_file(tmp_path: Path) -> None:
    tell("cachectl", "the end", {"CACHE_TERMINATION_LOG": str(tmp_path / "log")})
    assert not list(tmp_path.iterdir())
