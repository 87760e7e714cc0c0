"""Damages files of JSON and CSV at random and loads them: ``make soak-texts``.

A damaged file is read, or refused by an error that names it, within a time limit. The files are
read in another process: if it ends, its last case is the defect, and its file is kept.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import LoadError, RequestError
from cache_server.plan.pinned_version import plan_version
from cache_server.sql.loader import read_split
from cache_server.sql.local_tables import LocalFile

CASE_S = 20  # the longest time of one case
_ROWS = [
    {"a": i, "f": i / 7, "s": f'é "{i}" \\ \n', "t": {"x": i, "l": [1.5, None]}, "b": i % 2 == 0}
    for i in range(40)
]
_LINES = {
    "json": "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in _ROWS),
    "csv": "a,f,s,at\n"
    + "".join(f'{i:03d},{i / 7},"é ""{i}"", \\\\ x\n",2024-01-02\n' for i in range(40)),
}
_PIECES = (
    *(b"null", b"}null", b"NaN", b"-NaN", b"Inf", b"1e999", b"1e-999999999", b'"\\ud83d"', b"\xff"),
    *(
        b"\x00",
        b"\xef\xbb\xbf",
        b"\r",
        b"\n",
        b"\n\n",
        b'"',
        b'""',
        b"\\",
        b'\\"',
        b",",
        b"{}",
        b"[]",
    ),
    *(
        b"[" * 60_000,
        b'{"x":' * 60_000,
        b"9" * 5000,
        b'"' * 999,
        b"\xed\xa0\x80",
        b"{" * 600,
        b"PAR1",
    ),
)


def damaged(data: bytes, chance: random.Random) -> bytes:
    """The same bytes with one to four changes."""
    for _ in range(chance.randint(1, 4)):
        place, length = chance.randrange(len(data) + 1), chance.choice([1, 1, 2, 9, 400])
        before, piece, after = data[:place], data[place : place + length], data[place + length :]
        match chance.randrange(7):
            case 0:
                data = before + chance.randbytes(len(piece)) + after
            case 1:
                data = before + after
            case 2:
                data = before + piece * chance.choice([2, 3, 300]) + after
            case 3:
                data = before
            case 4:
                lines = data.split(b"\n")
                chance.shuffle(lines)
                data = b"\n".join(lines)
            case _:
                data = before + chance.choice(_PIECES) + piece + after
    return data


def read_case(folder: Path, seed: int) -> str:
    """Loads a damaged file as a node does.

    Returns:
        the refusal, or nothing.

    Raises:
        AssertionError: the refusal does not name the file.
    """
    chance = random.Random(seed)
    format = chance.choice(["json", "csv"])
    path = folder / f"case.{format}"
    path.write_bytes(damaged(_LINES[format].encode(), chance))
    escape = "\\" if format == "csv" and chance.random() < 0.4 else None
    names = ["a"] if chance.random() < 0.5 else ["a", "f", "s"]
    types = {"a": "string"} if chance.random() < 0.3 else None
    size = chance.choice(["64MiB", "1KiB"])
    try:
        spec = DatasetSpec(
            "t", path, columns=names, escape=escape, types=types, target_shard_bytes=size
        )
        plan = plan_version(spec).version
        for split in [split for shard in plan.shards or () for split in shard.splits]:
            for batch in read_split(LocalFile(path, format, split), plan.sql, plan.tables[0]):
                batch.validate(full=True)
    except LoadError as error:
        assert str(path) in str(error), f"case {seed}: {error}"
        return str(error)
    except RequestError as error:  # the damage took a column that the query or the types name
        assert "'a'" in str(error) or "SELECT" in str(error), f"case {seed}: {error}"
        return str(error)
    return ""


def _run(folder: Path, first: int, stop: int) -> None:
    refused = 0
    for seed in range(first, stop):
        (folder / "seed").write_text(str(seed))
        signal.alarm(CASE_S)  # ends the process
        refused += bool(read_case(folder, seed))
    signal.alarm(0)
    print(f"{stop - first:,} damaged files: {refused:,} refused, the others read")


def main(arguments: list[str] | None = None) -> None:
    """Runs the cases; exits with 1 if the process that reads them ends."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--cases", type=int, default=20_000, help="how many")
    parser.add_argument("--here", type=Path, help="read them in this process, in this folder")
    given = parser.parse_args(arguments)
    if given.here is not None:
        _run(given.here, given.seed, given.seed + given.cases)
        return
    folder = Path(tempfile.mkdtemp(prefix="text-fuzz-"))
    command = [sys.executable, "-m", "benchmarks.trials.text_fuzz", "--here", str(folder)]
    command += ["--seed", str(given.seed), "--cases", str(given.cases)]
    if (done := subprocess.run(command)).returncode:
        seed = (folder / "seed").read_text()
        sys.exit(f"case {seed} ended the process with {done.returncode}; its file is in {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
