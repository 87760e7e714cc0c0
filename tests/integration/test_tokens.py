"""Tokens and masks that nodes compute, against `datasets`, Transformers and `tokenizers`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from cache_client import CacheClient, CacheIterableDataset, Connection, DatasetSpec, View
from cache_protocol.errors import LoadError, RequestError
from cache_server import LocalCluster
from tests.tokenizers_here import BOS, EOS, KINDS, TEMPLATE, chats, texts, trained

TEXTS = [*texts(9_999), None]
CHATS = chats(2_000)
CALL = pa.struct([("name", pa.string()), ("arguments", pa.string())])
MESSAGE = pa.struct(
    [
        *((name, pa.string()) for name in ("role", "content", "reasoning")),
        ("tool_calls", pa.list_(CALL)),
    ]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for kind in KINDS:
        trained(kind, folder / f"{kind}.json", TEXTS[:200])
    (folder / "template.jinja").write_text(TEMPLATE)
    pq.write_table(pa.table({"text": TEXTS}), folder / "texts.parquet", row_group_size=4000)
    table = {
        "messages": pa.array([messages for messages, _ in CHATS], pa.list_(MESSAGE)),
        "as_json": [json.dumps(messages) for messages, _ in CHATS],
        "tools": [tools and json.dumps(tools) for _, tools in CHATS],
    }
    pq.write_table(pa.table(table), folder / "chats.parquet")
    return folder


@pytest.fixture(scope="module")
def client() -> Iterator[CacheClient]:
    with LocalCluster(nodes=1) as cluster:
        yield CacheClient(cluster.endpoint)


def loaded(client: CacheClient, source: Path, **columns: str) -> pa.Table:
    """The rows of a load of some expressions."""
    name = f"of-{abs(hash(tuple(columns.items())))}"
    results = ", ".join(f"{sql} AS {column}" for column, sql in columns.items())
    client.load(DatasetSpec(name, source, sql=f"SELECT {results} FROM source"))
    return pa.Table.from_batches(client.read(name))


@pytest.mark.frameworks
def test_tokens_are_those_of_a_map_of_datasets_over_a_fast_tokenizer(
    client: CacheClient, folder: Path
) -> None:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast

    columns = {kind: f"tokenize(text, '{folder}/{kind}.json')" for kind in KINDS}
    table = loaded(client, folder / "texts.parquet", **columns)
    rows = Dataset.from_dict({"text": TEXTS[:-1]})
    for kind in KINDS:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / f"{kind}.json"))
        mapped = rows.map(lambda batch, of=tokenizer: of(batch["text"]), batched=True)
        assert table[kind].to_pylist() == [*mapped["input_ids"], None]
        assert table[kind].type == pa.list_(pa.uint16())


@pytest.mark.frameworks
@pytest.mark.parametrize("kind", KINDS)
def test_chat_tokens_and_masks_are_those_of_transformers(
    client: CacheClient, folder: Path, kind: str
) -> None:
    from transformers import PreTrainedTokenizerFast

    files = f"'{folder}/{kind}.json', '{folder}/template.jinja'"
    given = f"tools => tools, bos_token => '{BOS}', eos_token => '{EOS}'"
    table = loaded(
        client,
        folder / "chats.parquet",
        chat=f"chat_tokens(messages, {files}, {given})",
        same=f"chat_tokens(as_json, {files}, {given})",
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / f"{kind}.json"),
        chat_template=TEMPLATE,
        bos_token=BOS,
        eos_token=EOS,
    )
    expected = {"tokens": [], "loss_mask": []}  # type: dict[str, list[Any]]
    for messages, tools in CHATS:
        found = tokenizer.apply_chat_template(
            messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
        )
        expected["tokens"].append(found["input_ids"])
        expected["loss_mask"].append(found["assistant_masks"])
    for column in ("chat", "same"):
        chats = table[column].combine_chunks()
        for name, values in expected.items():
            assert chats.field(name).to_pylist() == values
    assert any(map(any, expected["loss_mask"]))
    assert not all(map(all, expected["loss_mask"]))


def test_options_cut_leave_out_special_tokens_count_and_decode(
    client: CacheClient, folder: Path
) -> None:
    file = f"'{folder}/bpe.json'"
    table = loaded(
        client,
        folder / "texts.parquet",
        cut=f"tokenize(text, {file}, max_length => 5)",
        plain=f"tokenize(text, {file}, special_tokens => false)",
        number=f"num_tokens(text, {file}, special_tokens => false)",
        decoded=f"decode_tokens(tokenize(text, {file}, false), {file})",
    )
    tokenizer = Tokenizer.from_file(str(folder / "bpe.json"))
    plain = [each.ids for each in tokenizer.encode_batch(TEXTS[:-1], add_special_tokens=False)]
    assert table["plain"].to_pylist() == [*plain, None]
    assert table["number"].to_pylist() == [*map(len, plain), None]
    assert table["decoded"].to_pylist() == TEXTS
    assert max(map(len, table["cut"].to_pylist()[:-1])) == 5


def test_a_view_counts_and_reads_tokens_by_the_tokenizer_that_the_load_has_pinned(
    client: CacheClient, folder: Path, tmp_path: Path
) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes((folder / "bpe.json").read_bytes())
    sql = f"SELECT text, tokenize(text, '{tokenizer}') AS tokens FROM source WHERE text IS NOT NULL"
    client.load(DatasetSpec("pinned", folder / "texts.parquet", sql=sql))
    tokenizer.write_text("{}")  # the nodes that have read it do not read it again

    def rows(where: str) -> list[str]:
        cache, view = Connection(client.endpoint), View(where=where)
        dataset = CacheIterableDataset("pinned", batch_size=10_000, cache=cache, view=view)
        return [text for batch in dataset for text in batch["text"]]

    of_three = [text for text in TEXTS if text and len(text.split()) == 3 and text.isascii()]
    number = f"num_tokens(text, '{tokenizer}')"
    assert len(rows(f"{number} = array_length(tokens)")) == len(TEXTS) - 1
    same = f"decode_tokens(tokens, '{tokenizer}', skip_special_tokens => true) = text"
    assert {*of_three} <= {*rows(same)}
    with pytest.raises(RequestError, match=rf"has pinned, '{tokenizer}'; got '/other'"):
        rows("num_tokens(text, '/other') = 1")


def test_tokens_take_four_bytes_where_the_vocabulary_needs_them(
    client: CacheClient, folder: Path, tmp_path: Path
) -> None:
    words = {f"w{number}": number for number in range(1 << 16)}
    model = {"type": "WordLevel", "unk_token": "w0", "vocab": {**words, "text": 1 << 16}}
    split = {"type": "WhitespaceSplit"}
    (tmp_path / "large.json").write_text(json.dumps({"model": model, "pre_tokenizer": split}))
    pq.write_table(pa.table({"text": ["w5 text", ""]}), tmp_path / "rows.parquet")
    table = loaded(client, tmp_path / "rows.parquet", t=f"tokenize(text, '{tmp_path}/large.json')")
    assert table["t"].type == pa.list_(pa.uint32())
    assert table["t"].to_pylist() == [[5, 1 << 16], []]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages }}", "marks no tokens to learn"),
        ("{% generation %}", "is no chat template"),
    ],
)
def test_a_template_that_cannot_make_a_mask_is_refused(
    client: CacheClient, folder: Path, tmp_path: Path, template: str, reason: str
) -> None:
    (tmp_path / "template.jinja").write_text(template)
    files = f"'{folder}/bpe.json', '{tmp_path}/template.jinja'"
    with pytest.raises(RequestError, match=reason):
        loaded(client, folder / "chats.parquet", chat=f"chat_tokens(messages, {files})")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% for a in range(99999999) %}{% endfor %}", "OverflowError"),
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ strftime_now('%d') }}", "'strftime_now' is undefined"),
        ("{{ messages[0].no.such }}", "has no attribute 'no'"),
    ],
)
def test_a_template_stays_in_its_sandbox_and_names_the_chat_where_it_fails(
    client: CacheClient, folder: Path, tmp_path: Path, body: str, reason: str
) -> None:
    template = f"{body}{{% generation %}}{{% endgeneration %}}"
    (tmp_path / "template.jinja").write_text(template)
    files = f"'{folder}/bpe.json', '{tmp_path}/template.jinja'"
    with pytest.raises(LoadError, match=f"function chat_tokens raised .*{reason}.*row 0 of"):
        loaded(client, folder / "chats.parquet", chat=f"chat_tokens(messages, {files})")
