"""What an error must not be: too long, its cause behind a list, advice of another interface.

`watched` notes each error of the project that this process makes, also those that arrive over the
wire; `note_output` those that its programs print. `tests/conftest.py` runs every test inside it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import PurePath

import pytest

from cache_protocol import errors
from cache_protocol.errors import CacheError, ConfigError

LONGEST = 600  # characters
_LATEST = 120  # character at which the cause begins, without quoted values and paths
_MOST_COMPARED = 30  # characters of a cause: what follows may be shortened
_ROOT = PurePath(__file__).parent.parent
_MOST_FRAMES = 60
# Places of this project whose callers typed a command line, and those that write rows.
_PROGRAMS = ("cache_client/cli/", "cache_client/__main__", "cache_server/", "runtimes/")
_WRITERS = ("cache_client/writing/", "cache_client/control/commits")

_MAIN = {"cachectl": "cache_client/__main__.py", "cache-server": "cache_server/__main__.py"}
_PRINTED = re.compile(r"^(cachectl|cache-server): (\w+): (.*)$", re.MULTILINE)
_watching: list[list[str]] = []

_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
_PROGRAM = re.compile(r"\b(?:cachectl|cache-server|python -m|docker|torchrun|operator|node'?s?)\b")
_PYTHON = re.compile(  # calls and arguments that no command and no spec has
    r"\b(?:View|Join|DatasetSpec|Cache[A-Z]\w+)\(|(?<!\w)[a-z_]+=(?:True|False|None)\b"
    r"|\b(?:timeout_s|num_nodes|world_size|skip_steps|batch_format|ready_deadline_s)\b"
)
_QUERY = re.compile(r"\b(?:in|by|into) (?:the |its |your )?sql\b|\bCOALESCE\b", re.IGNORECASE)
_LIST_FIRST = re.compile(
    r"(?:cannot (?:read|load|open|list)|failed|error)\b[^:]* and [\d,]+ more\b[^:]*: ",
    re.IGNORECASE,
)
_NAMED = re.compile(r"""'[^']*(?:'|\.\.\.)|"[^"]*(?:"|\.\.\.)|\S*/\S*""")
_CAUSELESS = re.compile(r"(?:failed|error|exception|traceback)\b[^:]{0,20}:", re.IGNORECASE)


def problems(error: CacheError, places: Iterable[str] = (), cause: str = "") -> list[str]:
    """What is wrong with an error; see `problems_of`."""
    return problems_of(str(error), places, cause, are_many=isinstance(error, ConfigError))


def problems_of(
    text: str, places: Iterable[str] = (), cause: str = "", *, are_many: bool = False
) -> list[str]:
    """What is wrong with the message of an error.

    Args:
        are_many: bad settings, which are quoted all at once.
        cause: text of the error of a library that was handled when it was made.
        places: files of the project that were running when it was made, as `cache_client/a.py`.
    """
    places = list(places)
    parts = text.split("; ") if are_many else [text]
    found = []
    if max(map(len, parts)) > LONGEST:
        found.append(f"is longer than {LONGEST} characters")
    if _LIST_FIRST.match(text):
        found.append("lists places before the cause")
    if _CAUSELESS.match(text):
        found.append("begins with a word that is no cause")
    begin = text.find(cause[:_MOST_COMPARED])
    if cause and begin > _LATEST and len(_NAMED.sub("", text[:begin])) > _LATEST:
        found.append(f"has its cause behind {_LATEST} other characters")
    is_program = any(place.startswith(_PROGRAMS) for place in places)
    advice = _NAMED.sub("", text)  # a quoted value is the caller's
    if not is_program and (flag := _FLAG.search(advice)) and not _PROGRAM.search(text):
        found.append(f"names {flag[0]}, of a command line, to who calls Python")
    is_command = any(place.startswith(_PROGRAMS[:2]) for place in places)
    if is_command and (argument := _PYTHON.search(text)):
        found.append(f"names {argument[0]}, of Python, to who typed a command")
    if any(place.startswith(_WRITERS) for place in places) and (query := _QUERY.search(text)):
        found.append(f"advises {query[0]!r} for a write, which has no query")
    return found


@contextmanager
def watched() -> Iterator[list[str]]:
    """Notes each bad error that is made in this process meanwhile, with what is wrong with it."""
    bad: list[str] = []
    _watching.append(bad)

    def note(error: CacheError, *args: object) -> None:
        Exception.__init__(error, *args)
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            return  # a DataLoader raises the error of its worker again, with its traceback
        found = problems(error, _places(), str(sys.exc_info()[1] or ""))
        bad.extend(f"{type(error).__name__} {problem}: {error}" for problem in found)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CacheError, "__init__", note)
            yield bad
    finally:
        _watching.pop()


def note_output(output: str | bytes | None) -> None:
    """Notes the bad errors that a program of the project has printed."""
    for program, name, text in _PRINTED.findall(output if isinstance(output, str) else ""):
        are_many = issubclass(getattr(errors, name, ConfigError), ConfigError)
        found = problems_of(text, [_MAIN[program]], are_many=are_many)
        for bad in _watching[-1:]:
            bad.extend(f"{program}: {name} {problem}: {text}" for problem in found)


def _places() -> Iterator[str]:
    frame, left = sys._getframe(2), _MOST_FRAMES
    while frame is not None and left:
        if place := _place_of(frame.f_code.co_filename):
            yield place
        frame, left = frame.f_back, left - 1  # type: ignore[assignment]


@cache
def _place_of(file: str) -> str:
    """The path in this project; empty outside."""
    path = PurePath(file)
    return path.relative_to(_ROOT).as_posix() if path.is_relative_to(_ROOT) else ""
