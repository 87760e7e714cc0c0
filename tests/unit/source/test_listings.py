"""Which tables files belong to, by names alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cache_server.source import listings

_PARTS = st.sampled_from(["a", "b", "data", "day=1", "h=2", "metadata"])
_DIRECTORIES = st.lists(_PARTS, max_size=6).map(lambda parts: "".join(f"{p}/" for p in parts))


@given(_DIRECTORIES, st.sampled_from(["", "data/", "day=1/", "day=1/h=2/", "data/day=1/h=2/"]))
def test_the_root_of_a_table_is_among_the_likely_ones_of_what_lies_in_it(
    root: str, inside: str
) -> None:
    likely = listings.likely_roots_above(root + inside)
    names = root.rstrip("/").rpartition("/")[2]
    if inside and not (inside.startswith("day") and "=" in names):
        assert root in likely
    assert all((root + inside).startswith(found) for found in likely)
    assert len(likely) == len(set(likely))


def test_where_nothing_hints_at_a_table_nowhere_is_looked() -> None:
    assert listings.likely_roots_above("") == []
    assert listings.likely_roots_above("lake/houses/2024/") == []


@given(_DIRECTORIES, _DIRECTORIES)
def test_a_table_is_told_by_its_log_and_has_the_files_below(above: str, below: str) -> None:
    root = f"/{above}t"
    told = listings.root_told_by(f"{root}/_delta_log/{0:020}.json")
    assert told == (root, "delta")
    roots = dict([told])
    assert listings.first_root([f"{root}/{below}x.parquet"], roots) == root
    assert listings.first_root([f"{root}x/{below}x.parquet"], roots) is None
    assert listings.first_root([f"{root}/_delta_log/{below}x.json"], roots) is None


def test_other_metadata_than_icebergs_makes_no_table() -> None:
    for name in ("metadata/schema.json", "metadata/a.metadata.json", "00001-a.metadata.json"):
        assert listings.root_told_by(name) is None
    assert listings.root_told_by("metadata/v1.metadata.json") == ("", "iceberg")
