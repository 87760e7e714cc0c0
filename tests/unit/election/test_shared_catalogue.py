"""Documents in ConfigMaps, and what an earlier coordinator can no longer do to them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cache_server.coordination.catalogue_store import (
    CatalogueLostError,
    CatalogueStore,
    FileStore,
)
from cache_server.election import shared_catalogue
from cache_server.election.objects import ElectionStore, RefusedError, StoredMap
from cache_server.election.shared_catalogue import MAX_BYTES, SharedCatalogue
from tests.api_server import ApiServer, Fault

Open = Callable[[], SharedCatalogue]


@pytest.fixture
def lost() -> list[str]:
    """Grows when a store says that it is lost."""
    return []


@pytest.fixture
def open_store(objects: ElectionStore, lost: list[str]) -> Open:
    return lambda: SharedCatalogue(objects, lambda: True, lambda: lost.append("lost"))


def maps(api: ApiServer) -> set[str]:
    return {one["metadata"]["name"] for one in api.store.find("configmaps", "team")}


@pytest.fixture
def store(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> CatalogueStore:
    if kind == "files":
        return FileStore(tmp_path / "catalogue")
    open_store: Open = request.getfixturevalue("open_store")
    return open_store()


def test_every_form_keeps_replaces_renames_and_removes_documents(store: CatalogueStore) -> None:
    assert store.age_s() < 60 and store.exists()
    assert store.read(".members.json") is None
    for name, content in ((".c/a", "1"), (".c/b", "2"), (".c/a", "3"), (".members.json", "{}")):
        store.write(name, content)
    assert store.read(".c/a") == b"3"
    assert {*store.names(".c")} == {".c/a", ".c/b"}
    store.rename(".c/b", ".c/a")
    assert store.names(".c") == [".c/a"] and store.read(".c/a") == b"2"
    store.remove(".c/a", ".c/unknown")
    assert store.names(".c") == [] and store.read(".c/a") is None
    assert store.read(".members.json") == b"{}"


def test_the_next_coordinator_finds_every_document_and_begins_a_larger_term(
    open_store: Open, api: ApiServer
) -> None:
    first = open_store()
    first.write(".c/a", "old")
    first.write(".c/b", "b")
    first.write(".c/a", "new")
    second = open_store()
    assert second.term > first.term
    assert second.names(".c") == [".c/b", ".c/a"]
    assert (second.read(".c/a"), second.read(".c/b")) == (b"new", b"b")
    assert len(maps(api)) == 3  # with the root; what was replaced is gone


@pytest.mark.parametrize(
    "change",
    [
        lambda store: store.write(".c/new", "late"),
        lambda store: store.write(".c/a", "late"),
        lambda store: store.remove(".c/a"),
        lambda store: store.rename(".c/a", ".c/b"),
    ],
)
def test_a_coordinator_that_wakes_late_changes_nothing(
    open_store: Open, lost: list[str], change: Callable[[SharedCatalogue], None]
) -> None:
    stale = open_store()
    stale.write(".c/a", "1")
    current = open_store()
    with pytest.raises(CatalogueLostError):
        change(stale)
    assert lost == ["lost"]
    current.write(".c/c", "2")
    with pytest.raises(CatalogueLostError):
        change(stale)
    found = open_store()
    assert {name: found.read(name) for name in found.names(".c")} == {".c/a": b"1", ".c/c": b"2"}


def test_a_catalogue_that_was_deleted_begins_again_with_a_larger_term(
    open_store: Open, objects: ElectionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes refuse the answers of terms before the last one that they saw."""
    before = [open_store(), open_store()][-1].term
    objects.remove_map("cache-catalogue")
    later_s = time.time() + 60
    monkeypatch.setattr(time, "time", lambda: later_s)
    assert open_store().term > before


def test_what_a_late_coordinator_left_behind_goes_when_the_next_term_begins(
    open_store: Open, api: ApiServer
) -> None:
    stale = open_store()
    open_store().write(".c/a", "1")
    with pytest.raises(CatalogueLostError):
        stale.write(".c/b", "late")
    assert len(maps(api)) == 3
    open_store()
    assert len(maps(api)) == 2


def test_a_process_without_the_lease_begins_no_term(
    objects: ElectionStore, open_store: Open
) -> None:
    current = open_store()
    with pytest.raises(CatalogueLostError):
        SharedCatalogue(objects, lambda: False, lambda: None)
    current.write(".c/a", "1")


