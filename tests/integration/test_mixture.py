"""A mixture of cached tables, as a training loop reads it."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from torchdata.stateful_dataloader import StatefulDataLoader

from cache_client import (
    CacheClient,
    CacheIterableDataset,
    CacheMixture,
    ConfigError,
    Connection,
    DatasetSpec,
    StaleVersionError,
)
from cache_client.order import audit, audit_record
from cache_client.order import order as ordering
from cache_client.views import mixing
from cache_server import LocalCluster
from tests.conftest import numbered_table
from tests.job_arguments import grouped

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.usefixtures("forked_workers"),
]

WEB, CODE = 301, 97
CODE_BEGINS = 10_000  # the number of its first row


@pytest.fixture(scope="module")
def tables(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """``mix-web`` and ``mix-code``, whose rows know their numbers; returns the endpoint."""
    client = CacheClient(cluster.endpoint)
    wide = numbered_table(5).append_column("more", pa.array([True] * 5))
    contents = {
        "web": numbered_table(WEB),
        "code": numbered_table(CODE, CODE_BEGINS),
        "wide": wide.set_column(1, "a", pa.array(range(5), pa.int32())),
    }
    for name, table in contents.items():
        directory = tmp_path_factory.mktemp(name)
        pq.write_table(table, directory / "rows.parquet", row_group_size=60)
        client.load(DatasetSpec(f"mix-{name}", directory, target_shard_bytes=2_000))
    yield cluster.endpoint
    for name in contents:
        client.drop(f"mix-{name}")


def made(
    endpoint: str,
    weights: tuple[float, float] = (0.7, 0.3),
    *,
    local: bool = True,
    of_mixture: dict[str, Any] | None = None,
    **arguments: Any,
) -> CacheMixture:
    options = {"batch_size": 16, "shuffle": True, "seed": 5, "rank": 0, "world_size": 1}
    web, code = (
        CacheIterableDataset(
            f"mix-{name}", **grouped(cache=Connection(endpoint, local=local), **options | arguments)
        )
        for name in ("web", "code")
    )
    given = {"stop": "all_exhausted", "source_column": "source"} | (of_mixture or {})
    return CacheMixture({"web": (web, weights[0]), "code": (code, weights[1])}, **given)


def expected(found: mixing.Mixing, epoch: int) -> list[int]:
    """The rows of an epoch: each source in an order of its place and name, pass after pass."""
    sources, places = found.locate(np.arange(found.num_slots(epoch)), epoch)
    rows = []
    for source, place in zip(sources.tolist(), places.tolist(), strict=True):
        of_pass, slot = divmod(place, found.rows[source])
        text = f"mixture place={source} name={('web', 'code')[source]!r} seed=5"
        key = hashlib.blake2b(text.encode(), digest_size=8).digest()
        seed = int.from_bytes(key, "little")
        order = ordering.EpochOrder(found.rows[source], shuffle=True, seed=seed, epoch=of_pass)
        rows.append(source * CODE_BEGINS + int(order.row_ids(np.array([slot]))[0]))
    return rows


PLAIN = mixing.mixing((WEB, CODE), [(0, (7, 3))], stop="all_exhausted")


def rows_in(batches: list[dict[str, Any]]) -> list[int]:
    for batch in batches:
        assert batch["source"] == ["code" if row >= CODE_BEGINS else "web" for row in batch["row"]]
        assert batch["text"] == [f"row {row}" for row in batch["row"].tolist()]
    return [row for batch in batches for row in batch["row"].tolist()]


@pytest.mark.parametrize(("ranks", "workers", "local"), [(1, 0, True), (2, 2, False)])
def test_a_mixture_reads_the_same_rows_with_any_number_of_ranks_and_workers(
    tables: str, ranks: int, workers: int, local: bool
) -> None:
    mixtures = [
        made(tables, batch_size=16 // ranks, rank=rank, world_size=ranks, local=local)
        for rank in range(ranks)
    ]
    for mixture in mixtures:
        mixture.set_epoch(2)
    of_ranks = [list(mixture.loader(num_workers=workers)) for mixture in mixtures]
    assert {len(batches) for batches in of_ranks} == {len(mixtures[0])}
    rows = [rows_in(list(step)) for step in zip(*of_ranks, strict=True)]
    whole = [row for step in rows[:-1] for row in step]
    reference = expected(PLAIN, 2)
    assert whole == reference[: len(whole)]
    assert set(rows[-1]) == set(reference[len(whole) :])
    assert mixtures[0].num_samples == len(reference)
    parts = mixtures[0].rows_of_sources(2)
    assert len(parts["web"]) == sum(row < CODE_BEGINS for row in reference)


@pytest.mark.parametrize("draw", ["stratified", "random"])
def test_a_state_resumes_with_another_batch_size_and_with_new_weights(
    tables: str, draw: str
) -> None:
    of_mixture = {"stop": 25, "draw": draw, "weights_at": {20: {"web": 1, "code": 1}}}
    mixture = made(tables, of_mixture=of_mixture)
    loader = iter(mixture.loader())
    rows = rows_in([next(loader) for _ in range(9)])
    state = json.loads(json.dumps(mixture.state_dict()))
    assert len(json.dumps(state)) < 1000
    rest = rows_in(list(loader))

    other = made(tables, batch_size=8, of_mixture=of_mixture, rank=0, world_size=1)
    other.load_state_dict(state)
    assert (other.steps_left, len(other)) == (2 * (25 - 9), 50)
    assert rows_in(list(other)) == rest
    other.set_epoch(1)
    mixture.set_epoch(1)
    assert rows_in(list(other)) == rows_in(list(mixture))

    of_mixture.pop("weights_at")
    changed = made(tables, (0.1, 0.9), batch_size=8, of_mixture=of_mixture)
    changed.load_state_dict(state)
    found = rows_in(list(changed))
    assert len(found) == len(rest)
    # The random draw reads the block of the state to its end, here at the change that was planned.
    kept = 0 if draw == "stratified" else 16 * (20 - 9)
    assert found[:kept] == rest[:kept]
    of_code = sum(row >= CODE_BEGINS for row in found[kept:])
    assert abs(of_code - 0.9 * len(found[kept:])) < 1
    code = [row for row in rows + found if row >= CODE_BEGINS]
    assert len(set(code[:CODE])) == CODE  # no row is lost or given again by the change
    again = made(tables, (0.1, 0.9), batch_size=8, of_mixture=of_mixture)
    again.load_state_dict(json.loads(json.dumps(changed.state_dict())))
    changed.set_epoch(1)
    assert rows_in(list(again)) == rows_in(list(changed))


def test_a_stateful_loader_resumes_a_mixture_in_its_workers(tables: str) -> None:
    mixture = made(tables)
    loader = StatefulDataLoader(mixture, batch_size=None, num_workers=2)
    batches = iter(loader)
    first = [next(batches) for _ in range(5)]
    state = loader.state_dict()
    del batches
    other = StatefulDataLoader(made(tables), batch_size=None, num_workers=2)
    other.load_state_dict(state)
    assert rows_in(first) + rows_in(list(other)) == expected(PLAIN, 0)


def test_an_audit_proves_every_slot_and_so_the_rows_of_each_source(tables: str) -> None:
    evidence = []
    for rank in range(2):
        mixture = made(tables, rank=rank, world_size=2, audit="states")
        for epoch in (0, 1):
            mixture.set_epoch(epoch)
            for _ in mixture:
                state = mixture.state_dict()
            evidence.append(
                audit_record.Evidence(audit_record.AuditRecord.from_dict(state["audit"]))
            )
    found = audit.audit(evidence)
    sizes = [PLAIN.num_slots(0), PLAIN.num_slots(1)]
    assert [(each.outcome, each.rows) for each in found] == [("proven", n) for n in sizes]


def test_padding_pickles_and_other_formats_hold_for_a_mixture(tables: str) -> None:
    padded = pickle.loads(pickle.dumps(made(tables, pad_mask="valid", batch_size=50)))
    batches = list(padded)
    assert {len(batch["row"]) for batch in batches} == {50}
    rows = [r for b in batches for r, ok in zip(b["row"].tolist(), b["valid"], strict=True) if ok]
    assert rows == expected(PLAIN, 0)
    arrow = next(iter(made(tables, batch_format="arrow", pad_mask="valid")))
    first = expected(PLAIN, 0)[:16]
    assert rows_in([{**arrow.to_pydict(), "row": np.array(arrow["row"])}]) == first
    polars = next(iter(made(tables, batch_format="polars", pad_mask="valid")))
    assert polars["row"].to_list() == first
    assert polars["valid"].all() and polars["source"].to_list() == arrow["source"].to_pylist()
    stacked = next(iter(made(tables, stack={"x": ["b", "a"]}, columns=["a", "b", "row"])))
    assert stacked["x"][:, 0].tolist() == [2 * row for row in first]


def test_sources_that_differ_are_refused_with_both_values(tables: str) -> None:
    def of(name: str, **arguments: Any) -> CacheIterableDataset:
        options = {"batch_size": 16} | arguments
        return CacheIterableDataset(f"mix-{name}", **grouped(cache=tables, **options))

    with pytest.raises(ConfigError, match=r"'one' has 'a' float, 'two' has 'a' int32, 'more' bool"):
        CacheMixture({"one": (of("web"), 1), "two": (of("wide"), 1)})
    with pytest.raises(ConfigError, match="batch_size: 'one' has 16, 'two' has 8"):
        CacheMixture({"one": (of("web"), 1), "two": (of("code", batch_size=8), 1)})
    with pytest.raises(ConfigError, match="agree on job: 'one' has 'a', 'two' has 'b'"):
        CacheMixture({"one": (of("web", job="a"), 1), "two": (of("code", job="b"), 1)})
    wide = CacheMixture(
        {"one": (of("web", columns=["row", "b"]), 1), "two": (of("wide", columns=["row", "b"]), 1)}
    )
    assert sorted(next(iter(wide))["row"].tolist()) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    web = of("web")
    bad: list[tuple[str, dict[str, Any]]] = [
        ("stop must be", {"stop": "never"}),
        ("stop must be", {"stop": 0}),
        ("draw must be", {"draw": "dice"}),
        ("seed must be", {"seed": 1.5}),
        ("source_column adds a column 'row', and batches have", {"source_column": "row"}),
        ("source_column must be", {"source_column": ""}),
        ("a weight must be", {"weights_at": {5: {"web": -1}}}),
        ("weights_at.5. must have", {"weights_at": {5: {"code": 1}}}),
        ("step of weights_at", {"weights_at": {0: {"web": 1}}}),
        ("waits for", {"weights_at": {5: {"web": 0, "x": 1}}, "stop": "all_exhausted"}),
    ]
    for message, arguments in bad:
        sources = {"web": (web, 1), "x": (web, 1)} if "waits" in message else {"web": (web, 1)}
        with pytest.raises(ConfigError, match=message):
            CacheMixture(sources, **arguments)
    for sources in ({}, {"web": web}, {"web": ("mix-web", 1)}, [web]):
        with pytest.raises(ConfigError, match="a mixture takes a dict"):
            CacheMixture(sources)  # type: ignore[arg-type]


def test_a_state_of_something_else_is_refused(tables: str) -> None:
    mixture = made(tables)
    state = mixture.state_dict()
    plain = CacheIterableDataset("mix-web", cache=tables, batch_size=16, shuffle=True, seed=5)
    with pytest.raises(StaleVersionError):
        mixture.load_state_dict(plain.state_dict())
    with pytest.raises(ConfigError, match="mixture"):
        plain.load_state_dict(state)
    with pytest.raises(StaleVersionError):
        made(tables, seed=6).load_state_dict(state)
    with pytest.raises(ConfigError, match="bad state: mixture"):
        mixture.load_state_dict({**state, "mixture": {}})
    with pytest.raises(ConfigError, match="rows_consumed"):
        mixture.load_state_dict({**state, "rows_consumed": 10_000})
    steps = made(tables, of_mixture={"stop": 5}).state_dict()
    with pytest.raises(ConfigError, match="stop=5 steps, this mixture 6"):
        made(tables, of_mixture={"stop": 6}).load_state_dict(steps)
    assert mixture.state_dict() == state


def test_a_lost_file_is_read_from_its_node(tables: str, fetches: list[int]) -> None:
    mixture = made(tables)
    batches = iter(mixture)
    next(batches)
    source = mixture.opened.source
    local = source._process_shards.latest()
    assert local is not None
    lost = sorted(local.shards)[0]
    with local._lock:
        del local._files[lost]
    mixture.set_epoch(0)
    assert rows_in(list(made(tables, local=False))) == rows_in(list(mixture))


def test_images_are_decoded_from_both_sources(tables: str, tmp_path: Path) -> None:
    def png(value: int, size: tuple[int, int] = (3, 2)) -> bytes:
        file = io.BytesIO()
        Image.new("RGB", size, (value, 0, 255)).save(file, "png")
        return file.getvalue()

    client = CacheClient(tables)
    values = [png(1), png(2, (4, 2)), None, png(3)]
    table = pa.table({"n": range(4), "image": pa.array(values, pa.binary())})
    pq.write_table(table, tmp_path / "images.parquet")
    client.load(DatasetSpec("mix-images", tmp_path))
    try:
        for workers in (0, 1):
            dataset = CacheIterableDataset(
                "mix-images", cache=tables, batch_size=2, decode={"image": "rgb"}
            )
            one, two = dataset.loader(num_workers=workers)
            assert [tuple(image.shape) for image in one["image"]] == [(3, 2, 3), (3, 2, 4)]
            assert one["image"][1][0].unique().tolist() == [2]
            assert two["image"][0] is None and two["image"][1][0].unique().tolist() == [3]
    finally:
        client.drop("mix-images")


def test_the_example_trains_on_both_tables(capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "mixture.py"
    runpy.run_path(str(example), run_name="__main__")
    output = capsys.readouterr().out
    assert "after 30 steps: {'old': 2400, 'new': 600}" in output
    assert "the epoch has {'old': 6000, 'new': 4199}" in output
