"""Packed tokens, groups, windows and length buckets over a cluster: exact, elastic, resumable."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from cache_client import CacheClient, CacheIterableDataset, CacheMixture, ConfigError, DatasetSpec
from cache_client.order import audit, audit_record
from cache_client.order import order as ordering
from cache_server import LocalCluster
from tests.job_arguments import grouped

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.usefixtures("forked_workers"),
]

DOCUMENTS, LENGTH = 300, 32
LENGTHS = np.random.default_rng(0).integers(0, 60, DOCUMENTS)
TOKENS = [[row * 100 + i for i in range(length)] for row, length in enumerate(LENGTHS)]
TIMES = np.random.default_rng(1).permutation(DOCUMENTS)
USERS = [f"user{row % 7}" for row in range(DOCUMENTS)]


@pytest.fixture(scope="module")
def name(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    source: Path = tmp_path_factory.mktemp("documents") / "documents.parquet"
    table = pa.table(
        {
            "tokens": pa.array(TOKENS, pa.list_(pa.int32())),
            "mask": pa.array([[token % 2 for token in each] for each in TOKENS]),
            "flags": pa.array([[token % 2 > 0 for token in each] for each in TOKENS]),
            "chat": [
                None if row % 9 == 0 else {"it's": each, "more": {"mask": [t % 2 for t in each]}}
                for row, each in enumerate(TOKENS)
            ],
            "some": [None if row % 9 == 0 else each for row, each in enumerate(TOKENS)],
            "some_mask": [
                None if row % 9 == 0 else [token % 2 for token in each]
                for row, each in enumerate(TOKENS)
            ],
            "user": USERS,
            "maybe": [None if row % 5 == 0 else user for row, user in enumerate(USERS)],
            "t": TIMES,
            "row": np.arange(DOCUMENTS),
        }
    )
    pq.write_table(table, source, row_group_size=50)
    client = CacheClient(cluster.endpoint)
    client.load(DatasetSpec("packed-documents", source, target_shard_bytes=20_000))
    yield "packed-documents"
    client.drop("packed-documents")


def dataset(cluster: LocalCluster, name: str, **options: Any) -> CacheIterableDataset:
    return CacheIterableDataset(name, **grouped(cache=cluster.endpoint, seed=4, **options))


def steps_of(cluster: LocalCluster, name: str, ranks: int, **options: Any) -> Iterator[list[Any]]:
    """The batches of all ranks, step by step."""
    datasets = [
        dataset(cluster, name, rank=rank, world_size=ranks, **options) for rank in range(ranks)
    ]
    for each in datasets:
        each.set_epoch(1)
    return zip(*datasets, strict=True)


def stream(epoch: int) -> list[int]:
    order = ordering.EpochOrder(DOCUMENTS, shuffle=True, seed=4, epoch=epoch).row_ids(
        np.arange(DOCUMENTS)
    )
    return [token for row in order.tolist() for token in TOKENS[row]]


PACKED: dict[str, Any] = {"pack": "tokens", "sequence_length": LENGTH, "shuffle": True}


@pytest.mark.parametrize("local", [True, False])
def test_packed_batches_are_the_shuffled_stream_cut(
    cluster: LocalCluster, name: str, local: bool
) -> None:
    batches = [
        batch
        for step in steps_of(cluster, name, 3, batch_size=5, local=local, **PACKED)
        for batch in step
    ]
    tokens = torch.cat([batch["tokens"] for batch in batches])
    expected = stream(1)
    assert tokens.dtype == torch.int64
    assert tokens.reshape(-1).tolist()[: len(expected)] == expected
    assert len(tokens) == -(-len(expected) // LENGTH)
    assert list(batches[0]) == ["tokens", "position_ids", "labels"]


def test_fields_of_structs_are_packed_with_their_mask(cluster: LocalCluster, name: str) -> None:
    options = {**PACKED, "batch_size": 5, "pack_outputs": ["labels", "seq_idx"]}
    fields = {"pack": "chat.it's", "label_mask": "chat.more.mask"}
    columns = {"pack": "some", "label_mask": "some_mask"}
    of_fields = list(dataset(cluster, name, **{**options, **fields}))
    of_columns = list(dataset(cluster, name, **{**options, **columns}))
    assert len(of_fields) == len(of_columns) > 1
    for batch, expected in zip(of_fields, of_columns, strict=True):
        assert list(batch) == ["chat.it's", "labels", "seq_idx"]
        for ours, theirs in zip(batch.values(), expected.values(), strict=True):
            assert torch.equal(ours, theirs)
    with pytest.raises(ConfigError, match=r"pack: column 'chat' is struct<.*: name a field of it"):
        dataset(cluster, name, **{**options, "pack": "chat"})


def test_another_world_size_continues_a_packed_epoch(cluster: LocalCluster, name: str) -> None:
    taken: list[int] = []
    ranks = [
        dataset(cluster, name, rank=rank, world_size=2, batch_size=4, audit="states", **PACKED)
        for rank in range(2)
    ]
    loaders = [iter(each.loader(num_workers=2, multiprocessing_context="spawn")) for each in ranks]
    for _ in range(5):
        for loader in loaders:
            taken += next(loader)["tokens"].reshape(-1).tolist()
    state = ranks[0].state_dict(steps=5)
    del loaders
    others = [
        dataset(cluster, name, rank=rank, world_size=3, batch_size=3, **PACKED) for rank in range(3)
    ]
    for each in others:
        each.load_state_dict(state)
    for step in zip(*others, strict=True):
        for batch in step:
            taken += batch["tokens"].reshape(-1).tolist()
    expected = stream(0)
    assert taken[: len(expected)] == expected
    assert ranks[0].slots.num_padding(0) == len(taken) - len(expected)  # type: ignore[attr-defined]
    whole = dataset(cluster, name, batch_size=4, cut_documents=False, **PACKED)
    with pytest.raises(Exception, match="fingerprint"):
        whole.load_state_dict(state)


@pytest.mark.parametrize("long", ["drop", "truncate"])
def test_best_fit_gives_each_document_once_with_its_end_also_after_a_resume(
    cluster: LocalCluster, name: str, long: str
) -> None:
    options = {**PACKED, "cut_documents": False, "long_documents": long, "best_fit": True}
    options |= {"end_token": 99_999, "pad_token": -1}
    ranks = [
        dataset(cluster, name, rank=rank, world_size=2, batch_size=4, **options) for rank in (0, 1)
    ]
    taken: list[int] = []
    for steps, step in enumerate(zip(*ranks, strict=True), 1):
        taken += [token for batch in step for token in batch["tokens"].reshape(-1).tolist()]
        if steps == 3:
            break
    others = [
        dataset(cluster, name, rank=rank, world_size=3, batch_size=3, **options)
        for rank in range(3)
    ]
    for each in others:
        each.load_state_dict(ranks[0].state_dict())
    for step in zip(*others, strict=True):
        taken += [token for batch in step for token in batch["tokens"].reshape(-1).tolist()]
    kept = [[*each, 99_999] for each in TOKENS if each and (long != "drop" or len(each) < LENGTH)]
    expected = sorted(token for each in kept for token in each[:LENGTH])
    given = sorted(token for token in taken if token != -1)
    slots: Any = ranks[0].slots
    repeated = len(taken) // LENGTH - slots.num_slots(0)  # for equal steps
    assert repeated < 9
    assert (given == expected) == (repeated == 0)
    assert set(given) == set(expected)
    assert slots.num_tokens(0) == len(expected)
    assert slots.num_padding(0) < 0.05 * slots.num_slots(0) * LENGTH


def test_whole_documents_stay_together_and_labels_follow_their_mask(
    cluster: LocalCluster, name: str
) -> None:
    options = {**PACKED, "sequence_length": 64, "cut_documents": False, "label_mask": "mask"}
    found: list[list[int]] = []
    reader = dataset(
        cluster, name, batch_size=4, pack_outputs=["document_ids", "labels", "cu_seqlens"],
        pad_mask="real", **options,
    )  # fmt: skip
    assert len(reader) * 4 == -(-reader.num_samples // 4) * 4
    for batch in reader.loader(num_workers=1):
        tokens, ids = batch["tokens"].reshape(-1), batch["document_ids"].reshape(-1)
        labels = batch["labels"].reshape(-1)
        documents = zip(
            torch.tensor_split(tokens, batch["cu_seqlens"][1:-1].tolist()),
            torch.tensor_split(ids, batch["cu_seqlens"][1:-1].tolist()),
            torch.tensor_split(labels, batch["cu_seqlens"][1:-1].tolist()),
            strict=True,
        )
        real = batch["real"].repeat_interleave(64)
        at = 0
        for document, numbers, own_labels in documents:
            assert len(set(numbers.tolist())) == 1
            if numbers[0] >= 0 and real[at]:
                found.append(document.tolist())
                wanted = [token if token % 2 else -100 for token in found[-1]]
                assert own_labels.tolist() == [-100, *wanted[1:]]
            elif numbers[0] < 0:
                assert set(own_labels.tolist()) == {-100}
            at += len(document)
    assert sorted(found) == sorted(document for document in TOKENS if document)


def test_groups_are_in_the_order_of_their_times(cluster: LocalCluster, name: str) -> None:
    reader = dataset(
        cluster, name, batch_size=3, columns=["row", "tokens"], group_by="user", order_by="t",
        shuffle=True,
    )  # fmt: skip
    assert reader.num_samples == 7
    groups = {}
    for batch in reader.loader(num_workers=2, multiprocessing_context="spawn"):
        for rows, length in zip(batch["row"], batch["lengths"].tolist(), strict=True):
            groups[USERS[rows[0]]] = rows.tolist()
            assert len(rows) == length
    assert groups == {
        user: sorted(
            (row for row in range(DOCUMENTS) if USERS[row] == user), key=lambda row: TIMES[row]
        )
        for user in set(USERS)
    }


def test_windows_are_elastic(cluster: LocalCluster, name: str) -> None:
    options: dict[str, Any] = {
        "columns": ["row"], "group_by": "user", "order_by": "t", "window": (8, 4), "shuffle": True
    }  # fmt: skip
    first = dataset(cluster, name, batch_size=5, **options)
    batches = iter(first)
    taken = [next(batches)["row"] for _ in range(3)]
    rest = steps_of(cluster, name, 2, batch_size=2, **options)
    assert next(rest)[0]["row"].shape == (2, 8)
    second = dataset(cluster, name, batch_size=2, **options)
    second.load_state_dict(first.state_dict())
    taken += [batch["row"] for batch in second]
    expected = []
    for user in dict.fromkeys(USERS):
        rows = [row for row in range(DOCUMENTS) if USERS[row] == user]
        rows.sort(key=lambda row: TIMES[row])
        expected += [rows[at : at + 8] for at in range(0, len(rows) - 7, 4)]
    assert sorted(torch.cat(taken).tolist()) == sorted(expected)


def test_length_buckets_read_each_row_once_with_little_padding(
    cluster: LocalCluster, name: str
) -> None:
    options: dict[str, Any] = {
        "length_buckets": "array_length(tokens)", "bucket_rows": 32,
        "pad_lists": {"tokens": -1, "flags": 0},
        "columns": ["row", "tokens", "flags"], "shuffle": True,
    }  # fmt: skip
    rows: list[int] = []
    padding = places = 0
    for step in steps_of(cluster, name, 2, batch_size=8, **options):
        for batch in step:
            rows += batch["row"].tolist()
            assert batch["flags"].dtype == torch.bool
            assert batch["flags"].equal(batch["tokens"] % 2 * batch["tokens_mask"] > 0)
            for row, tokens, mask in zip(
                batch["row"], batch["tokens"], batch["tokens_mask"], strict=True
            ):
                assert tokens[mask].tolist() == TOKENS[row]
                padding, places = padding + int((~mask).sum()), places + len(mask)
    assert sorted(rows) == list(range(DOCUMENTS))
    assert padding < places / 8


def test_the_example_resumes_with_the_same_losses(
    cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(__file__).resolve().parents[2] / "examples" / "train_packed.py"
    spec = importlib.util.spec_from_file_location("train_packed", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    client = CacheClient(cluster.endpoint)
    client.load(DatasetSpec("pages", example.write_documents(tmp_path)))
    example.compare(cluster.endpoint, "pages", 8)
    client.drop("pages")
    assert "all 8 losses are the same" in capsys.readouterr().out


def test_the_snippets_of_the_page_run_as_they_stand(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {
        "documents": {"tokens": TOKENS, "answer": [[token % 2 for token in t] for t in TOKENS]},
        "events": {"session": USERS, "t": TIMES, "value": np.arange(DOCUMENTS, dtype=np.float32)},
    }
    client = CacheClient(cluster.endpoint)
    monkeypatch.setenv("CACHE_ENDPOINT", cluster.endpoint)
    shapes = []
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
        client.load(DatasetSpec(name, tmp_path / f"{name}.parquet"))
    page = Path(__file__).resolve().parents[2] / "docs" / "sequences.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    for block in blocks:
        exec(compile(block, "sequences.md", "exec"), {
            "train_step": lambda values, *_: shapes.append(tuple(values.shape))
        })  # fmt: skip
    for name in tables:
        client.drop(name)
    assert (len(blocks), shapes[0], shapes[-1][0]) == (5, (5, 2048), DOCUMENTS % 8)
    assert (16, 8) in shapes


def test_an_audit_knows_the_order_of_packed_sequences(cluster: LocalCluster, name: str) -> None:
    states = []
    for rank in range(2):
        each = dataset(
            cluster, name, rank=rank, world_size=2, batch_size=4, audit="states", **PACKED
        )
        assert len(list(each)) == len(each)
        states.append(each.state_dict())
    (found,) = audit.audit(
        [
            audit_record.Evidence(audit_record.AuditRecord.from_dict(state["audit"]))
            for state in states
        ]
    )
    assert (found.outcome, found.rows) == ("proven", found.num_rows), found


def test_sequences_are_of_the_rows_of_a_selection(cluster: LocalCluster, name: str) -> None:
    packed = dataset(
        cluster, name, batch_size=4, where="\"user\" = 'user3'", pack="tokens",
        sequence_length=LENGTH, cut_documents=False,
    )  # fmt: skip
    found = {token // 100 for batch in packed for token in batch["tokens"].unique().tolist()}
    assert found - {0} == {row for row in range(3, DOCUMENTS, 7) if TOKENS[row]}
    groups = dataset(
        cluster, name, batch_size=4, columns=["row"], except_fold=(0, 2), group_by="user"
    )
    rows = [row for batch in groups for group in batch["row"] for row in group.tolist()]
    plain = dataset(cluster, name, batch_size=4, columns=["row"], except_fold=(0, 2))
    assert len(plain.opened.shards.starts) > 1
    for by, options in (
        ("maybe", {}),
        (["maybe", "user"], {"where": "row >= 7"}),
        (["maybe"], {"subset": range(DOCUMENTS)[::-1]}),
    ):
        (batch,) = dataset(cluster, name, batch_size=16, columns=["row"], group_by=by, **options)
        chosen = options.get("subset", range(7 if options else 0, DOCUMENTS))
        expected: dict[tuple[str | None, ...], list[int]] = {}
        for row in chosen:
            maybe = None if row % 5 == 0 else USERS[row]
            key = (maybe, USERS[row]) if len(by) == 2 else (maybe,)
            expected.setdefault(key, []).append(row)
        assert [group.tolist() for group in batch["row"]] == list(expected.values())
    assert sorted(rows) == [row for batch in plain for row in batch["row"].tolist()]
    assert len({each.fingerprint for each in (packed, groups, plain)}) == 3


def test_a_mixture_reads_packed_tables_whose_epochs_are_equally_long(
    cluster: LocalCluster, name: str
) -> None:
    packed = dataset(cluster, name, batch_size=4, **PACKED)
    mixture = CacheMixture({"a": (packed, 1), "b": (packed, 1)}, stop=3, source_column="source")
    batches = list(mixture)
    assert all(batch["source"] == ["a", "b"] * 2 for batch in batches)
    assert list(batches[0]) == ["tokens", "position_ids", "labels", "source"]
    places = [torch.cat([batch["tokens"][first::2] for batch in batches]) for first in (0, 1)]
    documents = [set(tokens.reshape(-1).tolist()) for tokens in places]
    assert documents[0] != documents[1], "each source has an order of its own"
    assert all(tokens.shape == (6, LENGTH) for tokens in places)
    with pytest.raises(ConfigError, match="source_column adds a column 'labels', and batches"):
        CacheMixture({"a": (packed, 1)}, source_column="labels")
    with pytest.raises(ConfigError, match="pad_mask adds a column 'labels', and batches have one"):
        dataset(cluster, name, batch_size=4, pad_mask="labels", **PACKED)
    whole = dataset(cluster, name, batch_size=4, cut_documents=False, **PACKED)
    with pytest.raises(ConfigError, match="'a' may have another number of samples in each epoch"):
        CacheMixture({"a": (whole, 1)})


def test_every_bad_option_is_refused_at_once(cluster: LocalCluster, name: str) -> None:
    with pytest.raises(ConfigError) as error:
        dataset(cluster, name, batch_size=1, pack="tokens", window=3)
    for problem in ("pack needs sequence_length", "window needs group_by, got 3"):
        assert problem in str(error.value)
    with pytest.raises(TypeError, match="windows: did you mean window"):
        dataset(cluster, name, batch_size=1, windows=3)
    with pytest.raises(ConfigError, match=r"column 'user' is string, not a list of integers"):
        dataset(cluster, name, batch_size=1, pack="user", sequence_length=4)
    with pytest.raises(ConfigError, match=r"pack reads columns \['tokens'\] only"):
        dataset(cluster, name, batch_size=1, columns=["t"], pack="tokens", sequence_length=4)
