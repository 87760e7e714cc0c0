"""Functions that packages on nodes register, called by SQL of loads and of views."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from cache_client import CacheClient, CacheIterableDataset, Connection, DatasetSpec, View
from cache_client.__main__ import app
from cache_protocol.errors import LoadError, RequestError
from cache_server.local import LocalNode
from tests import function_packages
from tests.conftest import nodes_executed
from tests.waiting import wait_until

ROWS, BAD = 3000, 2345
ALLOWED = (*function_packages.NAMES, "json_field", "hash_bucket", "tokenize")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.parquet"
    texts = [f"text {row}" for row in range(ROWS)]
    worse = [*texts]
    worse[BAD] = "bad"
    pq.write_table(pa.table({"row": range(ROWS), "text": texts, "worse": worse}), path)
    return path


@contextmanager
def started(folder: Path, packages: Path, *arguments: str) -> Iterator[LocalNode]:
    """A node that has a package of functions installed; it is executed, to see it."""
    node = LocalNode(folder / "node", list(arguments))
    with pytest.MonkeyPatch.context() as patch, nodes_executed():
        patch.setenv("PYTHONPATH", str(packages))
        try:
            node.start()
            yield node
        finally:
            node.close()


ANY = ("--allow-source", "")


def allow(*names: str) -> list[str]:
    return [part for name in names for part in ("--allow-function", name)]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalNode]:
    packages = function_packages.install(tmp_path_factory.mktemp("packages"))
    arguments = (*ANY, *allow(*ALLOWED), "--function-workers", "2", "--load-threads", "2")
    with started(tmp_path_factory.mktemp("node"), packages, *arguments) as running:
        yield running


@pytest.fixture
def client(node: LocalNode) -> CacheClient:
    return CacheClient(node.endpoint)


def read(client: CacheClient, name: str, **options: Any) -> list[dict[str, Any]]:
    cache = Connection(client.endpoint)
    return list(CacheIterableDataset(name, batch_size=ROWS, shuffle=False, cache=cache, **options))


def spec(name: str, source: Path, expression: str) -> DatasetSpec:
    return DatasetSpec(name, source, sql=f"SELECT row, {expression} AS value FROM source")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("raises", "raised KeyError: 'no such word'"),
        ("dies", "ended its process (SIGKILL)"),
        ("exits", "ended its process (exit code 3)"),
        ("too_short", "gave 0 values for 1 rows"),
        ("other_type", "gave values of double instead of int32"),
        ("no_array", "gave list instead of an Arrow array"),
        ("hogs", "of memory"),
    ],
)
def test_a_batch_that_fails_fails_its_load_by_the_name_of_function_and_row(
    client: CacheClient, source: Path, function: str, reason: str
) -> None:
    with pytest.raises(LoadError) as failed:
        client.load(spec(f"of-{function}", source, f"{function}(worse)"))
    said = str(failed.value)
    assert f"function {function} " in said
    assert reason in said
    assert f"row {BAD} of those that it got, 'bad'" in said
    assert str(source) in said
    client.load(spec("well", source, f"{function}(text)"))
    (batch,) = read(client, "well")
    assert batch["value"].tolist() == [len(f"text {row}") for row in range(ROWS)]


def test_other_loads_go_on_while_a_function_hangs_and_a_drop_ends_it(
    client: CacheClient, source: Path
) -> None:
    client.load(spec("hanging", source, "hangs(worse)"), wait=False)
    done = client.load(spec("beside", source, "good(text) + hash_bucket(text, 5)"))
    assert done.num_rows == ROWS
    assert client.describe("hanging").state == "loading"
    client.drop("hanging")
    wait_until(lambda: "hanging" not in [each.name for each in client.datasets()], 30, "the drop")
    assert client.load(spec("after", source, "good(worse)")).num_rows == ROWS


def test_sql_that_runs_in_a_process_apart_calls_functions_too(
    client: CacheClient, source: Path
) -> None:
    client.load(spec("apart", source, "good(repeat(text, 2))"))
    with pytest.raises(LoadError, match=rf"function raises .*: row {BAD} of those that it got"):
        client.load(spec("apart-bad", source, "raises(replace(worse, 'text', 'x'))"))


def test_a_whole_query_calls_functions(client: CacheClient, source: Path) -> None:
    sql = "SELECT good(text) AS length, count(*) AS n FROM source GROUP BY 1 ORDER BY 1"
    client.load(DatasetSpec("whole", source, sql=sql))
    (batch,) = read(client, "whole")
    assert batch["length"].tolist() == [6, 7, 8, 9]
    assert batch["n"].tolist() == [10, 90, 900, 2000]


def test_expressions_of_views_call_functions(client: CacheClient, source: Path) -> None:
    client.load(DatasetSpec("viewed", source, sql="SELECT row, text, worse FROM source"))

    def rows(where: str) -> list[int]:
        batches = read(client, "viewed", view=View(where=where))
        return [row for batch in batches for row in batch["row"].tolist()]

    assert rows("good(text) = 6 AND hash_bucket(text, 1) = 0") == list(range(10))
    with pytest.raises(RequestError, match=f"function raises raised KeyError.* row {BAD} of"):
        rows("raises(worse) = 6")
    with pytest.raises(RequestError, match=r"pinned, none; got '/t\.json': name it in the `sql`"):
        rows("array_length(tokenize(text, '/t.json')) = 1")


def test_the_functions_of_the_nodes_are_listed_with_signatures_and_versions(
    node: LocalNode,
) -> None:
    shown = CliRunner().invoke(app, ["functions", "--endpoint", node.endpoint])
    assert shown.exit_code == 0, shown.output
    assert "good(text: string) -> int32" in shown.output
    asked = CliRunner().invoke(app, ["functions", "--json", "--endpoint", node.endpoint])
    found = {each["name"]: each for each in json.loads(asked.output)}
    assert found.keys() == {*ALLOWED}
    assert found["good"]["version"] == "1"
    assert found["good"]["nodes"] == [node.node_id]


def test_the_function_of_the_documentation_runs_as_it_stands() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "functions.md"
    (block,) = [
        found
        for found in re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.M)
        if "count_words" in found
    ]
    names: dict[str, Any] = {}
    exec(compile(block, "functions.md", "exec"), names)
    function = names["count_words"]
    assert function.signature == "count_words(text: string, between: text = ' ') -> int32"
    compute = function.make({"between": ","})
    assert compute(pa.array(["a,b", "", "c"])).to_pylist() == [2, 1, 1]


def test_a_function_that_is_not_allowed_is_refused_with_the_way_to_allow_it(
    client: CacheClient, source: Path
) -> None:
    with pytest.raises(RequestError, match="the nodes need --allow-function normalize_text"):
        client.load(spec("refused", source, "normalize_text(text)"))


def test_nodes_with_other_versions_are_named(tmp_path: Path, source: Path) -> None:
    one = function_packages.install(tmp_path / "one")
    two = function_packages.install(tmp_path / "two", version="2")
    with started(tmp_path / "first", one, *ANY, *allow("good")) as first:
        arguments = (*ANY, *allow("good"), "--coordinator", first.control_location)
        with started(tmp_path / "second", two, *arguments) as second:
            client = CacheClient(first.endpoint)
            wait_until(lambda: len(client.nodes()) == 2, 30, "the second node")
            with pytest.raises(RequestError) as refused:
                client.load(spec("differs", source, "good(text)"))
    assert "function good has version 1 on the coordinator" in str(refused.value)
    assert f"node {second.node_id} has 2" in str(refused.value)


def test_files_are_pinned_by_digest_and_refused_unless_they_are_data(
    client: CacheClient, source: Path, tmp_path: Path
) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    wanted = spec("tokens", source, f"tokenize(text, '{tokenizer}')")

    def saved(words: list[str]) -> None:
        model = {"type": "WordLevel", "unk_token": words[0]}
        model["vocab"] = {word: number for number, word in enumerate(words)}  # type: ignore[assignment]
        split = {"type": "WhitespaceSplit"}
        tokenizer.write_text(json.dumps({"model": model, "pre_tokenizer": split}))

    saved(["<unk>", "text"])
    first = client.load(wanted)
    saved(["<unk>", "text", "0"])
    second = client.load(wanted, refresh=True)
    assert first.fingerprint != second.fingerprint
    saved(["<unk>", "text"])
    assert client.load(wanted, refresh=True).fingerprint == first.fingerprint

    tokenizer.write_bytes(pickle.dumps({"model": 1}))
    with pytest.raises(LoadError, match="must be a json file: it is a pickle, which runs code"):
        client.load(spec("pickled", source, f"tokenize(text, '{tokenizer}')"))
    tokenizer.write_text("{}")
    with pytest.raises(RequestError, match=r"the file is no tokenizer\.json"):
        client.load(spec("empty", source, f"tokenize(text, '{tokenizer}')"))


def test_files_are_read_only_where_sources_may_be(tmp_path: Path, source: Path) -> None:
    with started(
        tmp_path / "node", tmp_path, "--allow-source", str(source), *allow("tokenize")
    ) as node:
        client = CacheClient(node.endpoint)
        with pytest.raises(RequestError, match=r"may not read '/etc/passwd'"):
            client.load(spec("refused", source, "tokenize(text, '/etc/passwd')"))
