"""Acts that forget rows are recorded, end in any order, and are chained as they are signed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cache_protocol.wire import attestations
from cache_server.coordination.catalogue_store import FileStore
from cache_server.coordination.forget_book import ForgetBook
from cache_server.coordination.forgets import Forgets
from cache_server.shards.version_key import VersionKey


@pytest.fixture
def forgets(tmp_path: Path) -> Forgets:
    made = Forgets(ForgetBook(FileStore(tmp_path)))
    made.key()
    return made


def cache_with_files_of(*datasets: str) -> Any:
    """The state of a cache without versions, whose only node still removes files of datasets."""
    held = {VersionKey(name, "old"): SimpleNamespace(forgot=0, shards=[]) for name in datasets}
    node = SimpleNamespace(flight_location="grpc://n:1")
    member = SimpleNamespace(node=node, actual=held, untrusted="")
    membership = SimpleNamespace(alive=lambda: frozenset({"n"}), members={"n": member})
    return SimpleNamespace(
        versions={},
        membership=membership,
        catalogue=SimpleNamespace(id=lambda: "cache"),
        mark_changed=lambda *_: None,
    )


def begin(forgets: Forgets, state: Any, dataset: str) -> int:
    about = {"dataset": dataset, "by": "ann", "reason": "x", "condition_mac": ""}
    return forgets.begin(state, about, {}, ())


def attestation(forgets: Forgets, state: Any, number: int) -> str:
    (act,) = forgets.messages(state, "", number)
    return str(act.attestation)


def test_an_act_that_waits_holds_up_no_other_one_and_follows_it_in_the_chain(
    forgets: Forgets,
) -> None:
    waiting = cache_with_files_of("a")
    first, second = begin(forgets, waiting, "a"), begin(forgets, waiting, "b")
    forgets.settle(waiting)
    assert list(forgets.open_acts) == [first]
    done = attestation(forgets, waiting, second)
    assert attestations.verify(done)["previous"] == ""

    free = cache_with_files_of()
    forgets.settle(free)
    third = begin(forgets, free, "c")
    forgets.settle(free)

    assert not forgets.open_acts
    later, last = (attestation(forgets, free, number) for number in (first, third))
    assert attestations.verify(later)["previous"] == attestations.digest(done)
    assert attestations.verify(last)["previous"] == attestations.digest(later)
    assert [json.loads(each)["attestation"]["number"] for each in (done, later, last)] == [2, 1, 3]
