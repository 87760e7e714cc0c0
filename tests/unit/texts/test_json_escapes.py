from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from cache_server.pinned import PinnedTable, Split
from cache_server.sql.loader import LocalFile, read_split
from cache_server.texts import json_escapes
from cache_server.texts.json_escapes import check_escapes
from protos.errors import LoadError
from tests.query_source import whole

RARE = "\U00020bb7"  # 𠮷, escaped as \ud842\udfb7


def refusal(path: Path, part: int = 0, parts: int = 1) -> str:
    split = Split(whole(path).file, part, parts, None, 0)
    with pytest.raises(LoadError) as caught:
        check_escapes(path, split)
    return str(caught.value)


def lets_through(path: Path, part: int = 0, parts: int = 1) -> bool:
    check_escapes(path, Split(whole(path).file, part, parts, None, 0))
    return True


def test_a_file_with_such_an_escape_is_not_read_and_named_with_the_place_and_what_to_do(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"text": "plain"}) + "\n" + json.dumps({"text": RARE}))
    table = PinnedTable("source", "json", pa.schema([("text", pa.string())]))

    with pytest.raises(LoadError) as caught:
        list(read_split(LocalFile(path, "json", whole(path)), "SELECT * FROM source", table))

    assert str(caught.value) == (
        f"cannot load {path}: byte 28 begins the escape \\ud842, which would be read as another "
        "character; write such characters as UTF-8 (in Python: json.dumps(..., ensure_ascii=False))"
    )


@pytest.mark.parametrize("code", range(0x10000, 0x110000, 0x4000))
def test_what_is_refused_is_what_would_be_read_as_another_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"text": chr(code)}))
    table = PinnedTable("source", "json", pa.schema([("text", pa.string())]))
    file = LocalFile(path, "json", whole(path))
    monkeypatch.setattr("cache_server.sql.loader.check_escapes", lambda path, split: None)

    (batch,) = read_split(file, "SELECT * FROM source", table)

    if batch.to_pylist() == [{"text": chr(code)}]:
        assert code // 0x10000 % 2 and lets_through(path)
    else:
        assert "begins the escape" in refusal(path)


@pytest.mark.parametrize(
    "text",
    [
        *(r"\ud840\udc00", r"\uD840\uDC00", r"\udbff\udfff", r"\uDBFF\uDFFF", r"\uD9cF\uDC00"),
        *(r"\uda40\udc00", r"\uDAC0\uDC00", r"\\\ud842\udfb7", r"\\\\\ud842\udfb7"),
        *(r"\"\ud842\udfb7", r"\ud83d\ude00\ud842\udfb7", r"\ud8fa\udc00", r"\uD84F\uDC00"),
    ],
)
def test_an_escape_is_found_however_it_is_written(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(f'{{"{text}": 1}}')

    assert "begins the escape" in refusal(path)


@pytest.mark.parametrize(
    "text",
    [
        *("", RARE, r"\ud83d\ude00", r"\uD83F\uDFFF", r"\u4e2d", r"\udc00", r"\ud7ff", r"\ue000"),
        *(r"\\ud842", r"\\\\ud842\\udfb7", r"ud842", r"\n\\ud842", r"\\", r"\u005cud842", r"\\u"),
        *(r"\U00020bb7", r"\ud800", r"\ud83f", r"\ud880\udc00", r"\uDBBF\uDFFF"),
    ],
)
def test_what_is_no_such_escape_is_let_through(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(f'{{"text": "{text}"}}')

    assert lets_through(path)


@pytest.mark.parametrize("block_bytes", [1, 7, 64])
def test_blocks_hide_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(json_escapes, "_BLOCK_BYTES", block_bytes)
    path = tmp_path / "a.json"
    for before in range(70):
        path.write_text(
            '{"a": "\\\\ud842"}\n' * 3 + f'{{"text": "{"x" * before}\\ud842\\udfb7"}}\n'
        )

        assert f"byte {3 * 17 + 10 + before} begins" in refusal(path)


def test_each_split_looks_through_the_lines_that_begin_in_it(tmp_path: Path) -> None:
    lines = [json.dumps({"row": i, "text": RARE if i == 6 else "x" * i}) + "\n" for i in range(12)]
    path = tmp_path / "a.json"
    path.write_text("".join(lines))
    begins = sum(map(len, lines[:6]))
    for parts in range(1, 40):
        owner = begins // -(-path.stat().st_size // parts)
        for part in range(parts):
            if part == owner:
                assert f"{begins + 20} begins the escape" in refusal(path, part, parts)
            else:
                assert lets_through(path, part, parts)