def test_the_lease_is_looked_at_after_the_root_was_read(
    objects: ElectionStore, open_store: Open
) -> None:
    """Else a process that is paused in between would end a later term."""
    open_store()
    answers = [True, False]
    later: list[SharedCatalogue] = []

    def leads() -> bool:
        if answers[0]:
            later.append(open_store())  # the next holder, before the root is replaced
        return answers.pop(0)

    with pytest.raises(CatalogueLostError):
        SharedCatalogue(objects, leads, lambda: None)
    later[0].write(".c/a", "1")


@pytest.mark.parametrize("status", [0, 500, 503])
@pytest.mark.parametrize("carried_out", [False, True])
@pytest.mark.parametrize("verb", ["create", "update"])
def test_a_change_without_an_answer_happens_once(
    open_store: Open, api: ApiServer, verb: str, carried_out: bool, status: int
) -> None:
    store = open_store()
    store.write(".c/a", "1")
    api.faults.append(
        Fault(status, verb=verb, resource="configmaps", times=1, carried_out=carried_out)
    )
    store.write(".c/a", "2")
    store.write(".c/b", "3")
    found = open_store()
    assert {name: found.read(name) for name in found.names(".c")} == {".c/a": b"2", ".c/b": b"3"}


@pytest.mark.parametrize("steps_done", [0, 1])
def test_a_catalogue_that_cannot_be_reached_for_long_counts_as_lost(
    open_store: Open,
    api: ApiServer,
    lost: list[str],
    monkeypatch: pytest.MonkeyPatch,
    steps_done: int,
) -> None:
    """Another node has it soon: a load waits for that node, and does not fail."""
    monkeypatch.setattr(shared_catalogue, "_PATIENCE_S", 0.3)
    store = open_store()
    # The second step is to replace the root.
    api.faults.append(Fault(503, resource="configmaps", skip=steps_done))
    with pytest.raises(CatalogueLostError):
        store.write(".c/a", "1")
    assert lost == ["lost"]


def test_a_change_that_is_refused_leaves_the_catalogue_as_it_was(
    open_store: Open, api: ApiServer, lost: list[str]
) -> None:
    store = open_store()
    store.write(".c/a", "1")
    api.faults.append(Fault(403, verb="update", resource="configmaps", times=1))
    with pytest.raises(RefusedError, match="403"):
        store.write(".c/a", "2")
    assert store.read(".c/a") == b"1" and lost == []
    store.write(".c/a", "3")
    assert open_store().read(".c/a") == b"3"


def test_a_long_document_is_kept_in_parts_that_etcd_takes(open_store: Open, api: ApiServer) -> None:
    text = random.Random(3).randbytes(MAX_BYTES).hex() * 2
    open_store().write(".c/long", text)
    assert open_store().read(".c/long") == text.encode()
    sizes = [
        len(one.get("binaryData", {}).get("content", ""))
        for one in api.store.find("configmaps", "team")
    ]
    assert len(sizes) == 4 and max(sizes) <= 4 * MAX_BYTES / 3 + 4


def test_a_part_that_a_person_removed_is_damage_of_its_document_only(
    open_store: Open, objects: ElectionStore, api: ApiServer
) -> None:
    store = open_store()
    store.write(".c/a", "1")
    (victim,) = maps(api) - {"cache-catalogue"}
    store.write(".c/b", "2")
    objects.remove_map(victim)
    found = open_store()
    with pytest.raises(ValueError, match="its bytes have changed"):
        found.read(".c/a")
    assert found.read(".c/b") == b"2"


def test_maps_of_another_cache_in_the_namespace_stay(
    objects: ElectionStore, open_store: Open, api: ApiServer
) -> None:
    store = open_store()
    foreign = f"cache-catalogue-{store.term}-1"  # the name that it takes next
    api.store.create("configmaps", {"metadata": {"name": foreign}}, "team")
    assert [each.name for each in objects.maps()] == ["cache-catalogue"]
    store.write(".c/a", "1")
    store.write(".c/a", "2")
    assert foreign in maps(api)
    assert open_store().read(".c/a") == b"2"


def test_a_map_is_read_as_it_was_written(objects: ElectionStore) -> None:
    made = objects.write_map(StoredMap("one", b"\x00\xff", {"a": "b"}))
    assert objects.read_map("one") == made
    assert (made.content, made.notes) == (b"\x00\xff", {"a": "b"})
