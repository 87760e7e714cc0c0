"""That benchmarks which reach into the client still find there what they replace."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import costs, scale, wire


def test_the_scale_benchmark_fetches_every_window_without_a_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    results: list[Mapping[str, Any]] = []

    def kept(name: str, result: Mapping[str, Any]) -> Path:
        results.append(result)
        return tmp_path / name

    monkeypatch.setattr(scale, "write_result", kept)
    monkeypatch.setattr(scale, "SHARDS", (10, 100))
    monkeypatch.setattr(sys, "argv", ["scale", "--quick"])

    scale.main()

    (result,) = results
    assert [case["num_nodes"] for case in result["cases"]] == [10, 10]


def test_the_cost_of_a_client_is_measured_without_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_LEAST_S", 0.001)
    monkeypatch.setattr(costs, "_NODES", (1, 2, 8))

    plan_ns, (row_ns, request_ns, order_ns), _ = costs.client_without_wire()

    # On a busy machine, the fit may give the whole cost to one of the three.
    assert plan_ns > 0 and max(row_ns, request_ns, order_ns) > 0
    assert min(row_ns, request_ns, order_ns) >= 0


@pytest.mark.usefixtures("forked_workers")
def test_the_wire_benchmark_prints_each_reader_beside_the_bare_stream(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results: list[Mapping[str, Any]] = []

    def kept(name: str, result: Mapping[str, Any]) -> Path:
        results.append(result)
        return tmp_path / name

    monkeypatch.setattr(wire, "write_result", kept)
    arguments = ["--rows", "5000", "--tables", "named", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["wire", *arguments])

    wire.main()

    (result,) = results
    bare, *ours = result["tables"]["named"]["contenders"]
    assert bare["name"].startswith(wire.BARE)
    assert [each["name"] for each in ours] == [
        *(wire.SEQUENTIAL, wire.AS_ARROW),
        *(wire.SHUFFLED, wire.SHUFFLED_TWO),
    ]
    assert min(each["client_ns_per_row"] for each in ours) > 0
    assert "CPU of two nodes / of one" in capsys.readouterr().out
