"""What the documentation shows must run as it stands."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from cache_client import DatasetSpec

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def houses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The README's table in the working directory; returns how many rows have a price."""
    rng = np.random.default_rng(0)
    (tmp_path / "houses").mkdir()
    prices = rng.uniform(-10, 100, 1000).astype(np.float32)
    for part in range(2):
        rows = slice(part * 500, part * 500 + 500)
        columns = {name: rng.uniform(0, 9, 500).astype(np.float32) for name in ("rooms", "area")}
        table = pa.table({**columns, "age": columns["area"], "price": prices[rows]})
        pq.write_table(table, tmp_path / "houses" / f"{part}.parquet")
    monkeypatch.chdir(tmp_path)
    return int((prices > 0).sum())


def test_the_training_loop_of_the_readme_runs_as_it_stands(houses: int) -> None:
    shapes: list[tuple[torch.Size, torch.Size]] = []
    names: dict[str, object] = {
        "train_step": lambda features, price: shapes.append((features.shape, price.shape))
    }
    try:
        for block in blocks(README, "python"):
            exec(compile(block, "README.md", "exec"), names)
    finally:
        if "cluster" in names:
            names["cluster"].close()  # type: ignore[attr-defined]
    steps = -(-houses // 256)
    assert len(shapes) == 2 * steps  # two epochs
    assert all(features[1] == 3 and features[0] == price[0] for features, price in shapes)
    assert sum(features[0] for features, _ in shapes) == 2 * houses
    assert shapes[0] == (torch.Size([256, 3]), torch.Size([256]))


def test_the_spec_of_the_readme_is_a_spec() -> None:
    block, _ = blocks(README, "yaml")  # the other one is part of a TrainJob
    spec = DatasetSpec.from_mapping(yaml.safe_load(block))
    assert (spec.name, spec.replicas) == ("houses", 2)


def test_the_two_commands_of_the_readme_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = re.findall(r"^make (\w+)", "\n".join(blocks(README, "console")), re.MULTILINE)
    assert commands == ["demo", "test"]
    for command in commands:
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)


def test_the_worked_example_of_the_order_holds() -> None:
    result = doctest.testfile(str(ROOT / "docs" / "order.md"), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0


def test_every_link_of_the_documentation_leads_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_tree_of_the_architecture_page_names_every_module() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    tree = blocks(page, "")[0]
    for package in ("protos", "cache_server", "cache_client", "runtimes"):
        for module in (ROOT / package).rglob("*.py"):
            # A folder that the tree names as a whole stands for its modules.
            named = f"{module.parent.name}/" if module.parent.name == "postgres" else module.name
            if module.name not in ("__init__.py", "generate.py") and "_pb2" not in module.name:
                assert re.search(rf"^ +{re.escape(named)} ", tree, re.MULTILINE), module


def test_the_demo_sees_every_row_once_on_a_small_table(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "examples" / "demo.py"),
            "--data-dir", str(tmp_path), "--scale-factor", "0.01", "--epochs", "2",
        ],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "60,175 of 60,175 rows seen exactly once" in done.stdout
    assert done.stdout.rstrip().endswith("every row was seen exactly once in each of 2 epochs")
