"""When rows were given, computed from states and records, against a log of every row."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from typer.testing import CliRunner

from cache_client import CacheClient, CacheIterableDataset, CacheMixture, View
from cache_client import __main__ as program
from cache_server import LocalCluster
from tests.erasing import Erasing, erasing
from tests.waiting import wait_until

__all__ = ["erasing"]

VIEWS = (
    None,
    View(where="user % 3 <> 1"),
    View(split={"train": 0.7, "val": 0.3}, part="train"),
    View(weights="1 + row % 3", epoch_rows=50),
    View(per_class="user", epoch_rows=40),
    View(epoch_rows=33),
    View(group_by="user"),
    View(length_buckets="row % 5", bucket_rows=16),
)


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalCluster]:
    with LocalCluster() as running:
        yield running


def write(nodes: LocalCluster, name: str, start: int, stop: int) -> None:
    row = np.arange(start, stop)
    table = pa.table({"row": row, "user": row % 4})
    CacheClient(nodes.endpoint).write(name, table, append=start > 0)


def seen(nodes: LocalCluster, *arguments: str) -> Any:
    """What the command says as JSON."""
    ran = CliRunner().invoke(
        program.app, ["seen", *arguments, "--endpoint", nodes.endpoint, "--json"]
    )
    assert ran.exit_code == 0, (ran.output, ran.exception)
    return json.loads(ran.stdout)


def given_in(found: Any) -> list[tuple[int, int, int, int]]:
    """Epoch, step, rank and row of each time."""
    return sorted(
        (epoch["epoch"], each["step"], each["rank"], each["row"])
        for one in found
        for epoch in one["epochs"]
        for each in epoch["given"]
    )


@pytest.mark.parametrize("number", range(len(VIEWS)))
def test_a_state_tells_each_step_that_had_a_row(
    nodes: LocalCluster, tmp_path: Path, number: int
) -> None:
    draw, name = random.Random(number), f"views-{number}"
    write(nodes, name, 0, 90)
    world, batch = draw.choice([(1, 7), (2, 3), (3, 5)])
    ranks = [
        CacheIterableDataset(
            name, batch_size=batch, view=VIEWS[number], shuffle=number != 5, seed=number,
            rank=rank, world_size=world, cache=nodes.endpoint, job=name,
            batch_format="arrow" if number == 6 else "torch",
        )
        for rank in range(world)
    ]  # fmt: skip
    log = []
    for epoch in range(3):
        steps = len(ranks[0]) - 1 if epoch < 2 else draw.randint(1, 3)
        for rank, dataset in enumerate(ranks):
            dataset.set_epoch(epoch)
            for step, given in enumerate(dataset):
                rows = np.hstack(given["row"].to_pylist() if number == 6 else [given["row"]])
                log += [(epoch, step, rank, int(row)) for row in rows.tolist()]
                if epoch == 2 and step + 1 == steps:
                    break
    path = tmp_path / "state.json"
    path.write_text(json.dumps({"model": 1, "data": [ranks[0].state_dict(steps=steps)]}))

    found = seen(
        nodes, name, "--where", "user = 3", "--state", str(path),
        "--batch-size", str(batch), "--world-size", str(world),
    )  # fmt: skip

    # A short last step may give a row to two ranks: it counts where it comes first.
    firsts = {(epoch, step, row): rank for epoch, step, rank, row in sorted(log, reverse=True)}
    expected = [
        each
        for each in sorted(log)
        if each[3] % 4 == 3
        and (number in (3, 4, 5) or firsts[each[0], each[1], each[3]] == each[2])
    ]
    assert given_in(found) == expected
    assert found[0]["rows"] == len([row for row in range(90) if row % 4 == 3])


@pytest.mark.parametrize("seed", range(6))
def test_amended_epochs_tell_it_too(nodes: LocalCluster, tmp_path: Path, seed: int) -> None:
    draw, name = random.Random(seed), f"amended-{seed}"
    write(nodes, name, 0, 60)
    dataset = CacheIterableDataset(
        name, batch_size=4, shuffle=True, seed=seed, cache=nodes.endpoint, audit="states"
    )
    log, num_rows = Counter[tuple[int, int]](), 60
    for epoch in range(3):
        dataset.set_epoch(epoch)
        stop = draw.randint(6, 9) if epoch == 2 else 10**9
        amends = {draw.randint(1, 5) for _ in range(draw.randint(0, 3))}
        for step, batch in enumerate(dataset, 1):
            log.update((epoch, row) for row in batch["row"].tolist())
            if step in amends:
                write(nodes, name, num_rows, num_rows + 8)
                num_rows += 8
                dataset.amend(view=draw.choice([View(), View(where="user <> 2"), dataset.view]))
            if step == stop:
                break
    path = tmp_path / "checkpoint.pt"
    torch.save({"dataset": dataset.state_dict()}, path)

    found = seen(nodes, name, "--where", "row % 2 = 1", "--state", str(path))

    times = Counter(
        (epoch["epoch"], each["row"]) for epoch in found[0]["epochs"] for each in epoch["given"]
    )
    assert times == Counter({key: count for key, count in log.items() if key[1] % 2})


def test_a_mixture_and_the_records_of_a_job_tell_it(nodes: LocalCluster, tmp_path: Path) -> None:
    for name in ("left", "right"):
        write(nodes, name, 0, 50)
    sources = {
        name: (CacheIterableDataset(name, batch_size=5, shuffle=True, cache=nodes.endpoint), weight)
        for name, weight in (("left", 2), ("right", 1))
    }
    mixture = CacheMixture(sources, source_column="source")
    log = []
    for step, batch in enumerate(mixture):
        rows, places = batch["row"].tolist(), list(batch["source"])
        log += [(0, step, 0, row) for row, at in zip(rows, places, strict=True) if at == "left"]
        if step == 9:
            break
    path = tmp_path / "mixture.json"
    path.write_text(json.dumps(mixture.state_dict(steps=10)))

    found = seen(nodes, "left", "--where", "true", "--state", str(path), "--batch-size", "5")
    assert given_in(found) == sorted(log)

    plain = CacheIterableDataset(
        "right", batch_size=5, shuffle=True, cache=nodes.endpoint, job="plain", audit="reports"
    )
    own = [(0, step, 0, int(row)) for step, batch in enumerate(plain) for row in batch["row"]]
    client = CacheClient(nodes.endpoint)

    def has_record() -> bool:
        return any(each.audits and each.name == "plain" for each in client.jobs(audits=True))

    wait_until(has_record, 10, "a record")
    found = seen(nodes, "right", "--where", "user = 1", "--job", "plain")
    assert given_in(found) == sorted(each for each in own if each[3] % 4 == 1)


def test_people_see_how_often_and_what_cannot_be_shown(nodes: LocalCluster, tmp_path: Path) -> None:
    write(nodes, "people", 0, 40)
    dataset = CacheIterableDataset("people", batch_size=10, shuffle=True, cache=nodes.endpoint)
    batches = iter(dataset)
    next(batches)
    path = tmp_path / "state.json"
    path.write_text(json.dumps(dataset.state_dict()))

    def run(*arguments: str) -> tuple[int, str]:
        ran = CliRunner().invoke(
            program.app, ["seen", "people", *arguments, "--endpoint", nodes.endpoint]
        )
        return ran.exit_code, f"{ran.output} {ran.exception}"

    code, text = run("--where", "row >= 0", "--state", str(path), "--batch-size", "10")
    assert (code, "10 of 40 rows were given, 10 times in all" in text) == (0, True), text
    assert "step 0, rank 0" in text
    for arguments, wrong in (
        (("--where", "row = 1"), "give either --state FILE or --job JOB"),
        (("--state", str(path)), "give either --where SQL or --forgotten ACT"),
        (("--where", "row = 1", "--state", str(tmp_path / "none")), "cannot read"),
        (("--where", "nothing = 1", "--state", str(path)), "nothing"),
    ):
        code, text = run(*arguments)
        assert code != 0
        assert wrong in text


def test_the_last_clean_state_is_named(nodes: LocalCluster, tmp_path: Path) -> None:
    write(nodes, "clean", 0, 40)
    dataset = CacheIterableDataset(
        "clean", batch_size=4, shuffle=True, cache=nodes.endpoint, job="clean"
    )
    order, paths = list[int](), []
    for step, batch in enumerate(dataset):
        order += batch["row"].tolist()
        paths.append(tmp_path / f"ckpt-{step}.json")
        paths[-1].write_text(json.dumps(dataset.state_dict()))

    def last(row: int) -> str:
        states = [part for path in reversed(paths) for part in ("--state", str(path))]
        arguments = ["seen", "clean", "--where", f"row = {row}", *states]
        ran = CliRunner().invoke(program.app, [*arguments, "--endpoint", nodes.endpoint])
        assert ran.exit_code == 0, (ran.output, ran.exception)
        return ran.output.splitlines()[-1]

    assert last(order[17]) == f"last clean: {paths[3]}"
    assert last(order[0]) == "no state is clean"


def test_rows_that_were_forgotten_are_found_by_their_act(
    nodes: LocalCluster, tmp_path: Path, erasing: Erasing
) -> None:
    write(nodes, "gone", 0, 40)
    dataset = CacheIterableDataset("gone", batch_size=4, shuffle=True, cache=nodes.endpoint)
    order, path = list[int](), tmp_path / "state.json"
    for step, batch in enumerate(dataset):
        order += batch["row"].tolist()
        if step == 4:
            path.write_text(json.dumps(dataset.state_dict()))
    erasing.erase("gone", [0, 1])
    act = erasing.erase("gone", sorted(order[18:23]))

    (found,) = seen(nodes, "gone", "--forgotten", str(act), "--state", str(path))

    (epoch,) = found["epochs"]
    assert [each["row"] for each in epoch["given"]] == order[18:20]
    assert (found["rows"], found["last_clean"]) == (5, False)
