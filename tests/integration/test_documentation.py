"""What the documentation shows must run as it stands."""

from __future__ import annotations

import doctest
import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from cache_client import CacheClient, CacheIterableDataset, Connection, DatasetSpec
from cache_server import LocalCluster
from tests import forked_python
from tests.waiting import wait_until

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
        area = rng.uniform(0, 9, 500).astype(np.float32)
        rooms = rng.integers(1, 9, 500)
        table = pa.table({"rooms": rooms, "area": area, "age": area, "price": prices[rows]})
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


def test_the_spec_of_the_readme_suits_its_training_loop(houses: int) -> None:
    """A stack with integers in it would be float64, which the layers of a model refuse."""
    block, _ = blocks(README, "yaml")
    spec = DatasetSpec.from_mapping({**yaml.safe_load(block), "source": "houses"})
    with LocalCluster(nodes=2) as cluster:
        CacheClient(cluster.endpoint).load(spec)
        dataset = CacheIterableDataset(
            spec.name,
            cache=cluster.endpoint,
            batch_size=256,
            stack={"features": ["rooms", "area", "age"]},
        )
        assert next(iter(dataset))["features"].dtype == torch.float32


def test_the_spec_of_the_readme_is_a_spec() -> None:
    block, _ = blocks(README, "yaml")  # the other one is part of a TrainJob
    spec = DatasetSpec.from_mapping(yaml.safe_load(block))
    assert (spec.name, spec.replicas) == ("houses", 2)


def commands_on_servers() -> list[list[str]]:
    """The console block under "On servers", a command a list of words, without what installs."""
    section = README.partition("## On servers")[2]
    block = blocks(section, "console")[0].replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    return [words for words in lines if words and words[0] != "pip"]


def test_the_commands_of_the_readme_on_servers_run_as_they_stand(
    houses: int, tmp_path: Path
) -> None:
    """Two nodes of this machine, on free ports, with directories of the test."""
    commands = commands_on_servers()
    kinds = ["export", *["cache-server"] * 2, "export", *["cachectl"] * 4]
    assert [words[0] for words in commands] == kinds
    block, _ = blocks(README, "yaml")
    spec = block.replace("/data/houses", str(tmp_path / "houses"))
    (tmp_path / "houses.yaml").write_text(spec, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "CACHE_ENDPOINT"}
    (tmp_path / "token").write_text("a shared secret".replace(" ", "-"), encoding="utf-8")
    # What the README says -> what is so here.
    known = {
        "0.0.0.0": "127.0.0.1", "token": str(tmp_path / "token"), "/data/": f"{tmp_path}/",
    }  # fmt: skip
    output: dict[str, str] = {}
    with ExitStack() as stack:
        for number, words in enumerate(commands):
            here = [known.get(word, word) for word in words]
            if here[0] == "export":
                name, _, value = here[1].partition("=")
                environment[name] = known[value]
            elif here[0] == "cache-server":
                host = here[here.index("--advertise") + 1]
                ready = start_node(stack, here, tmp_path / f"cache-{number}", environment)
                known.setdefault(f"{host}:50052", ready["control"])
                known.setdefault(f"grpc://{host}:50051", ready["flight"])
            else:
                if here[1] == "load":  # both replicas need a node
                    client = CacheClient(
                        Connection(environment["CACHE_ENDPOINT"], token_file=known["token"])
                    )
                    wait_until(lambda c=client: len(c.nodes()) == 2, 30.0, "two nodes")
                output[here[1]] = forked_python.run(
                    [sys.executable, "-m", "cache_client", *here[1:]], cwd=tmp_path,
                    env=environment, capture_output=True, text=True, timeout=60, check=True,
                ).stdout  # fmt: skip
    assert "houses" in output["plan"] and "nodes needed" not in output["plan"]
    for command in ("load", "ls"):
        assert "ready" in output[command] and str(houses) in output[command]
    assert output["head"].split()[:4] == ["rooms", "area", "age", "price"]
    assert len(output["head"].splitlines()) == 1 + 3


def start_node(
    stack: ExitStack, words: list[str], cache_dir: Path, environment: dict[str, str]
) -> dict[str, str]:
    """Starts a node by a command of the README; returns what it prints when it listens."""
    words = [sys.executable, "-m", "cache_server", *words[1:]]
    words[words.index("--cache-dir") + 1] = str(cache_dir)
    words[words.index("--advertise") + 1] = "127.0.0.1"
    process = forked_python.Popen(
        [*words, "--flight-port", "0", "--control-port", "0", "--http-port", "0"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    stack.enter_context(process)  # waits for it, and closes its output
    stack.callback(process.kill)
    assert process.stdout is not None
    ready: dict[str, str] = json.loads(process.stdout.readline())
    return ready


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


def test_the_calls_beside_those_of_other_libraries_run_as_they_stand(
    houses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "come-from.md").read_text(encoding="utf-8")
    ours = re.findall(r"^Now:\n\n```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    (ancestor,) = (block for block in blocks(page, "python") if "FlightClient" in block)
    assert len(ours) == 5
    with LocalCluster(nodes=1, insecure=True) as cluster:
        monkeypatch.setenv("CACHE_ENDPOINT", cluster.endpoint)
        CacheClient(cluster.endpoint).load(DatasetSpec("houses", "houses", filter="price > 0"))
        for block in (
            *ours,
            ancestor.replace("grpc://houses-cache-service:50051", cluster.endpoint),
        ):
            rows: list[int] = []
            names: dict[str, object] = {
                "train_step": lambda area, price, rows=rows: rows.append(len(price)),
                "rank": 0,
                "world_size": 1,
            }
            exec(compile(block, "come-from.md", "exec"), names)
            if "train" in names:
                names["train"]()  # type: ignore[operator]
            assert sum(rows) % houses == 0 and rows, block


def test_the_notebook_runs_and_its_resumed_epoch_has_every_row_once() -> None:
    notebook = json.loads((ROOT / "examples" / "local_cache.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    code = ["".join(cell["source"]) for cell in cells]
    # An optimizer imports torch._dynamo, which takes ten seconds.
    done = forked_python.run(
        [sys.executable, "-c", "\n".join([*code, "print(losses[-1] < losses[0])"])],
        env={**forked_python.environ(), "FORKED_PYTHON_IMPORTS": "torch._dynamo"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1000 rows loaded" in done.stdout
    assert "1000 rows, 1000 of them different" in done.stdout
    assert done.stdout.endswith("True\n")


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
    path = os.environ.get("PYTHONPATH", "")
    done = forked_python.run(
        [
            sys.executable, str(ROOT / "examples" / "demo.py"),
            "--data-dir", str(tmp_path), "--scale-factor", "0.01", "--epochs", "2",
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/rank_ends"), path]),
            "FORKED_PYTHON": forked_python.executable(),
            "FORKED_PYTHON_IMPORTS": "torch._dynamo",
        },
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "threads of gloo are left" not in done.stderr
    assert "60,175 of 60,175 rows seen exactly once" in done.stdout
    assert done.stdout.rstrip().endswith("every row was seen exactly once in each of 2 epochs")
