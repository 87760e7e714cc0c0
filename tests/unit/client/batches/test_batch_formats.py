"""Batches of JAX arrays, and polars DataFrames."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cache_client.batches import batch_formats, convert
from cache_protocol.errors import ConfigError
from tests import forked_python
from tests.fetched_rows import LAYOUT, SCHEMA, rows

polars = pytest.importorskip("polars")


def test_a_polars_batch_has_the_values_and_booleans() -> None:
    frame = convert.Converter(LAYOUT, None, "polars")(rows([5, 6, 7]))
    assert isinstance(frame, polars.DataFrame)
    assert frame.columns == SCHEMA.names
    assert frame["a"].to_list() == [0, 2, 4] and frame["label"].to_list() == [5, 6, 7]
    assert frame.schema["ok"] == polars.Boolean and frame["ids"].to_list() == [[], [0], [0, 1]]
    with pytest.raises(ConfigError, match="stack cannot be used with batch_format='polars'"):
        convert.Converter(LAYOUT, {"x": ["a", "b"]}, "polars")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("jax", "polars"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ConfigError, match=f"package {package!r}: pip install {package}"):
            convert.Converter(LAYOUT, None, package)  # type: ignore[arg-type]


def test_workers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_formats, "get_worker_info", lambda: "a worker")
    with pytest.raises(ConfigError, match="batch_format='polars' cannot be used in DataLoader"):
        convert.Converter(LAYOUT, None, "polars")(rows([1]))


JAX = """
import os
os.environ["JAX_PLATFORMS"] = "cpu"
import warnings
import jax
import numpy as np
import pytest
from cache_client.batches.batch_formats import to_jax
from cache_client.batches.convert import Converter
from cache_protocol.errors import ConfigError
from tests.fetched_rows import LAYOUT, rows
warnings.simplefilter("error")
convert = Converter(LAYOUT, {"x": ["b", "a"]}, "jax")
batch = convert(rows([5, -6, 2**31 - 1]))
assert all(isinstance(batch[name], jax.Array) for name in ("x", "label", "ok"))
assert batch["x"].tolist() == [[1, 0], [3, 2], [5, 4]] and batch["ok"].dtype == bool
assert batch["label"].tolist() == [5, -6, 2**31 - 1] and batch["text"] == ["0", "1", "2"]
assert [ids.tolist() for ids in batch["ids"]] == [[], [0], [0, 1]]
with pytest.raises(ConfigError, match="column 'label' has 2147483648"):
    convert(rows([2**31]))
block = np.zeros(4096 + 64, np.uint8)
aligned = block[-block.ctypes.data % 64 :][:4096].view(np.float32)
assert to_jax("a", aligned).unsafe_buffer_pointer() == aligned.ctypes.data
jax.config.update("jax_enable_x64", True)
assert convert(rows([2**40]))["label"].tolist() == [2**40]
print("done")
"""


@pytest.mark.frameworks
def test_a_jax_batch_shares_memory_and_refuses_what_32_bits_cannot_hold(tmp_path: Path) -> None:
    """In another process: JAX starts threads, which forks of later tests would not survive."""
    program = tmp_path / "program.py"
    program.write_text(JAX, encoding="utf-8")
    done = forked_python.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0 and "done" in done.stdout, done.stderr
